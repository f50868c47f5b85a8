"""What a person sees while something long goes on: a bar in a terminal, elsewhere a plain line every so often."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pouf.cli._console import console, messages, note, plain, speaks
from pouf.training.callbacks import Callback

if TYPE_CHECKING:
    from rich.progress import Progress

    from pouf.bench.grid import Outcome
    from pouf.cli._inputs import Task
    from pouf.cli._options import InferenceOptions, OutputOptions
    from pouf.inference.encode import InferenceConfig
    from pouf.training.callbacks import Step
    from pouf.training.estimate import Estimate

PATIENCE = 1.0  # seconds after which a phase is told where there is no terminal
EVERY = 20.0  # seconds from one line to the next there


class Shown(Callback):
    """Phases of a command as they come and go: what is done, how much of it, how long, and how long still."""

    def __init__(self, hidden: bool) -> None:
        self.hidden = hidden
        self.phase, self.total, self.done, self.facts = "", 0, 0, ""
        self.began = self.told = time.monotonic()
        self.named = True  # this phase has been told in a line
        self.steps, self.about = 0, ""  # of the training
        self.training: float | None = None  # when it began
        self.paused = ""  # how far it was when a checkpoint was looked at
        self.waiting: list[str] | None = []  # messages from before the start: an error in the settings stands alone
        self.ended = threading.Event()
        self.bar: Progress | None = None
        self.task: Any = None
        if hidden:
            return
        if console.is_terminal:
            self.bar = _bar()
            self.task = self.bar.add_task("", total=None, facts="")
            self.bar.start()
        else:
            threading.Thread(target=self._lines, daemon=True).start()

    def on_phase(self, phase: str, total: int = 0) -> None:
        from pouf.training.trainer import LOOKING, TRAINING

        now = time.monotonic()
        interrupted = self.training is not None and phase == LOOKING  # by a checkpoint: no news
        if not interrupted:
            self.training = now if phase == TRAINING else None
        elif self.phase == TRAINING:
            self.paused = self.line(now - self.began)
        self._begin(phase, total, now)
        self.named = interrupted

    def _begin(self, phase: str, total: int, began: float, done: int = 0) -> None:
        self.phase, self.total, self.done, self.facts = phase, total, done, ""
        self.began, self.named = began, done > 0
        if self.bar is not None:
            self.bar.reset(self.task, total=total or None, completed=done, description=plain(phase), facts="")
            self.bar.tasks[0].start_time = self.bar.get_time() - (time.monotonic() - began)
            self.bar.refresh()  # so that a short one is seen as well

    def on_progress(self, n: int) -> None:
        self._at(self.done + n)

    def on_start(self, recipe: Any, trainable: int, total: int) -> None:
        from pouf.tuners import describe

        self.steps = recipe.steps
        self._introduce()
        self.say(describe(trainable, total))

    def on_step(self, step: Step) -> None:
        from pouf.training.trainer import TRAINING

        if self.phase != TRAINING:  # a checkpoint was looked at, and training goes on
            self._begin(TRAINING, self.steps, self._since(), step.step - 1)
        self._at(step.step, f"loss {step.loss:.3f}, {step.effective_classes:.1f} classes in the batch")

    def _since(self) -> float:
        return time.monotonic() if self.training is None else self.training

    def introduce(self, task: Task) -> None:
        """What a run is about: told when it starts, after all that can be wrong with its settings."""
        given = [f"{len(task.data):,} unlabelled {task.data.modality}s"] if task.data is not None else []
        given += [f"{len(task.shots.inputs):,} labelled shots"] if task.shots is not None else []
        self.about = f"{', '.join(given)}, {len(task.classifier.classes)} classes"

    def on_estimate(self, estimate: Estimate) -> None:
        self._introduce()  # the library logs the estimate itself

    def log(self, message: str) -> None:
        """A message of the library."""
        if self.waiting is None:
            self.say(message)
        else:
            self.waiting.append(message)

    def _introduce(self) -> None:
        for message in (self.about, *(self.waiting or ())):
            self.say(message)
        self.about, self.waiting = "", None

    def say(self, message: str) -> None:
        if message and not self.hidden:
            note(message)

    def stop(self) -> None:
        self.ended.set()
        if self.bar is not None:
            self.bar.stop()

    def _at(self, done: int, facts: str = "") -> None:
        self.done, self.facts = done, facts
        if self.bar is not None:
            self.bar.update(self.task, completed=done, facts=facts)

    def _lines(self) -> None:
        """A line for each phase that lasts, and then one every so often, whatever keeps the rest busy."""
        while not self.ended.wait(min(PATIENCE, EVERY) / 4):
            now = time.monotonic()
            if self.phase and (now - self.told >= EVERY or (not self.named and now - self.began >= PATIENCE)):
                self.told, self.named = now, True
                looking = self.training is not None and self.began > self.training  # at a checkpoint
                self.say(f"{self.paused}; " * looking + self.line(now - self.began))

    def line(self, seconds: float) -> str:
        """`encoding: 640 of 2,000 after 83 s, about 3 minutes left`"""
        from pouf.training.estimate import spoken

        if not self.total:
            return f"{self.phase} … {seconds:.0f} s"
        left = f", {spoken(seconds * (self.total / self.done - 1))} left" if 0 < self.done < self.total else ""
        facts = f", {self.facts}" if self.facts else ""
        return f"{self.phase}: {self.done:,} of {self.total:,} after {seconds:.0f} s{facts}{left}"


@contextmanager
def progress(hidden: bool) -> Iterator[Shown]:
    """While open, progress is shown, and what the library logs."""
    shown = Shown(hidden or not speaks())
    with messages(shown.log, logging.INFO):
        try:
            yield shown
            shown._introduce()
        finally:
            shown.stop()


@contextmanager
def encoding(place: InferenceOptions, output: OutputOptions) -> Iterator[InferenceConfig]:
    """While open, inputs that are encoded with this are shown."""
    from pouf.inference.encode import InferenceConfig
    from pouf.training.callbacks import Callbacks

    with progress(output.hidden) as shown:
        inference = InferenceConfig(workers=place.workers or 0, cache=place.features())
        yield Callbacks([shown]).watching(inference, "encoding")


@contextmanager
def grid_progress(hidden: bool) -> Iterator[tuple[Callable[[int], None], Callable[[Outcome], None]]]:
    """The cells of a table, with the time left; yields what to tell how many there are, and of each."""
    with progress(hidden) as shown:

        def advance(outcome: Outcome) -> None:
            name = f"{outcome.cell.task} {outcome.cell.method} seed {outcome.cell.seed}"
            shown._at(shown.done + 1, name)
            if outcome.error:
                shown.say(f"failed: {name}: {outcome.error}")

        yield lambda cells: shown.on_phase("cells", cells), advance


def _bar() -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    task, facts = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[facts]}"))
    return Progress(
        SpinnerColumn(), task, BarColumn(), MofNCompleteColumn(), facts, TimeElapsedColumn(), TimeRemainingColumn(),
        console=console,
    )  # fmt: skip
