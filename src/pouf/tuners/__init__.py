"""Tuners: which parameters are trained, and which side of the model they change."""

from __future__ import annotations

from collections.abc import Callable

from pouf.recipe import TunerSettings
from pouf.tuners.base import Target, Tuner, describe_trainable
from pouf.tuners.prompt import SoftPrompt, linear_map, prompt, prototypes
from pouf.tuners.weights import full, layernorm, lora, upper

__all__ = ["TUNERS", "SoftPrompt", "Target", "Tuner", "describe_trainable"]

TUNERS: dict[str, Callable[[Target, TunerSettings], Tuner]] = {
    "full": full, "upper": upper, "prompt": prompt, "layernorm": layernorm, "lora": lora, "prototypes": prototypes,
    "map": linear_map,
}  # fmt: skip
