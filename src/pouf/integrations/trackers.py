"""Curves of a run in TensorBoard, Weights & Biases, MLflow or Trackio, through accelerate's trackers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pouf.errors import InputError, one_of, optional
from pouf.training.callbacks import Callback, Step

if TYPE_CHECKING:
    from pouf.recipe import Recipe
    from pouf.training.adaptation import Adaptation

# The argument of each by which a run gets its name; TensorBoard has folders instead.
TRACKERS: dict[str, str | None] = {"tensorboard": None, "wandb": "name", "mlflow": "run_name", "trackio": "name"}


class Tracking(Callback):
    """Tells trackers of all settings, of every step, and of the verdict.

        clf.adapt("photos/", callbacks=[Tracking("tensorboard", folder="logs")])

    Each trial of a search is a run of its own, with a number behind its name. A run that goes on is a new run to the
    tracker, unless its options say otherwise (as Weights & Biases' `id` and `resume`).

    Args:
        trackers: one or several of tensorboard, wandb, mlflow and trackio.
        project: what runs are gathered under; MLflow calls it the experiment.
        name: of the run; the tracker's choice by default.
        folder: where TensorBoard writes.
        options: more arguments for a tracker, by its name: {"wandb": {"mode": "offline"}}.
    """

    def __init__(
        self,
        trackers: str | Sequence[str],
        *,
        project: str = "pouf",
        name: str | None = None,
        folder: str | Path = "tensorboard",
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.names = [trackers] if isinstance(trackers, str) else list(dict.fromkeys(trackers))
        self.project, self.name, self.folder, self.options = project, name, Path(folder), options or {}
        for tracker in self.names:  # before anything long: a run must not fail for want of a package
            one_of("tracker", tracker, TRACKERS)
            optional(tracker, tracker, f"the tracker {tracker!r}")
        if unknown := self.options.keys() - set(self.names):
            raise InputError(
                f"options for {', '.join(sorted(unknown))}, which is not among the trackers: name it there"
            )
        self.open: list[Any] = []
        self.runs = self.last = 0

    def on_start(self, recipe: Recipe, trainable: int, total: int) -> None:
        self._finish()
        if os.environ.get("RANK", "0") != "0":
            return  # of several processes the first one speaks
        from accelerate import PartialState

        self.runs += 1
        PartialState()  # without it the trackers' own logger refuses to speak
        plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in recipe.flat().items()}
        for tracker in self.names:
            self.open.append(self._made(tracker))
            self.open[-1].start()
            self.open[-1].store_init_configuration(plain | {"trainable": trainable, "total": total})

    def on_step(self, step: Step) -> None:
        figures = {"loss": step.loss, **{f"terms/{name}": value for name, value in step.terms.items()}}
        rest = ("effective_classes", "temperature", "lr", "seconds")
        self._log(figures | {name: getattr(step, name) for name in rest}, step.step)

    def on_end(self, result: Adaptation) -> None:
        verdict = result.verdict
        found: dict[str, float] = {
            "trusted": verdict.trusted,
            "alarms": len(verdict.alarms),
            "cautions": len(verdict.cautions),
        }
        if verdict.chosen is not None:
            found["chosen_step"] = verdict.chosen
        if verdict.diagnostics is not None:
            figures = verdict.diagnostics._asdict().items()
            found |= {name: value for name, value in figures if isinstance(value, (int, float))}
        if result.drift is not None:
            found |= {f"drift_{name}": value for name, value in result.drift._asdict().items() if value is not None}
        self._log({f"verdict/{name}": float(value) for name, value in found.items()}, self.last)
        self._finish()

    def on_error(self, error: BaseException) -> None:
        self._finish()

    def _made(self, tracker: str) -> Any:
        """One of accelerate's, not started yet."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        options, of_run = dict(self.options.get(tracker, {})), TRACKERS[tracker]
        name = f"{self.name or ''}-{self.runs}".removeprefix("-") if self.runs > 1 else self.name
        if of_run is None:
            return LOGGER_TYPE_TO_CLASS[tracker](name or "", self.folder, **options)
        if name is not None:
            options.setdefault(of_run, name)
        return LOGGER_TYPE_TO_CLASS[tracker](self.project, **options)

    def _log(self, figures: dict[str, float], step: int) -> None:
        self.last = step
        for tracker in self.open:
            tracker.log(figures, step=step)

    def _finish(self) -> None:
        while self.open:
            self.open.pop().finish()
