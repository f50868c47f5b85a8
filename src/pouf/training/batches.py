"""Batches for training: features are looked up where training leaves them alone, else inputs are read to be encoded."""

from __future__ import annotations

import logging
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Transform, Unlabelled
from pouf.data.batches import BatchReader, Draw, ReadBatch, read_batches
from pouf.data.labels import Shots, Teacher
from pouf.data.views import AUGMENTATIONS, Augmentation
from pouf.errors import InputError
from pouf.inference.encode import FeatureSet, InferenceConfig
from pouf.models.text_side import PROMPTS_AT_ONCE
from pouf.parallel.process_group import PaddingSample, ProcessGroup, processes, split_into
from pouf.recipe import Recipe
from pouf.training.model import Chunk, prompt_counts
from pouf.training.state import random_state, set_random_state
from pouf.training.two_pass import Batch, Side, split_by_length
from pouf.tuners import Tuner

logger = logging.getLogger(__name__)


class Batches(Iterator[Batch]):
    """Random batches without end.

    Args:
        data: what is learned from without labels, or the shots alone.
        teacher: of the data.
    """

    def __init__(
        self,
        classifier: Classifier,
        tuner: Tuner,
        data: Unlabelled,
        shots: Shots | None,
        recipe: Recipe,
        inference: InferenceConfig,
        teacher: Teacher | None = None,
    ) -> None:
        def batches_of(source: Unlabelled) -> InputBatches:
            # Each with random numbers of its own, so that what is read ahead of one does not change another.
            generator = torch.Generator().manual_seed(recipe.seed)
            return InputBatches(classifier, tuner, source, recipe, generator, inference)

        # Before the first step: what training leaves alone is encoded here, once.
        self.sources = {"inputs": batches_of(data)}
        self.tables: dict[str, tuple[int, Tensor]] = {}

        learned = {"labels": shots, "teacher": teacher.shots(data) if teacher is not None else None}
        for term, given in learned.items():
            if given is None:
                continue
            if given.inputs is not data:
                self.sources[term] = batches_of(given.inputs)
            index = list(self.sources).index(term) if term in self.sources else 0
            self.tables[term] = (index, given.targets.to(classifier.device))
        total, sharded = sum(prompt_counts(classifier)), classifier.backbone.sharded
        self.prompts = partial(prompt_side, total, tuner.touches_prompts, sharded, recipe.compute.chunk, processes())
        self.any_prompts = total > 0
        self.seeds = random.Random(recipe.seed)

    def __next__(self) -> Batch:
        inputs, seed = [next(source) for source in self.sources.values()], self.seeds.getrandbits(62)
        return Batch(inputs, self.prompts(seed) if self.any_prompts else None, seed, self.tables)

    def close(self) -> None:
        """No more are wanted: worker processes end, and the model can be freed."""
        for source in self.sources.values():
            source.close()

    def state_dict(self) -> dict[str, Any]:
        return {name: source.state_dict() for name, source in self.sources.items()} | {
            "dropout": random_state(self.seeds)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, source in self.sources.items():
            source.load_state_dict(state[name])
        set_random_state(self.seeds, state["dropout"])


def prompt_side(total: int, trained: bool, sharded: bool, chunk: int, world: ProcessGroup, seed: int) -> Side:
    """This process's share of the prompts, in equally many chunks on all processes.

    Args:
        total: prompts of all processes.
        sharded: the weights are, so that all processes must encode equally often.
        seed: of dropout in this step.
    """
    most = -(-total // world.size)  # prompts of a process
    # Encoders cut there by themselves, and would do so unequally often on processes that share weights.
    size = min(chunk or most, PROMPTS_AT_ONCE if sharded else most)
    parts = split_into(list(world.share(range(total))), -(-most // size))
    first = world.rank * (total + 1)
    chunks = [Chunk(rows or [0], (seed + (first + i) * 7919) % 2**62, len(rows)) for i, rows in enumerate(parts)]
    return Side(trained, chunked=chunk > 0 and len(chunks) > 1, parts=chunks)


class InputBatches(Iterator[Side]):
    """Random batches of some data without end."""

    def __init__(
        self,
        classifier: Classifier,
        tuner: Tuner,
        data: Unlabelled,
        recipe: Recipe,
        generator: torch.Generator,
        inference: InferenceConfig,
    ) -> None:
        self.classifier, self.data, self.recipe = classifier, data, recipe
        self.trained, self.world = tuner.touches_inputs, processes()
        self.draws = data.random_batches(recipe.batch_size, generator)
        self.seeds = random.Random(f"{recipe.seed} {self.world.rank}")  # of dropout
        # Where weights are sharded, all processes must encode equally often; a compiled encoder wants few shapes.
        self.splits_lengths = not (classifier.backbone.sharded or recipe.compute.compile)
        self.batches = self._batches(inference)

    def __next__(self) -> Side:
        return next(self.batches)

    def close(self) -> None:
        self.batches.close()

    def state_dict(self) -> dict[str, Any]:
        """Each process has its own random numbers for dropout."""
        seeds = self.world.gather_objects(random_state(self.seeds))
        return {"draws": self.draws.state_dict(), "dropout": seeds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws.load_state_dict(state["draws"])
        set_random_state(self.seeds, state["dropout"][self.world.rank])

    def _batches(self, inference: InferenceConfig) -> Generator[Side, None, None]:
        classifier, data, recipe = self.classifier, self.data, self.recipe
        crop = make_crop(classifier, data, recipe)
        changing = self.trained or classifier.demonstrations is not None
        if changing or data.streamed or (crop is not None and recipe.views == 0):
            return self._read(crop)
        views = [None] if crop is None else [crop.view(recipe.seed, number) for number in range(recipe.views)]
        return self._looked_up([classifier.store(inference).share(data, view) for view in views])

    def _looked_up(self, tables: list[FeatureSet]) -> Generator[Side, None, None]:
        """Each process has the rows of a batch that lie in its own share of the data."""
        # Each has its own: a file that went while the views were computed is in the first ones alone, and is not drawn.
        rows = [rows_by_index(table.indices, len(self.data)) for table in tables]
        for batch in self.draws:
            self.draws.done()
            own = rows[0][batch.positions] >= 0
            positions, seeds = batch.positions[own], batch.seeds[own]
            features = tables[0].features.index_select(0, rows[0][positions])  # ten times as fast as [ ]
            for number in range(1, len(tables)):
                of_view = seeds % len(tables) == number
                features[of_view] = tables[number].features[rows[number][positions[of_view]]]
            everyone = [index for part in self.world.gather_objects(positions.tolist()) for index in part]
            yield Side(features=features.to(self.classifier.device).float(), indices=everyone)

    def _read(self, crop: Crop | None) -> Generator[Side, None, None]:
        backbone, shots = self.classifier.backbone, self.classifier.demonstrations
        transform = shots.at_random if shots is not None else crop
        reader = BatchReader(self.data, backbone.prepare, transform, backbone.image_size)
        padding = PaddingSample()
        reads = read_batches(reader, self._draws_of_chunks(), self.recipe.compute.workers)
        while True:
            side = ChunkedInputs(self, reads, padding)
            if side.parts:
                yield side
            else:
                self.data.check_readable()

    def _draws_of_chunks(self) -> Iterator[list[Draw]]:
        """What this process reads of each batch, chunk by chunk; twice where there is a second pass."""
        for batch in self.draws:
            parts = split_into(list(self.world.share(batch)), self.chunks_of(len(batch)))
            for _ in range(self.times_read(len(parts))):
                yield from parts

    def chunks_of(self, n: int) -> int:
        """In how many chunks n samples are encoded, on each process alike."""
        most, size = -(-n // self.world.size), self.recipe.compute.chunk
        return max(1, -(-most // size)) if size else 1

    def times_read(self, chunks: int) -> int:
        return 2 if chunks > 1 and self.trained else 1


class ChunkedInputs(Side):
    """Inputs of one batch that are read chunk by chunk; where there are several, read again for the second pass, so
    that one chunk is in memory at a time.

    Args:
        reads: of all batches; here are those of the next one.
        padding: stands in where this process could read nothing of a chunk, and others something.
    """

    def __init__(self, batches: InputBatches, reads: Iterator[ReadBatch], padding: PaddingSample) -> None:
        super().__init__(trained=batches.trained)
        self.batches, self.reads, self.padding = batches, reads, padding
        first = next(reads)  # now the batch is drawn
        self.count = batches.chunks_of(len(batches.draws.done()))
        self.chunked = self.count > 1
        self.samples: list[list[int] | None] = []  # of each chunk; None where no process could read any
        self.seeds: list[int] = []  # of the dropout of each chunk
        self.failed: dict[int, str] = {}  # why samples could not be read
        self.parts = self._chunk(first)
        while not self.parts and len(self.samples) < self.count:
            self.parts = self._chunk(next(reads))
        if self.parts and not self.chunked and batches.splits_lengths:
            self.parts, rows = split_by_length(self.parts[0], batches.classifier.device)
            self.samples = [[own[row] for row in rows] if own else own for own in self.samples]
        if not self.parts or not self.chunked:
            self._share_results()
        if not self.parts:
            for _ in range(self.count * (batches.times_read(self.count) - 1)):
                next(reads)

    def _chunk(self, read: ReadBatch) -> list[Chunk]:
        """Nothing where no process could read anything."""
        self.seeds.append(self.batches.seeds.getrandbits(62))
        self.failed |= read.failed
        tensors = self.padding.tensors_for(read)
        self.samples.append(None if tensors is None else read.indices)
        return [] if tensors is None else [Chunk(tensors, self.seeds[-1], len(read.indices))]

    def _share_results(self) -> None:
        """All processes come to know which samples the batch has, and which could not be read."""
        own = [index for part in self.samples for index in part or ()]
        everyone = self.batches.world.gather_objects((own, self.failed))
        for _, failed in everyone:
            self.batches.data.skipped.update(failed)
        self.indices = [index for part, _ in everyone for index in part]

    def chunks(self) -> Iterator[Chunk]:
        yield from self.parts
        if self.chunked:
            self.parts = []
            while len(self.samples) < self.count:
                yield from self._chunk(next(self.reads))
            self._share_results()

    def chunks_again(self, gradient: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        """What has gone since the first pass has no part in this step."""
        if not self.chunked:
            yield from super().chunks_again(gradient)
            return
        gradients = iter(gradient.split([len(part) for part in self.samples if part is not None]))
        for before, seed in zip(self.samples, self.seeds, strict=True):
            read = next(self.reads)
            if before is None:
                continue
            tensors, rows = read.tensors or self.padding.own, next(gradients)
            if read.indices != before:
                logger.warning("%d inputs went while they were read: this step leaves them out", len(read.failed))
                there = [row for row, index in enumerate(read.indices) if index in before]
                if there:
                    tensors = {name: tensor[there] for name, tensor in tensors.items()}
                rows = rows[[row for row, index in enumerate(before) if index in read.indices]]
            if tensors:  # one process alone has no padding sample, and needs none
                yield Chunk(tensors, seed, len(rows)), rows


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


def rows_by_index(indices: list[int], n: int) -> Tensor:
    """(n,): the row of each of n samples, -1 where it has none."""
    rows = torch.full((n,), -1)
    rows[indices] = torch.arange(len(indices))
    return rows
