"""A run folder: its files, what it says of itself, its classifiers, and inputs as it reads them.

run/report.html, predictions.csv    for people
run/model/                          the classifier that the run advises
run/details/                        how it was made: settings, plan, steps, verdict, and the other states of the run
run/unfinished/                     while a run is under way, or can be resumed: a run folder with checkpoints"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.contents import as_url
from pouf.data.inputs import normalise, split_columns
from pouf.data.labels import Labelled, read_labelled
from pouf.errors import InputError
from pouf.files import read_json, read_text, write_json
from pouf.model_card import README
from pouf.parallel.fsdp import set_shard_device, shard_classifier
from pouf.parallel.process_group import launched_sharding, started_processes
from pouf.saving import DETAILS, MODEL_FOLDER, Use, read_card, stored
from pouf.validation.verdict import Verdict, nothing_to_judge

PREDICTIONS, REPORT, UNFINISHED, CHECKPOINTS = "predictions.csv", "report.html", "unfinished", "checkpoints"
VERDICT, TRIALS, PLAN = f"{DETAILS}/verdict.json", f"{DETAILS}/search.json", f"{DETAILS}/plan.json"
RECIPE, METRICS = f"{DETAILS}/recipe.toml", f"{DETAILS}/metrics.jsonl"
MANIFEST, SKIPPED = f"{DETAILS}/run.json", f"{DETAILS}/skipped.jsonl"
CLASSES = f"{DETAILS}/classes.txt"
DESCRIPTIONS = f"{DETAILS}/classes.json"  # where the classes have descriptions, in the place of classes.txt
REVIEW = f"{DETAILS}/review.json"
MODEL_CARD = f"{MODEL_FOLDER}/{README}"

PACKAGES = "pouf torch transformers tokenizers safetensors numpy pillow scikit-learn accelerate".split()


class _Part(BaseModel):
    """What a report reads of a file of the run. More may stand there."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Step(_Part):
    step: int
    loss: float
    effective_classes: float
    seconds: float


class _Skipped(_Part):
    id: str
    reason: str


class _Source(_Part):
    source: str = ""
    columns: str = ""
    id_columns: str = ""


class _Drift(_Part):
    agreement: float


class _Manifest(_Part):
    status: str = "running"
    method: str = "pouf"
    data: _Source | None = None
    shots: _Source | None = None
    drift: _Drift | None = None
    absent: list[str] = []
    resumed: list[str] = []
    trainable: int | None = None
    total: int | None = None


class Run:
    """A run folder that is there. `Classifier.from_pretrained(folder, use=…)` gives its classifiers."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.card = read_card(self.folder)
        self.files = stored(self.folder)  # where its parts are complete
        self.manifest = read_manifest(self.files)
        verdict = read_json(self.files / VERDICT, Verdict) if (self.files / VERDICT).is_file() else None
        if verdict is None and self.manifest.get("status", "running") != "running":
            raise InputError(f"{VERDICT!r} is missing in {str(folder)!r}: restore it, or adapt again")
        self.verdict = verdict or nothing_to_judge()

    @property
    def name(self) -> str:
        folder = self.folder.resolve()
        return folder.parent.name if folder.name == UNFINISHED else folder.name

    @property
    def adapted(self) -> Use:
        """What stands for the adapted model, trusted or not."""
        return self.verdict.adapted

    def lines(self, name: str) -> list[str]:
        file = self.files / name
        return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []

    def steps(self) -> list[dict[str, Any]]:
        """What was logged of each step; a run that was killed may have left the last line half written."""
        return self._rows(METRICS, _Step)

    def skipped(self) -> list[dict[str, Any]]:
        """What could not be read: `of`, `id` and `reason`."""
        return self._rows(SKIPPED, _Skipped)

    def _rows(self, name: str, kind: type[_Part]) -> list[dict[str, Any]]:
        file = self.files / name
        lines = read_text(file).splitlines(keepends=True) if file.is_file() else []
        rows = []
        for number, line in enumerate(line for line in lines if line.endswith("\n")):
            try:
                rows.append(kind.model_validate(json.loads(line)).model_dump())
            except (ValueError, RecursionError):
                raise InputError(f"{str(file)!r} is damaged in line {number + 1}: restore it, or adapt again") from None
        return rows

    def _data(self) -> dict[str, Any]:
        return self.manifest.get("data") or self.manifest.get("shots") or {}

    def columns(self) -> tuple[str, ...] | None:
        """The columns of the run's own texts, where they are from a table."""
        columns = self._data().get("columns")
        return tuple(columns.split(",")) if columns else None

    def id_columns(self) -> tuple[str, ...]:
        """The columns that name the run's own inputs, where some were chosen."""
        columns = self._data().get("id_columns")
        return tuple(columns.split(",")) if columns else ()

    def source(self) -> str:
        """Where the data of the run lie; an error where they are gone."""
        source = str(self._data().get("source", ""))
        if as_url(source) is None and not os.path.exists(source.split("::")[0]):
            raise InputError(f"the data of the run, {source!r}, are not there any more: name the inputs")
        return source


