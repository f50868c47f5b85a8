"""`pouf report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pouf.cli import _console as console
from pouf.cli._inputs import labelled_or_not, load_run
from pouf.cli._options import InferenceOptions, LabelColumn, OutputOptions, RunFolder, TextColumn, grouped
from pouf.cli._progress import encoding


@grouped
def report(
    run: RunFolder,
    place: InferenceOptions,
    output: OutputOptions,
    inputs: Annotated[
        Path | None, typer.Argument(metavar="INPUT", help="Images, texts or vectors.", show_default="the run's own")
    ] = None,
    labelled: Annotated[bool, typer.Option("--labelled", help="INPUT has labels, as for pouf evaluate.")] = False,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="File to write.", show_default="RUN/report.html")
    ] = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = "label",
) -> None:
    """One HTML file about a run: whether to trust it, and why."""
    from pouf.files import check_writable
    from pouf.reporting.html import write_report
    from pouf.runs.folder import Run

    console.calm_libraries()
    check_writable(out_file or run / "report.html")
    there = Run(run)
    (classifier,) = load_run(run, place, "advised")
    data, labels = labelled_or_not(classifier, inputs, labelled, text_column, label_column, there)
    with encoding(place, output) as inference:
        file = write_report(run, data, labels, out_file, inference, device=place.place(), trust_model=place.trust_model)
    if output.as_json:
        console.tell_json({"report": str(file)})
    elif not output.quiet:
        console.say(f"The report is in {file}")
