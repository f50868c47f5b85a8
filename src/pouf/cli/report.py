"""`pouf report`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pouf.cli._console import calm_libraries, out
from pouf.cli._options import (
    Cache,
    Device,
    Json,
    LabelColumn,
    NoCache,
    Quiet,
    TextColumn,
    cache_of,
    columns_of,
    device_of,
    read_inputs,
)
from pouf.errors import InputError

if TYPE_CHECKING:
    from pouf.classifier import Classifier
    from pouf.data.base import Unlabelled


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    inputs: Annotated[
        Path | None, typer.Argument(metavar="[INPUT]", help="Images, texts or vectors.", show_default="the run's own")
    ] = None,
    labelled: Annotated[bool, typer.Option("--labelled", help="INPUT has labels, as for pouf evaluate.")] = False,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="File to write.", show_default="RUN/report.html")
    ] = None,
    cache: Cache = None,
    no_cache: NoCache = False,
    text_column: TextColumn = None,
    label_column: LabelColumn = "label",
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """One HTML file about a run: whether to trust it, and why."""
    from pouf.classifier import Classifier
    from pouf.data.labelled import read_labelled
    from pouf.inference import InferenceConfig
    from pouf.reporting.html import write_report
    from pouf.runs.folder import check_run

    calm_libraries()
    classifier = Classifier.load(check_run(run))
    labels = None
    if labelled:
        if inputs is None:
            raise InputError("--labelled is about INPUT: name the folder or the file with labels")
        columns = columns_of(text_column, classifier.columns)
        data, labels = read_labelled(inputs, classifier.classes, classifier.backbone.modality, columns, label_column)
    else:
        data = inputs_of(run, classifier, inputs, text_column)
    inference = InferenceConfig(cache=cache_of(cache, no_cache))
    file = write_report(run, data, labels, out_file, inference, device_of(device))
    if as_json:
        typer.echo(json.dumps({"report": str(file)}))
    elif not quiet:
        out.print(f"The report is in {file}", markup=False, soft_wrap=True)


def inputs_of(run: Path, classifier: Classifier, inputs: Path | None, text_column: str | None) -> Unlabelled:
    """What a run was adapted to, or what is named instead."""
    from pouf.runs.folder import read_manifest

    if inputs is not None:
        return read_inputs(classifier, inputs, text_column)
    manifest = read_manifest(run)
    facts = manifest.get("data") or manifest.get("shots") or {}
    source = facts.get("source", "")
    if not source or not os.path.exists(source.split("::")[0]):
        raise InputError(f"the data of the run, {source!r}, are not there any more: name INPUT")
    return read_inputs(classifier, Path(source), text_column or facts.get("columns"))
