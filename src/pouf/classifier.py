"""A zero-shot classifier: a backbone, class names and what it is asked with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pouf.data.base import Unlabelled
from pouf.data.images import Images
from pouf.data.texts import Texts
from pouf.data.vectors import NAMES, PROTOTYPES, Vectors, read_arrays
from pouf.errors import InputError
from pouf.inference import FeatureSet, InferenceConfig, Transform, encode
from pouf.models import EMBEDDED, Backbone, load_backbone, load_sequence_classifier
from pouf.models.base import check_modality
from pouf.models.cloze import MAX_LENGTH, make_cloze
from pouf.models.demonstrations import Demonstrations
from pouf.models.precomputed import Precomputed
from pouf.models.prompts import DEFAULT_TEMPLATES, check_classes, check_templates, numbered
from pouf.postprocess.postprocessor import FITTED_ON, POSTPROCESSORS, Postprocessor
from pouf.recipe import Tuning
from pouf.tuners import TUNERS, Tuner
from pouf.tuners.soft_prompt import SoftPrompt

INFERENCE = InferenceConfig()
Inputs = Unlabelled | str | Path | Sequence[Any]


class Predictions(NamedTuple):
    indices: list[int]  # positions of the samples that could be read, ascending
    log_probabilities: Tensor  # (len(indices), k)


class Classifier(nn.Module):
    """Scores inputs against one prototype a class.

    Args:
        backbone: a model from `load_backbone`, or any `Backbone` of your own.
        classes: the names, at least two. `_` is read as a space.
        templates: sentences with `{}` for the name; the prototype is the mean over them. Default: "a photo of a {}."
            for images, "{}" for texts. A masked language model has its own, in its cloze.
        model: what to write into a saved run so that the backbone can be loaded again.
        temperature: T of the softmax and of the transport plan; None keeps the model's own.
    """

    def __init__(
        self,
        backbone: Backbone,
        classes: Sequence[str],
        templates: Sequence[str] | None = None,
        *,
        model: str | None = None,
        temperature: float | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.classes = check_classes(classes)
        self.templates = _check_question(backbone, self.classes, templates)
        self.model = model
        self.tuning: Tuning | None = None
        self.soft_prompt: SoftPrompt | None = None
        self.demonstrations: Demonstrations | None = None  # solved examples to show beside each sample
        self.fresh_head: int | None = None  # the seed of a head that started without knowledge
        self.prior: Tensor | None = None  # (k,) class proportions, where they are known
        self.postprocessor: Postprocessor | None = None  # of predictions, fitted on many of them
        self.temperature: float | None = None
        if temperature is not None:
            self.set_temperature(temperature)
        self.eval()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        classes: Sequence[str],
        templates: Sequence[str] | None = None,
        temperature: float | None = None,
        *,
        words: Sequence[str] | Sequence[Sequence[str]] | None = None,
        max_length: int | None = None,
    ) -> Classifier:
        """From a model on the hub, in a local folder, or `pouf/tiny-clip`, the one that comes with the package.

        A template with `[MASK]` makes it a masked language model:

            Classifier.from_pretrained("roberta-base", ["negative", "positive"], ["{text} It was [MASK]."],
                                       words=["terrible", "great"])

        where `words` has one word a class, or several, and at most `max_length` tokens (256) are read. Without
        `words` the names of the classes are the words.
        """
        names = check_classes(classes)  # before the model is loaded, which may take long
        cloze = make_cloze(names, templates, words, max_length)
        if cloze is None and templates is not None:
            check_templates(templates)
        backbone = load_backbone(name_or_path, cloze)
        return cls(backbone, names, templates, model=_lasting(name_or_path), temperature=temperature)

    @classmethod
    def with_fresh_head(
        cls, name_or_path: str | Path, classes: Sequence[str], seed: int = 0, max_length: int = MAX_LENGTH
    ) -> Classifier:
        """A text encoder under a head that knows nothing yet: standard fine-tuning, to be trained on labelled shots."""
        names = check_classes(classes)
        backbone = load_sequence_classifier(name_or_path, len(names), seed, max_length)
        classifier = cls(backbone, names, model=_lasting(name_or_path))
        classifier.fresh_head = seed
        return classifier

    @classmethod
    def from_vectors(
        cls, prototypes: Tensor | str | Path, classes: Sequence[str] | None = None, temperature: float | None = None
    ) -> Classifier:
        """No model, only one vector a class, (k, d) or a file of them; the inputs are vectors of the same model then.

        The names of the classes may stand in the file, as `names`; a name that comes twice gets a number, since two
        prototypes can bear one (ImageNet has two kinds of "missile"). The temperature is CLIP's unless given.
        """
        if not isinstance(prototypes, Tensor):
            arrays = read_arrays(prototypes)
            named = arrays.first(NAMES)
            classes = named.tolist() if classes is None and named is not None else classes
            prototypes = torch.from_numpy(np.array(arrays.vectors(PROTOTYPES), dtype=np.float32))
        if classes is None or len(classes) != len(prototypes):
            came = "none" if classes is None else len(classes)
            raise InputError(
                f"expected names for {len(prototypes)} prototypes, not {came}: give the classes in their order"
            )
        return cls(Precomputed(prototypes), numbered(classes), temperature=temperature)

    def set_temperature(self, temperature: float) -> None:
        self.backbone.set_temperature(temperature)
        self.temperature = temperature

    def set_prior(self, proportions: Sequence[float] | Tensor) -> None:
        """The share of each class in the data, where it is known: training then pulls towards it."""
        prior = torch.as_tensor(proportions, dtype=torch.float32).detach().cpu()
        if prior.shape != (len(self.classes),) or not bool((prior > 0).all()) or not bool(prior.isfinite().all()):
            raise InputError(
                f"expected one proportion above 0 for each of the {len(self.classes)} classes, not {prior.tolist()}"
            )
        self.prior = prior / prior.sum()

    def tune(self, tuning: Tuning) -> Tuner:
        """Make the chosen parameters trainable and all others not."""
        if self.tuning not in (None, tuning):
            raise InputError(
                f"this classifier was tuned with {self.tuning.name!r} already; to tune {tuning.name!r} on top of it, "
                "start from its saved folder as the model"
            )
        self.tuning = tuning
        tuner = TUNERS[tuning.name](self, tuning)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in tuner.parameters)
        return tuner

    def prototypes(self) -> Tensor:
        """(k, d), differentiable unless called under `torch.no_grad()`.

        Each of length 1, but for masked language models, whose logits need the decoder's own lengths.
        """
        if self.soft_prompt is not None:
            return F.normalize(self.soft_prompt(), dim=1)
        return self.backbone.prototypes(self.classes, self.templates)

    def features(self, inputs: Inputs, batch_size: int = 64) -> Tensor:
        """(n, d), each of length 1."""
        data = self.unlabelled(inputs)
        encoded = self.encode(data, InferenceConfig(batch_size))
        _check_complete(data)
        return F.normalize(encoded.features, dim=1)

    def predict_proba(self, inputs: Inputs, batch_size: int = 64) -> Tensor:
        """(n, k), rows sum to 1."""
        data = self.unlabelled(inputs)
        predictions = self.infer(data, InferenceConfig(batch_size))
        _check_complete(data)
        return predictions.log_probabilities.exp()

    def predict(self, inputs: Inputs, batch_size: int = 64) -> list[str]:
        """The most likely class of each input."""
        return [self.classes[i] for i in self.predict_proba(inputs, batch_size).argmax(1).tolist()]

    @torch.no_grad()
    def encode(
        self, data: Unlabelled, inference: InferenceConfig = INFERENCE, *, change: Transform | None = None
    ) -> FeatureSet:
        """Features of all that can be read; what can't is listed in `data.skipped`.

        With demonstrations they are means over several draws of these (the logits are linear in them), and not kept.

        Args:
            reading: batch size, workers, cache, progress, processes.
            change: seen by the model instead of the samples as they are.
        """
        check_modality(self.backbone, data.modality)
        if data.streamed:
            raise InputError(f"{data.source} has no known end: take some of it with take(n)")
        self.eval()
        if self.demonstrations is None:
            return encode(self.backbone, data, inference, change)
        views = [
            Transform("", _in_turn(change, self.demonstrations.view(i))) for i in range(self.demonstrations.samples)
        ]
        # The bar advances once for each sample: during the last view.
        unseen = replace(inference, cache=None, on_batch=None)
        readings = [unseen] * (len(views) - 1) + [replace(unseen, on_batch=inference.on_batch)]
        encoded = [encode(self.backbone, data, how, view) for how, view in zip(readings, views, strict=True)]
        return FeatureSet(encoded[0].indices, torch.stack([each.features for each in encoded]).mean(0))

    def infer(self, data: Unlabelled, inference: InferenceConfig = INFERENCE) -> Predictions:
        """Log-probabilities of all that can be read; prototypes are computed once."""
        encoded = self.encode(data, inference)
        blocks = list(self.score_features(encoded))
        return Predictions(encoded.indices, torch.cat([block.log_probabilities for block in blocks]))

    @torch.no_grad()
    def adjust(self, name: str, encoded: FeatureSet, seed: int = 0) -> None:
        """Fit one of `ADJUSTMENTS` on these features (a random part where they are very many) and predict with it."""
        features = encoded.features
        if len(features) > FITTED_ON:
            chosen = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))[:FITTED_ON]
            features = features[chosen.sort().values]
        features = features.to(self.backbone.device).float()
        self.postprocessor = POSTPROCESSORS[name](
            features, self.backbone.scores(features, self.prototypes()), self.prior
        )

    @torch.no_grad()
    def score_features(self, encoded: FeatureSet, rows: int = 8192) -> Iterator[Predictions]:
        """The same, block by block: a million samples and a thousand classes need not be in memory at once."""
        prototypes = self.prototypes()
        for start in range(0, len(encoded.indices), rows):
            features = encoded.features[start : start + rows].to(self.backbone.device).float()
            logits = self.backbone.scores(features, prototypes).logits
            if self.postprocessor is not None:
                logits = self.postprocessor(features, logits)
            yield Predictions(encoded.indices[start : start + rows], logits.float().log_softmax(1).cpu())

    def unlabelled(self, inputs: Inputs) -> Unlabelled:
        """Folders, files, lists of paths, of images or of texts, as the backbone's kind of data."""
        if isinstance(inputs, Unlabelled):
            return inputs
        if self.backbone.modality == "vector":
            return Vectors.from_file(inputs) if isinstance(inputs, (str, Path)) else Vectors(np.asarray(inputs))
        if self.backbone.modality == "image":
            return Images.from_folder(inputs) if isinstance(inputs, (str, Path)) else Images(inputs)
        return Texts.from_file(inputs, self.columns) if isinstance(inputs, (str, Path)) else Texts(inputs)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a file of texts that make a sample: one, or two for pairs."""
        return self.backbone.cloze.columns if self.backbone.cloze is not None else ("text",)

    def save(self, folder: str | Path) -> None:
        """Write the classifier. After full tuning this is a normal transformers folder; otherwise kilobytes."""
        from pouf.saving import save

        save(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path, backbone: Backbone | None = None) -> Classifier:
        """What `save` wrote. A backbone of your own must be given again: only its weights were saved."""
        from pouf.saving import load

        return load(Path(folder), backbone, adapted=True)

    @classmethod
    def load_zero_shot(cls, folder: str | Path, backbone: Backbone | None = None) -> Classifier:
        """The classifier as it was before it was tuned."""
        from pouf.saving import load

        return load(Path(folder), backbone, adapted=False)


def _check_question(backbone: Backbone, classes: Sequence[str], templates: Sequence[str] | None) -> tuple[str, ...]:
    """The templates of a classifier; a masked language model brings its own with its words."""
    if backbone.cloze is None:
        return check_templates(DEFAULT_TEMPLATES[backbone.modality] if templates is None else templates)
    if len(backbone.cloze.words) != len(classes):
        raise InputError(f"the model has label words for {len(backbone.cloze.words)} classes, not for {len(classes)}")
    return (backbone.cloze.template,)


def _lasting(name_or_path: str | Path) -> str:
    """What to call a model in a saved run: a local folder by its whole path."""
    name = str(name_or_path)
    return os.path.abspath(name) if name != EMBEDDED and os.path.isdir(name) else name


def _check_complete(data: Unlabelled) -> None:
    if data.skipped:
        index, reason = next(iter(data.skipped.items()))
        raise InputError(
            f"{len(data.skipped)} of {len(data)} inputs can't be read, the first {data.ids[index]}: {reason}. "
            "Leave them out, or use score(), which skips them."
        )


def _in_turn(change: Transform | None, view: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """A changed sample among its demonstrations."""
    return view if change is None else lambda sample, seed: view(change.apply(sample, seed), seed)
