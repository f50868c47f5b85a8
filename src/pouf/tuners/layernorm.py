"""Gains and biases of normalisation layers: about a thousandth of the weights."""

from __future__ import annotations

from torch import nn

from pouf.errors import InputError
from pouf.tuners.base import Target, Tuner, TunerSettings


def layernorm(target: Target, settings: TunerSettings) -> Tuner:
    """Gains and biases of all LayerNorms, in both encoders."""
    norms = {
        f"backbone.{path}.{name}": parameter
        for path, module in target.backbone.named_modules()
        if isinstance(module, nn.LayerNorm) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
        for name, parameter in module.named_parameters(recurse=False)
    }
    if not norms:
        raise InputError(f"{type(target.backbone).__name__} has no LayerNorm to tune: tune 'full' or 'prompt'")
    return Tuner(norms, touches_inputs=True, touches_prompts=True, keeps_base=True)
