"""Samples → tensors, in this process or in worker processes."""

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
    """A batch as it was read."""

    indices: list[int]  # of the samples that could be read
    tensors: dict[str, Tensor]  # first dimension len(indices); empty if no sample could be read
    failed: dict[int, str]  # index -> reason


@dataclass(frozen=True)
class BatchReader:
    """Reads samples, transforms them and turns them into tensors.

    Args:
        prepare: samples -> tensors, each with the samples as first dimension.
        transform: (sample, seed) -> changed sample: a random crop, or the sample with demonstrations.
        side: pixels of the square that the model reads; larger images are decoded at reduced size.
    """

    data: Unlabelled
    prepare: Callable[[Sequence[Any]], dict[str, Tensor]]
    transform: Callable[[Any, int], Any] | None = None
    side: int | None = None

    def __getitem__(self, draws: Sequence[Draw]) -> ReadBatch:
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
    """The tensors of some samples by name; empty if there are no samples."""
    tensors = prepare(samples) if samples else {}
    if not isinstance(tensors, Mapping):
        raise InputError(f"prepare() must return tensors by name, as {{'pixels': …}}, not {type(tensors).__name__}")
    return dict(tensors)


class SupportsRead(Protocol[T_co]):
    """Reads a batch of draws, here or in a worker process."""

    @property
    def data(self) -> Unlabelled: ...

    def __getitem__(self, draws: Sequence[Draw], /) -> T_co: ...


def read_batches(reader: SupportsRead[T], batches: Iterable[Sequence[Draw]], workers: int = 0) -> Iterator[T]:
    """Batches in order; `workers` processes read ahead.

    The caller adds unreadable samples to the data's `skipped`, in agreement with the other processes of a run, since
    later draws leave them out.

    The result does not depend on the number of workers: the seed of all random changes is part of the draw. Only an
    unreadable sample may be drawn again until it is in `skipped`.
    """
    # A batch is one item to the loader: its own batching stays off. The buffer of a stream is in this process only.
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
