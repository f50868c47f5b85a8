"""A classifier as a folder, and back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pouf.errors import InputError
from pouf.models import Backbone, load_backbone, load_sequence_classifier
from pouf.models.cloze import make_cloze
from pouf.models.demonstrations import Demonstrations
from pouf.models.precomputed import Precomputed
from pouf.postprocess import Postprocessor
from pouf.recipe import TunerSettings
from pouf.tuners import Tuner

if TYPE_CHECKING:
    from pouf.base import BaseClassifier

    C = TypeVar("C", bound=BaseClassifier)

CARD = "pouf.json"  # what a saved classifier is made of
FORMAT = 2  # of the card; a newer one is refused
WEIGHTS = "weights.safetensors"  # the tuned parameters alone, where the base model is kept elsewhere
POSTPROCESSOR = "postprocessor.safetensors"
Use = Literal["advised", "chosen", "last", "zero-shot"]
USES: tuple[Use, ...] = ("advised", "chosen", "last", "zero-shot")


def save(classifier: BaseClassifier, folder: Path, stands_for: tuple[Use, ...] = ("chosen", "last")) -> None:
    """The card is written last: a folder that has one is complete.

    Args:
        stands_for: what of a run this is; the other folders of the run hold the rest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    backbone, settings = classifier.backbone, classifier.tuner_settings
    card = {
        "format": FORMAT,
        "stands_for": stands_for,
        "model": classifier.model,
        "revision": classifier.revision,
        "classes": classifier.classes,
        "templates": classifier.templates,
        "words": backbone.cloze.words if backbone.cloze is not None else None,
        "max_length": getattr(backbone.cloze or backbone, "max_length", None),
        "fresh_head": classifier.fresh_head,
        "regression": getattr(backbone, "regression", False),
        "vectors": isinstance(backbone, Precomputed),
        "demonstrations": classifier.demonstrations.to_json() if classifier.demonstrations is not None else None,
        "temperature": classifier.temperature,
        "prior": classifier.prior.tolist() if classifier.prior is not None else None,
        "postprocessed": classifier.postprocessor is not None,
        "tuner": settings.model_dump() if settings is not None else None,
    }
    if isinstance(backbone, Precomputed):
        backbone.save_pretrained(folder)
    elif settings is not None:
        tuner = classifier.tuner(settings)
        if tuner.keeps_base:
            _save_tensors(tuner.parameters, folder / WEIGHTS)
        else:
            backbone.save_pretrained(folder)
    if classifier.postprocessor is not None:
        _save_tensors(classifier.postprocessor.state_dict(), folder / POSTPROCESSOR)
    write_json(folder / CARD, card)


def _save_tensors(tensors: dict[str, Any], file: Path) -> None:
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, file)


def is_saved(folder: str | Path) -> bool:
    return (Path(folder) / CARD).is_file()


def read_card(folder: Path) -> dict[str, Any]:
    """What a saved classifier is made of."""
    if not folder.is_dir():
        raise InputError(f"no run folder {str(folder)!r}: expected one that adapt or save_pretrained wrote")
    if not (folder / CARD).is_file():
        raise InputError(f"{str(folder)!r} is not a finished run: expected {CARD} in it; adapt again")
    try:
        card: dict[str, Any] = json.loads((folder / CARD).read_text(encoding="utf-8"))
        version = int(card["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{str(folder / CARD)!r} is damaged ({error}): adapt again, or restore the file") from None
    if version > FORMAT:
        raise InputError(f"{str(folder)!r} has format {version}, this pouf reads up to {FORMAT}: update pouf")
    if version < FORMAT:
        raise InputError(f"{str(folder)!r} has format {version} of an early pouf: adapt again")
    return card


def load(cls: type[C], folder: Path, use: Use = "advised", backbone: Backbone | None = None) -> C:
    """What a run advises, or another state of it.

    Args:
        backbone: one of the user's own, which must be given again: only its weights were saved.
    """
    if use not in USES:
        raise InputError(f"unknown use {use!r}: choose one of {', '.join(USES)}")
    card = read_card(folder)
    if use in ("chosen", "last") and use not in card["stands_for"]:
        others = [(folder / name, read_card(folder / name)) for name in ("chosen", "last") if is_saved(folder / name)]
        found = [(inner, other) for inner, other in others if use in other["stands_for"]]
        if not found:
            raise InputError(f"{str(folder)!r} holds no {use} step any more: adapt again")
        folder, card = found[0]
    adapted = use != "zero-shot"
    settings = TunerSettings(**card["tuner"]) if card["tuner"] is not None and adapted else None
    own_weights = settings is not None and not (folder / WEIGHTS).is_file()
    if card["vectors"]:
        backbone = Precomputed.from_saved(folder, settings is not None)
    elif backbone is None:
        if card["model"] is None:
            raise InputError(f"{str(folder)!r} was saved from a backbone of your own: give it as backbone=…")
        source = (folder, None) if own_weights else (card["model"], card["revision"])
        backbone = _load_carded(card, *source)
    elif own_weights:
        backbone.load_weights(folder)
    classifier = cls(backbone, card["classes"], card["templates"], model=card["model"], revision=card["revision"])
    classifier.fresh_head = card["fresh_head"]
    if adapted and card["demonstrations"] is not None:  # they have labels: not part of zero-shot
        classifier.demonstrations = Demonstrations.from_json(card["demonstrations"])
    # A temperature that was set holds until training moves it; then it lies in the weights.
    if card["temperature"] is not None and not (own_weights and isinstance(backbone.logit_scale, nn.Parameter)):
        classifier.set_temperature(card["temperature"])
    if settings is not None:
        tuner = classifier.tune(settings)
        if not own_weights:
            _fill(tuner, _read_tensors(folder / WEIGHTS))
    classifier.temperature = card["temperature"]
    if card["prior"] is not None:
        classifier.set_prior(card["prior"])
    if adapted and card["postprocessed"]:
        classifier.postprocessor = Postprocessor(**_read_tensors(folder / POSTPROCESSOR))
    return classifier


def _load_carded(card: dict[str, Any], name_or_path: str | Path, revision: str | None) -> Backbone:
    if card["fresh_head"] is not None:
        outputs = 1 if card.get("regression") else len(card["classes"])
        return load_sequence_classifier(name_or_path, outputs, card["fresh_head"], card["max_length"], revision)
    cloze = make_cloze(card["classes"], card["templates"], card["words"], card["max_length"])
    return load_backbone(name_or_path, cloze, revision)


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{str(file)!r} can't be read ({error}): restore it, or adapt again") from None
    return tensors


def _fill(tuner: Tuner, tensors: dict[str, Tensor]) -> None:
    differ = tuner.parameters.keys() ^ tensors.keys()
    differ |= {name for name in tuner.parameters.keys() & tensors.keys()
               if tuner.parameters[name].shape != tensors[name].shape}  # fmt: skip
    if differ:
        raise InputError(
            f"the saved weights do not fit the base model ({len(differ)} differ, such as {min(differ)!r}): "
            "is it the model the run started from?"
        )
    with torch.no_grad():
        for name, parameter in tuner.parameters.items():
            parameter.copy_(tensors[name])


def write_json(file: Path, value: Any) -> None:
    """Whole or not at all: a reader never meets half a file."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, file)
