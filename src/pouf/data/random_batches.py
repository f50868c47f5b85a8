"""Endless random batches with a state that can be saved, so that a run resumes at the same batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from pouf.data.base import Unlabelled


class Draw(NamedTuple):
    """One sample of a coming batch. All its random changes follow from the seed, in whichever process it is read."""

    position: int  # in the data
    seed: int


class RandomBatches(ABC, Iterator[list[Draw]]):
    """Readers may draw batches ahead of training: `done` marks the earliest open batch as trained on."""

    @abstractmethod
    def done(self) -> list[Draw]:
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
        self.order = data.content_order()
        # Seeds have a generator of their own, so that the order of samples is the same whether they are used or not.
        self.seeds = torch.Generator().manual_seed(generator.initial_seed() + 1)
        self.epoch = self._states()  # as they were before the epoch was drawn
        self.permuted, self.drawn_seeds = torch.empty(0), torch.empty(0)  # of the epoch: ranks in the order, and seeds
        self.position = 0  # of the next one
        self.open: deque[list[Draw]] = deque()  # drawn and not done
        self.again: deque[list[Draw]] = deque()  # drawn and not done before the run was interrupted

    def __next__(self) -> list[Draw]:
        batch = self.again.popleft() if self.again else self._draw()
        self.open.append(batch)
        return batch

    def _draw(self) -> list[Draw]:
        batch: list[Draw] = []
        while True:
            if self.position == len(self.permuted):
                self.data.check_readable()
                self.size = min(self.size, len(self.data) - len(self.data.skipped))
                self._begin_epoch()
                batch = []
            rows = slice(self.position, self.position + self.size - len(batch))
            for rank, seed in zip(self.permuted[rows].tolist(), self.drawn_seeds[rows].tolist(), strict=True):
                self.position += 1
                if (index := int(self.order[rank])) not in self.data.skipped:
                    batch.append(Draw(index, seed))
            if len(batch) == self.size:
                return batch

    def _begin_epoch(self) -> None:
        self.epoch, self.position = self._states(), 0
        self.permuted = torch.randperm(len(self.order), generator=self.generator)
        self.drawn_seeds = torch.randint(2**62, (len(self.order),), generator=self.seeds)

    def _states(self) -> list[torch.Tensor]:
        return [self.generator.get_state(), self.seeds.get_state()]

    def done(self) -> list[Draw]:
        return self.open.popleft()

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch, "position": self.position, "size": self.size,
            "open": [torch.tensor(batch) for batch in (*self.open, *self.again)], "skipped": dict(self.data.skipped),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.skipped.update(state["skipped"])
        self.size = state["size"]
        self.generator.set_state(state["epoch"][0])
        self.seeds.set_state(state["epoch"][1])
        if state["position"]:
            self._begin_epoch()
            self.position = state["position"]
        self.again = deque([Draw(*pair) for pair in batch.tolist()] for batch in state["open"])


class ReplayedBatches(RandomBatches):
    """Batches of a stream: to resume at one, all before it are read again."""

    def __init__(self, batches: Iterator[list[Draw]]) -> None:
        self.batches, self.number = batches, 0
        self.open: deque[list[Draw]] = deque()  # drawn and not done

    def __next__(self) -> list[Draw]:
        self.open.append(next(self.batches))
        return self.open[-1]

    def done(self) -> list[Draw]:
        self.number += 1
        return self.open.popleft()

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for _ in range(state["number"]):
            next(self.batches)
        self.number = state["number"]
