"""Reading samples for several views of them: each is opened once, and goes through the model in full batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.data.base import Transform, Unlabelled
from pouf.data.batches import Draw, ReadBatch, tensors_of
from pouf.errors import Unreadable
from pouf.inference.cache import CachedFeatures
from pouf.parallel.process_group import pad_batches


class View(NamedTuple):
    """How samples are to be encoded: as they are, or transformed; all of them, or those at some positions."""

    transform: Transform | None = None
    only: Set[int] | None = None

    def has(self, index: int) -> bool:
        return self.only is None or index in self.only


class ViewsRead(NamedTuple):
    views: list[ReadBatch]  # the samples of each view that are in no cache
    failed: dict[int, str]
    digests: dict[int, bytes]
    found: int  # of all views, what is in their caches
    size: int  # number of requested samples


@dataclass(frozen=True)
class ViewReader:
    """Reads each sample once, for all views of it that are in no cache."""

    data: Unlabelled
    prepare: Callable[[Sequence[Any]], dict[str, Tensor]]
    side: int | None
    views: Sequence[View]
    known: Sequence[CachedFeatures | None]

    def __getitem__(self, draws: Sequence[Draw]) -> ViewsRead:
        samples: list[list[Any]] = [[] for _ in self.views]
        indices: list[list[int]] = [[] for _ in self.views]
        failed: dict[int, str] = {}
        digests: dict[int, bytes] = {}
        found = 0
        for index, _ in draws:
            of_sample = [number for number, view in enumerate(self.views) if view.has(index)]
            wanted = [number for number in of_sample if not self._is_known(number, index)]
            found += len(of_sample) - len(wanted)
            try:
                sample = self.data.read(index, self.side) if wanted else None
            except Unreadable as error:
                failed[index] = str(error)
                continue
            digests[index] = self.data.known_digest(index) or b""
            for number in wanted:
                transform = self.views[number].transform
                indices[number].append(index)
                samples[number].append(sample if transform is None else transform.apply(sample, self.data.seed(index)))
        tensors = [tensors_of(given, self.prepare) for given in samples]
        reads = [ReadBatch(own, given, failed) for own, given in zip(indices, tensors, strict=True)]
        return ViewsRead(reads, failed, digests, found, len(draws))

    def _is_known(self, number: int, index: int) -> bool:
        known = self.known[number]
        return known is not None and (digest := self.data.digest(index)) != b"" and digest in known


def in_batches(
    reads: Iterator[ViewsRead], views: int, batch_size: int, sharded: bool
) -> Iterator[tuple[int, ReadBatch, dict[str, Tensor]]]:
    """(number of the view, read, what to go through the model with), in batches as large as may be."""
    if sharded:
        for read, tensors in pad_batches(each.views[0] for each in reads):
            yield 0, read, tensors
        return
    waiting = [Batcher(batch_size) for _ in range(views)]
    for each in reads:
        for number, read in enumerate(each.views):
            complete = len(read.indices) + len(read.failed) == each.size
            yield from ((number, batch, batch.tensors) for batch in waiting[number].add(read, complete))
    for number, batcher in enumerate(waiting):
        yield from ((number, batch, batch.tensors) for batch in batcher.rest())


class Batcher:
    """Makes full batches of what is left of some: of a view of few samples there may be one in each batch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.waiting: list[ReadBatch] = []

    def add(self, read: ReadBatch, complete: bool) -> Iterator[ReadBatch]:
        if complete and not self.waiting:
            yield read
        elif read.indices:
            if self.waiting and _shapes(self.waiting[0]) != _shapes(read):  # padded to another length
                yield from self.rest()
            self.waiting.append(read)
            if sum(len(each.indices) for each in self.waiting) >= self.size:
                indices = [index for each in self.waiting for index in each.indices]
                tensors = {name: torch.cat([each.tensors[name] for each in self.waiting]) for name in read.tensors}
                yield ReadBatch(indices[: self.size], {name: t[: self.size] for name, t in tensors.items()}, {})
                rest = ReadBatch(indices[self.size :], {name: t[self.size :] for name, t in tensors.items()}, {})
                self.waiting = [rest] if rest.indices else []

    def rest(self) -> Iterator[ReadBatch]:
        if self.waiting:
            indices = [index for each in self.waiting for index in each.indices]
            names = self.waiting[0].tensors
            yield ReadBatch(
                indices, {name: torch.cat([each.tensors[name] for each in self.waiting]) for name in names}, {}
            )
        self.waiting = []


def _shapes(read: ReadBatch) -> dict[str, torch.Size]:
    return {name: tensor.shape[1:] for name, tensor in read.tensors.items()}
