"""What every kind of unlabelled data offers. There is no field that could hold a label."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from pouf.errors import InputError

Modality = Literal["image", "text"]


class Unreadable(Exception):
    """One sample can't be read; its message says why. Never fatal: the sample is skipped and listed."""


class Batch(NamedTuple):
    indices: list[int]  # positions in the data
    samples: list[Any]  # what was read there


class Unlabelled(ABC):
    """Samples that are read one by one when needed; those that can't be read are skipped and remembered.

    Attributes:
        ids: what to call each sample in predictions and lists: a path, or a row's number.
        source: where the samples come from, for messages and the run's manifest.
        skipped: index → reason, for the samples found unreadable so far.
    """

    modality: Modality

    def __init__(self, ids: Sequence[str], source: str) -> None:
        self.ids = ids
        self.source = source
        self.skipped: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.ids)

    @abstractmethod
    def read(self, index: int) -> Any:
        """The sample, or `Unreadable`."""

    @abstractmethod
    def content_order(self) -> list[int]:
        """All positions in an order that only the samples' contents decide.

        Folder names, file names and the order of rows can tell the classes; none of them may steer the training.
        """

    def batches(self, size: int) -> Iterator[Batch]:
        """Every readable sample once, those that cost alike together."""
        return self._batches(self.reading_order(), size, self.read, keep_rest=True)

    def reading_order(self) -> Sequence[int]:
        """The order of `batches`. Texts come by length, so that little of a batch is padding."""
        return range(len(self))

    def random_batches(
        self, size: int, generator: torch.Generator, read: Callable[[int], Any] | None = None
    ) -> Iterator[Batch]:
        """Batches without end. Each epoch is a new permutation; no batch holds a sample twice.

        What is left of an epoch after its last full batch waits for the next one. Data smaller than `size` come
        whole in every batch. `read` takes the place of the data's own, for samples that are known in another form.
        """
        order = self.content_order()
        while True:
            usable = [index for index in order if index not in self.skipped]
            self.check_readable()
            size = min(size, len(usable))
            permutation = torch.randperm(len(usable), generator=generator).tolist()
            yield from self._batches([usable[i] for i in permutation], size, read or self.read, keep_rest=False)

    def check_readable(self) -> None:
        """An error if there is nothing, or if every sample has turned out to be unreadable."""
        if not len(self):
            raise InputError(f"no inputs in {self.source}: there must be at least one")
        if len(self.skipped) == len(self):
            example = min(self.skipped)
            raise InputError(
                f"none of the {len(self)} inputs in {self.source} can be read; "
                f"the first, {self.ids[example]}: {self.skipped[example]}"
            )

    def _batches(
        self, indices: Sequence[int], size: int, read: Callable[[int], Any], keep_rest: bool
    ) -> Iterator[Batch]:
        batch = Batch([], [])
        for index in indices:
            try:
                sample = read(index)
            except Unreadable as error:
                self.skipped[index] = str(error)
                continue
            batch.indices.append(index)
            batch.samples.append(sample)
            if len(batch.indices) == size:
                yield batch
                batch = Batch([], [])
        if batch.indices and keep_rest:
            yield batch
