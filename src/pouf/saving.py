"""A classifier as a folder, and back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor, nn

from pouf.data.class_names import ClassSet
from pouf.errors import InputError
from pouf.files import (
    atomic_folder,
    copy,
    discard,
    file_digest,
    read_json,
    read_tensors,
    read_text,
    remove,
    write_json,
    write_tensors,
    write_text,
)
from pouf.model_card import README, model_card
from pouf.models import Backbone, load_backbone, load_sequence_classifier
from pouf.models.demonstrations import Demonstrations
from pouf.models.precomputed import Precomputed
from pouf.models.templates import MAX_LENGTH, make_cloze
from pouf.models.vision import OPEN_CLIP_PREFIX as OPEN_CLIP
from pouf.parallel.fsdp import gather_weights, is_main
from pouf.postprocess import Postprocessor
from pouf.recipe import TunerSettings
from pouf.tuners import Tuner, base_fingerprint, tune, tuner_of
from pouf.tuners.weights import ADAPTER, ADAPTER_CONFIG

if TYPE_CHECKING:
    from pouf.classifier import Classifier

    C = TypeVar("C", bound=Classifier)

CARD = "pouf.json"  # what a saved classifier is made of
MODEL_FOLDER, DETAILS = "model", "details"  # of a run folder: the advised classifier, and everything else for machines
SAVED = ".saved"  # a classifier or a run that is complete, until each part of it is in its place in the folder above
REPLACED = ("report.html", "predictions.csv", "review.html", "onnx", "merged")  # of a run: they speak of its classifier
FORMAT: Literal[3] = 3  # of the card; a newer one is refused
WEIGHTS = "weights.safetensors"  # the tuned parameters alone, if the base model is elsewhere
MODEL, POSTPROCESSOR = "model.safetensors", "postprocessor.safetensors"
Use = Literal["advised", "chosen", "last", "zero-shot"]
USES: tuple[Use, ...] = ("advised", "chosen", "last", "zero-shot")


class Card(BaseModel):
    """What a saved classifier is made of."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[3]
    stands_for: tuple[Use, ...]  # of a run; its other folders hold the rest
    model: str | None
    revision: str | None
    base: str | None  # fingerprint of the weights that it started from
    classes: tuple[str, ...]
    descriptions: tuple[tuple[str, ...], ...] | None = None
    templates: tuple[str, ...]
    words: tuple[tuple[str, ...], ...] | None = None
    max_length: int | None = None
    new_head_seed: int | None
    regression: bool = False
    vectors: bool = False
    windows: bool = False  # long texts are read in windows
    demonstrations: Demonstrations | None
    temperature: float | None
    prior: list[float] | None = None  # of earlier versions; known shares are those of a run's data, in its manifest
    postprocessed: bool
    tuner: TunerSettings | None
    files: dict[str, str]  # all that belongs to it, with fingerprints

    @model_validator(mode="after")
    def _each_class_is_described(self) -> Card:
        for name in ("descriptions", "words"):
            given = getattr(self, name)
            if given is not None and len(given) != len(self.classes):
                raise ValueError(f"{len(given)} {name} for {len(self.classes)} classes")
        return self


