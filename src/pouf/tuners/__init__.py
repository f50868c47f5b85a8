"""Tuners: which parameters are trained, and which side of the model they change."""

from __future__ import annotations

from collections.abc import Callable

from pouf.recipe import TunerSettings
from pouf.tuners.base import Target, Tuner, describe_trainable
from pouf.tuners.full import full
from pouf.tuners.layernorm import layernorm
from pouf.tuners.lora import lora
from pouf.tuners.prompt import SoftPrompt, prompt
from pouf.tuners.prototypes import linear_map, prototypes

__all__ = ["TUNERS", "SoftPrompt", "Target", "Tuner", "describe_trainable"]

TUNERS: dict[str, Callable[[Target, TunerSettings], Tuner]] = {
    "full": full, "prompt": prompt, "layernorm": layernorm, "lora": lora, "prototypes": prototypes, "map": linear_map,
}  # fmt: skip
