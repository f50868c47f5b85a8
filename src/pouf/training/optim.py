"""Optimizers and learning-rate schedules, by their names in a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pouf.parallel.fsdp import is_shard
from pouf.recipe import Optimisation

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