def save(classifier: Classifier, folder: Path, merge: bool = False) -> None:
    """Replace what stood in the folder. Of several processes the first writes; all must call it, for their shards.

    Args:
        merge: write the whole model with what was tuned, as full tuning does.
    """
    if merge:
        _check_mergeable(classifier)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"can't save into {str(folder)!r}, which is a file: give a folder")
    if _is_run(stored(folder)):
        raise InputError(f"{str(folder)!r} holds a run, which has a classifier of its own: save into another folder")
    with replacing(folder) as partial:
        write(classifier, partial, merge=merge)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder to write a classifier to, or a run, which then takes the place of the one in `folder` in one rename.

    It is in `.saved` from then on, where readers find it until each part is in its place: a process that is killed at
    any moment leaves the old one or the new one. Processes but the first write nothing.
    """
    if not is_main():
        yield folder
        return
    folder.mkdir(parents=True, exist_ok=True)
    put_in_place(folder)  # where a process was killed before it had
    with atomic_folder(folder / SAVED) as partial:
        yield partial
    put_in_place(folder)


def put_in_place(folder: Path) -> None:
    """Each part of what `.saved` holds, in the place of what was there before."""
    saved = folder / SAVED
    if not saved.is_dir():
        return
    if _is_run(saved):
        stale = {*REPLACED, *_files_of_classifier(folder)} - {child.name for child in saved.iterdir()}
    else:
        stale = {WEIGHTS, MODEL, POSTPROCESSOR, ADAPTER, ADAPTER_CONFIG} - read_card(saved).files.keys()
    for name in stale:
        remove(folder / name)
    for child in saved.iterdir():
        if child.is_dir():
            discard(folder / child.name)
        copy(child, folder / child.name)
    discard(saved)


def _files_of_classifier(folder: Path) -> set[str]:
    """The files of a classifier that was saved in this folder without a run."""
    if not (folder / CARD).is_file():
        return set()
    with suppress(InputError):  # damaged
        files = read_json(folder / CARD, dict[str, Any]).get("files", ())
        return {CARD, README, *(Path(name).parts[0] for name in files)}
    return {CARD, README}


def write(
    classifier: Classifier, folder: Path, stands_for: tuple[Use, ...] = ("chosen", "last"), merge: bool = False
) -> None:
    """Into a folder that is new or empty. Of several processes the first writes; all must call it, for their shards.

    Args:
        stands_for: the steps of a run that this is.
        merge: write the whole model with what was tuned, as full tuning does.
    """
    backbone, settings = classifier.backbone, classifier.tuner_settings
    if merge:
        settings = TunerSettings()
    base, weights = base_fingerprint(classifier), None
    if backbone.sharded and (merge or (settings is not None and not _keeps_base(classifier))):
        weights = gather_weights(backbone)
    if not is_main():
        return
    folder.mkdir(parents=True, exist_ok=True)
    _save_parts(classifier, folder, merge, weights)
    files = {file.relative_to(folder).as_posix(): file_digest(file) for file in folder.rglob("*") if file.is_file()}
    write_text(folder / README, classifier.model_card or model_card(classifier))  # people may edit it: no fingerprint
    card = Card(
        format=FORMAT,
        stands_for=stands_for,
        model=classifier.model,
        revision=classifier.revision,
        base=base,
        classes=classifier.classes,
        descriptions=classifier.descriptions,
        templates=classifier.templates,
        new_head_seed=getattr(backbone, "head_seed", None),
        demonstrations=classifier.demonstrations,
        temperature=classifier.temperature,
        postprocessed=classifier.postprocessor is not None,
        tuner=settings,
        files=files,
        **backbone.card_facts(),
    )
    write_json(folder / CARD, card.model_dump())


def _check_mergeable(classifier: Classifier) -> None:
    settings = classifier.tuner_settings
    if classifier.backbone.sharded and classifier.backbone.adapter is not None:
        raise InputError("low-rank matrices can't be merged into shards: load the saved run in one process for that")
    if classifier.backbone.saved_whole or (settings and settings.name in ("prompt", "prototypes")):
        what = (
            "vectors"
            if settings is None
            else {"prompt": "a soft prompt", "map": "a map"}.get(settings.name, "prototypes")
        )
        raise InputError(
            f"{what} can't be merged into a model that transformers opens: tune 'full', 'layernorm' or 'lora' for that"
        )


def _save_parts(classifier: Classifier, folder: Path, merge: bool, weights: Mapping[str, Tensor] | None) -> None:
    """Everything but the card. The weights are those of the backbone, where its own lie in shards."""
    backbone, settings = classifier.backbone, classifier.tuner_settings
    # A backbone of the user's own need not know of shards.
    own: tuple[Any, ...] = (folder,) if weights is None else (folder, weights)
    if backbone.saved_whole:
        backbone.save_pretrained(folder)
    elif merge:
        with backbone.adapter.merged() if backbone.adapter is not None else nullcontext():
            backbone.save_pretrained(*own)
    elif settings is not None:
        tuner = tuner_of(classifier, settings)
        if backbone.adapter is not None:
            backbone.adapter.save(folder)
        elif tuner.keeps_base:
            write_tensors(folder / WEIGHTS, tuner.parameters)
        else:
            backbone.save_pretrained(*own)
    if classifier.postprocessor is not None:
        write_tensors(folder / POSTPROCESSOR, classifier.postprocessor.state_dict())


def stored(folder: Path) -> Path:
    """Where what a folder holds is complete: a process may have been killed before each part was in its place."""
    return folder / SAVED if (folder / SAVED).is_dir() else folder


def _is_run(folder: Path) -> bool:
    return (folder / MODEL_FOLDER / CARD).is_file()


def _advised(folder: Path) -> Path:
    """Where the files of a classifier are: the one that a run advises, or one that was saved without a run."""
    folder = stored(folder)
    return folder / MODEL_FOLDER if _is_run(folder) else folder


def is_saved(folder: str | Path) -> bool:
    return (_advised(Path(folder)) / CARD).is_file()


def read_card(folder: Path) -> Card:
    """What a saved classifier is made of; of a run, the one that it advises."""
    if not folder.is_dir():
        raise InputError(f"no run folder {str(folder)!r}: expected one that adapt or save_pretrained wrote")
    if not is_saved(folder):
        if (folder / "config.json").is_file():
            raise InputError(
                f"{str(folder)!r} is a model and not a run: give classes= to use it zero-shot, or adapt it first"
            )
        raise InputError(f"{str(folder)!r} is not a finished run: expected {CARD} in it; resume it, or adapt again")
    folder = _advised(folder)
    version = read_json(folder / CARD, dict[str, Any]).get("format")
    if isinstance(version, int) and version > FORMAT:
        raise InputError(f"{str(folder)!r} has format {version}, this pouf reads up to {FORMAT}: update pouf")
    if isinstance(version, int) and version < FORMAT:
        raise InputError(f"{str(folder)!r} has format {version} of an early pouf: adapt again")
    return read_json(folder / CARD, Card)


def check_files(folder: Path, card: Card) -> None:
    """An error where a part of a saved classifier is gone, cut or changed."""
    for name, digest in card.files.items():
        file = folder / name
        if ".." in Path(name).parts or not file.is_file():
            raise InputError(f"{name!r} is missing in {str(folder)!r}: restore it, or adapt again")
        if file_digest(file) != digest:
            raise InputError(f"{str(file)!r} is not as it was saved: restore it, or adapt again")


def load(
    cls: type[C], folder: Path, use: Use = "advised", backbone: Backbone | None = None, trust_model: bool = False
) -> C:
    """What a run advises, or another state of it.

    Args:
        backbone: one of the user's own, which must be given again: only its weights were saved.
        trust_model: allow pickled weights and code that comes with the model.
    """
    if use not in USES:
        raise InputError(f"unknown use {use!r}: choose one of {', '.join(USES)}")
    folder, card = _find(folder, use)
    adapted = use != "zero-shot"
    if adapted or card.vectors:  # a damaged step leaves zero-shot as it is
        check_files(folder, card)
    settings = card.tuner if adapted else None
    own_weights = settings is not None and not {WEIGHTS, ADAPTER} & card.files.keys()
    if card.vectors:
        backbone = Precomputed.from_saved(folder, settings is not None)
        _check_classes(folder, card, len(backbone.table), MODEL)
    elif backbone is None:
        if card.model is None:
            raise InputError(f"{str(folder)!r} was saved from a backbone of your own: give it as backbone=…")
        backbone = _load_carded(card, folder if own_weights else None, trust_model)
        if card.windows:
            backbone.use_windows()
    elif own_weights:
        backbone.load_weights(folder)
    if card.base is not None and not own_weights and backbone.weights_digest() != card.base:
        raise InputError(
            f"model {str(card.model or 'given')!r} has other weights than when {str(folder)!r} was made from it: "
            "bring back the model as it was, or adapt again"
        )
    classes = ClassSet(card.classes, card.descriptions).as_given()
    classifier = cls(backbone, classes, card.templates, model=card.model, revision=card.revision)
    classifier.base = card.base
    if adapted and card.demonstrations is not None:  # they have labels: not part of zero-shot
        classifier.demonstrations = card.demonstrations
    # A temperature that was set holds until training moves it; then it lies in the weights.
    if card.temperature is not None and not (own_weights and isinstance(backbone.logit_scale, nn.Parameter)):
        classifier.set_temperature(card.temperature)
    if settings is not None:
        tuner = tune(classifier, settings)
        if not own_weights:
            _fill(tuner, _tuned(backbone, folder))
    classifier.temperature = card.temperature
    if (folder / README).is_file():
        classifier.model_card = read_text(folder / README)
    if adapted and card.postprocessed:
        classifier.postprocessor = Postprocessor(**read_tensors(folder / POSTPROCESSOR))
        _check_classes(folder, card, len(classifier.postprocessor.bias), POSTPROCESSOR)
    return classifier


def _check_classes(folder: Path, card: Card, count: int, file: str) -> None:
    """An error where a file is of another number of classes than the card names."""
    if count != len(card.classes):
        raise InputError(
            f"{str(folder / CARD)!r} names {len(card.classes)} classes, and {file} was saved for {count}: restore it, "
            "or adapt again"
        )


def fetch(name_or_path: str | Path, revision: str | None = None) -> Path:
    """The folder of a saved classifier, from the hub where it is no folder here but could be a name there."""
    folder, parts = Path(name_or_path), str(name_or_path).split("/")
    could_be = isinstance(name_or_path, str) and len(parts) == 2 and all(parts) and not parts[0].startswith((".", "~"))
    if folder.exists() or not could_be:
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name_or_path), revision=revision))
    except Exception as error:  # of the network, the hub, or this library's own checks of the name
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"no run folder {name_or_path!r}, and it can't be fetched from the hub: {why} For a model that is not a "
            "run, give the classes"
        ) from None


def check_shareable(classifier: Classifier, merge: bool) -> None:
    """An error where others could not load it: what it builds on is here alone."""
    settings = classifier.tuner_settings
    whole = merge or classifier.backbone.saved_whole or (settings and not _keeps_base(classifier))
    if not whole and (classifier.model is None or os.path.isabs(classifier.model)):
        named = f"a folder on this machine, {classifier.model!r}" if classifier.model else "a backbone of your own"
        raise InputError(
            f"the base model is {named}, which others can't load: push with merge=True, or start from a model that is "
            "on the hub"
        )


def _keeps_base(classifier: Classifier) -> bool:
    settings = classifier.tuner_settings
    return settings is not None and tuner_of(classifier, settings).keeps_base


def _find(folder: Path, use: Use) -> tuple[Path, Card]:
    """The folder that holds a state of a run, and its card."""
    card, advised = read_card(folder), _advised(folder)
    if use in ("advised", "zero-shot") or use in card.stands_for:
        return advised, card
    details = stored(folder) / DETAILS
    others = [(details / name, read_card(details / name)) for name in ("chosen", "last") if is_saved(details / name)]
    found = [(inner, other) for inner, other in others if use in other.stands_for]
    if not found:
        raise InputError(f"{str(folder)!r} holds no {use} step any more: adapt again")
    return found[0]


def _load_carded(card: Card, own: Path | None, trust_model: bool) -> Backbone:
    """The base model, or the tuned one from the folder that holds it."""
    source, revision = (own, None) if own is not None else (card.model or "", card.revision)
    if card.new_head_seed is not None:
        outputs = 1 if card.regression else len(card.classes)
        return load_sequence_classifier(
            source, outputs, card.new_head_seed, card.max_length or MAX_LENGTH, revision,
            fresh=own is None, trust_model=trust_model,
        )  # fmt: skip
    if str(card.model).startswith(OPEN_CLIP):
        backbone = load_backbone(str(card.model))
        if own is not None:
            backbone.load_weights(own)
        return backbone
    cloze = make_cloze(ClassSet(card.classes), card.templates, card.words, card.max_length)
    return load_backbone(source, cloze, revision, trust_model)


def _tuned(backbone: Backbone, folder: Path) -> dict[str, Tensor]:
    """The saved parameters of a tuner that keeps the base model, by their names in the classifier."""
    if backbone.adapter is None:
        return read_tensors(folder / WEIGHTS)
    return {f"backbone.{name}": tensor for name, tensor in backbone.adapter.read(folder).items()}


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
