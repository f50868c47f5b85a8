"""The model of a step over all processes, by plain torch, DDP or FSDP2; its optimizer and learning rate.

Everything that a step computes goes through one module, which is what DDP wraps. Every process goes through it equally
often, with a borrowed sample where it has none of its own: engines communicate while they compute.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pouf.classifier import Classifier
from pouf.errors import InputError
from pouf.losses.objective import Objective
from pouf.parallel.fsdp import average_gradients, clip_gradients, is_shard, local, reshard
from pouf.parallel.process_group import ProcessGroup, connection_errors, launched_precision, launched_sharding
from pouf.recipe import Optimisation, Recipe
from pouf.training.model import StepModel
from pouf.tuners import Tuner


class Engine:
    """The model of a step on one process or on several. Alone, it is plain torch.

    With several processes the weights are copied in each (DDP), unless they were sharded over all before (FSDP2).
    """

    def __init__(
        self, classifier: Classifier, tuner: Tuner, objective: Objective, recipe: Recipe, world: ProcessGroup
    ) -> None:
        self.classifier, self.tuner, self.world = classifier, tuner, world
        self.recipe = as_launched(recipe, world)
        self.device = classifier.device
        self.sharded = classifier.backbone.sharded
        self.parameters: dict[str, nn.Parameter] = tuner.parameters
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.recipe.compute.precision == "fp16")
        self.model: nn.Module = StepModel(classifier, self.recipe, world, objective.used)
        if world.size > 1 and not self.sharded:
            self.model = _wrapped(self.model, self.device)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of the loss to the weights."""
        with connection_errors():
            self.scaler.scale(loss).backward()

    def no_sync(self) -> AbstractContextManager[Any]:
        """While open, DDP leaves gradients where they are."""
        return self.model.no_sync() if isinstance(self.model, nn.parallel.DistributedDataParallel) else nullcontext()

    def clip_gradients(self, optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
        """Exchange and unscale all gradients, cut them to the limit, and return their norm before that."""
        parameters = list(self.parameters.values())
        if self.sharded:
            average_gradients(parameters, self.world)
        self.scaler.unscale_(optimizer)
        if not self.sharded:
            return torch.nn.utils.clip_grad_norm_(parameters, limit)
        return clip_gradients(parameters, limit)

    def all_finite(self) -> bool:
        """The weights, on all processes."""
        return all(self.world.gather_objects(all(bool(local(p).isfinite().all()) for p in self.parameters.values())))

    def release(self) -> None:
        """After the last step, however it ended: free gradients and whole layers."""
        self.classifier.eval()
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.sharded:
            reshard(self.classifier.backbone)


def as_launched(recipe: Recipe, world: ProcessGroup) -> Recipe:
    """With the precision and the sharding that `accelerate launch` asks for."""
    changes: dict[str, Any] = {}
    launched, own = launched_precision(), recipe.compute.precision
    if launched is not None and own not in ("fp32", launched):
        raise InputError(f"accelerate asks for mixed_precision {launched}, the recipe for {own}: set one of them only")
    if launched is not None:
        changes["compute.precision"] = launched
    if launched_sharding():
        changes["compute.shard"] = True
    recipe = recipe.with_settings(changes) if changes else recipe
    if recipe.compute.shard and world.size > 1 and recipe.compute.compile:
        raise InputError("compute.compile does not go together with sharded weights: leave one of them out")
    if recipe.compute.shard and world.size > 1 and recipe.compute.precision == "fp16":
        raise InputError("fp16 needs a scale of the loss that shards can't agree on: take bf16, or do not shard")
    return recipe


def _wrapped(module: nn.Module, device: torch.device) -> nn.Module:
    """Prepared by accelerate: DDP, with gradients in buckets that are sent while others are computed."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    # Which parameters a step uses differs from piece to piece. Buffers are constants here.
    of_ddp = DistributedDataParallelKwargs(
        find_unused_parameters=True, broadcast_buffers=False, gradient_as_bucket_view=True
    )
    try:
        accelerator = Accelerator(cpu=device.type == "cpu", kwargs_handlers=[of_ddp])
    except ValueError as error:
        raise InputError(f"accelerate can't start as it was launched: {error}") from None
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # later versions of torch have another name for broadcast_buffers
        return accelerator.prepare_model(module, device_placement=False)  # type: ignore[no-any-return]


Groups = list[dict[str, Any]]


def make_optimizer(parameters: Mapping[str, nn.Parameter], settings: Optimisation) -> torch.optim.Optimizer:
    """Parameters by name. The temperature is a group of its own where it has a rate of its own."""
    own = {name for name in parameters if settings.temperature_lr and name.split(".")[-1] == "logit_scale"}
    groups: Groups = [
        {"params": [p for name, p in parameters.items() if name not in own], "share": 1.0},
        {"params": [parameters[name] for name in own], "share": settings.temperature_lr / settings.lr},
    ]
    # Shards and whole tensors can't be updated by one call.
    groups = [
        group | {"params": [p for p in group["params"] if is_shard(p) is sharded]}
        for group in groups
        for sharded in (False, True)
    ]
    groups = [group for group in groups if group["params"]]
    return OPTIMIZERS[settings.name]([group | {"fused": can_fuse(group["params"])} for group in groups], settings)


def can_fuse(parameters: Sequence[Tensor]) -> bool:
    """Whether torch updates them in one pass over memory: on a CPU a seventh of the time."""
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") and not is_shard(p) for p in parameters)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """For the next update; a group may take a share of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["share"]


OPTIMIZERS: dict[str, Callable[[Groups, Optimisation], torch.optim.Optimizer]] = {
    "sgd": lambda groups, s: torch.optim.SGD(
        groups,
        lr=s.lr,
        momentum=s.momentum,
        nesterov=s.nesterov and s.momentum > 0,
        weight_decay=s.weight_decay,
    ),
    "adamw": lambda groups, s: torch.optim.AdamW(groups, lr=s.lr, weight_decay=s.weight_decay),
}


def learning_rate(settings: Optimisation, step: int, steps: int) -> float:
    """The rate of update number `step`, from 0."""
    return settings.lr * SCHEDULES[settings.schedule](settings, step, steps)


SCHEDULES: dict[str, Callable[[Optimisation, int, int], float]] = {
    "paper": lambda s, step, steps: (1 + s.gamma * step) ** -s.alpha,
    "linear": lambda s, step, steps: 1 - step / steps,
    "cosine": lambda s, step, steps: 0.5 * (1 + math.cos(math.pi * step / steps)),
    "constant": lambda s, step, steps: 1.0,
}