def update_manifest(folder: str | Path, **facts: Any) -> None:
    """Add facts to the manifest of a run that is there."""
    file = Path(folder) / MANIFEST
    write_json(file, read_json(file, dict[str, Any]) | facts)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a run says of itself; nothing where it says nothing."""
    if not (folder / MANIFEST).is_file():
        return {}
    return read_json(folder / MANIFEST, _Manifest).model_dump(exclude_unset=True)


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "platform": sys.platform} | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    """`importlib.metadata.version` parses the whole description of each package, which takes a fifth of a second."""
    try:
        files = distribution(package)
    except PackageNotFoundError:
        return "not installed"
    found = re.search("^Version: (.*)", files.read_text("METADATA") or files.read_text("PKG-INFO") or "", re.MULTILINE)
    return found[1] if found is not None else "unknown"


T = TypeVar("T")


def load_classifiers(run: str | Path, *uses: str, device: str = "cpu", trust_model: bool = False) -> list[Classifier]:
    """States of a run, by their `use` or as "adapted", in this order; sharded where the launcher says so."""

    def load(use: str) -> Classifier:
        classifier = Classifier.from_pretrained(run, use=use, trust_model=trust_model)  # type: ignore[arg-type]
        if not (launched_sharding() and started_processes() > 1):
            return classifier.to(device)
        set_shard_device(classifier.backbone, device)
        shard_classifier(classifier)
        return classifier

    return [load(Run(run).adapted if use == "adapted" else use) for use in uses]


def read_inputs(
    run: Run,
    classifier: Classifier,
    inputs: Path | None,
    text_column: str | None = None,
    id_column: str | None = None,
) -> Unlabelled:
    """Images, texts or vectors, as the classifier reads them; without any, those of the run, by the same ids."""
    source = Path(run.source()) if inputs is None else inputs
    ids = id_column.split(",") if id_column else run.id_columns() if inputs is None else ()
    modality = classifier.backbone.modality
    return _by_columns(run, classifier, text_column, lambda columns: normalise(source, modality, columns, ids).data)


def read_labels(
    run: Run, classifier: Classifier, inputs: Path, text_column: str | None = None, label_column: str = "label"
) -> Labelled:
    """The same with labels."""
    classes, modality = classifier.classes, classifier.backbone.modality
    return _by_columns(
        run, classifier, text_column, lambda columns: read_labelled(inputs, classes, modality, columns, label_column)
    )


def read_labelled_or_not(
    run: Run, classifier: Classifier, inputs: Path | None, labelled: bool, text_column: str | None, label_column: str
) -> tuple[Unlabelled, list[int] | None]:
    """Inputs, and their labels if they are `labelled`."""
    if not labelled:
        return read_inputs(run, classifier, inputs, text_column), None
    if inputs is None:
        raise InputError("labels are read from inputs: name the folder or the file that holds them")
    return read_labels(run, classifier, inputs, text_column, label_column)


def _by_columns(run: Run, classifier: Classifier, text_column: str | None, read: Callable[[Sequence[str]], T]) -> T:
    """Read by the columns that were named, or those of the run's own data, or the usual ones."""
    known = run.columns()
    if text_column is None and known is not None and known != classifier.columns:
        try:
            return read(known)
        except InputError as error:
            with suppress(InputError):
                return read(classifier.columns)
            raise error
    return read(split_columns(text_column, classifier.columns))
