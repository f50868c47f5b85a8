"""Streams of samples: of unknown length, read in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from pouf.data.base import Modality, Unlabelled
from pouf.data.batches import Draw, Draws, RandomBatches, ReplayedBatches
from pouf.data.images import ImageFile, Images, as_item
from pouf.data.texts import RowNumbers, Texts
from pouf.errors import InputError, Unreadable


class Stream(Unlabelled):
    """Training data that are too large to list: a stream of `datasets`, a database, a queue.

    Samples fill a buffer, from which batches are drawn at random; at its end the stream is opened again. It can only be
    read forwards, so whatever needs all samples first (prediction, features computed once) needs `take(n)`.

    Args:
        open: returns an iterable over the samples from the first on, each time it is called.
        modality: "image" for Pillow images, "text" for strings or pairs of them.
        buffer: size of the buffer in samples: the larger, the more random the batches.
    """

    streamed = True

    def __init__(
        self, open: Callable[[], Iterable[Any]], modality: Modality, source: str = "the stream", buffer: int = 4096
    ) -> None:
        super().__init__(RowNumbers(0), source)  # numbers in the order of arrival, as many as were read
        self.open = open
        self.modality = modality
        self.buffer = buffer
        self.waiting: dict[int, Any] = {}
        self.any_read = False

    @classmethod
    def from_dataset(cls, dataset: Any, columns: str | Sequence[str], modality: Modality, buffer: int = 4096) -> Stream:
        """A column of a `datasets.IterableDataset`, or two for pairs of texts; no other is read."""
        names, wanted = dataset.column_names, (columns,) if isinstance(columns, str) else tuple(columns)
        if names is not None and (missing := [name for name in wanted if name not in names]):
            raise InputError(f"the dataset has no column {missing[0]!r}, only: {', '.join(names)}")

        def samples() -> Iterator[Any]:
            for row in dataset:
                yield row[wanted[0]] if len(wanted) == 1 else tuple(row[name] for name in wanted)

        return cls(samples, modality, "the dataset", buffer)

    def take(self, n: int) -> Images | Texts:
        """The first n samples, in memory."""
        samples = [as_item(sample) for sample in islice(self.open(), n)]
        return Images(samples, source=self.source) if self.modality == "image" else Texts(samples, source=self.source)

    def read(self, index: int, side: int | None = None) -> Any:
        sample = as_item(self.waiting[index])
        one = Images([sample]) if isinstance(sample, (Image.Image, ImageFile, Path)) else Texts([sample])
        if one.modality != self.modality:
            raise Unreadable(f"expected {'an image' if self.modality == 'image' else 'a text'}, not {type(sample)}")
        read = one.read(0, side)
        self.any_read = True
        return read

    def random_batches(self, size: int, generator: torch.Generator) -> RandomBatches:
        return ReplayedBatches(self._batches(size, generator))

    def _batches(self, size: int, generator: torch.Generator) -> Iterator[Draws]:
        """Batches drawn from the buffer, which is refilled from the stream; at its end the stream starts again."""
        seeds = torch.Generator().manual_seed(generator.initial_seed() + 1)
        pool: list[int] = []
        batch: list[Draw] = []
        for position, sample in enumerate(self._repeat()):
            self.ids.n = position + 1  # type: ignore[attr-defined]
            self.waiting[position] = sample
            pool.append(position)
            if len(pool) < max(self.buffer, size):
                continue
            chosen = int(torch.randint(len(pool), (), generator=generator))
            pool[chosen], pool[-1] = pool[-1], pool[chosen]
            batch.append(Draw(pool.pop(), int(torch.randint(2**62, (), generator=seeds))))
            if len(batch) == size:
                yield Draws(torch.tensor(batch))
                for draw in batch:
                    del self.waiting[draw.position]
                batch = []

    def content_order(self) -> Sequence[int]:
        raise InputError(f"{self.source} has no end, so its samples can't be put in order: use take(n)")

    def reading_order(self) -> Sequence[int]:
        return self.content_order()

    def fingerprint(self) -> str:
        return self.source

    def check_readable(self) -> None:
        """Raise an error after a buffer full of samples of which none could be read."""
        if len(self.skipped) >= max(self.buffer, 1) and not self.any_read:
            reason = next(iter(self.skipped.values()))
            raise InputError(f"none of the first {len(self.skipped)} samples of {self.source} can be read: {reason}")

    def _repeat(self) -> Iterator[Any]:
        while True:
            empty, first = True, not self.ids.n  # type: ignore[attr-defined]
            for sample in self.open():
                empty = False
                yield sample
            if empty:
                why = "there must be at least one" if first else "each call of open() must start from the first sample"
                raise InputError(f"{self.source} is empty: {why}")
