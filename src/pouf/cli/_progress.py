"""Progress of long phases: a bar in a terminal, otherwise lines of text."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pouf.cli._console import console, is_main, messages, plain, print_err
from pouf.errors import plural
from pouf.training.callbacks import Callback

if TYPE_CHECKING:
    from rich.progress import Progress

    from pouf.bench.tables import Result
    from pouf.cli._options import InferenceOptions
    from pouf.cli.adapt import AdaptInputs
    from pouf.inference.encode import InferenceConfig
    from pouf.training.callbacks import Step
    from pouf.training.estimate import Estimate

FIRST_LINE_AFTER = 1.0  # seconds until the first line of a phase, without a terminal
LINE_EVERY = 20.0  # seconds between lines, without a terminal


class ProgressReporter(Callback):
    """Shows the phase of a command, its progress, and the elapsed and remaining time."""

    def __init__(self, hidden: bool) -> None:
        self.hidden = hidden
        self.phase, self.total, self.done, self.facts = "", 0, 0, ""
        self.began = self.last_line = time.monotonic()
        self.printed = True  # a line about this phase was printed
        self.steps, self.about = 0, ""  # of the training run
        self.training: float | None = None  # start of training
        self.paused = ""  # progress of training while a checkpoint is evaluated
        self.waiting: list[str] | None = []  # messages before the start: an error in the settings is printed alone
        self.logged: set[str] = set()  # a correction that is fitted to several steps says the same each time
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
        interrupted = self.training is not None and phase == LOOKING  # by a checkpoint, which gets no line
        if not interrupted:
            self.training = now if phase == TRAINING else None
        elif self.phase == TRAINING:
            self.paused = self.line(now - self.began)
        self._begin(phase, total, now)
        self.printed = interrupted

    def _begin(self, phase: str, total: int, began: float, done: int = 0) -> None:
        self.phase, self.total, self.done, self.facts = phase, total, done, ""
        self.began, self.printed = began, done > 0
        if self.bar is not None:
            self.bar.reset(self.task, total=total or None, completed=done, description=plain(phase), facts="")
            self.bar.tasks[0].start_time = self.bar.get_time() - (time.monotonic() - began)
            self.bar.refresh()  # displays short phases too

    def on_progress(self, n: int) -> None:
        self._at(self.done + n)

    def on_start(self, recipe: Any, trainable: int, total: int) -> None:
        from pouf.tuners import describe_trainable

        self.steps = recipe.steps
        self._introduce()
        self.say(describe_trainable(trainable, total))

    def on_step(self, step: Step) -> None:
        from pouf.training.trainer import TRAINING

        if self.phase != TRAINING:  # training continues after a checkpoint
            self._begin(TRAINING, self.steps, self._since(), step.step - 1)
        self._at(step.step, f"loss {step.loss:.3f}, {step.effective_classes:.1f} classes in the batch")

    def _since(self) -> float:
        return time.monotonic() if self.training is None else self.training

    def introduce(self, inputs: AdaptInputs) -> None:
        """Describe the inputs; printed at the start, so that an error in the settings is printed alone."""
        parts = [plural(len(inputs.data), f"unlabelled {inputs.data.modality}")] if inputs.data is not None else []
        parts += [plural(len(inputs.shots.inputs), "labelled shot")] if inputs.shots is not None else []
        k = len(inputs.classifier.classes)
        self.about = f"{', '.join(parts)}, {k} classes"
        if inputs.data is not None and len(inputs.data) < k:
            self.about += ": too many for so few inputs; leave out classes that are not in the data"

    def on_estimate(self, estimate: Estimate) -> None:
        self._introduce()  # the library logs the estimate itself

    def log(self, message: str) -> None:
        """A message of the library, once."""
        if message in self.logged:
            return
        self.logged.add(message)
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
            print_err(message)

    def stop(self) -> None:
        self.ended.set()
        if self.bar is not None:
            self.bar.stop()

    def _at(self, done: int, facts: str = "") -> None:
        self.done, self.facts = done, facts
        if self.bar is not None:
            self.bar.update(self.task, completed=done, facts=facts)

    def _lines(self) -> None:
        """Print a line for each long phase, and more at intervals; runs in a separate thread."""
        while not self.ended.wait(min(FIRST_LINE_AFTER, LINE_EVERY) / 4):
            now = time.monotonic()
            if self.phase and (
                now - self.last_line >= LINE_EVERY or (not self.printed and now - self.began >= FIRST_LINE_AFTER)
            ):
                self.last_line, self.printed = now, True
                at_checkpoint = self.training is not None and self.began > self.training
                self.say(f"{self.paused}; " * at_checkpoint + self.line(now - self.began))

    def line(self, seconds: float) -> str:
        """`encoding: 640 of 2,000 after 83 s, about 3 minutes left`"""
        from pouf.training.estimate import spoken

        if not self.total:
            return f"{self.phase} … {seconds:.0f} s"
        left = f", {spoken(seconds * (self.total / self.done - 1))} left" if 0 < self.done < self.total else ""
        facts = f", {self.facts}" if self.facts else ""
        return f"{self.phase}: {self.done:,} of {self.total:,} after {seconds:.0f} s{facts}{left}"


@contextmanager
def progress(hidden: bool) -> Iterator[ProgressReporter]:
    """While open, print the progress of the library and its log messages."""
    reporter = ProgressReporter(hidden or not is_main())
    with messages(reporter.log, logging.INFO):
        try:
            yield reporter
            reporter._introduce()
        finally:
            reporter.stop()


@contextmanager
def encoding(options: InferenceOptions, batch_size: int = 64) -> Iterator[InferenceConfig]:
    """An inference configuration that prints its progress while open."""
    from pouf.inference.encode import InferenceConfig
    from pouf.training.callbacks import Callbacks

    with progress(options.hidden) as reporter:
        inference = InferenceConfig(batch_size, options.workers, options.features_cache())
        yield Callbacks([reporter]).watching(inference, "encoding")


@contextmanager
def grid_progress(hidden: bool) -> Iterator[tuple[Callable[[int], None], Callable[[Result], None]]]:
    """Progress of the cells of a table; yields a callback for their number and one for each result."""
    with progress(hidden) as reporter:

        def advance(result: Result) -> None:
            name = f"{result.cell.task} {result.cell.method} seed {result.cell.seed}"
            reporter._at(reporter.done + 1, name)
            if result.error:
                reporter.say(f"failed: {name}: {result.error}")

        yield lambda cells: reporter.on_phase("cells", cells), advance


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
