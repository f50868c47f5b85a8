"""Batches of features for training: looked up where training leaves them alone, else computed, whole or in chunks."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain, islice, pairwise
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from pouf.base import BaseClassifier
from pouf.data.augment import AUGMENTATIONS, Augmentation
from pouf.data.base import Draw, Transform, Unlabelled
from pouf.data.loader import Read, Reader, read_batches
from pouf.distributed import World
from pouf.errors import InputError
from pouf.inference import FeatureSet, InferenceConfig
from pouf.recipe import Recipe
from pouf.tuners import Tuner


class FeatureBatch(NamedTuple):
    """The features of one batch over all processes.

    `push_back` is called after the loss has been differentiated: it carries the gradient on to the weights where that
    has not happened yet.
    """

    features: Tensor  # (n, d)
    indices: list[int]  # which samples these are
    push_back: Callable[[], None]


def feature_batches(
    classifier: BaseClassifier,
    tuner: Tuner,
    data: Unlabelled,
    recipe: Recipe,
    generator: torch.Generator,
    inference: InferenceConfig,
) -> Iterator[FeatureBatch]:
    """Random batches without end."""
    world = inference.world
    if len(set(sizes := world.gather_objects(len(data)))) > 1:
        raise InputError(
            f"the processes see {', '.join(map(str, sizes))} inputs in {data.source}: give all the same data"
        )
    crop = _crop(classifier, data, recipe)
    frozen = not tuner.touches_inputs and classifier.demonstrations is None and not data.streamed
    if frozen and (crop is None or recipe.views > 0):
        views = [None] if crop is None else [crop.view(recipe.seed, number) for number in range(recipe.views)]
        tables = [classifier.encode(data, inference, transform=view) for view in views]
        return _looked_up(tables, data, recipe, generator, classifier.device)
    return _computed(classifier, tuner, data, recipe, generator, world, crop)


@dataclass(frozen=True)
class Crop:
    """A random view of an image, decided by a seed."""

    augment: Augmentation
    size: int

    def __call__(self, image: Image.Image, seed: int) -> Image.Image:
        return self.augment(image, self.size, torch.Generator().manual_seed(seed))

    def view(self, seed: int, number: int) -> Transform:
        """One of several views that are computed once for all steps."""
        return Transform(f"{self.augment.__name__} {self.size} {seed} {number}", View(self, seed, number))


@dataclass(frozen=True)
class View:
    """Always the same crop of an image; another for each number and each seed of the run."""

    crop: Crop
    seed: int
    number: int

    def __call__(self, image: Image.Image, seed: int) -> Image.Image:
        mixed = blake2b(f"{self.seed} {self.number} {seed}".encode(), digest_size=7).digest()
        return self.crop(image, int.from_bytes(mixed, "big"))


def _crop(classifier: BaseClassifier, data: Unlabelled, recipe: Recipe) -> Crop | None:
    augment = AUGMENTATIONS[recipe.augment] if data.modality == "image" else None
    if augment is None:
        return None
    size = classifier.backbone.image_size
    if size is None:
        name = type(classifier.backbone).__name__
        raise InputError(f"{name} has no image_size to crop to: set it, or use augment = 'none'")
    return Crop(augment, size)


def _looked_up(
    tables: list[FeatureSet], data: Unlabelled, recipe: Recipe, generator: torch.Generator, device: torch.device
) -> Iterator[FeatureBatch]:
    row = {index: i for i, index in enumerate(tables[0].indices)}
    for draws in data.random_batches(recipe.batch_size, generator):
        indices = [draw.place for draw in draws]
        if len(tables) == 1:
            features = tables[0].features[[row[index] for index in indices]]
        else:
            features = torch.stack([tables[draw.seed % len(tables)].features[row[draw.place]] for draw in draws])
        yield FeatureBatch(features.to(device).float(), indices, _nothing)


def _computed(
    classifier: BaseClassifier,
    tuner: Tuner,
    data: Unlabelled,
    recipe: Recipe,
    generator: torch.Generator,
    world: World,
    crop: Crop | None,
) -> Iterator[FeatureBatch]:
    backbone = classifier.backbone
    transform = classifier.demonstrations.at_random if classifier.demonstrations is not None else crop
    encode = Encoder(classifier, recipe, world.rank)
    sizes: deque[int] = deque()  # in how many pieces each batch comes that has been asked for

    def pieces() -> Iterator[list[Draw]]:
        for draws in data.random_batches(recipe.batch_size, generator):
            parts = _cut(list(world.share(draws)), recipe.compute.chunk)
            sizes.append(len(parts))
            yield from parts
            if len(parts) > 1 and tuner.touches_inputs:
                yield from parts  # once more, for the gradient

    reads = read_batches(Reader(data, backbone.prepare, transform), pieces(), recipe.compute.workers)
    for first in reads:
        size = sizes.popleft()
        with torch.set_grad_enabled(tuner.touches_inputs and size == 1):
            own = LocalFeatures.of(encode, chain([first], islice(reads, size - 1)))
        features, push_back = own.features, _nothing
        if tuner.touches_inputs:
            features.requires_grad_()
            if size > 1:
                push_back = partial(_push_back, encode, own, islice(reads, size), data.source)
        parts = world.gather_objects((own.indices, own.failed))
        for _, failed in parts:
            data.skipped.update(failed)
        indices = [index for part, _ in parts for index in part]
        if indices:
            yield FeatureBatch(world.gather(features), indices, push_back)
        else:
            data.check_readable()
            push_back()  # nothing to learn from, but what is to come again must be passed


class LocalFeatures(NamedTuple):
    """What this process encoded of a batch."""

    features: Tensor  # (n, d); (0, 0) where nothing could be read
    pieces: list[list[int]]  # the samples of each piece
    seeds: list[int]  # of the dropout of each piece
    failed: dict[int, str]  # what could not be read

    @property
    def indices(self) -> list[int]:
        return [index for piece in self.pieces for index in piece]

    @classmethod
    def of(cls, encode: Encoder, reads: Iterable[Read]) -> LocalFeatures:
        """One piece in memory at a time."""
        features: list[Tensor] = []
        pieces: list[list[int]] = []
        seeds: list[int] = []
        failed: dict[int, str] = {}
        for read in reads:
            pieces.append(read.indices)
            seeds.append(encode.draw.getrandbits(62))
            failed |= read.failed
            if read.indices:
                features.append(encode(read.tensors, seeds[-1]))
        return cls(torch.cat(features) if features else torch.zeros(0, 0, device=encode.device), pieces, seeds, failed)


def _push_back(encode: Encoder, own: LocalFeatures, again: Iterator[Read], source: str) -> None:
    """The exact gradient of a batch of any size, in the memory of one piece.

    The features were computed without a graph, and the loss was differentiated by them alone. Now each piece is read
    and computed again with its graph, which takes its rows of that gradient to the weights.
    """
    sizes = [len(piece) for piece in own.pieces]
    gradients = own.features.grad.split(sizes) if own.features.grad is not None else [None] * len(sizes)
    for read, piece, seed, gradient in zip(again, own.pieces, own.seeds, gradients, strict=True):
        if read.indices != piece:
            raise InputError(f"{source} changed while it was being read: a file is missing that was there before")
        if piece and gradient is not None:
            features = encode(read.tensors, seed)
            if features.requires_grad:  # not where nothing on this side is trained
                features.backward(gradient)


def _nothing() -> None:
    """There is no graph to go back through, or it has been gone through already."""


class Encoder:
    """Tensors → features, in the recipe's precision and with its dropout."""

    def __init__(self, classifier: BaseClassifier, recipe: Recipe, rank: int) -> None:
        self.recipe, self.classifier = recipe, classifier
        self.device = classifier.device
        self.draw = random.Random(f"{recipe.seed} {rank}")
        encode: Callable[[dict[str, Tensor]], Tensor] = classifier.backbone.encode_inputs
        self.encode_inputs = torch.compile(encode) if recipe.compute.compile else encode

    def __call__(self, tensors: dict[str, Tensor], seed: int) -> Tensor:
        """The same seed drops the same units."""
        tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        with training_mode(self.classifier, self.recipe, seed), precision(self.recipe, self.device):
            return self.encode_inputs(tensors).float()


