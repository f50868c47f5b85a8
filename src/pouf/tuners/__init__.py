"""Tuners: which parameters are trained, and which side of the model they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pouf.errors import InputError, one_of
from pouf.recipe import TunerSettings
from pouf.tuners.base import Target, Tuner, describe_trainable
from pouf.tuners.prompt import SoftPrompt, linear_map, prompt, prototypes
from pouf.tuners.weights import full, layernorm, lora, upper

if TYPE_CHECKING:
    from pouf.classifier import Classifier

__all__ = ["TUNERS", "SoftPrompt", "Target", "Tuner", "base_fingerprint", "describe_trainable", "tune", "tuner_of"]

TUNERS: dict[str, Callable[[Target, TunerSettings], Tuner]] = {
    "full": full, "upper": upper, "prompt": prompt, "layernorm": layernorm, "lora": lora, "prototypes": prototypes,
    "map": linear_map,
}  # fmt: skip


def tuner_of(classifier: Classifier, settings: TunerSettings) -> Tuner:
    target = Target(classifier.backbone, classifier.texts(), classifier.prompt, classifier.prototypes)
    return one_of("tuner", settings.name, TUNERS)(target, settings)  # type: ignore[no-any-return]


def tune(classifier: Classifier, settings: TunerSettings) -> Tuner:
    """Make the chosen parameters trainable and all others not, in memory of their own."""
    before = classifier.tuner_settings
    if before not in (None, settings):
        raise InputError(
            f"this classifier was tuned with {before.name!r} already; to tune {settings.name!r} on top of it, start "
            "from its saved folder as the model"
        )
    classifier.base = base_fingerprint(classifier)  # now, as training changes the weights
    tuner = tuner_of(classifier, settings)
    classifier.tuner_settings, classifier.prompt = settings, tuner.prompt
    for name, parameter in classifier.named_parameters():
        parameter.requires_grad_(name in tuner.parameters)
    for parameter in () if classifier.backbone.sharded else tuner.parameters.values():
        parameter.data = parameter.data.clone()  # a copy shares them with what it was copied from
    return tuner


def base_fingerprint(classifier: Classifier) -> str | None:
    """Of the weights before tuning; None where they are in the saved folder anyway, or come from a seed."""
    backbone = classifier.backbone
    if classifier.base is None and not hasattr(backbone, "head_seed") and not backbone.saved_whole:
        classifier.base = backbone.weights_digest()
    return classifier.base
