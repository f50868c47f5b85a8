"""What `Classifier.adapt` and `Classifier.search` take beside the data: values that belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from pouf.data.class_names import Classes
from pouf.data.labels import Labelled, Shots
from pouf.files import check_named
from pouf.recipe import Recipe

if TYPE_CHECKING:
    from pouf.inference.cache import FeatureCache
    from pouf.training.callbacks import Callback

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
    """The arguments of `Classifier.adapt` and `search` beside the data.

    Args:
        text_column: of a file, where the texts are not in `text`; two, as "a,b", for pairs.
        method: pouf, or what it is compared with, by its name in `METHODS`.
        recipe: all settings: a preset ("fast", "light", "balanced" or "paper"), a `Recipe`, the name of one, or a TOML
            file; by default the one for this kind.
        settings: changes to it, as {"steps": 50, "lr": 1e-3}; a dotted name, as "optimisation.lr", where several
            settings end alike.
        shots: a few examples with labels to learn from as well; the data stay without.
        demonstrations: show a shot of each class beside every text, as LM-BFF does.
        teacher: soft labels to learn from as well: a file of answers, a matrix (n, k) of probabilities, a `Classifier`,
            a run, or a model by name: one that `from_pretrained` loads, or a cross-encoder (NLI, reranker). Inputs that
            it did not answer are unlabelled as ever.
        second_features: of the same inputs, from another frozen encoder that need know no text: a matrix (n, d), a
            file of it, or a model by name. Predictions refined in their space are then the teacher.
        prior: shares of the classes: "uniform", "estimated", "paper" (its own estimate), or known ones, one number
            per class, which the predictions then have as a whole.
        refine: a last pass over all predictions together.
        seed: of everything random, in the place of the recipe's.
        max_minutes: in the place of a recipe: the largest preset that is expected to take no longer; for all trials of
            a search together.
        output: a new folder for the run: classifier, verdict, predictions, report. `Output` says more; with `resume`,
            finished trials of a search are not run again.
        keep: names outside of the task, and how much of zero-shot with these is left: `result.drift`. The setting
            `weight_pull` loses less of it.
        callbacks: called with steps and checkpoints while the run goes on.
        cache: where features that training can't change are stored; by default in memory.
        command: the command line that repeats the run, for its manifest.
    """

    text_column: str | None = None
    method: str = "pouf"
    recipe: Recipe | str | Path | None = None
    settings: Mapping[str, Any] | None = None
    shots: Shots | str | Path | None = None
    demonstrations: bool = False
    teacher: Any = None
    second_features: Any = None
    prior: str | Sequence[float] | None = None
    refine: bool | None = None
    seed: int | None = None
    max_minutes: float | None = None
    output: Output | str | Path | None = None
    keep: KeepNames | None = None
    callbacks: Iterable[Callback] = ()
    cache: FeatureCache | None = None
    command: Sequence[str] = ()


class AdaptArguments(TypedDict, total=False):
    """`AdaptOptions` as keyword arguments, for editors and mypy."""

    text_column: str | None
    method: str
    recipe: Recipe | str | Path | None
    settings: Mapping[str, Any] | None
    shots: Shots | str | Path | None
    demonstrations: bool
    teacher: Any
    second_features: Any
    prior: str | Sequence[float] | None
    refine: bool | None
    seed: int | None
    max_minutes: float | None
    output: Output | str | Path | None
    keep: KeepNames | None
    callbacks: Iterable[Callback]
    cache: FeatureCache | None
    command: Sequence[str]
