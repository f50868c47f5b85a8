"""What is trained. A tuner names its parameters and says which side of the model they change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from pouf.errors import InputError
from pouf.models.masked_lm import MaskedLM
from pouf.models.precomputed import Precomputed
from pouf.recipe import Tuning
from pouf.tuners.soft_prompt import SoftPrompt

if TYPE_CHECKING:
    from pouf.classifier import Classifier


@dataclass(frozen=True)
class Tuner:
    """Parameters by their name in the classifier. What a tuner does not touch need not be computed twice."""

    parameters: dict[str, nn.Parameter]
    touches_inputs: bool  # the features change from step to step
    touches_prompts: bool  # the prototypes change from step to step
    keeps_base: bool  # a saved run refers to the model it started from instead of holding a copy

    @property
    def trainable(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())


def full(classifier: Classifier, tuning: Tuning) -> Tuner:
    """Every weight of the model, the temperature among them."""
    named = {f"backbone.{name}": p for name, p in classifier.backbone.named_parameters()}
    return Tuner(named, touches_inputs=True, touches_prompts=True, keeps_base=False)


def prompt(classifier: Classifier, tuning: Tuning) -> Tuner:
    """Context vectors before the class names, and the temperature: 4 x 512 + 1 = 2,049 numbers for CLIP ViT-B/16.

    For a masked language model, whose classes are fixed words, the vectors stand before the embedded input.
    """
    backbone = classifier.backbone
    if isinstance(backbone, MaskedLM):
        vectors = {"backbone.input_prompt": backbone.add_input_prompt(tuning.context)}
        return Tuner(vectors, touches_inputs=True, touches_prompts=False, keeps_base=True)
    if backbone.text_side is None:
        raise InputError(f"{type(backbone).__name__} has no text_side, which prompt tuning needs: tune 'full' instead")
    if classifier.soft_prompt is None:
        classifier.soft_prompt = SoftPrompt(backbone.text_side, classifier.classes, tuning).to(backbone.device)
    named = {"soft_prompt.vectors": classifier.soft_prompt.vectors}
    named |= {f"backbone.{n}": p for n, p in backbone.named_parameters() if n.split(".")[-1] == "logit_scale"}
    return Tuner(named, touches_inputs=False, touches_prompts=True, keeps_base=True)


def layernorm(classifier: Classifier, tuning: Tuning) -> Tuner:
    """Gains and biases of all LayerNorms, in both encoders."""
    norms = {
        f"backbone.{path}.{name}": parameter
        for path, module in classifier.backbone.named_modules()
        if isinstance(module, nn.LayerNorm) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
        for name, parameter in module.named_parameters(recurse=False)
    }
    if not norms:
        raise InputError(f"{type(classifier.backbone).__name__} has no LayerNorm to tune: tune 'full' or 'prompt'")
    return Tuner(norms, touches_inputs=True, touches_prompts=True, keeps_base=True)


def prototypes(classifier: Classifier, tuning: Tuning) -> Tuner:
    """The prototypes themselves, where there are only vectors and no model."""
    backbone = _bare_vectors(classifier, tuning)
    return Tuner({"backbone.table": backbone.table}, touches_inputs=False, touches_prompts=True, keeps_base=False)


def linear_map(classifier: Classifier, tuning: Tuning) -> Tuner:
    """The prototypes and a linear map of the features, where there are only vectors and no model."""
    backbone = _bare_vectors(classifier, tuning)
    named = {"backbone.table": backbone.table, "backbone.map": backbone.add_map()}
    return Tuner(named, touches_inputs=True, touches_prompts=True, keeps_base=False)


def _bare_vectors(classifier: Classifier, tuning: Tuning) -> Precomputed:
    if not isinstance(classifier.backbone, Precomputed):
        raise InputError(f"{tuning.name!r} is for vectors without a model: tune 'full', 'prompt' or 'layernorm'")
    return classifier.backbone


TUNERS: dict[str, Callable[[Classifier, Tuning], Tuner]] = {
    "full": full, "prompt": prompt, "layernorm": layernorm, "prototypes": prototypes, "map": linear_map,
}  # fmt: skip


def describe(trainable: int, total: int) -> str:
    """trainable 2,049 of 149,622,785 (0.001 %)"""
    return f"trainable {trainable:,} of {total:,} ({100 * trainable / total:.3g} %)"
