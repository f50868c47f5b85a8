"""Optimizers and learning-rate schedules, by their names in a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from pouf.recipe import Optimisation


def make_optimizer(parameters: Sequence[nn.Parameter], settings: Optimisation) -> torch.optim.Optimizer:
    return OPTIMIZERS[settings.name](parameters, settings)


OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter], Optimisation], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, s: torch.optim.SGD(
        parameters,
        lr=s.lr,
        momentum=s.momentum,
        nesterov=s.nesterov and s.momentum > 0,
        weight_decay=s.weight_decay,
    ),
    "adamw": lambda parameters, s: torch.optim.AdamW(parameters, lr=s.lr, weight_decay=s.weight_decay),
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
