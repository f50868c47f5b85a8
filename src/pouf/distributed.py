"""Several processes that take one step together. Start them with `accelerate launch` or `torchrun`.

Each process reads and encodes its share of a batch; the features are gathered with their gradients, so that every
process sees the loss of the whole batch and all take the step that one process alone would have taken.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pouf.errors import InputError

T = TypeVar("T")


class World(NamedTuple):
    """The processes of a run. Alone, everything here is the identity."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """The one that writes and speaks."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's part of a list: together and in their order, the parts are the list. Some may be longer."""
        first, last = (len(items) * rank // self.size for rank in (self.rank, self.rank + 1))
        return items[first:last]

    def gather_objects(self, value: T) -> list[T]:
        """The value of each process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all processes, (n_local, d) -> (n, d), in the order of their ranks, differentiable.

        A process without rows need not know d: it gives (0, 0).
        """
        return rows if self.size == 1 else _Gather.apply(rows, self, self.gather_objects(tuple(rows.shape)))

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """What `gather` sent back, summed; what every process computed alike, once.

        `gather` multiplies its gradients by the number of processes, and the mean takes that away again.
        """
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:  # a process without a sample still takes part
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.size


ALONE = World()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: World, shapes: list[tuple[int, int]]) -> Tensor:
        sizes = [n for n, _ in shapes]
        ctx.world, ctx.sizes, ctx.width = world, sizes, rows.shape[1]
        # All must send alike: shorter parts are filled up, and the filling is cut off again.
        padded = rows.new_zeros(max(sizes), max(d for _, d in shapes))
        if len(rows):
            padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        own = gradients[0].split(ctx.sizes)[ctx.world.rank]
        return own[:, : ctx.width] * ctx.world.size, None, None


def join(device: torch.device) -> World:
    """The processes that `accelerate launch` or `torchrun` started, or this one alone."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started == 1:
        return ALONE
    from accelerate import PartialState

    # One process may find its features in the cache while another computes for hours.
    state = PartialState(cpu=device.type == "cpu", timeout=timedelta(days=1))
    if state.num_processes != started:
        raise InputError(
            f"{started} processes were started, but {state.num_processes} found each other: on CPU say so to the "
            "launcher, as accelerate launch --cpu, or use torchrun"
        )
    atexit.unregister(_leave)
    atexit.register(_leave)
    return World(state.process_index, state.num_processes)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