def _cut(draws: list[Draw], size: int) -> list[list[Draw]]:
    """Pieces of at most `size` samples, of about equal size, at least one; 0 does not cut."""
    pieces = max(1, -(-len(draws) // size)) if size else 1
    bounds = [len(draws) * i // pieces for i in range(pieces + 1)]
    return [draws[first:last] for first, last in pairwise(bounds)]


def precision(recipe: Recipe, device: torch.device) -> torch.autocast:
    """bf16 where the recipe asks for it. Losses are computed in fp32 all the same."""
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.compute.precision == "bf16")


@contextmanager
def training_mode(classifier: BaseClassifier, recipe: Recipe, seed: int) -> Iterator[None]:
    """With dropout where the recipe asks for it, by a seed of its own: the caller's random numbers are left alone.

    The classifier stays in training mode: activations that are computed again, for their gradient, drop the same units.
    """
    if not recipe.optimisation.dropout:
        yield
        return
    with torch.random.fork_rng([classifier.device] if classifier.device.type == "cuda" else []):
        torch.manual_seed(seed)
        classifier.train()
        yield


@contextmanager
def checkpointing(classifier: BaseClassifier) -> Iterator[None]:
    """While open, layers forget their activations and compute them again when their gradient is needed.

    transformers does so only for layers in training mode; these get it for themselves and not for their parts, so that
    dropout stays off.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model = getattr(classifier.backbone, "model", None)
    if model is None or not getattr(model, "supports_gradient_checkpointing", False):
        kind = type(classifier.backbone).__name__
        raise InputError(f"{kind} can't forget activations and compute them again: set compute.checkpointing = false")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        classifier.eval()
