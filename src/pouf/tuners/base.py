"""What a tuner says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from pouf.models.base import Backbone
from pouf.recipe import TunerSettings


class Target(NamedTuple):
    """What is to be tuned."""

    backbone: Backbone
    texts: tuple[tuple[str, ...], ...]  # what stands for each class in a prompt: its name, or its descriptions
    prompt: nn.Module | None  # what an earlier call of the same tuner put in the place of the text side
    prototypes: Callable[[], Tensor]  # as the classifier has them now, (k, d)


@dataclass(frozen=True)
class Tuner:
    """Parameters by their name in the classifier. What a tuner does not touch need not be computed twice."""

    parameters: dict[str, nn.Parameter]
    touches_inputs: bool  # the features change from step to step
    touches_prompts: bool  # the prototypes change from step to step
    keeps_base: bool  # a saved run refers to the model it started from instead of holding a copy
    prompt: nn.Module | None = None  # gives the prototypes in the place of the text side

    @property
    def trainable(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())


def describe_trainable(trainable: int, total: int) -> str:
    """trainable 2,049 of 149,622,785 (0.001 %)"""
    return f"trainable {trainable:,} of {total:,} ({100 * trainable / total:.3g} %)"


__all__ = ["Target", "Tuner", "TunerSettings", "describe_trainable"]
