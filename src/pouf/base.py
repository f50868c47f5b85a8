"""A zero-shot classifier: a backbone, class names and what it is asked with them. All but its training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pouf import saving
from pouf.data.base import Transform, Unlabelled
from pouf.data.class_names import check_classes, numbered
from pouf.data.inputs import Given, Inputs, as_data
from pouf.errors import InputError, one_of
from pouf.inference import FeatureSet, InferenceConfig, encode
from pouf.models import Backbone, load_backbone, load_sequence_classifier
from pouf.models.base import Scores, check_modality, evaluating
from pouf.models.cloze import MAX_LENGTH, make_cloze
from pouf.models.demonstrations import Demonstrations
from pouf.models.load import lasting_name
from pouf.models.precomputed import Precomputed, read_prototypes
from pouf.models.prompts import DEFAULT_TEMPLATES, check_templates
from pouf.postprocess import POSTPROCESSORS, Postprocessor
from pouf.recipe import Kind, TunerSettings
from pouf.saving import Use
from pouf.tuners import TUNERS, Target, Tuner

C = TypeVar("C", bound="BaseClassifier")
INFERENCE = InferenceConfig()
FITTED_ON = 2**14  # inputs that a postprocessor is fitted on at most, drawn at random


class Predictions(NamedTuple):
    indices: list[int]  # positions of the samples that could be read, ascending
    log_probabilities: Tensor  # (len(indices), k)


class State(NamedTuple):
    """What a classifier is beside its weights."""

    tuner_settings: TunerSettings | None
    prompt: nn.Module | None
    postprocessor: Postprocessor | None
    demonstrations: Demonstrations | None
    added: dict[str, nn.Parameter | None]  # parameters that a tuner gave the backbone


class BaseClassifier(nn.Module):
    """Scores inputs against one prototype per class.

    Args:
        backbone: a model from `load_backbone`, or any `Backbone` of your own.
        classes: the names, at least two. `_` is read as a space.
        templates: sentences with `{}` for the name; the prototype is the mean over them. Default: "a photo of a {}."
            for images, "{}" for texts. A masked language model has its own, in its cloze.
        model, revision: what to write into a saved run so that the backbone can be loaded again.
        temperature: T of the softmax and of the transport plan; None keeps the model's own.
    """

    def __init__(
        self,
        backbone: Backbone,
        classes: Sequence[str],
        templates: Sequence[str] | None = None,
        *,
        model: str | None = None,
        revision: str | None = None,
        temperature: float | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.classes = check_classes(classes)
        self.templates = _check_question(backbone, self.classes, templates)
        self.model, self.revision = model, revision
        self.tuner_settings: TunerSettings | None = None
        self.prompt: nn.Module | None = None  # gives the prototypes in the place of the text side
        self.postprocessor: Postprocessor | None = None
        self.demonstrations: Demonstrations | None = None  # solved examples to show beside each sample
        self.fresh_head: int | None = None  # the seed of a head that started without knowledge
        self.prior: Tensor | None = None  # (k,) class proportions, where they are known
        self.temperature: float | None = None
        if temperature is not None:
            self.set_temperature(temperature)
        self.eval()

    @classmethod
    def from_pretrained(
        cls: type[C],
        name_or_path: str | Path,
        classes: Sequence[str] | None = None,
        templates: Sequence[str] | None = None,
        *,
        words: Sequence[str] | Sequence[Sequence[str]] | None = None,
        max_length: int | None = None,
        temperature: float | None = None,
        device: str | torch.device | None = None,
        revision: str | None = None,
        use: Use = "advised",
        backbone: Backbone | None = None,
    ) -> C:
        """From a model on the hub or in a folder, with the names of classes; or, without, from a folder of a run.

            Classifier.from_pretrained("openai/clip-vit-base-patch16", ["cat", "dog"])
            Classifier.from_pretrained("my-run")

        A template with `[MASK]` makes it a masked language model:

            Classifier.from_pretrained("roberta-base", ["negative", "positive"], ["{text} It was [MASK]."],
                                       words=["terrible", "great"])

        Args:
            name_or_path: `pouf/tiny-clip` is the model that comes with the package.
            words: one word per class, or several; without them the names of the classes are the words.
            max_length: tokens that a masked language model reads at most (256).
            revision: of the model on the hub; a saved run remembers it.
            use: of a run: what it advises, or its chosen step, its last one, or zero-shot.
            backbone: of a run: your own model, which must be given again.
        """
        if classes is None:
            classifier = saving.load(cls, Path(name_or_path), use, backbone)
        else:
            names = check_classes(classes)  # before the model is loaded, which may take long
            cloze = make_cloze(names, templates, words, max_length)
            if cloze is None and templates is not None:
                check_templates(templates)
            loaded = load_backbone(name_or_path, cloze, revision=revision)
            named = {"model": lasting_name(name_or_path), "revision": revision}
            classifier = cls(loaded, names, templates, **named, temperature=temperature)
        return classifier if device is None else classifier.to(device)

    @classmethod
    def from_vectors(
        cls: type[C], prototypes: Tensor | str | Path, classes: Sequence[str] | None = None,
        temperature: float | None = None,
    ) -> C:  # fmt: skip
        """No model, only one vector per class, (k, d) or a file of them; the inputs are vectors of the same model then.

        The names of the classes may stand in the file, as `names`; a name that comes twice gets a number, since two
        prototypes can bear one (ImageNet has two kinds of "missile"). The temperature is CLIP's unless given.
        """
        if isinstance(prototypes, (str, Path)):
            prototypes, named = read_prototypes(prototypes)
            classes = named if classes is None else classes
        prototypes = torch.as_tensor(prototypes)
        if classes is None or len(classes) != len(prototypes):
            came = "none" if classes is None else len(classes)
            raise InputError(
                f"expected names for {len(prototypes)} prototypes, not {came}: give the classes in their order"
            )
        return cls(Precomputed(prototypes), numbered(classes), temperature=temperature)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the classifier. After full tuning this is a normal transformers folder; otherwise kilobytes."""
        saving.save(self, Path(folder))

    @property
    def kind(self) -> Kind:
        """What decides which recipe is the default."""
        return "cloze" if self.backbone.cloze is not None else self.backbone.modality

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a file of texts that make a sample: one, or two for pairs."""
        return self.backbone.cloze.columns if self.backbone.cloze is not None else ("text",)

    def set_temperature(self, temperature: float) -> None:
        if not 0 < temperature < float("inf"):
            raise InputError(f"the temperature must be a number above 0, not {temperature}")
        self.backbone.set_temperature(temperature)
        self.temperature = temperature

    def set_prior(self, proportions: Sequence[float] | Tensor) -> None:
        """The share of each class in the data, where it is known: training then pulls towards it."""
        prior = torch.as_tensor(proportions, dtype=torch.float32).detach().cpu()
        if prior.shape != (len(self.classes),) or not bool((prior > 0).all()) or not bool(prior.isfinite().all()):
            raise InputError(
                f"expected one proportion above 0 for each of the {len(self.classes)} classes, not {list(proportions)}"
            )
        if abs(float(prior.sum()) - 1) > 0.02:
            raise InputError(f"the proportions sum to {float(prior.sum()):.3g}, expected 1: {list(proportions)}")
        self.prior = prior / prior.sum()

    def start_afresh(self, seed: int, max_length: int = MAX_LENGTH, regression: bool = False) -> None:
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
        self.backbone, self.templates, self.fresh_head = fresh.to(device), DEFAULT_TEMPLATES["text"], seed

    def tuner(self, settings: TunerSettings) -> Tuner:
        return one_of("tuner", settings.name, TUNERS)(  # type: ignore[no-any-return]
            Target(self.backbone, self.classes, self.prompt), settings
        )

    def tune(self, settings: TunerSettings) -> Tuner:
        """Make the chosen parameters trainable and all others not."""
        if self.tuner_settings not in (None, settings):
            raise InputError(
                f"this classifier was tuned with {self.tuner_settings.name!r} already; to tune {settings.name!r} on "
                "top of it, start from its saved folder as the model"
            )
        tuner = self.tuner(settings)
        self.tuner_settings, self.prompt = settings, tuner.prompt
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in tuner.parameters)
        return tuner

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
        return self.backbone.prototypes(self.classes, self.templates)

    def data(self, inputs: Inputs) -> Unlabelled:
        """Whatever can be handed to `predict`, as data of the backbone's kind."""
        return as_data(inputs, self.backbone.modality, self.columns).data

    def features(self, inputs: Inputs, batch_size: int = 64) -> Tensor:
        """(n, d), each of length 1."""
        given, encoded = self._complete(inputs, batch_size)
        features = F.normalize(encoded.features.float(), dim=1)
        return features[0] if given.single else features

    def predict_log_proba(self, inputs: Inputs, batch_size: int = 64) -> Tensor:
        """(n, k) log-probabilities; (k,) for one sample. An input that can't be read is an error; see `infer`."""
        given, encoded = self._complete(inputs, batch_size)
        logs = self.log_probabilities(encoded)
        return logs[0] if given.single else logs

    def predict_proba(self, inputs: Inputs, batch_size: int = 64) -> Tensor:
        """(n, k), rows sum to 1; (k,) for one sample."""
        return self.predict_log_proba(inputs, batch_size).exp()

    def predict(self, inputs: Inputs, batch_size: int = 64) -> Any:
        """The most likely class of each input: a list of names, or one name for one sample."""
        best = self.predict_log_proba(inputs, batch_size).argmax(-1)
        return self.classes[int(best)] if best.ndim == 0 else [self.classes[i] for i in best.tolist()]

    def infer(self, data: Unlabelled, inference: InferenceConfig = INFERENCE) -> Predictions:
        """Log-probabilities of all that can be read; what can't is listed in `data.skipped`."""
        encoded = self.encode(data, inference)
        return Predictions(encoded.indices, self.log_probabilities(encoded))

    @torch.no_grad()
    def encode(
        self, data: Unlabelled, inference: InferenceConfig = INFERENCE, *, transform: Transform | None = None
    ) -> FeatureSet:
        """Features of all that can be read; what can't is listed in `data.skipped`.

        With demonstrations they are means over several draws of these (the logits are linear in them), and not kept.

        Args:
            transform: what the model is shown instead of the samples as they are.
        """
        check_modality(self.backbone, data.modality)
        if data.streamed:
            raise InputError(f"{data.source} has no known end: take some of it with take(n)")
        with evaluating(self):
            return self._encode(data, inference, transform)

    def _encode(self, data: Unlabelled, inference: InferenceConfig, transform: Transform | None) -> FeatureSet:
        if self.demonstrations is None:
            return encode(self.backbone, data, inference, transform)
        shown = self.demonstrations
        views = [Transform("", _in_turn(transform, shown.view(i))) for i in range(shown.samples)]
        # The bar advances once for each sample: during the last view.
        unseen = replace(inference, cache=None, on_batch=None)
        configs = [unseen] * (len(views) - 1) + [replace(unseen, on_batch=inference.on_batch)]
        encoded = [encode(self.backbone, data, how, view) for how, view in zip(configs, views, strict=True)]
        return FeatureSet(encoded[0].indices, torch.stack([each.features for each in encoded]).mean(0))

    @torch.no_grad()
    def _fixed_prototypes(self) -> Tensor:
        """For prediction: without a gradient and without dropout, also in the middle of training."""
        with evaluating(self):
            return self.prototypes()

    @torch.no_grad()
    def scores(self, encoded: FeatureSet) -> Scores:
        features = encoded.features.to(self.device).float()
        return self.backbone.scores(features, self._fixed_prototypes())

    @torch.no_grad()
    def score_blocks(self, encoded: FeatureSet, rows: int = 8192) -> Iterator[Predictions]:
        """Predictions block by block: a million samples and a thousand classes need not be in memory at once."""
        prototypes = self._fixed_prototypes()
        for start in range(0, len(encoded.indices), rows):
            features = encoded.features[start : start + rows].to(self.device).float()
            logits = self.backbone.scores(features, prototypes).logits
            if self.postprocessor is not None:
                logits = self.postprocessor(features, logits)
            yield Predictions(encoded.indices[start : start + rows], logits.float().log_softmax(1).cpu())

    def log_probabilities(self, encoded: FeatureSet) -> Tensor:
        """(n, k), all blocks together."""
        blocks = [block.log_probabilities for block in self.score_blocks(encoded)]
        return torch.cat(blocks) if blocks else torch.zeros(0, len(self.classes))

    @torch.no_grad()
    def fit_postprocessor(self, name: str, encoded: FeatureSet, seed: int = 0) -> None:
        """Fit one of `POSTPROCESSORS` on these features (a random part where they are very many), and use it."""
        features = encoded.features
        if len(features) > FITTED_ON:
            chosen = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))[:FITTED_ON]
            encoded = FeatureSet([], features[chosen.sort().values])
        fit = one_of("postprocessor", name, POSTPROCESSORS)
        features = encoded.features.to(self.device).float()
        self.postprocessor = fit(features, self._fixed_prototypes(), self.scores(encoded), self.prior)

    @torch.no_grad()
    def nearness(self, encoded: FeatureSet) -> Tensor:
        """(n,): cosine of each feature with the nearest prototype."""
        prototypes = F.normalize(self._fixed_prototypes().float(), dim=1)
        features = F.normalize(encoded.features.float().to(prototypes.device), dim=1)
        return (features @ prototypes.T).max(1).values.cpu()

    def _complete(self, inputs: Inputs, batch_size: int) -> tuple[Given, FeatureSet]:
        given = as_data(inputs, self.backbone.modality, self.columns)
        encoded = self.encode(given.data, InferenceConfig(batch_size))
        if given.data.skipped:
            index, reason = next(iter(given.data.skipped.items()))
            raise InputError(
                f"{len(given.data.skipped)} of {len(given.data)} inputs can't be read, the first "
                f"{given.data.ids[index]}: {reason}. Leave them out, or use infer(), which skips them."
            )
        return given, encoded


def _check_question(backbone: Backbone, classes: Sequence[str], templates: Sequence[str] | None) -> tuple[str, ...]:
    """The templates of a classifier; a masked language model brings its own with its words."""
    if backbone.cloze is None:
        return check_templates(DEFAULT_TEMPLATES[backbone.modality] if templates is None else templates)
    if len(backbone.cloze.words) != len(classes):
        raise InputError(f"the model has label words for {len(backbone.cloze.words)} classes, not for {len(classes)}")
    return (backbone.cloze.template,)


def _in_turn(transform: Transform | None, view: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """A changed sample among its demonstrations."""
    return view if transform is None else lambda sample, seed: view(transform.apply(sample, seed), seed)
