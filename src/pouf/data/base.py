"""What every kind of unlabelled data offers. There is no field that could hold a label."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from pouf.errors import InputError

Modality = Literal["image", "text", "vector"]


class Unreadable(Exception):
    """One sample can't be read; its message says why. Never fatal: the sample is skipped and listed."""


class Draw(NamedTuple):
    """One sample of a batch to come: what is random about it follows from the seed alone, whoever reads it."""

    place: int  # position in the data
    seed: int


class Transform(NamedTuple):
    """What is done to samples before they are encoded, and what to call it: features are kept under this name too."""

    name: str
    apply: Callable[[Any, int], Any]  # a sample and its seed


class Unlabelled(ABC):
    """Samples that are read one by one when needed; those that can't be read are skipped and remembered.

    Attributes:
        ids: what to call each sample in predictions and lists: a path, or a row's number.
        source: where the samples come from, for messages and the run's manifest.
        skipped: index → reason, for the samples found unreadable so far.
    """

    modality: Modality
    streamed = False  # without a known number of samples, and without a way back to one

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
    def content_order(self) -> Sequence[int]:
        """All positions in an order that only the samples' contents decide.

        Folder names, file names and the order of rows can tell the classes; none of them may steer the training.
        """

    def digest(self, index: int) -> bytes:
        """A fingerprint of the sample's content (16 bytes), by which its features are found again; empty if unknown."""
        return b""

    def reading_order(self) -> Sequence[int]:
        """The order of `batches`. Texts come by length, so that little of a batch is padding."""
        return range(len(self))

    def batches(self, size: int, only: Sequence[int] | None = None, seeded: bool = False) -> Iterator[list[Draw]]:
        """Every sample once, those that cost alike together.

        Args:
            only: positions of some samples; by default all that are not known to be unreadable.
            seeded: the draws have seeds, which follow from the samples' contents, or from their places.
        """
        wanted = set(range(len(self)) if only is None else only) - self.skipped.keys()
        order = [place for place in self.reading_order() if place in wanted]
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            yield [Draw(place, self._seed(place) if seeded else 0) for place in batch]

    def _seed(self, place: int) -> int:
        digest = self.digest(place)
        return int.from_bytes(digest[:7], "big") if digest else place

    def random_batches(self, size: int, generator: torch.Generator) -> Iterator[list[Draw]]:
        """Batches without end. Each epoch is a new permutation; no batch holds a sample twice.

        What is left of an epoch after its last full batch waits for the next one. Data smaller than `size` come
        whole in every batch. Samples that have turned out to be unreadable are left out from then on.
        """
        order = self.content_order()
        # Seeds come from a stream of their own, so that the order of samples is the same whether they are used or not.
        seeds = torch.Generator().manual_seed(generator.initial_seed() + 1)
        while True:
            self.check_readable()
            size = min(size, len(self) - len(self.skipped))
            batch: list[Draw] = []
            for position in torch.randperm(len(order), generator=generator).tolist():
                if (index := order[position]) in self.skipped:
                    continue
                batch.append(Draw(index, int(torch.randint(2**62, (), generator=seeds))))
                if len(batch) == size:
                    yield batch
                    batch = []

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


class Subset(Unlabelled):
    """Some samples of other data, in the order given."""

    def __init__(self, data: Unlabelled, places: Sequence[int]) -> None:
        super().__init__([data.ids[place] for place in places], data.source)
        self.data, self.places = data, places
        self.modality = data.modality
        self.skipped = {i: data.skipped[place] for i, place in enumerate(places) if place in data.skipped}

    def read(self, index: int) -> Any:
        return self.data.read(self.places[index])

    def content_order(self) -> Sequence[int]:
        own: dict[int, list[int]] = {}  # a place may be given twice
        for i, place in enumerate(self.places):
            own.setdefault(place, []).append(i)
        return [i for place in self.data.content_order() for i in own.get(place, ())]

    def reading_order(self) -> Sequence[int]:
        rank = {place: i for i, place in enumerate(self.data.reading_order())}
        return sorted(range(len(self)), key=lambda index: rank[self.places[index]])

    def digest(self, index: int) -> bytes:
        return self.data.digest(self.places[index])
