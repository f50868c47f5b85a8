"""Every weight of the model."""

from __future__ import annotations

from pouf.tuners.base import Target, Tuner, TunerSettings


def full(target: Target, settings: TunerSettings) -> Tuner:
    """All weights of the model, including the temperature."""
    named = {f"backbone.{name}": p for name, p in target.backbone.named_parameters()}
    return Tuner(named, touches_inputs=True, touches_prompts=True, keeps_base=False)
