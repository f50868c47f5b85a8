"""Several processes that take one step together. Start them with `accelerate launch` or `torchrun`.

Each process reads and encodes its share of a batch and of the prompts. What comes of them is gathered with its
gradients: every process sees the loss of the whole batch, and all take the step that one process would have taken.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pouf.errors import InputError, ProcessLost

logger = logging.getLogger(__name__)
T = TypeVar("T")
BEAT, LOST = 2.0, 30.0  # seconds between two signs of life, and without one after which a process counts as lost


class ProcessGroup(NamedTuple):
    """The processes of a run. Alone, everything here is the identity."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
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
        with name_lost_process():
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of the first process, or of another, whatever the others have."""
        if self.size == 1:
            return value
        values = [value]
        with name_lost_process():
            dist.broadcast_object_list(values, source)
        return values[0]

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all processes, (n_local, d) -> (n, d), in the order of their ranks, differentiable.

        A process without rows need not know d: it gives (0, 0). Gradients come back multiplied by the number of
        processes, since engines average them over these.
        """
        return rows if self.size == 1 else _Gather.apply(rows, self, self.gather_objects(tuple(rows.shape)))

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all processes, on the CPU or a device; not differentiable."""
        return tensor if self.size == 1 else torch.stack(self.gather_objects(tensor)).sum(0)

    def check_equal(self, value: str, what: str) -> None:
        """An error on all processes, where they do not have the same."""
        if len(set(values := self.gather_objects(value))) > 1:
            other = next(rank for rank, each in enumerate(values) if each != values[0])
            raise InputError(f"processes 0 and {other} see different {what}: give all processes the same")

    @torch.no_grad()
    def broadcast_weights(self, module: nn.Module) -> None:
        """All start from the weights of the first."""
        if self.size > 1:
            with name_lost_process():
                for tensor in [*module.parameters(), *module.buffers()]:
                    dist.broadcast(tensor, 0)


ALONE = ProcessGroup()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, world: ProcessGroup, shapes: list[tuple[int, int]]) -> Tensor:
        sizes = [n for n, _ in shapes]
        ctx.world, ctx.sizes, ctx.width = world, sizes, rows.shape[1]
        # All must send alike: shorter parts are filled up, and the filling is cut off again.
        padded = rows.new_zeros(max(sizes), max(d for _, d in shapes))
        if len(rows):
            padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        with name_lost_process():
            dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        own = gradients[0].split(ctx.sizes)[ctx.world.rank]
        return own[:, : ctx.width] * ctx.world.size, None, None


def init_processes(device: torch.device) -> ProcessGroup:
    """The processes that `accelerate launch` or `torchrun` started, or this one alone."""
    check_launch()
    started = started_processes()
    if started == 1:
        return ALONE
    from accelerate import PartialState

    # One process may find its features in the cache while another computes for hours; who is lost is told by signs of
    # life instead.
    state = PartialState(cpu=device.type == "cpu", timeout=timedelta(days=1))
    if state.num_processes != started:
        raise InputError(
            f"{started} processes were started, but {state.num_processes} found each other: on CPU say so to the "
            "launcher, as accelerate launch --cpu, or use torchrun"
        )
    world = ProcessGroup(state.process_index, state.num_processes)
    if not _signs:
        _signs.append(SignsOfLife(world))
        atexit.register(_leave)
    return world


def started_processes() -> int:
    """How many the launcher started; they need not have met yet."""
    return int(os.environ.get("WORLD_SIZE", "1"))


# Settings of `accelerate launch` that nothing here follows: the name, what it may be, what to do instead.
UNMET = {
    "ACCELERATE_USE_DEEPSPEED": (("false",), "DeepSpeed: use FSDP (version 2), which shards as well"),
    "ACCELERATE_USE_MEGATRON_LM": (("false",), "Megatron-LM: use FSDP (version 2)"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (("false",), "tensor and context parallelism: use FSDP (version 2)"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        ("1",), "gradient_accumulation_steps: the loss is of a whole batch, which compute.chunk computes in parts"),
    "ACCELERATE_GRADIENT_CLIPPING": (("none",), "gradient_clipping: set optimisation.clip in the recipe"),
    "ACCELERATE_DYNAMO_BACKEND": (("no",), "dynamo_backend: set compute.compile in the recipe"),
}  # fmt: skip
UNMET_SHARDING = {
    "FSDP_VERSION": (("2",), "fsdp_version: only version 2 is supported"),
    "FSDP_OFFLOAD_PARAMS": (("false",), "fsdp_offload_params: weights stay on their devices"),
    "FSDP_ACTIVATION_CHECKPOINTING": (
        ("false",), "fsdp_activation_checkpointing: set compute.checkpointing in the recipe"),
    "FSDP_AUTO_WRAP_POLICY": (
        ("transformer_based_wrap", "no_wrap"), "fsdp_auto_wrap_policy: layers are wrapped, or the model as a whole"),
}  # fmt: skip


def check_launch() -> None:
    """An error that names the first setting of `accelerate launch` that can't be honoured."""
    sharded = _environment("ACCELERATE_USE_FSDP") == "true"
    for name, (fine, instead) in (UNMET | (UNMET_SHARDING if sharded else {})).items():
        value = _environment(name)
        if (value and value not in fine) or (name == "FSDP_VERSION" and not value):
            raise InputError(f"accelerate asks for {value or 'its default'}, which is not supported: {instead}")
    if _environment("ACCELERATE_MIXED_PRECISION") not in ("", "no", "bf16", "fp16"):
        raise InputError("accelerate asks for a mixed_precision that can't be honoured: use no, bf16 or fp16")


