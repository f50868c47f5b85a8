"""Random batches that can be resumed, and reading them as tensors, in this process or in worker processes."""

from __future__ import annotations

import multiprocessing
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pouf.errors import InputError, Unreadable

if TYPE_CHECKING:
    from pouf.data.base import Unlabelled


class Draw(NamedTuple):
    """One sample of a coming batch. All its random changes follow from the seed, in whichever process it is read."""

    position: int  # in the data
    seed: int


class Draws(Sequence[Draw]):
    """The samples of a batch, as tensors: a batch of thousands is looked up at once.

    Args:
        pairs: (n, 2), the position and the seed of each.
    """

    def __init__(self, pairs: Tensor) -> None:
        self.pairs = pairs

    @property
    def positions(self) -> Tensor:
        return self.pairs[:, 0]

    @property
    def seeds(self) -> Tensor:
        return self.pairs[:, 1]

    def __len__(self) -> int:
        return len(self.pairs)

    @overload
    def __getitem__(self, index: int) -> Draw: ...

    @overload
    def __getitem__(self, index: slice) -> Draws: ...

    def __getitem__(self, index: int | slice) -> Draw | Draws:
        return Draws(self.pairs[index]) if isinstance(index, slice) else Draw(*self.pairs[index].tolist())

    def __iter__(self) -> Iterator[Draw]:
        return (Draw(*pair) for pair in self.pairs.tolist())


class RandomBatches(ABC, Iterator[Draws]):
    """Readers may draw batches ahead of training: `done` marks the earliest open batch as trained on."""

    @abstractmethod
    def done(self) -> Draws:
        """Mark the earliest open batch as trained on, and return it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the first batch that was not done. To be called before any is drawn."""


class Permutations(RandomBatches):
    """Each epoch is a new permutation; no batch holds a sample twice.

    The remainder of an epoch after its last full batch is left out. Data smaller than `size` make up
    every batch as a whole. Unreadable samples are left out once they are known.
    """

    def __init__(self, data: Unlabelled, size: int, generator: torch.Generator) -> None:
        self.data, self.size, self.generator = data, size, generator
        self.order: Any = data.content_order()  # a sequence, or an array
        # Seeds have a generator of their own, so that the order of samples is the same whether they are used or not.
        self.seeds = torch.Generator().manual_seed(generator.initial_seed() + 1)
        self.epoch = self._states()  # as they were before the epoch was drawn
        self.permuted, self.drawn_seeds = torch.empty(0), torch.empty(0)  # of the epoch: ranks in the order, and seeds
        self.position = 0  # of the next one
        self.open: deque[Draws] = deque()  # drawn and not done
        self.again: deque[Draws] = deque()  # drawn and not done before the run was interrupted

    def __next__(self) -> Draws:
        batch = self.again.popleft() if self.again else self._draw()
        self.open.append(batch)
        return batch

    def _draw(self) -> Draws:
        batch = torch.empty(0, 2, dtype=torch.long)
        while True:
            if self.position == len(self.permuted):
                self.data.check_readable()
                self.size = min(self.size, len(self.data) - len(self.data.skipped))
                self._begin_epoch()
                batch = batch[:0]
            rows = slice(self.position, self.position + self.size - len(batch))
            positions = self._at(self.permuted[rows])
            self.position += len(positions)
            drawn = torch.stack([positions, self.drawn_seeds[rows]], dim=1)
            if self.data.skipped:
                drawn = drawn[~torch.isin(positions, torch.tensor(list(self.data.skipped)))]
            batch = torch.cat([batch, drawn])
            if len(batch) == self.size:
                return Draws(batch)

    def _at(self, ranks: Tensor) -> Tensor:
        if isinstance(self.order, np.ndarray):
            return torch.from_numpy(self.order[ranks.numpy()])
        return torch.tensor([self.order[rank] for rank in ranks.tolist()], dtype=torch.long)

    def _begin_epoch(self) -> None:
        self.epoch, self.position = self._states(), 0
        self.permuted = torch.randperm(len(self.order), generator=self.generator)
        self.drawn_seeds = torch.randint(2**62, (len(self.order),), generator=self.seeds)

    def _states(self) -> list[torch.Tensor]:
        return [self.generator.get_state(), self.seeds.get_state()]

    def done(self) -> Draws:
        return self.open.popleft()

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch, "position": self.position, "size": self.size,
            "open": [batch.pairs for batch in (*self.open, *self.again)], "skipped": dict(self.data.skipped),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.skipped.update(state["skipped"])
        self.size = state["size"]
        self.generator.set_state(state["epoch"][0])
        self.seeds.set_state(state["epoch"][1])
        if state["position"]:
            self._begin_epoch()
            self.position = state["position"]
        self.again = deque(map(Draws, state["open"]))


class ReplayedBatches(RandomBatches):
    """Batches of a stream: to resume at one, all before it are read again."""

    def __init__(self, batches: Iterator[Draws]) -> None:
        self.batches, self.number = batches, 0
        self.open: deque[Draws] = deque()  # drawn and not done

    def __next__(self) -> Draws:
        self.open.append(next(self.batches))
        return self.open[-1]

    def done(self) -> Draws:
        self.number += 1
        return self.open.popleft()

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for _ in range(state["number"]):
            next(self.batches)
        self.number = state["number"]


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
                sample = self.data.read(index, self.side)
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
