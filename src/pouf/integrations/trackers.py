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

# Tracker -> its argument for the name of a run; TensorBoard has folders instead.
TRACKERS: dict[str, str | None] = {"tensorboard": None, "wandb": "name", "mlflow": "run_name", "trackio": "name"}


class Tracking(Callback):
    """Logs settings, steps and the verdict to experiment trackers.

        clf.adapt("photos/", callbacks=[Tracking("tensorboard", folder="logs")])

    Each trial of a search is a separate tracker run, with a number after its name. The verdict is logged to the last
    one; if the chosen settings are not those of the last trial, another tracker run is opened for them. A resumed run
    is a new tracker run, unless options say otherwise (as Weights & Biases' `id` and `resume`).

    A tracker that can't be started is an error before training; one that fails later is dropped with a warning.

    Args:
        trackers: one or several of tensorboard, wandb, mlflow and trackio.
        project: name of the project; MLflow's experiment.
        name: of the run; by default the tracker's choice.
        folder: for TensorBoard.
        options: more arguments of a tracker, by its name: {"wandb": {"mode": "offline"}}.
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
        for tracker in self.names:  # before training: a run must not fail later for a missing package
            one_of("tracker", tracker, TRACKERS)
            optional(tracker, tracker, f"the tracker {tracker!r}")
        if unknown := self.options.keys() - set(self.names):
            raise InputError(
                f"options for {', '.join(sorted(unknown))}, which is not among the trackers: name it there"
            )
        self.open: dict[str, Any] = {}  # accelerate's trackers, by name
        self.runs = self.last = 0
        self.recipe: Recipe | None = None  # of the open tracker run

    def on_start(self, recipe: Recipe, trainable: int, total: int) -> None:
        self._finish()
        self.recipe, self.last = recipe, 0
        if os.environ.get("RANK", "0") != "0":
            return  # only the first process logs
        from accelerate import PartialState

        self.runs += 1
        PartialState()  # the trackers' logger needs it
        plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in recipe.flat().items()}
        for name in self.names:
            self.open[name] = self._start(name, plain | {"trainable": trainable, "total": total})

    def on_step(self, step: Step) -> None:
        figures = {"loss": step.loss, **{f"terms/{name}": value for name, value in step.terms.items()}}
        rest = ("effective_classes", "temperature", "lr", "seconds")
        self._log(figures | {name: getattr(step, name) for name in rest}, step.step)

    def on_end(self, result: Adaptation) -> None:
        if self.recipe != result.recipe:  # nothing was trained, or an earlier trial of a search was chosen
            self.on_start(result.recipe, result.trainable, result.total)
            self.last = result.verdict.last or 0
        verdict = result.verdict
        found: dict[str, Any] = {"trusted": verdict.trusted, "alarms": len(verdict.alarms)}
        found |= {"cautions": len(verdict.cautions), "chosen_step": verdict.chosen}
        found |= verdict.diagnostics._asdict() if verdict.diagnostics is not None else {}
        drift = result.drift._asdict() if result.drift is not None else {}
        found |= {f"drift_{name}": value for name, value in drift.items()}
        numbers = {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
        self._log({f"verdict/{name}": value for name, value in numbers.items()}, self.last)
        self._finish()

    def on_error(self, error: BaseException) -> None:
        self._finish()

    def _start(self, name: str, settings: Mapping[str, Any]) -> Any:
        """One of accelerate's trackers, started, with all settings logged."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        options, argument = dict(self.options.get(name, {})), TRACKERS[name]
        run = f"{self.name or ''}-{self.runs}".removeprefix("-") if self.runs > 1 else self.name
        if argument is None:
            tracker = LOGGER_TYPE_TO_CLASS[name](run or "", self.folder, **options)
        else:
            tracker = LOGGER_TYPE_TO_CLASS[name](self.project, **({} if run is None else {argument: run}) | options)
        try:
            with _log_output(name):
                tracker.start()
                tracker.store_init_configuration(settings)
        except Exception as error:  # of its package: no key, no server, no permission to write
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
        """Call a tracker; if it fails, drop it: a run of hours must not end for that."""
        try:
            with _log_output(name):
                call()
        except Exception as error:
            self.open.pop(name, None)
            logger.warning("the tracker %r failed and is not used any more: %s", name, _first_line(error))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _trackio_finish() -> None:
    """trackio's own `finish`: accelerate's leaves the run open until the process ends."""
    optional("trackio", "trackio", "the tracker 'trackio'").finish()


@contextmanager
def _log_output(name: str) -> Iterator[None]:
    """While open, Trackio's prints go to the log: standard output belongs to the caller."""
    if name != "trackio":
        yield
        return
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        for line in filter(None, map(str.strip, printed.getvalue().splitlines())):
            logger.info("%s: %s", name, re.sub(r"\x1b\[[0-9;]*m", "", line.removeprefix("* ")))
