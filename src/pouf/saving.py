"""A classifier as a folder, and back."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pouf.classifier import Classifier
from pouf.errors import InputError
from pouf.models import Backbone, load_backbone, load_sequence_classifier
from pouf.models.cloze import make_cloze
from pouf.models.demonstrations import Demonstrations
from pouf.models.precomputed import Precomputed
from pouf.postprocess.postprocessor import Postprocessor
from pouf.recipe import Tuning
from pouf.tuners import TUNERS, Tuner

CARD = "pouf.json"  # what a saved classifier is made of
WEIGHTS = "weights.safetensors"  # the tuned parameters alone, where the base model is kept elsewhere
ADJUSTMENT = "adjustment.safetensors"


def save(classifier: Classifier, folder: Path) -> None:
    """The card is written last: a folder that has one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    tuning, cloze = classifier.tuning, classifier.backbone.cloze
    card = {
        "format": 1,
        "model": classifier.model,
        "classes": list(classifier.classes),
        "templates": list(classifier.templates),
        "words": cloze.words if cloze is not None else None,
        "max_length": getattr(cloze or classifier.backbone, "max_length", None),
        "fresh_head": classifier.fresh_head,
        "vectors": isinstance(classifier.backbone, Precomputed),
        "demonstrations": classifier.demonstrations.to_json() if classifier.demonstrations is not None else None,
        "temperature": classifier.temperature,
        "prior": classifier.prior.tolist() if classifier.prior is not None else None,
        "adjusted": classifier.postprocessor is not None,
        "tuning": asdict(tuning) if tuning is not None else None,
    }
    if isinstance(classifier.backbone, Precomputed):
        classifier.backbone.save_pretrained(folder)
    elif tuning is not None:
        tuner = TUNERS[tuning.name](classifier, tuning)
        if tuner.keeps_base:
            tensors = {name: p.detach().contiguous().cpu() for name, p in tuner.parameters.items()}
            save_file(tensors, folder / WEIGHTS)
        else:
            classifier.backbone.save_pretrained(folder)
    if classifier.postprocessor is not None:
        tensors = {name: tensor.contiguous().cpu() for name, tensor in classifier.postprocessor.tensors().items()}
        save_file(tensors, folder / ADJUSTMENT)
    (folder / CARD).write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_card(folder: Path) -> dict[str, Any]:
    """What a saved classifier is made of."""
    if not (folder / CARD).is_file():
        raise InputError(f"no saved classifier in {str(folder)!r}: expected a folder with {CARD}")
    card: dict[str, Any] = json.loads((folder / CARD).read_text(encoding="utf-8"))
    return card


def load(folder: Path, backbone: Backbone | None, adapted: bool) -> Classifier:
    """With its tuning, or as it was before."""
    card = read_card(folder)
    tuning = Tuning(**card["tuning"]) if card["tuning"] is not None and adapted else None
    own_weights = tuning is not None and not (folder / WEIGHTS).is_file()
    if card.get("vectors"):
        backbone = Precomputed.from_saved(folder, adapted)
    elif backbone is None:
        if card["model"] is None:
            raise InputError(f"{str(folder)!r} was saved from a backbone of your own: give it as backbone=…")
        backbone = _load_carded(folder if own_weights else card["model"], card)
    elif own_weights:
        backbone.load_weights(folder)
    classifier = Classifier(backbone, card["classes"], card["templates"], model=card["model"])
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
    if card.get("prior") is not None:
        classifier.set_prior(card["prior"])
    if adapted and card.get("adjusted"):
        classifier.postprocessor = Postprocessor(**load_file(folder / ADJUSTMENT))
    return classifier


def _load_carded(name_or_path: str | Path, card: dict[str, Any]) -> Backbone:
    if card.get("fresh_head") is not None:
        return load_sequence_classifier(name_or_path, len(card["classes"]), card["fresh_head"], card["max_length"])
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
