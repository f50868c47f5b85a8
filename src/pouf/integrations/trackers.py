"""Curves of a run in TensorBoard, Weights & Biases, MLflow or Trackio, through accelerate's trackers."""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pouf.errors import InputError, one_of, optional
from pouf.training.callbacks import Callback, Step

if TYPE_CHECKING:
    from pouf.recipe import Recipe
    from pouf.training.adaptation import Adaptation

logger = logging.getLogger(__name__)

# The argument of each by which a run gets its name; TensorBoard has folders instead.
TRACKERS: dict[str, str | None] = {"tensorboard": None, "wandb": "name", "mlflow": "run_name", "trackio": "name"}


class Tracking(Callback):
    """Tells trackers of all settings, of every step, and of the verdict.

        clf.adapt("photos/", callbacks=[Tracking("tensorboard", folder="logs")])

    Each trial of a search is a run of its own, with a number behind its name. The verdict stands in the last one, which
    is one more with the chosen settings unless the last trial had them. A run that goes on is a new run to the tracker,
    unless its options say otherwise (as Weights & Biases' `id` and `resume`).

    A tracker that can't be started is an error before the training; one that fails later is left out with a warning.

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
        self.open: dict[str, Any] = {}  # accelerate's trackers, by name
        self.runs = self.last = 0
        self.recipe: Recipe | None = None  # of the run that is open

    def on_start(self, recipe: Recipe, trainable: int, total: int) -> None:
        self._finish()
        self.recipe, self.last = recipe, 0
        if os.environ.get("RANK", "0") != "0":
            return  # of several processes the first one speaks
        from accelerate import PartialState

        self.runs += 1
        PartialState()  # without it the trackers' own logger refuses to speak
        plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in recipe.flat().items()}
        for name in self.names:
            self.open[name] = self._started(name, plain | {"trainable": trainable, "total": total})

    def on_step(self, step: Step) -> None:
        figures = {"loss": step.loss, **{f"terms/{name}": value for name, value in step.terms.items()}}
        rest = ("effective_classes", "temperature", "lr", "seconds")
        self._log(figures | {name: getattr(step, name) for name in rest}, step.step)

    def on_end(self, result: Adaptation) -> None:
        if self.recipe != result.recipe:  # nothing was trained, or an earlier trial of a search was chosen
            self.on_start(result.recipe, result.trainable, result.total)
            self.last = result.verdict.last or 0
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

    def _started(self, name: str, settings: Mapping[str, Any]) -> Any:
        """One of accelerate's, which knows all settings."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        options, of_run = dict(self.options.get(name, {})), TRACKERS[name]
        run = f"{self.name or ''}-{self.runs}".removeprefix("-") if self.runs > 1 else self.name
        if of_run is None:
            tracker = LOGGER_TYPE_TO_CLASS[name](run or "", self.folder, **options)
        else:
            named = {} if run is None else {of_run: run}
            tracker = LOGGER_TYPE_TO_CLASS[name](self.project, **(named | options))
        try:
            with _heard(name):
                tracker.start()
                tracker.store_init_configuration(settings)
        except Exception as error:  # whatever its package raises: no key, no server, no right to write
            raise InputError(f"the tracker {name!r} could not be started: {_first_line(error)}") from error
        return tracker

    def _log(self, figures: dict[str, float], step: int) -> None:
        self.last = step
        for name, tracker in list(self.open.items()):
            self._try(name, lambda tracker=tracker: tracker.log(figures, step=step))  # type: ignore[misc]

    def _finish(self) -> None:
        while self.open:
            name, tracker = self.open.popitem()
            self._try(name, _trackio_finish if name == "trackio" else tracker.finish)

    def _try(self, name: str, call: Callable[[], None]) -> None:
        """A run that has taken hours does not fail for its tracker."""
        try:
            with _heard(name):
                call()
        except Exception as error:
            self.open.pop(name, None)
            logger.warning("the tracker %r failed and is left out from here on: %s", name, _first_line(error))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _trackio_finish() -> None:
    """Its own `finish`, where accelerate's would leave the run open to it until the process ends."""
    optional("trackio", "trackio", "the tracker 'trackio'").finish()


@contextmanager
def _heard(name: str) -> Iterator[None]:
    """What Trackio prints goes into the log: standard output is for what the caller prints."""
    if name != "trackio":
        yield
        return
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            yield
    finally:
        for line in filter(None, map(str.strip, said.getvalue().splitlines())):
            logger.info("%s: %s", name, re.sub(r"\x1b\[[0-9;]*m", "", line.removeprefix("* ")))
