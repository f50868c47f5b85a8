"""A zero-shot classifier: a backbone, class names and what it is asked with them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pouf.backbones import EMBEDDED, Backbone, load_backbone, load_fresh_head
from pouf.backbones.base import check_modality
from pouf.cloze import MAX_LENGTH, make_cloze
from pouf.data.base import Unlabelled
from pouf.data.cache import FeatureCache
from pouf.data.images import Images
from pouf.data.reading import Reader, read_batches
from pouf.data.texts import Texts
from pouf.demonstrations import Demonstrations
from pouf.errors import InputError
from pouf.prompts import DEFAULT_TEMPLATES, check_classes, check_templates
from pouf.recipe import Tuning
from pouf.tuners import TUNERS, Tuner
from pouf.tuners.soft_prompt import SoftPrompt

CARD = "pouf.json"  # what a saved classifier is made of
WEIGHTS = "weights.safetensors"  # the tuned parameters alone, where the base model is kept elsewhere

Inputs = Unlabelled | str | Path | Sequence[Any]


class Encoded(NamedTuple):
    indices: list[int]  # positions of the samples that could be read, ascending
    features: Tensor  # (len(indices), d), on the CPU, as the backbone gives them


class Change(NamedTuple):
    """What is done to samples before they are encoded, and what to call it: features are kept under this name too."""

    name: str
    apply: Callable[[Any, int], Any]  # a sample and its seed


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
        backbone = load_fresh_head(name_or_path, len(names), seed, max_length)
        classifier = cls(backbone, names, model=_lasting(name_or_path))
        classifier.fresh_head = seed
        return classifier

    def set_temperature(self, temperature: float) -> None:
        self.backbone.set_temperature(temperature)
        self.temperature = temperature

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
        encoded = self.encode(data, batch_size)
        _check_complete(data)
        return F.normalize(encoded.features, dim=1)

    def predict_proba(self, inputs: Inputs, batch_size: int = 64) -> Tensor:
        """(n, k), rows sum to 1."""
        data = self.unlabelled(inputs)
        predictions = self.score(data, batch_size)
        _check_complete(data)
        return predictions.log_probabilities.exp()

    def predict(self, inputs: Inputs, batch_size: int = 64) -> list[str]:
        """The most likely class of each input."""
        return [self.classes[i] for i in self.predict_proba(inputs, batch_size).argmax(1).tolist()]

    @torch.no_grad()
    def encode(
        self,
        data: Unlabelled,
        batch_size: int = 64,
        on_batch: Callable[[int], None] | None = None,
        *,
        workers: int = 0,
        cache: FeatureCache | None = None,
        change: Change | None = None,
        only: Sequence[int] | None = None,
    ) -> Encoded:
        """Features of all that can be read; what can't is listed in `data.skipped`. `on_batch` gets batch sizes.

        With demonstrations they are means over several draws of these: the logits are linear in them.

        Args:
            workers: processes that read and decode ahead.
            cache: where features are kept and found again; those of texts with demonstrations are not.
            change: seen by the model instead of the samples as they are.
            only: positions of the samples to encode; all by default.
        """
        check_modality(self.backbone, data.modality)
        if data.streamed:
            raise InputError(f"{data.source} has no known end: take some of it with take(n)")
        self.eval()
        places = [place for place in (range(len(data)) if only is None else only) if place not in data.skipped]
        if self.demonstrations is not None:
            views = [Change("", self.demonstrations.view(i)) for i in range(self.demonstrations.samples)]
            # The bar advances once for each sample: during the last view.
            told = [None] * (len(views) - 1) + [on_batch]
            encoded = [
                self._encode(data, places, batch_size, view, tell, workers)
                for view, tell in zip(views, told, strict=True)
            ]
            return Encoded(encoded[0].indices, torch.stack([each.features for each in encoded]).mean(0))
        if cache is None:
            return self._encode(data, places, batch_size, change, on_batch, workers)
        name = self.backbone.fingerprint() + (f" {change.name}" if change is not None else "")
        kept = cache.open(blake2b(name.encode(), digest_size=16).hexdigest())
        digests = {place: data.digest(place) for place in places}
        known = {place for place, digest in digests.items() if digest in kept}
        if on_batch is not None:
            on_batch(len(known))
        missing = [place for place in places if place not in known]
        fresh = self._encode(data, missing, batch_size, change, on_batch, workers) if missing or not known else None
        found = sorted(known)
        if fresh is None:
            return Encoded(found, kept.get([digests[place] for place in found]))
        # The same content twice is kept once, and what has no fingerprint not at all.
        rows = {digests[place]: row for row, place in enumerate(fresh.indices) if digests[place]}
        if rows:
            kept.put(list(rows), fresh.features[list(rows.values())])
        if not found:
            return fresh
        both = torch.cat([fresh.features, kept.get([digests[place] for place in found])])
        indices = [*fresh.indices, *found]
        order = sorted(range(len(indices)), key=indices.__getitem__)
        return Encoded([indices[i] for i in order], both[order])

    def _encode(
        self,
        data: Unlabelled,
        places: Sequence[int],
        batch_size: int,
        change: Change | None,
        on_batch: Callable[[int], None] | None,
        workers: int,
    ) -> Encoded:
        indices: list[int] = []
        features: list[Tensor] = []
        reader = Reader(data, self.backbone.prepare, change.apply if change is not None else None)
        for read in read_batches(reader, data.batches(batch_size, places, change is not None), workers):
            if read.indices:
                tensors = {name: tensor.to(self.backbone.device) for name, tensor in read.tensors.items()}
                features.append(self.backbone.encode_inputs(tensors).float().cpu())
                indices += read.indices
            if on_batch is not None:
                on_batch(len(read.indices))
        if not features:
            data.check_readable()
            return Encoded([], torch.zeros(0, self.prototypes().shape[1]))  # this share had nothing readable
        order = sorted(range(len(indices)), key=indices.__getitem__)
        return Encoded([indices[i] for i in order], torch.cat(features)[order])

    @torch.no_grad()
    def score(
        self,
        data: Unlabelled,
        batch_size: int = 64,
        on_batch: Callable[[int], None] | None = None,
        *,
        workers: int = 0,
        cache: FeatureCache | None = None,
    ) -> Predictions:
        """Log-probabilities of all that can be read; prototypes are computed once. Arguments as in `encode`."""
        encoded = self.encode(data, batch_size, on_batch, workers=workers, cache=cache)
        logits = self.backbone.scores(encoded.features.to(self.backbone.device), self.prototypes()).logits
        return Predictions(encoded.indices, logits.float().log_softmax(1).cpu())

    def unlabelled(self, inputs: Inputs) -> Unlabelled:
        """Folders, files, lists of paths, of images or of texts, as the backbone's kind of data."""
        if isinstance(inputs, Unlabelled):
            return inputs
        if isinstance(inputs, (str, Path)):
            return (
                Images.from_folder(inputs)
                if self.backbone.modality == "image"
                else Texts.from_file(inputs, self.columns)
            )
        return Images(inputs) if self.backbone.modality == "image" else Texts(inputs)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a file of texts that make a sample: one, or two for pairs."""
        return self.backbone.cloze.columns if self.backbone.cloze is not None else ("text",)

    def save(self, folder: str | Path) -> None:
        """Write the classifier. After full tuning this is a normal transformers folder; otherwise kilobytes.

        The card is written last: a folder that has one is complete.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        cloze = self.backbone.cloze
        card = {
            "format": 1,
            "model": self.model,
            "classes": list(self.classes),
            "templates": list(self.templates),
            "words": cloze.words if cloze is not None else None,
            "max_length": getattr(cloze or self.backbone, "max_length", None),
            "fresh_head": self.fresh_head,
            "demonstrations": self.demonstrations.to_json() if self.demonstrations is not None else None,
            "temperature": self.temperature,
            "tuning": asdict(self.tuning) if self.tuning is not None else None,
        }
        if self.tuning is not None:
            tuner = TUNERS[self.tuning.name](self, self.tuning)
            if tuner.keeps_base:
                tensors = {name: p.detach().contiguous().cpu() for name, p in tuner.parameters.items()}
                save_file(tensors, folder / WEIGHTS)
            else:
                self.backbone.save_pretrained(folder)
        (folder / CARD).write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, backbone: Backbone | None = None) -> Classifier:
        """What `save` wrote. A backbone of your own must be given again: only its weights were saved."""
        return cls._load(Path(folder), backbone, adapted=True)

    @classmethod
    def load_zero_shot(cls, folder: str | Path, backbone: Backbone | None = None) -> Classifier:
        """The classifier as it was before it was tuned."""
        return cls._load(Path(folder), backbone, adapted=False)

    @classmethod
    def _load(cls, folder: Path, backbone: Backbone | None, adapted: bool) -> Classifier:
        if not (folder / CARD).is_file():
            raise InputError(f"no saved classifier in {str(folder)!r}: expected a folder with {CARD}")
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
        tuning = Tuning(**card["tuning"]) if card["tuning"] is not None and adapted else None
        own_weights = tuning is not None and not (folder / WEIGHTS).is_file()
        if backbone is None:
            if card["model"] is None:
                raise InputError(f"{str(folder)!r} was saved from a backbone of your own: give it as backbone=…")
            backbone = _load_carded(folder if own_weights else card["model"], card)
        elif own_weights:
            backbone.load_weights(folder)
        classifier = cls(backbone, card["classes"], card["templates"], model=card["model"])
        classifier.fresh_head = card.get("fresh_head")
        if adapted and card.get("demonstrations") is not None:  # they have labels: not part of zero-shot
            classifier.demonstrations = Demonstrations.from_json(card["demonstrations"])
        # A temperature that was set holds until training moves it; then it lies in the weights.
        if card["temperature"] is not None and not (own_weights and isinstance(backbone.logit_scale, nn.Parameter)):
            classifier.set_temperature(card["temperature"])
        if tuning is not None:
            tuner = classifier.tune(tuning)
            if not own_weights:
                _fill(tuner, load_file(folder / WEIGHTS))
        classifier.temperature = card["temperature"]
        return classifier


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


def _load_carded(name_or_path: str | Path, card: dict[str, Any]) -> Backbone:
    if card.get("fresh_head") is not None:
        return load_fresh_head(name_or_path, len(card["classes"]), card["fresh_head"], card["max_length"])
    cloze = make_cloze(card["classes"], card["templates"], card.get("words"), card.get("max_length"))
    return load_backbone(name_or_path, cloze)


def _fill(tuner: Tuner, tensors: dict[str, Tensor]) -> None:
    missing = tuner.parameters.keys() ^ tensors.keys()
    if missing:
        raise InputError(
            f"the saved weights do not fit the base model ({len(missing)} names differ, such as {min(missing)!r}): "
            "is it the model the run started from?"
        )
    with torch.no_grad():
        for name, parameter in tuner.parameters.items():
            parameter.copy_(tensors[name])


def _check_complete(data: Unlabelled) -> None:
    if data.skipped:
        index, reason = next(iter(data.skipped.items()))
        raise InputError(
            f"{len(data.skipped)} of {len(data)} inputs can't be read, the first {data.ids[index]}: {reason}. "
            "Leave them out, or use score(), which skips them."
        )
