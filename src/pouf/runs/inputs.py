"""The classifiers of a run on this machine, and inputs as the run reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.inputs import normalise, split_columns
from pouf.data.labels import Labelled, read_labelled
from pouf.errors import InputError
from pouf.parallel.fsdp import shard_classifier, wait_for_shards
from pouf.parallel.process_group import launched_sharding, started_processes
from pouf.runs.folder import Run

T = TypeVar("T")


def load_classifiers(run: str | Path, *uses: str, device: str = "cpu", trust_model: bool = False) -> list[Classifier]:
    """States of a run, by their `use` or as "adapted", in this order; sharded where the launcher says so."""

    def load(use: str) -> Classifier:
        classifier = Classifier.from_pretrained(run, use=use, trust_model=trust_model)  # type: ignore[arg-type]
        if not (launched_sharding() and started_processes() > 1):
            return classifier.to(device)
        wait_for_shards(classifier.backbone, device)
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
