"""Batches of features for training: looked up where training can't change them, else computed, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from pouf.classifier import Change, Classifier, Encoded
from pouf.data.augment import AUGMENTATIONS, Augmentation
from pouf.data.base import Unlabelled
from pouf.data.cache import FeatureCache
from pouf.data.reading import Reader, read_batches
from pouf.distributed import World
from pouf.errors import InputError
from pouf.recipe import Recipe
from pouf.tuners import Tuner

Tensors = dict[str, Tensor]


class FeatureBatch(NamedTuple):
    """The features of one batch over all processes.

    `push_back` is called after the loss has been differentiated: it carries the gradient on to the weights where that
    has not happened yet.
    """

    features: Tensor  # (n, d)
    indices: list[int]  # which samples these are
    push_back: Callable[[], None]


def feature_batches(
    classifier: Classifier,
    tuner: Tuner,
    data: Unlabelled,
    recipe: Recipe,
    generator: torch.Generator,
    world: World,
    cache: FeatureCache | None,
) -> Iterator[FeatureBatch]:
    """Random batches without end."""
    if len(set(sizes := world.gather_objects(len(data)))) > 1:
        raise InputError(
            f"the processes see {', '.join(map(str, sizes))} inputs in {data.source}: give all the same data"
        )
    crop = _crop(classifier, data, recipe)
    frozen = not tuner.touches_inputs and classifier.demonstrations is None and not data.streamed
    if frozen and (crop is None or recipe.views > 0):
        views = [None] if crop is None else [crop.view(recipe.seed, number) for number in range(recipe.views)]
        tables = [encode_together(classifier, data, recipe, world, cache, view) for view in views]
        return _looked_up(tables, data, recipe, generator, classifier.backbone.device)
    return _computed(classifier, tuner, data, recipe, generator, world, crop)


@dataclass(frozen=True)
class Crop:
    """A random view of an image, decided by a seed."""

    augment: Augmentation
    size: int

    def __call__(self, image: Image.Image, seed: int) -> Image.Image:
        return self.augment(image, self.size, torch.Generator().manual_seed(seed))

    def view(self, seed: int, number: int) -> Change:
        """One of several views that are computed once for all steps."""
        return Change(f"{self.augment.__name__} {self.size} {seed} {number}", View(self, seed, number))


@dataclass(frozen=True)
class View:
    """Always the same crop of an image; another for each number and each seed of the run."""

    crop: Crop
    seed: int
    number: int

    def __call__(self, image: Image.Image, seed: int) -> Image.Image:
        mixed = blake2b(f"{self.seed} {self.number} {seed}".encode(), digest_size=7).digest()
        return self.crop(image, int.from_bytes(mixed, "big"))


def _crop(classifier: Classifier, data: Unlabelled, recipe: Recipe) -> Crop | None:
    augment = AUGMENTATIONS[recipe.augment] if data.modality == "image" else None
    if augment is None:
        return None
    size = classifier.backbone.image_size
    if size is None:
        name = type(classifier.backbone).__name__
        raise InputError(f"{name} has no image_size to crop to: set it, or use augment = 'none'")
    return Crop(augment, size)


def encode_together(
    classifier: Classifier,
    data: Unlabelled,
    recipe: Recipe,
    world: World,
    cache: FeatureCache | None,
    change: Change | None = None,
) -> Encoded:
    """All features, each process its share."""
    own = classifier.encode(
        data,
        recipe.compute.chunk or 64,
        workers=recipe.compute.workers,
        cache=cache,
        change=change,
        only=world.share(range(len(data))) if world.size > 1 else None,
    )
    if world.size == 1:
        return own
    for skipped in world.gather_objects(data.skipped):
        data.skipped.update(skipped)
    data.check_readable()
    indices = [index for part in world.gather_objects(own.indices) for index in part]
    return Encoded(indices, world.gather(own.features.to(classifier.backbone.device)).cpu())


def _looked_up(
    tables: list[Encoded], data: Unlabelled, recipe: Recipe, generator: torch.Generator, device: torch.device
) -> Iterator[FeatureBatch]:
    row = {index: i for i, index in enumerate(tables[0].indices)}
    for draws in data.random_batches(recipe.batch_size, generator):
        indices = [draw.place for draw in draws]
        if len(tables) == 1:
            features = tables[0].features[[row[index] for index in indices]]
        else:
            features = torch.stack([tables[draw.seed % len(tables)].features[row[draw.place]] for draw in draws])
        yield FeatureBatch(features.to(device), indices, lambda: None)


def _computed(
    classifier: Classifier,
    tuner: Tuner,
    data: Unlabelled,
    recipe: Recipe,
    generator: torch.Generator,
    world: World,
    crop: Crop | None,
) -> Iterator[FeatureBatch]:
    backbone = classifier.backbone
    change = classifier.demonstrations.at_random if classifier.demonstrations is not None else crop
    own = (list(world.share(draws)) for draws in data.random_batches(recipe.batch_size, generator))
    encode = Encoder(classifier, recipe)
    for read in read_batches(Reader(data, backbone.prepare, change), own, recipe.compute.workers):
        parts = world.gather_objects((read.indices, read.failed))
        for _, failed in parts:
            data.skipped.update(failed)
        indices = [index for part, _ in parts for index in part]
        if not indices:
            data.check_readable()
            continue
        chunks = _chunks(read.tensors, len(read.indices), recipe.compute.chunk)
        with torch.set_grad_enabled(tuner.touches_inputs):
            features, push_back = encode.in_chunks(chunks) if len(chunks) > 1 else encode.whole(chunks)
        width = max(world.gather_objects(0 if features is None else features.shape[1]))
        if features is None:  # nothing to read here, but the others wait
            features = torch.zeros(0, width, device=backbone.device, requires_grad=tuner.touches_inputs)
        yield FeatureBatch(world.gather(features), indices, push_back)


class Encoder:
    """Tensors → features, in the recipe's precision, differentiable at once or chunk by chunk."""

    def __init__(self, classifier: Classifier, recipe: Recipe) -> None:
        self.recipe = recipe
        self.device = classifier.backbone.device
        encode: Callable[[Tensors], Tensor] = classifier.backbone.encode_inputs
        self.encode_inputs = torch.compile(encode) if recipe.compute.compile else encode

    def __call__(self, tensors: Tensors) -> Tensor:
        tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        with precision(self.recipe, self.device):
            return self.encode_inputs(tensors).float()

    def whole(self, chunks: list[Tensors]) -> tuple[Tensor | None, Callable[[], None]]:
        return (self(chunks[0]) if chunks else None), lambda: None

    def in_chunks(self, chunks: list[Tensors]) -> tuple[Tensor, Callable[[], None]]:
        """The exact gradient of a batch of any size, in the memory of one chunk.

        First pass: features without a graph. The loss is then differentiated by these features alone. Second pass:
        each chunk is computed again with its graph, which takes its rows of that gradient to the weights.
        """
        with torch.no_grad():
            features = torch.cat([self(chunk) for chunk in chunks])
        if not torch.is_grad_enabled():
            return features, lambda: None
        features.requires_grad_()

        def push_back() -> None:
            if features.grad is None:
                return
            sizes = [len(next(iter(chunk.values()))) for chunk in chunks]
            for chunk, gradient in zip(chunks, features.grad.split(sizes), strict=True):
                again = self(chunk)
                if again.requires_grad:  # not where nothing on this side is trained
                    again.backward(gradient)

        return features, push_back


def _chunks(tensors: Tensors, n: int, size: int) -> list[Tensors]:
    """Pieces of at most `size` samples, of about equal size; 0 does not cut."""
    if n == 0:
        return []
    pieces = -(-n // size) if size else 1
    bounds = [n * i // pieces for i in range(pieces + 1)]
    return [{name: tensor[first:last] for name, tensor in tensors.items()} for first, last in pairwise(bounds)]


def precision(recipe: Recipe, device: torch.device) -> torch.autocast:
    """bf16 where the recipe asks for it. Losses are computed in fp32 all the same."""
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.compute.precision == "bf16")


@contextmanager
def checkpointing(classifier: Classifier) -> Iterator[None]:
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
