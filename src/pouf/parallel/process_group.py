"""Several processes that take one step together. Start them with `accelerate launch` or `torchrun`.

Each process reads and encodes its share of a batch and of the prompts. The results are gathered with their gradients:
every process computes the loss of the whole batch, and all take the step that one process would have taken.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import partial, wraps
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pouf.data.batches import ReadBatch
from pouf.errors import InputError, ProcessLost

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
TIMEOUT = "POUF_PROCESS_TIMEOUT"  # environment variable: seconds that a process waits for the others, at most
DEFAULT_TIMEOUT = 3600.0  # one process may encode for long what another finds in the cache


class ProcessGroup(NamedTuple):
    """The processes of a run. In a group of one, every method is the identity."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and prints."""
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
        with connection_errors():
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of the first process, or of another, whatever the others have."""
        if self.size == 1:
            return value
        values = [value]
        with connection_errors():
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
            with connection_errors():
                for tensor in [*module.parameters(), *module.buffers()]:
                    dist.broadcast(tensor, 0)


ALONE = ProcessGroup()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup, shapes: list[tuple[int, int]]) -> Tensor:
        sizes = [n for n, _ in shapes]
        ctx.group, ctx.sizes, ctx.width = group, sizes, rows.shape[1]
        # All must send alike: shorter parts are filled up, and the filling is cut off again.
        padded = rows.new_zeros(max(sizes), max(d for _, d in shapes))
        if len(rows):
            padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        with connection_errors():
            dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        own = gradients[0].split(ctx.sizes)[ctx.group.rank]
        return own[:, : ctx.width] * ctx.group.size, None, None


_working: ContextVar[ProcessGroup] = ContextVar("processes", default=ALONE)


def processes() -> ProcessGroup:
    """Those that compute together here: all that were started while `together` is open, else this one alone."""
    return _working.get()


@contextmanager
def together(device: torch.device) -> Iterator[ProcessGroup]:
    """While open, all processes that were started share the work: each must compute the same."""
    with connection_errors(), in_group(init_processes(device)) as group:
        yield group


def by_all_processes(compute: F) -> F:
    """A function of a classifier that all processes call with the same arguments, and share the work of."""

    @wraps(compute)
    def computed(classifier: Any, *args: Any, **options: Any) -> Any:
        with together(classifier.device):
            return compute(classifier, *args, **options)

    return computed  # type: ignore[return-value]


@contextmanager
def in_group(group: ProcessGroup) -> Iterator[ProcessGroup]:
    """While open, these are the processes that compute together here."""
    before = _working.set(group)
    try:
        yield group
    finally:
        _working.reset(before)


alone = partial(in_group, ALONE)  # while open, this process works by itself


def init_processes(device: torch.device) -> ProcessGroup:
    """The processes that `accelerate launch` or `torchrun` started, or this one alone."""
    check_launch()
    started = started_processes()
    if started == 1:
        return ALONE
    from accelerate import PartialState

    first_call = not dist.is_initialized()
    state = PartialState(cpu=device.type == "cpu", timeout=timedelta(seconds=timeout()))
    if state.num_processes != started:
        raise InputError(
            f"{started} processes were started, but {state.num_processes} found each other: on CPU say so to the "
            "launcher, as accelerate launch --cpu, or use torchrun"
        )
    if first_call:
        atexit.register(end_processes)
    return ProcessGroup(state.process_index, state.num_processes)


def end_processes() -> None:
    """Before the process ends. Unreachable models still hold the process group, whose threads end with it."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def timeout() -> float:
    """Seconds after which a process that does not answer counts as lost."""
    text = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(text or DEFAULT_TIMEOUT)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InputError(f"{TIMEOUT} is {text!r}: expected a number of seconds above 0")
    return seconds


@contextmanager
def connection_errors() -> Iterator[None]:
    """While open, an error of the connection to other processes says what to look for."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if (
            started_processes() == 1
            or isinstance(error, ProcessLost)
            or not (isinstance(error, dist.DistError) or any(word in text for word in ("connection", "gloo", "nccl")))
        ):
            raise
        if "timed out" in text or "timeout" in text:
            reason = (
                f"another process has not answered for {timeout():g} seconds: it is stuck, its machine can't be "
                f"reached, or it computes for longer (set {TIMEOUT} to wait longer)"
            )
        else:
            reason = "another process has ended, or can't be reached any more: see its own error"
        raise ProcessLost(f"{reason} ({str(error).splitlines()[0]})") from error


def started_processes() -> int:
    """How many the launcher started; they need not have met yet."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_as_main() -> bool:
    """Whether the launcher started this as the first process; they need not have met yet."""
    return os.environ.get("RANK", "0") == "0"


