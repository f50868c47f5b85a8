"""Processes that share the weights of a model go through it equally often: with a borrowed sample where need be."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TypeVar

from torch import Tensor

from pouf.data.loader import ReadBatch
from pouf.parallel.process_group import processes

T = TypeVar("T")
PROMPTS = 256  # encoded at once at most: encoders cut there by themselves, and would do so unequally often
NOTHING = ReadBatch([], {}, {})


class PaddingSample:
    """A sample to go through the model with, for a process that could read none while others did."""

    def __init__(self) -> None:
        self.own: dict[str, Tensor] = {}

    def instead_of(self, read: ReadBatch) -> dict[str, Tensor] | None:
        """What was read, or a sample that stands for it; None where no process could read anything."""
        if read.indices and not self.own and processes().size > 1:
            # Each tensor of a sample may have several rows, as with demonstrations.
            n = len(read.indices)
            self.own = {name: tensor[: len(tensor) // n].clone() for name, tensor in read.tensors.items()}
        there = processes().gather_objects((bool(read.indices), bool(self.own)))
        if not any(has_read for has_read, _ in there):
            return None
        if not all(has_one for _, has_one in there):
            lender = next(rank for rank, (has_read, _) in enumerate(there) if has_read)
            lent = processes().broadcast(self.own, lender)
            self.own = self.own or lent
        return read.tensors if read.indices else self.own


def in_step(reads: Iterator[ReadBatch]) -> Iterator[tuple[ReadBatch, dict[str, Tensor]]]:
    """The batches of this process and the tensors to encode, equally many on all processes.

    A process that has read everything yields samples that do not count until all processes are done.
    """
    spare = PaddingSample()
    while True:
        read = next(reads, None)
        if not any(processes().gather_objects(read is not None)):
            return
        read = read or NOTHING
        tensors = spare.instead_of(read)
        if tensors is not None:
            yield read, tensors
        elif read.failed:
            yield read, {}


def in_pieces(items: list[T], count: int) -> list[list[T]]:
    """So many pieces of about equal size; some are empty where there are fewer items."""
    bounds = [len(items) * i // count for i in range(count + 1)]
    return [items[first:last] for first, last in pairwise(bounds)]
