"""For bare vectors without a model: the prototypes themselves, and a linear map of the features."""

from __future__ import annotations

from pouf.errors import InputError
from pouf.models.precomputed import Precomputed
from pouf.tuners.base import Target, Tuner, TunerSettings


def prototypes(target: Target, settings: TunerSettings) -> Tuner:
    """The prototypes themselves."""
    backbone = _bare_vectors(target, settings)
    return Tuner({"backbone.table": backbone.table}, touches_inputs=False, touches_prompts=True, keeps_base=False)


def linear_map(target: Target, settings: TunerSettings) -> Tuner:
    """The prototypes and a linear map of the features."""
    backbone = _bare_vectors(target, settings)
    named = {"backbone.table": backbone.table, "backbone.map": backbone.add_map()}
    return Tuner(named, touches_inputs=True, touches_prompts=True, keeps_base=False)


def _bare_vectors(target: Target, settings: TunerSettings) -> Precomputed:
    if not isinstance(target.backbone, Precomputed):
        raise InputError(f"{settings.name!r} is for vectors without a model: tune 'full', 'prompt' or 'layernorm'")
    return target.backbone
