"""`pouf report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pouf.cli import _console as console
from pouf.cli._inputs import load_run, read_inputs, read_labels
from pouf.cli._options import InferenceOptions, LabelColumn, OutputOptions, RunFolder, TextColumn, grouped
from pouf.errors import InputError


@grouped
def report(
    run: RunFolder,
    place: InferenceOptions,
    output: OutputOptions,
    inputs: Annotated[
        Path | None, typer.Argument(metavar="[INPUT]", help="Images, texts or vectors.", show_default="the run's own")
    ] = None,
    labelled: Annotated[bool, typer.Option("--labelled", help="INPUT has labels, as for pouf evaluate.")] = False,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="File to write.", show_default="RUN/report.html")
    ] = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = "label",
) -> None:
    """One HTML file about a run: whether to trust it, and why."""
    from pouf.files import room_for
    from pouf.inference import InferenceConfig
    from pouf.reporting.html import write_report
    from pouf.runs.folder import Run

    console.calm_libraries()
    room_for(out_file or run / "report.html")
    there, labels = Run(run), None
    (classifier,) = load_run(run, place, "advised")
    if labelled:
        if inputs is None:
            raise InputError("--labelled is about INPUT: name the folder or the file with labels")
        data, labels = read_labels(classifier, inputs, text_column, label_column, there)
    else:
        data = read_inputs(classifier, inputs, text_column, there)
    inference = InferenceConfig(workers=place.workers or 0, cache=place.features())
    file = write_report(run, data, labels, out_file, inference, device=place.place(), trust_model=place.trust_model)
    if output.as_json:
        console.tell_json({"report": str(file)})
    elif not output.quiet:
        console.say(f"The report is in {file}")
