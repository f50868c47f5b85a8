"""What a zero-shot classifier is: a backbone, the names of classes, and what it is asked with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pouf.data.class_names import Classes, ClassSet, class_set
from pouf.errors import InputError, one_of
from pouf.models import Backbone, load_sequence_classifier
from pouf.models.base import class_means
from pouf.models.causal_lm import CausalLM
from pouf.models.cloze import MAX_LENGTH
from pouf.models.demonstrations import Demonstrations
from pouf.models.precomputed import Precomputed
from pouf.models.prompts import DEFAULT_TEMPLATES, check_distinct, check_templates, class_texts, fill
from pouf.postprocess import Postprocessor
from pouf.recipe import Kind, TunerSettings
from pouf.tuners import TUNERS, SoftPrompt, Target, Tuner


class State(NamedTuple):
    """What a classifier is beside its weights."""

    tuner_settings: TunerSettings | None
    prompt: nn.Module | None
    postprocessor: Postprocessor | None
    demonstrations: Demonstrations | None
    added: dict[str, Any]  # what a tuner gave the backbone, or None


class ZeroShot(nn.Module):
    """Scores inputs against one prototype per class. `pouf.Classifier` describes the arguments."""

    def __init__(
        self,
        backbone: Backbone,
        classes: Classes,
        templates: Sequence[str] | None = None,
        *,
        model: str | None = None,
        revision: str | None = None,
        temperature: float | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.classes, self.descriptions = class_set(classes)
        self.templates = _check_question(backbone, ClassSet(self.classes, self.descriptions), templates)
        self.model, self.revision = model, revision
        self.tuner_settings: TunerSettings | None = None
        self.prompt: nn.Module | None = None  # gives the prototypes in the place of the text side
        self.postprocessor: Postprocessor | None = None
        self.demonstrations: Demonstrations | None = None  # solved examples to show beside each sample
        self.base: str | None = None  # fingerprint of the weights before anything was tuned, once it was asked for
        self.new_head_seed: int | None = None  # the seed of a head that started without knowledge
        self.model_card: str | None = None  # README.md of its folder; None writes one
        self.temperature: float | None = None
        if temperature is not None:
            self.set_temperature(temperature)
        self.eval()

    @property
    def kind(self) -> Kind:
        """What decides which recipe is the default."""
        if isinstance(self.backbone, CausalLM):
            return "causal"
        return "cloze" if self.backbone.cloze is not None else self.backbone.modality

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a file of texts that make a sample: one, or two for pairs."""
        return self.backbone.cloze.columns if self.backbone.cloze is not None else ("text",)

    @property
    def adapted(self) -> bool:
        """Whether it is no zero-shot classifier any more: something was tuned, or its predictions are corrected."""
        return self.tuner_settings is not None or self.postprocessor is not None

    def set_temperature(self, temperature: float) -> None:
        if not 0 < temperature < float("inf"):
            raise InputError(f"the temperature must be a number above 0, not {temperature}")
        self.backbone.set_temperature(temperature)
        self.temperature = temperature

    def attach_new_head(self, seed: int, max_length: int = MAX_LENGTH, regression: bool = False) -> None:
        """Put the text encoder under a head that knows nothing yet: standard fine-tuning, to be trained on shots.

        Args:
            regression: one output, the share of the second of two classes, instead of one for each.
        """
        if self.model is None or self.backbone.modality != "text":
            raise InputError("fine-tuning under a fresh head is for text models that transformers loads by name")
        device, k = self.device, len(self.classes)
        if regression and k != 2:
            raise InputError(f"a regression is between two classes, not {k}")
        outputs = 1 if regression else k
        fresh = load_sequence_classifier(self.model, outputs, seed, max_length, revision=self.revision)
        self.backbone, self.templates, self.new_head_seed = fresh.to(device), DEFAULT_TEMPLATES["text"], seed
        self.base = None

    def tuner(self, settings: TunerSettings) -> Tuner:
        return one_of("tuner", settings.name, TUNERS)(  # type: ignore[no-any-return]
            Target(self.backbone, self.texts(), self.prompt, self.prototypes), settings
        )

    def tune(self, settings: TunerSettings) -> Tuner:
        """Make the chosen parameters trainable and all others not."""
        if self.tuner_settings not in (None, settings):
            raise InputError(
                f"this classifier was tuned with {self.tuner_settings.name!r} already; to tune {settings.name!r} on "
                "top of it, start from its saved folder as the model"
            )
        self.base = self.base_fingerprint()  # now, as training changes the weights
        tuner = self.tuner(settings)
        self.tuner_settings, self.prompt = settings, tuner.prompt
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in tuner.parameters)
        return tuner

    def base_fingerprint(self) -> str | None:
        """Of the weights before tuning; None where they are in the saved folder anyway, or come from a seed."""
        if self.base is None and self.new_head_seed is None and not isinstance(self.backbone, Precomputed):
            self.base = self.backbone.weights_digest()
        return self.base

    def state(self) -> State:
        added = {name: getattr(self.backbone, name) for name in self.backbone.added_by_tuners}
        return State(self.tuner_settings, self.prompt, self.postprocessor, self.demonstrations, added)

    def set_state(self, state: State) -> None:
        self.tuner_settings, self.prompt, self.postprocessor, self.demonstrations = state[:4]
        for name, parameter in state.added.items():
            setattr(self.backbone, name, parameter)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Tensors of `backbone.prepare` -> features (n, d) and prototypes (k, d), both differentiable."""
        return self.backbone.encode_inputs(batch), self.prototypes()

    def prototypes(self) -> Tensor:
        """(k, d), differentiable unless called under `torch.no_grad()`.

        Each of length 1, but for masked language models, whose logits need the decoder's own lengths.
        """
        if self.prompt is not None:
            return self.prompt()  # type: ignore[no-any-return]
        return self.backbone.prototypes(self.prompts())

    def prompts_per_class(self) -> list[int]:
        """How many prompts are encoded for each prototype; nothing where none are."""
        if isinstance(self.prompt, SoftPrompt):
            return self.prompt.counts
        if self.prompt is not None or not self.backbone.reads_prompts:
            return []
        return [len(own) for own in self.prompts()]

    def encode_prompts(self, rows: Sequence[int]) -> Tensor:
        """Some of all prompts, by their number: (m, d), each of length 1, differentiable."""
        if isinstance(self.prompt, SoftPrompt):
            return self.prompt.encode(rows)
        every = [prompt for own in self.prompts() for prompt in own]
        return F.normalize(self.backbone.encode_prompts([every[row] for row in rows]), dim=1)

    def prototypes_of(self, encoded: Tensor) -> Tensor:
        """What `prototypes` gives, from all prompts once these are encoded: (m, d) -> (k, d)."""
        counts = self.prompts_per_class()
        if isinstance(self.prompt, SoftPrompt) and len(encoded) == len(counts):
            return encoded
        return F.normalize(class_means(encoded, counts), dim=1)

    def prompts(self) -> list[list[str]]:
        """For each class the sentences that its prototype is the mean of: what stands for it, in every template."""
        return [[prompt for text in own for prompt in fill(self.templates, text)] for own in self.texts()]

    def texts(self) -> tuple[tuple[str, ...], ...]:
        """What stands for each class in the templates: its descriptions, or its name."""
        return class_texts(ClassSet(self.classes, self.descriptions))


def _check_question(backbone: Backbone, classes: ClassSet, templates: Sequence[str] | None) -> tuple[str, ...]:
    """The templates of a classifier; a masked language model brings its own with its words."""
    if classes.descriptions is not None and (backbone.cloze is not None or backbone.modality == "vector"):
        raise InputError("this model has its own words or vectors for the classes and reads no descriptions: name them")
    if backbone.cloze is None:
        usual = DEFAULT_TEMPLATES[backbone.modality] if classes.descriptions is None else ("{}",)
        checked = check_templates(usual if templates is None else templates)
        if backbone.text_side is not None:
            check_distinct(backbone.text_side, classes, checked)
        return checked
    words, k = len(backbone.cloze.words), len(classes.names)
    if words != k:
        raise InputError(f"the model has label words for {words} classes, not for {k}")
    return (backbone.cloze.template,)
