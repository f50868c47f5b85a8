"""`pouf adapt`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from pouf.cli import _console as console
from pouf.cli._inputs import adapt_arguments, read_task
from pouf.cli._options import (
    DataOptions,
    InferenceOptions,
    ModelOptions,
    OutputOption,
    OutputOptions,
    SpeedOptions,
    TrainingOptions,
    grouped,
)
from pouf.errors import InputError

ReportOption = Annotated[
    bool, OutputOption("--report/--no-report", help="Predictions and a report in the run as well.")
]


@grouped
def adapt(
    source: DataOptions,
    model: ModelOptions,
    training: TrainingOptions,
    speed: SpeedOptions,
    place: InferenceOptions,
    output: OutputOptions,
    out_dir: Annotated[Path, OutputOption("--out", help="Folder of the run.")] = Path("pouf-run"),
    report: ReportOption = True,
) -> None:
    """Adapt a model to unlabelled images or texts, given the names of the classes."""
    from pouf.runs.folder import check_new

    console.calm_libraries()
    if model.method == "list":
        console.show_methods()
        return
    if training.steps == 0:
        raise InputError("steps must be above 0; to train nothing, use --method zero-shot")
    if console.speaks():
        check_new(out_dir)
    task = read_task(source, model, place)
    with console.training(output.hidden, task) as progress:
        result = task.classifier.adapt(
            task.data,
            **adapt_arguments(task, model, training, speed, place),
            output_dir=out_dir,
            report=report,
            callbacks=[progress],
            command=sys.argv,
        )
    if console.speaks():
        console.show_adaptation(result, task, output)
