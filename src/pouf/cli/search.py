"""`pouf search`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from pouf.cli import _console as console
from pouf.cli._inputs import adapt_arguments, check_options, names_to_keep, read_task, trackers
from pouf.cli._options import (
    DataOptions,
    FolderOptions,
    InferenceOptions,
    ModelOptions,
    OutputOption,
    OutputOptions,
    SpeedOptions,
    TrackerOption,
    TrainingOption,
    TrainingOptions,
    grouped,
)
from pouf.cli._progress import progress
from pouf.cli.adapt import KeepClasses, KeepData, ReportOption
from pouf.errors import InputError


@grouped
def search(
    source: DataOptions,
    model: ModelOptions,
    training: TrainingOptions,
    speed: SpeedOptions,
    place: InferenceOptions,
    output: OutputOptions,
    existing: FolderOptions,
    lrs: Annotated[
        str | None,
        TrainingOption(help="Learning rates to try, e.g. 1e-3,3e-3.", show_default="⅓×, 1× and 3× the recipe's rate"),
    ] = None,
    lambdas: Annotated[str | None, TrainingOption(help="Weights of the mutual information to try.")] = None,
    out_dir: Annotated[Path, OutputOption("--out", help="Folder of the run.")] = Path("pouf-run"),
    report: ReportOption = True,
    tracker: TrackerOption = None,
    keep_classes: KeepClasses = None,
    keep_data: KeepData = None,
) -> None:
    """Try a few learning rates (and lambdas), and choose among all their steps without labels."""
    from pouf.options import Output
    from pouf.runs.writer import check_new

    console.calm_libraries()
    if model.method == "list":
        console.show_methods()
        return
    check_options(source, model, training)
    if console.speaks():
        check_new(out_dir, existing.resume, existing.overwrite)
    values = {"optimisation.lr": _numbers("--lrs", lrs), "objective.information": _numbers("--lambdas", lambdas)}
    grid = {name: tried for name, tried in values.items() if tried}
    told = trackers(tracker, out_dir, output.quiet)
    with progress(output.hidden) as shown:
        task = read_task(source, model, place, shown)
        found = task.classifier.search(
            task.data,
            grid or None,
            **adapt_arguments(task, model, training, speed, place),
            output=Output(out_dir, existing.resume, existing.overwrite, report),
            callbacks=[shown, *told],
            on_trial=lambda settings: shown.say(console.told(settings)),
            command=sys.argv,
            keep=names_to_keep(keep_classes, keep_data),
        )
    if console.speaks():
        console.show_search(found, task, output)


def _numbers(option: str, text: str | None) -> list[float]:
    try:
        return [float(value) for value in text.split(",")] if text else []
    except ValueError:
        raise InputError(f"{option} {text!r}: expected numbers as 1e-3,3e-3") from None
