"""Batches for training: features are looked up where training leaves them alone, else inputs are read to be encoded."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.augment import AUGMENTATIONS, Augmentation
from pouf.data.base import Transform, Unlabelled
from pouf.data.loader import Read, Reader, read_batches
from pouf.data.random_batches import Draw, RandomBatches
from pouf.errors import InputError
from pouf.inference.encode import FeatureSet, InferenceConfig
from pouf.parallel.padding import PaddingSample, in_pieces
from pouf.parallel.process_group import ProcessGroup, processes
from pouf.recipe import Recipe
from pouf.training.engine import Engine
from pouf.training.state import random_state, set_random_state
from pouf.training.step import OwnInputs, Piece

logger = logging.getLogger(__name__)


class InputBatch(NamedTuple):
    own: OwnInputs  # what this process has of it
    indices: list[int]  # which samples the rows of all processes are, in the order of ranks


class InputBatches(Iterator[InputBatch]):
    """Random batches without end, and where they stand."""

    def __init__(
        self,
        classifier: Classifier,
        engine: Engine,
        data: Unlabelled,
        recipe: Recipe,
        generator: torch.Generator,
        inference: InferenceConfig,
    ) -> None:
        self.classifier, self.engine, self.data, self.recipe = classifier, engine, data, recipe
        self.world, self.draws = processes(), data.random_batches(recipe.batch_size, generator)
        self.dropout = random.Random(f"{recipe.seed} {self.world.rank}")
        self.batches = self._batches(inference)

    def __next__(self) -> InputBatch:
        return next(self.batches)

    def close(self) -> None:
        """No more are wanted: worker processes end, and the model is held on to no longer."""
        self.batches.close()

    def state_dict(self) -> dict[str, Any]:
        """Each process has its own random numbers for dropout."""
        seeds = {"draws": self.world.gather_objects(random_state(self.dropout))}
        return {"draws": self.draws.state_dict(), "dropout": seeds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws.load_state_dict(state["draws"])
        set_random_state(self.dropout, state["dropout"]["draws"][self.world.rank])

    def _batches(self, inference: InferenceConfig) -> Generator[InputBatch, None, None]:
        classifier, data, recipe = self.classifier, self.data, self.recipe
        crop = make_crop(classifier, data, recipe)
        touched = self.engine.tuner.touches_inputs or classifier.demonstrations is not None
        if touched or data.streamed or (crop is not None and recipe.views == 0):
            return self._read(crop)
        views = [None] if crop is None else [crop.view(recipe.seed, number) for number in range(recipe.views)]
        tables = [classifier.store(inference).share(data, view) for view in views]
        return _looked_up(tables, self.draws, self.world, classifier.device)

    def _read(self, crop: Crop | None) -> Generator[InputBatch, None, None]:
        backbone, world, data = self.classifier.backbone, self.world, self.data
        shots = self.classifier.demonstrations
        reader = Reader(data, backbone.prepare, shots.at_random if shots is not None else crop, backbone.image_size)
        trained = self.engine.tuner.touches_inputs
        sizes: deque[int] = deque()  # in how many pieces each batch comes that has been asked for

        def pieces() -> Iterator[list[Draw]]:
            for batch in self.draws:
                parts = in_pieces(list(world.share(batch)), self._count(len(batch)))
                sizes.append(len(parts))
                yield from parts
                if len(parts) > 1 and trained:
                    yield from parts  # once more, for the gradient

        spare = PaddingSample()
        reads = read_batches(reader, pieces(), self.recipe.compute.workers)
        for first in reads:
            size = sizes.popleft()
            self.draws.done()
            if size == 1:
                own, indices = self._at_once(first, spare), first.indices
                failed, again = first.failed, None
            else:
                parts = _Parts.of(chain([first], islice(reads, size - 1)), self.engine, self.dropout, spare)
                again = partial(parts.again, islice(reads, size), spare) if trained else None
                own, indices, failed = OwnInputs(parts.features, None, again), parts.indices, parts.failed
            told = world.gather_objects((indices, failed))
            for _, others in told:
                data.skipped.update(others)
            indices = [index for part, _ in told for index in part]
            if indices:
                yield InputBatch(own, indices)
            else:
                data.check_readable()
                for _ in islice(reads, size if size > 1 and trained else 0):
                    pass  # nothing to learn from, but what is to come again must be passed

    def _count(self, n: int) -> int:
        """In how many pieces n samples come, on each process alike."""
        most, size = -(-n // self.world.size), self.recipe.compute.chunk
        return max(1, -(-most // size)) if size else 1

    def _at_once(self, read: Read, spare: PaddingSample) -> OwnInputs:
        seed = self.dropout.getrandbits(62)
        tensors = spare.instead_of(read)
        return OwnInputs(None, Piece(tensors, seed, len(read.indices)) if tensors is not None else None, None)


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


def make_crop(classifier: Classifier, data: Unlabelled, recipe: Recipe) -> Crop | None:
    """What the recipe does to images at random, if anything."""
    augment = AUGMENTATIONS[recipe.augment] if data.modality == "image" else None
    if augment is None:
        return None
    size = classifier.backbone.image_size
    if size is None:
        name = type(classifier.backbone).__name__
        raise InputError(f"{name} has no image_size to crop to: set it, or use augment = 'none'")
    return Crop(augment, size)


def _looked_up(
    tables: list[FeatureSet], draws: RandomBatches, world: ProcessGroup, device: torch.device
) -> Generator[InputBatch, None, None]:
    """Each process gives the rows of a batch that lie in its own share of the data."""
    # Each has its own: a file that went while the views were computed is in the first ones alone, and is not drawn.
    rows = [{index: row for row, index in enumerate(table.indices)} for table in tables]
    for batch in draws:
        draws.done()
        own = [draw for draw in batch if draw.place in rows[0]]
        indices = [draw.place for draw in own]
        if len(tables) == 1:
            features = tables[0].features[[rows[0][index] for index in indices]]
        elif own:
            views = [draw.seed % len(tables) for draw in own]
            features = torch.stack([tables[v].features[rows[v][i]] for v, i in zip(views, indices, strict=True)])
        else:
            features = tables[0].features[:0]
        everyone = [index for part in world.gather_objects(indices) for index in part]
        yield InputBatch(OwnInputs(features.to(device).float(), None, None), everyone)


class _Parts(NamedTuple):
    """What this process encoded of a batch, piece by piece."""

    features: Tensor  # (n, d); (0, 0) where nothing could be read
    pieces: list[list[int] | None]  # the samples of each piece; None where no process could read any
    seeds: list[int]  # of the dropout of each piece
    failed: dict[int, str]  # what could not be read

    @property
    def indices(self) -> list[int]:
        return [index for piece in self.pieces for index in piece or ()]

    @classmethod
    def of(cls, reads: Iterator[Read], engine: Engine, dropout: random.Random, spare: PaddingSample) -> _Parts:
        """One piece in memory at a time."""
        features: list[Tensor] = []
        pieces: list[list[int] | None] = []
        seeds: list[int] = []
        failed: dict[int, str] = {}
        for read in reads:
            seeds.append(dropout.getrandbits(62))
            failed |= read.failed
            tensors = spare.instead_of(read)
            pieces.append(None if tensors is None else read.indices)
            if tensors is not None:
                features.append(engine.encode(Piece(tensors, seeds[-1], len(read.indices))))
        whole = torch.cat(features) if features else torch.zeros(0, 0, device=engine.device)
        return cls(whole, pieces, seeds, failed)

    def again(self, reads: Iterator[Read], spare: PaddingSample, gradient: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """All pieces once more, with the gradients of their rows. What has gone meanwhile has no part in this step."""
        gradients = iter(gradient.split([len(piece) for piece in self.pieces if piece is not None]))
        for read, piece, seed in zip(reads, self.pieces, self.seeds, strict=True):
            if piece is None:
                continue
            own = next(gradients)
            tensors, indices = read.tensors or spare.own, read.indices
            if indices != piece:
                logger.warning("%d inputs went while they were read: this step leaves them out", len(read.failed))
                there = [row for row, index in enumerate(indices) if index in piece]
                if there:
                    tensors = {name: tensor[there] for name, tensor in tensors.items()}
                own = own[[row for row, index in enumerate(piece) if index in indices]]
            if tensors:  # one process alone has no spare, and needs none
                yield Piece(tensors, seed, len(own)), own