# Settings of `accelerate launch` that can't be followed: the variable, the values that can, and what to do instead.
LAUNCH_SETTINGS = {
    "ACCELERATE_USE_DEEPSPEED": ("false", "DeepSpeed: use FSDP (version 2), which shards as well"),
    "ACCELERATE_USE_MEGATRON_LM": ("false", "Megatron-LM: use FSDP (version 2)"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("false", "tensor and context parallelism: use FSDP (version 2)"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "gradient_accumulation_steps: set compute.chunk in the recipe"),
    "ACCELERATE_GRADIENT_CLIPPING": ("none", "gradient_clipping: set optimisation.clip in the recipe"),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "dynamo_backend: set compute.compile in the recipe"),
    "ACCELERATE_MIXED_PRECISION": ("no bf16 fp16", "mixed_precision: use no, bf16 or fp16"),
    "FSDP_VERSION": ("2", "fsdp_version: only version 2 is supported"),
    "FSDP_OFFLOAD_PARAMS": ("false", "fsdp_offload_params: weights stay on their devices"),
    "FSDP_ACTIVATION_CHECKPOINTING": (
        "false",
        "fsdp_activation_checkpointing: set compute.checkpointing",
    ),
    "FSDP_AUTO_WRAP_POLICY": ("transformer_based_wrap no_wrap", "fsdp_auto_wrap_policy: wrap layers, or the model"),
}


def check_launch() -> None:
    """An error that names the first setting of `accelerate launch` that can't be honoured."""
    for name, (allowed, instead) in LAUNCH_SETTINGS.items():
        value = _environment(name)
        if name.startswith("FSDP_") and not launched_sharding():
            continue
        if value not in allowed.split() and (value or name == "FSDP_VERSION"):
            raise InputError(f"accelerate asks for {value or 'its default'}, which is not supported: {instead}")


def launched_precision() -> str | None:
    """What `accelerate launch` says, if it says anything."""
    precision = _environment("ACCELERATE_MIXED_PRECISION")
    return precision if precision not in ("", "no") else None


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


NOTHING = ReadBatch([], {}, {})


class PaddingSample:
    """A sample to go through the model with, for a process that could read none while others did."""

    def __init__(self) -> None:
        self.own: dict[str, Tensor] = {}

    def tensors_for(self, read: ReadBatch) -> dict[str, Tensor] | None:
        """What was read, or a sample that stands for it; None where no process could read anything."""
        if read.indices and not self.own and processes().size > 1:
            # Each tensor of a sample may have several rows, as with demonstrations.
            n = len(read.indices)
            self.own = {name: tensor[: len(tensor) // n].clone() for name, tensor in read.tensors.items()}
        per_rank = processes().gather_objects((bool(read.indices), bool(self.own)))
        if not any(has_read for has_read, _ in per_rank):
            return None
        if not all(has_sample for _, has_sample in per_rank):
            source = next(rank for rank, (has_read, _) in enumerate(per_rank) if has_read)
            sample = processes().broadcast(self.own, source)  # by all, also by those that have one
            self.own = self.own or sample
        return read.tensors if read.indices else self.own


def pad_batches(reads: Iterator[ReadBatch]) -> Iterator[tuple[ReadBatch, dict[str, Tensor]]]:
    """The batches of this process and the tensors to encode, equally many on all processes.

    A process that has read everything yields samples that do not count until all processes are done.
    """
    padding = PaddingSample()
    while True:
        read = next(reads, None)
        if not any(processes().gather_objects(read is not None)):
            return
        read = read or NOTHING
        tensors = padding.tensors_for(read)
        if tensors is not None:
            yield read, tensors
        elif read.failed:
            yield read, {}


def split_into(items: list[T], count: int) -> list[list[T]]:
    """So many pieces of about equal size; some are empty where there are fewer items."""
    bounds = [len(items) * i // count for i in range(count + 1)]
    return [items[first:last] for first, last in pairwise(bounds)]
