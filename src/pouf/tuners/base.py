"""The interface of tuners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from pouf.models.base import Backbone
from pouf.recipe import TunerSettings


class Target(NamedTuple):
    """The model to be tuned."""

    backbone: Backbone
    texts: tuple[tuple[str, ...], ...]  # of each class in prompts: its name or its descriptions
    prompt: nn.Module | None  # from an earlier call of the same tuner, in place of the text side
    prototypes: Callable[[], Tensor]  # the current ones, (k, d)


@dataclass(frozen=True)
class Tuner:
    """Parameters by their names in the classifier. Features or prototypes that they don't touch are computed once."""

    parameters: dict[str, nn.Parameter]
    touches_inputs: bool  # the features change from step to step
    touches_prompts: bool  # the prototypes change from step to step
    keeps_base: bool  # a saved run refers to the base model instead of holding a copy
    prompt: nn.Module | None = None  # computes the prototypes instead of the text side

    @property
    def trainable(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())


def describe_trainable(trainable: int, total: int) -> str:
    """trainable 2,049 of 149,622,785 (0.001 %)"""
    return f"trainable {trainable:,} of {total:,} ({100 * trainable / total:.3g} %)"


__all__ = ["Target", "Tuner", "TunerSettings", "describe_trainable"]
