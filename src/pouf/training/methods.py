"""POUF and what it is compared with, by name. A method is data: a recipe and the examples it learns from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from pouf.classifier import Classifier
from pouf.data.labels import Shots
from pouf.errors import InputError
from pouf.models.demonstrations import Demonstrations
from pouf.postprocess import Postprocessor
from pouf.recipe import DEFAULTS, PRESETS, Kind, Recipe, is_builtin

# A tuner brings settings of its own: at full tuning's 5e-7 a soft prompt does not move.
TUNER_RECIPES: dict[tuple[Kind, str], str] = {
    ("image", "full"): "office31-full",
    ("image", "layernorm"): "images-layernorm",
    ("image", "lora"): "images-lora",
    ("image", "prompt"): "office31-prompt",
    ("image", "prototypes"): PRESETS["fast"]["image"],
    ("text", "prototypes"): PRESETS["fast"]["text"],
    ("cloze", "prototypes"): PRESETS["fast"]["cloze"],
    ("text", "upper"): "texts-upper",
    ("cloze", "upper"): "masked-upper",
    ("text", "layernorm"): "texts-layernorm",
    ("text", "lora"): "texts-lora",
    ("text", "prompt"): "texts-prompt",
    ("cloze", "layernorm"): "masked-layernorm",
    ("cloze", "lora"): "masked-lora",
    ("cloze", "prompt"): "masked-prompt",
    ("causal", "full"): "causal-full",
    ("causal", "prompt"): "causal-prompt",
    ("causal", "prototypes"): PRESETS["fast"]["causal"],
}
_ENCODERS = ("full", "prompt", "layernorm", "lora", "prototypes")
_TEXT_ENCODERS = (*_ENCODERS, "upper")
TUNERS_OF: dict[Kind, tuple[str, ...]] = {
    "image": _ENCODERS, "text": _TEXT_ENCODERS, "cloze": _TEXT_ENCODERS, "causal": _ENCODERS,
    "vector": ("prototypes", "map"),
}  # fmt: skip
_READERS: tuple[Kind, ...] = ("image", "text", "cloze", "causal")
PROMPT: dict[Kind, str] = DEFAULTS | {kind: TUNER_RECIPES[kind, "prompt"] for kind in _READERS}
RATE = ("name", "lr", "temperature_lr", "schedule", "nesterov", "weight_decay")
FEW_SHOT: dict[Kind, str] = {**DEFAULTS, "cloze": "lm-bff", "text": "lm-bff"}


class Preparation(NamedTuple):
    """What a method gives a classifier before training."""

    head_seed: int | None = None  # of a new classification head instead of prompts
    demonstrations: Demonstrations | None = None
    postprocessor: Postprocessor | None = None

    def applied_to(self, classifier: Classifier) -> Classifier:
        """A classifier of its own; the given one stays as it is."""
        fresh = self.head_seed is not None and not hasattr(classifier.backbone, "head_seed")
        prepared = classifier.with_new_head(self.head_seed or 0) if fresh else classifier.copy()
        if self.demonstrations is not None:
            prepared.demonstrations = self.demonstrations
        if self.postprocessor is not None:
            prepared.postprocessor = self.postprocessor.to(classifier.device)
        return prepared


@dataclass(frozen=True)
class Method:
    """What to do with a classifier.

    Args:
        about: a line for people.
        settings: changes to the recipe, by dotted name.
        recipes: the recipe to start from for each kind of model, when none is given.
        needs_shots: it learns from labelled examples.
        demonstrations: it shows shots beside each text, after it (LM-BFF) or before it (in-context learning).
        new_head: it starts with a new classification head.
        kinds: the models it is for.
    """

    about: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    recipes: Mapping[Kind, str] = field(default_factory=lambda: DEFAULTS)
    needs_shots: bool = False
    demonstrations: Literal["", "after", "before"] = ""
    new_head: bool = False
    kinds: tuple[Kind, ...] = ("image", "text", "cloze", "causal", "vector")

    def recipe(
        self, kind: Kind, recipe: Recipe | str | Path | None = None, changes: Mapping[str, Any] | None = None
    ) -> Recipe:
        """All settings for a kind of model: the given recipe, or the method's own, with what makes the method.

        Args:
            changes: by dotted name. Another tuner than the usual one brings its own settings; where the recipe is one
                for another tuner too, its optimiser: a recipe's name stands for the rate of the tuner that it names,
                and a `Recipe` or a file has a rate of its own where it sets one.
        """
        settings, changes = dict(self.settings), dict(changes or {})
        if kind == "vector" and settings.get("tuner.name") == "prompt":
            settings["tuner.name"] = "prototypes"  # there is no prompt, only its prototypes
        usual = Recipe.load(self.recipes[kind])

        def read(base: Recipe) -> Recipe:
            return Recipe.load(recipe, base, kind) if isinstance(recipe, (str, Path)) else recipe or base

        given = read(usual)
        tuner = changes.get("tuner.name", settings.get("tuner.name", given.tuner.name))
        if "tuner.name" in changes and tuner not in TUNERS_OF[kind]:
            raise InputError(f"can't tune {tuner!r} of {_SPOKEN[kind]}: choose one of {', '.join(TUNERS_OF[kind])}")
        if tuner != usual.tuner.name and (kind, tuner) in TUNER_RECIPES:
            own = Recipe.load(TUNER_RECIPES[kind, tuner])
            given = read(own)  # what a file does not name comes from there
            named = recipe is not None and not isinstance(recipe, Recipe) and is_builtin(recipe)
            sets_rate = not named and "lr" in given.optimisation.model_fields_set
            if tuner != given.tuner.name and not sets_rate:
                given = given.with_settings({f"optimisation.{name}": getattr(own.optimisation, name) for name in RATE})
        return given.with_settings(settings).with_settings(changes)

    def check(self, name: str, kind: Kind, shots: Shots | None) -> None:
        if kind not in self.kinds:
            raise InputError(f"method {name!r} is for {' and '.join(_SPOKEN[k] for k in self.kinds)}")
        if self.needs_shots and shots is None:
            raise InputError(f"method {name!r} learns from labelled examples: give it shots")

    def preparation(self, shots: Shots | None, seed: int, samples: int = 16, **limits: int | None) -> Preparation:
        """The head and the shots that the method works with; limits as of `Demonstrations`."""
        demonstrations = postprocessor = None
        if self.demonstrations and shots is not None:
            samples = 1 if self.demonstrations == "before" else samples
            demonstrations = Demonstrations.from_shots(
                shots, place=self.demonstrations, samples=samples, seed=seed, **limits
            )
        if self is METHODS["majority"] and shots is not None:
            totals = shots.targets.sum(0)
            postprocessor = Postprocessor(1e4 * torch.eye(len(totals))[totals.argmax()])
        return Preparation(seed if self.new_head else None, demonstrations, postprocessor)


_SPOKEN: dict[Kind, str] = {
    "image": "images", "text": "sentence encoders", "cloze": "texts with a [MASK] template",
    "causal": "causal language models", "vector": "vectors",
}  # fmt: skip
_UNTRAINED = {"steps": 0, "postprocess": "none"}
_LABELS_ONLY = {
    "objective.transport": 0.0, "objective.information": 0.0, "objective.labels": 1.0, "postprocess": "none",
}  # fmt: skip
_TEXTS: tuple[Kind, ...] = ("text", "cloze")

METHODS: dict[str, Method] = {
    "pouf": Method("the paper's: transport and mutual information"),
    "zero-shot": Method("the model as it is", _UNTRAINED),
    "prior-correction": Method("predictions over their mean", {**_UNTRAINED, "postprocess": "prior-correction"}),
    "sinkhorn": Method("every class gets its share of the inputs", {**_UNTRAINED, "postprocess": "sinkhorn"}),
    "em": Method("shares of the classes by expectation maximisation", {**_UNTRAINED, "postprocess": "em"}),
    "stata": Method("classes as Gaussians, anchored at their prototypes", {**_UNTRAINED, "postprocess": "stata"}),
    "few-classes": Method("StatA on em, for few of many classes", {**_UNTRAINED, "postprocess": "few-classes"}),
    "transclip": Method("Gaussians of one width, set by the surest inputs", {**_UNTRAINED, "postprocess": "transclip"}),
    "zlap": Method("labels spread from classes over a graph of inputs", {**_UNTRAINED, "postprocess": "zlap"}),
    "inmap": Method("prototypes learned from an assignment to equal shares", {**_UNTRAINED, "postprocess": "inmap"}),
    "propagation": Method("inputs ask their neighbours", {**_UNTRAINED, "postprocess": "propagation"}),
    "tent": Method(
        "entropy alone, on a soft prompt",
        {
            "objective.transport": 0.0, "objective.information": 0.0, "objective.entropy": 0.3,
            "objective.prior": "uniform", "tuner.name": "prompt", "postprocess": "none", "min_class_usage": 0.0,
            "keep_shares_max_classes": 0,
        },
        PROMPT,
    ),
    "upl": Method(
        "the surest predictions as labels, on a soft prompt",
        {**_LABELS_ONLY, "pseudo_labels": 16, "tuner.name": "prompt"},
        PROMPT,
    ),
    "coop": Method(
        "labelled shots, on a soft prompt", {**_LABELS_ONLY, "tuner.name": "prompt"}, PROMPT, needs_shots=True
    ),
    "majority": Method(
        "always the most frequent class among the labelled examples given", _UNTRAINED, needs_shots=True
    ),
    "fine-tuning": Method(
        "labelled shots, under a fresh head", _LABELS_ONLY, FEW_SHOT, needs_shots=True, new_head=True, kinds=_TEXTS
    ),
    "in-context": Method(
        "labelled shots before each text, no training", _UNTRAINED, needs_shots=True, demonstrations="before",
        kinds=("cloze",),
    ),
    "lm-bff": Method(
        "labelled shots, one of each class after each text", _LABELS_ONLY, FEW_SHOT, needs_shots=True,
        demonstrations="after", kinds=("cloze",),
    ),
    "lm-bff-pouf": Method(
        "LM-BFF, and the paper's loss on the same shots without their labels", {}, {**FEW_SHOT, "cloze": "lm-bff-pouf"},
        needs_shots=True, demonstrations="after", kinds=("cloze",),
    ),
}  # fmt: skip
