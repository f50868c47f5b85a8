"""Samples → tensors, in this process or in several beside it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor
from torch.utils.data import DataLoader

from pouf.data.base import Unlabelled, Unreadable
from pouf.data.random_batches import Draw
from pouf.errors import InputError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ReadBatch(NamedTuple):
    """What came of a batch of draws."""

    indices: list[int]  # of the samples that could be read
    tensors: dict[str, Tensor]  # first dimension len(indices); empty where there is nothing
    failed: dict[int, str]  # index -> why


@dataclass(frozen=True)
class BatchReader:
    """Reads samples, changes them and makes tensors of them.

    Args:
        prepare: samples -> tensors, each with the samples as first dimension.
        transform: a sample and its seed -> the sample as it is to be seen: a random crop, or shots around it.
        side: of the square that the model reads, of images: larger ones are decoded no larger than needed.
    """

    data: Unlabelled
    prepare: Callable[[Sequence[Any]], dict[str, Tensor]]
    transform: Callable[[Any, int], Any] | None = None
    side: int | None = None

    def __getitem__(self, draws: list[Draw]) -> ReadBatch:
        indices, samples, failed = [], [], {}
        for index, seed in draws:
            try:
                sample = self.data.read_for(index, self.side)
            except Unreadable as error:
                failed[index] = str(error)
                continue
            indices.append(index)
            samples.append(sample if self.transform is None else self.transform(sample, seed))
        return ReadBatch(indices, tensors_of(samples, self.prepare), failed)


def tensors_of(samples: Sequence[Any], prepare: Callable[[Sequence[Any]], Any]) -> dict[str, Tensor]:
    """By name; empty where there are no samples."""
    tensors = prepare(samples) if samples else {}
    if not isinstance(tensors, Mapping):
        raise InputError(f"prepare() must return tensors by name, as {{'pixels': …}}, not {type(tensors).__name__}")
    return dict(tensors)


class SupportsRead(Protocol[T_co]):
    """What reads a batch of draws, here or in a worker process."""

    @property
    def data(self) -> Unlabelled: ...

    def __getitem__(self, draws: list[Draw], /) -> T_co: ...


def read_batches(reader: SupportsRead[T], batches: Iterable[list[Draw]], workers: int = 0) -> Iterator[T]:
    """Batches in their order. `workers` processes read ahead.

    Who goes through them notes what can't be read in the data's `skipped`: several processes do so together, since the
    next draws leave it out.

    The result does not depend on the number of workers: everything random about a sample comes with its draw. Only a
    sample that can't be read is drawn again as long as nobody has come to know it.
    """
    # A batch is one item to the loader: its own batching stays off. What a stream holds is in this process only.
    source: Iterable[T] = map(reader.__getitem__, batches)
    if workers and not reader.data.streamed:
        if "fork" not in multiprocessing.get_all_start_methods():
            raise InputError("worker processes need an operating system that can fork them: use 0 workers here")
        source = DataLoader(
            reader,  # type: ignore[arg-type]
            batch_size=None,
            sampler=batches,
            num_workers=workers,
            collate_fn=_as_is,
            multiprocessing_context="fork",
        )
    return iter(source)


def _as_is(read: T) -> T:
    return read
