"""`pouf adapt`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from pouf.cli import _console as console
from pouf.cli._inputs import adapt_arguments, check_options, names_to_keep, read_task, trackers
from pouf.cli._options import (
    DataOption,
    DataOptions,
    FolderOptions,
    InferenceOptions,
    ModelOptions,
    OutputOption,
    OutputOptions,
    SpeedOptions,
    TrackerOption,
    TrainingOptions,
    grouped,
)
from pouf.cli._progress import progress

ReportOption = Annotated[
    bool, OutputOption("--report/--no-report", help="Write predictions and a report into the run as well.")
]

KeepClasses = Annotated[
    str | None,
    DataOption(help="Measure what is lost on other class names: a,b,c, a file, or words for ordinary ones."),
]
KeepData = Annotated[
    Path | None, DataOption(help="Labelled inputs of the --keep-classes.", show_default="inputs of the task")
]


@grouped
def adapt(
    source: DataOptions,
    model: ModelOptions,
    training: TrainingOptions,
    speed: SpeedOptions,
    place: InferenceOptions,
    output: OutputOptions,
    existing: FolderOptions,
    out_dir: Annotated[Path, OutputOption("--out", help="Folder of the run.")] = Path("pouf-run"),
    report: ReportOption = True,
    tracker: TrackerOption = None,
    keep_classes: KeepClasses = None,
    keep_data: KeepData = None,
) -> None:
    """Adapt a model to unlabelled images or texts, given the names of the classes."""
    from pouf.options import Output
    from pouf.parallel.process_group import launched_sharding
    from pouf.runs.writer import check_new

    console.calm_libraries()
    if model.method == "list":
        console.show_methods()
        return
    check_options(source, model, training)
    if console.speaks():
        check_new(out_dir, existing.resume, existing.overwrite)
    told = trackers(tracker, out_dir, output.quiet)
    with progress(output.hidden) as shown:
        task = read_task(source, model, place, shown, shard=bool(speed.shard) or launched_sharding())
        result = task.classifier.adapt(
            task.data,
            **adapt_arguments(task, model, training, speed, place),
            output=Output(out_dir, existing.resume, existing.overwrite, report),
            callbacks=[shown, *told],
            command=sys.argv,
            keep=names_to_keep(keep_classes, keep_data),
        )
    if console.speaks():
        console.show_adaptation(result, task, output)
