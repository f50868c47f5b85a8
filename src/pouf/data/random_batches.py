"""Random batches without end that know where they stand, so that a run can go on from there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from pouf.data.base import Unlabelled


class Draw(NamedTuple):
    """One sample of a batch to come: what is random about it follows from the seed alone, whoever reads it."""

    place: int  # position in the data
    seed: int


class RandomBatches(ABC, Iterator[list[Draw]]):
    """Whoever reads ahead draws more batches than have been learned from: `done` says that one has been."""

    @abstractmethod
    def done(self) -> list[Draw]:
        """The earliest batch that has been drawn and not yet been learned from: now it is."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the first batch that was not done. To be called before any is drawn."""


class Permutations(RandomBatches):
    """Each epoch is a new permutation; no batch holds a sample twice.

    What is left of an epoch after its last full batch waits for the next one. Data smaller than `size` come whole in
    every batch. Samples that have turned out to be unreadable are left out from then on.
    """

    def __init__(self, data: Unlabelled, size: int, generator: torch.Generator) -> None:
        self.data, self.size, self.generator = data, size, generator
        self.order = data.content_order()
        # Seeds come from a stream of their own, so that the order of samples is the same whether they are used or not.
        self.seeds = torch.Generator().manual_seed(generator.initial_seed() + 1)
        self.epoch = self._states()  # as they were before the epoch was drawn
        self.permuted, self.drawn_seeds = torch.empty(0), torch.empty(0)  # of the epoch: places in the order, and seeds
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
            for place, seed in zip(self.permuted[rows].tolist(), self.drawn_seeds[rows].tolist(), strict=True):
                self.position += 1
                if (index := int(self.order[place])) not in self.data.skipped:
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


class Replayed(RandomBatches):
    """Batches of a stream: to get back to one, all before it are met again."""

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