def launched_precision() -> str | None:
    """What `accelerate launch` says, if it says anything."""
    said = _environment("ACCELERATE_MIXED_PRECISION")
    return said if said not in ("", "no") else None


def launched_sharding() -> bool:
    """`accelerate launch` asks for FSDP. On CPUs accelerate itself would silently use DDP instead."""
    return _environment("ACCELERATE_USE_FSDP") == "true"


def launched_wrapping() -> tuple[bool, list[str]]:
    """Whether layers are wrapped one by one, and the names of their classes where those are given."""
    names = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    policy = _environment("FSDP_AUTO_WRAP_POLICY")
    return policy != "no_wrap", [name.strip() for name in names.split(",") if name.strip()]


def launched_resharding() -> bool:
    return _environment("FSDP_RESHARD_AFTER_FORWARD") not in ("false", "no_shard", "shard_grad_op")


def _environment(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


class SignsOfLife:
    """Each process writes a sign into the store of the process group, and ends when another has stopped to.

    A collective call can wait for ever on a machine that is gone; this needs no answer of anyone but the store.
    """

    def __init__(self, world: ProcessGroup) -> None:
        self.world = world
        self.store = dist.distributed_c10d.PrefixStore("pouf", dist.distributed_c10d._get_default_store())
        self.store.set(f"host {world.rank}", socket.gethostname())
        self.store.set(f"left {world.rank}", "")
        self.store.set(f"free {world.rank}", "")  # watches no longer, since the first has left
        self.store.set(f"sign {world.rank}", "0")
        world.gather_objects(0)  # nobody is asked for a sign before the first
        self.seen = {rank: ("0", time.monotonic()) for rank in range(world.size) if rank != world.rank}
        self.ending = threading.Event()
        self.found: str | None = None  # who was lost
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()

    def _watch(self) -> None:
        number = 0
        while not self.ending.wait(BEAT):
            number += 1
            try:
                self.store.set(f"sign {self.world.rank}", str(number))
                if not self.world.is_main and self.store.get("left 0"):
                    self.ending.set()
                    self.store.set(f"free {self.world.rank}", "yes")
                    return
                self.found = self._lost()
            except RuntimeError:  # the store is gone, and with it the process that kept it
                self.found = "process 0, or the launcher that brought the processes together,"
            if self.ending.is_set():
                return
            if self.found is not None:
                time.sleep(BEAT)  # whoever waits for the name of the lost one tells it better
                if not self.ending.is_set():
                    logger.critical(_lost_text(self.found))
                    os._exit(1)

    def _lost(self) -> str | None:
        now = time.monotonic()
        for rank, (sign, since) in self.seen.items():
            fresh = self.store.get(f"sign {rank}").decode()
            if fresh != sign:
                self.seen[rank] = (fresh, now)
            elif now - since > LOST and not self.store.get(f"left {rank}"):
                return self._name(rank)
        return None

    def _name(self, rank: int) -> str:
        return f"process {rank} on {self.store.get(f'host {rank}').decode()}"

    def who_is_lost(self) -> str | None:
        """Waits until it is known; None where all are there, so that the reason is another."""
        end = time.monotonic() + LOST + 5 * BEAT
        while time.monotonic() < end:
            if self.found is not None:
                self.ending.set()
                return self.found
            with suppress(RuntimeError):  # the store is gone: the other thread finds that out
                for rank in self.seen:
                    if self.store.get(f"left {rank}"):
                        return self._name(rank)
            time.sleep(0.2)
        return None

    def leave(self) -> None:
        self.ending.set()
        with suppress(RuntimeError):  # nobody is there to be told
            self.store.set(f"left {self.world.rank}", "yes")
            end = time.monotonic() + 3 * BEAT
            # The store may end with the first process: whoever still watches must not take that for an accident.
            while self.world.is_main and time.monotonic() < end and not all(map(self._is_free, self.seen)):
                time.sleep(0.05)
        # A thread that the interpreter ends in the middle of a call to the store takes the whole process down with it.
        self.watch.join(3 * BEAT)

    def _is_free(self, rank: int) -> bool:
        return bool(self.store.get(f"left {rank}") or self.store.get(f"free {rank}"))


_signs: list[SignsOfLife] = []


def _lost_text(who: str) -> str:
    return f"{who} has ended or can't be reached any more: the others can't go on without it"


@contextmanager
def name_lost_process() -> Iterator[None]:
    """Where the processes lose touch, the error says with whom."""
    try:
        yield
    except RuntimeError as error:
        _raise_named(error)


def _raise_named(error: RuntimeError) -> NoReturn:
    if isinstance(error, ProcessLost) or not _signs or not _is_of_connection(error):
        raise error
    who = _signs[0].who_is_lost()
    if who is None:
        raise error
    raise ProcessLost(_lost_text(who)) from error


def _is_of_connection(error: RuntimeError) -> bool:
    told = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in told for word in ("connection", "gloo", "nccl", "peer"))


def _leave() -> None:
    _signs[0].leave()
    gc.collect()  # models that nobody needs any more hold on to the process group, whose threads end with it
    if dist.is_initialized():
        dist.destroy_process_group()
