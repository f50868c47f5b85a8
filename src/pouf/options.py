"""What `Classifier.adapt` and `Classifier.search` take beside the data: values that belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pouf.data.class_names import Classes
from pouf.data.labels import Labelled, Shots
from pouf.files import check_named
from pouf.recipe import Recipe

_NO_LABELS = "No labels are needed, and none are taken: give the inputs alone; a few labelled examples go into shots="
_OUTPUT = "Give output=Output('run', resume=…, overwrite=…, report=…)"
WRONG_ARGUMENTS = {  # what callers of `adapt` try, and what to give instead
    **{name: f"Give settings={{{name!r}: …}}" for name in (full.rsplit(".", 1)[-1] for full in Recipe().flat())},
    **dict.fromkeys(("", "labels", "label", "y", "targets"), _NO_LABELS),
    **dict.fromkeys(("output_dir", "resume", "overwrite", "report", "out"), _OUTPUT),
}


@dataclass(frozen=True)
class Output:
    """Where a run is written.

    Args:
        folder: of the run: classifier, verdict, predictions, report.
        resume: continue the run in that folder, which was interrupted; without one, start it. On a CPU it ends with the
            same weights, to the bit, as if it had never been interrupted.
        overwrite: replace the run in that folder once this one has succeeded; what is not pouf's stays.
        report: write predictions and a report into it as well.
    """

    folder: str | Path
    resume: bool = False
    overwrite: bool = False
    report: bool = True

    def __post_init__(self) -> None:
        check_named(self.folder)


@dataclass(frozen=True)
class KeepNames:
    """Names outside of the task: `result.drift` says how much of zero-shot with these is left after training.

    Args:
        names: a list, a file, or "words" for ordinary ones.
        data: labelled inputs of these names; by default inputs of the task.
    """

    names: Classes | str
    data: Labelled | str | Path | None = None


@dataclass(frozen=True)
class AdaptOptions:
    """What is to be done: the arguments of `Classifier.adapt` that decide on the result."""

    method: str = "pouf"
    recipe: Recipe | str | Path | None = None
    settings: Mapping[str, Any] | None = None
    shots: Shots | str | Path | None = None
    demonstrations: bool = False
    prior: str | Sequence[float] | None = None
    refine: bool | None = None
    seed: int | None = None
    max_minutes: float | None = None
    teacher: Any = None  # see `pouf.training.teachers.read`
    second_features: Any = None  # see `pouf.training.teachers.second_opinion`
