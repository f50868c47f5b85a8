"""What a person sees: progress, tables and errors. Results go to standard output, all else to standard error."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console

from pouf.training.callbacks import Callback

if TYPE_CHECKING:
    from rich.progress import Progress

    from pouf.bench.grid import Outcome
    from pouf.cli._inputs import Task
    from pouf.cli._options import OutputOptions
    from pouf.data.base import Unlabelled
    from pouf.training.adaptation import Adaptation
    from pouf.training.callbacks import Step
    from pouf.training.search import Search
    from pouf.validation.evaluation import Evaluation
    from pouf.validation.verdict import Verdict

console = Console(stderr=True, highlight=False)
out = Console(highlight=False)


def speaks() -> bool:
    """Of several processes the first."""
    return os.environ.get("RANK", "0") == "0"


def say(message: str) -> None:
    out.print(message, markup=False, soft_wrap=True)


def calm_libraries() -> None:
    from pouf.models.load import calm_libraries

    calm_libraries()


class Training(Callback):
    """A bar with loss, effective classes and the time left."""

    def __init__(self, progress: Progress, hidden: bool, about: str) -> None:
        self.progress, self.hidden, self.about = progress, hidden, about
        self.task: Any = None

    def on_start(self, recipe: Any, trainable: int, total: int) -> None:
        from pouf.tuners import describe

        if self.task is None:
            self.say(self.about)
            self.progress.start()
            self.task = self.progress.add_task("adapting", total=recipe.steps, facts="")
        self.progress.update(self.task, total=recipe.steps, completed=0)
        self.say(describe(trainable, total))

    def on_step(self, step: Step) -> None:
        facts = f"loss {step.loss:.3f}  {step.effective_classes:.1f} classes in use"
        self.progress.update(self.task, completed=step.step, facts=facts)

    def say(self, message: str) -> None:
        if message and not self.hidden:
            self.progress.console.print(message, markup=False)


@contextmanager
def training(hidden: bool, task: Task | None = None) -> Iterator[Any]:
    """While open, progress is shown, and what the library logs."""
    hidden, about = hidden or not speaks(), ""
    if task is not None:
        modality = task.classifier.backbone.modality
        given = [f"{len(task.data):,} unlabelled {modality}s"] if task.data is not None else []
        given += [f"{len(task.shots.inputs):,} labelled shots"] if task.shots is not None else []
        about = f"{', '.join(given)}, {len(task.classifier.classes)} classes"
    progress = _progress("{task.fields[facts]}", hidden)
    shown = Training(progress, hidden, about)
    handler = _Handler(shown.say)
    library = logging.getLogger("pouf")
    level = library.level
    library.addHandler(handler)
    library.setLevel(logging.INFO)
    try:
        yield shown
    finally:
        progress.stop()
        library.removeHandler(handler)
        library.setLevel(level)


class _Handler(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())


@contextmanager
def bar(title: str, total: int, hidden: bool) -> Iterator[Callable[[int], None]]:
    with _progress("", hidden) as progress:
        task = progress.add_task(title, total=total)
        yield lambda n: progress.advance(task, n)


@contextmanager
def grid_progress(hidden: bool) -> Iterator[tuple[Callable[[int], None], Callable[[Outcome], None]]]:
    """A bar over the cells of a table, with the time left; yields what to tell how many there are, and of each."""
    progress = _progress("{task.fields[facts]}", hidden)
    task = progress.add_task("cells", total=None, facts="")

    def start(cells: int) -> None:
        progress.update(task, total=cells)
        progress.start()

    def advance(outcome: Outcome) -> None:
        name = f"{outcome.cell.task} {outcome.cell.method} seed {outcome.cell.seed}"
        progress.update(task, advance=1, facts=name)
        if outcome.error and not hidden:
            progress.console.print(f"failed: {name}: {outcome.error}", markup=False, soft_wrap=True)

    try:
        yield start, advance
    finally:
        progress.stop()


def _progress(facts: str, hidden: bool) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(facts))
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=hidden)


def show_methods() -> None:
    from pouf.training.methods import METHODS

    for known, entry in METHODS.items():
        say(f"{known:16} {entry.about}{' (needs --shots)' if entry.needs_shots else ''}")


def show_adaptation(result: Adaptation, task: Task, output: OutputOptions) -> None:
    inputs = [i for i in (task.data, task.shots.inputs if task.shots is not None else None) if i is not None]
    last, verdict = (result.history[-1] if result.history else None), result.verdict
    show_verdict(verdict, output.hidden)
    if output.as_json:
        tell_json(
            _facts(result) | {
                "method": result.method, "n": sum(map(len, inputs)),
                "skipped": sum(len(each.skipped) for each in inputs), "steps": len(result.history),
                "loss": last.loss if last else None, "effective_classes": last.effective_classes if last else None,
                "seconds": round(last.seconds, 1) if last else 0.0,
                "trainable": result.trainable, "total": result.total,
            }
        )  # fmt: skip
    elif not output.quiet:
        show_skipped(inputs, result.files["run"])
        told = "Nothing was trained"
        if last:
            classes = len(task.classifier.classes)
            told = (
                f"{last.step:,} steps in {last.seconds:.0f} s, loss {last.loss:.3f}, "
                f"{last.effective_classes:.1f} of {classes} classes in use"
            )
        say(f"{told}.")
        show_files(result)
        run = result.files["run"]
        say(f"Next:\n  pouf predict {run} {inputs[0].source}\n  pouf review {run}")


def show_search(found: Search, task: Task, output: OutputOptions) -> None:
    show_verdict(found.result.verdict, output.hidden)
    if output.as_json:
        facts = {"settings": found.settings, "step": found.ranking.step, "trials": len(found.trials)}
        tell_json(_facts(found.result) | facts)
    elif not output.quiet:
        for trial in found.trials:
            if trial.why_not:
                say(f"not believed: {told(trial.settings)}: {trial.why_not}")
        if found.settings is not None:
            say(f"Chosen without labels: {told(found.settings)}.")
        show_skipped([task.data] if task.data is not None else [], found.result.files["run"])
        show_files(found.result)


def _facts(result: Adaptation) -> dict[str, Any]:
    verdict = result.verdict
    return {name: str(file) for name, file in result.files.items()} | {
        "verdict": verdict.message, "advised": verdict.advised, "chosen": verdict.chosen,
        "alarms": [alarm.name for alarm in verdict.alarms],
    }  # fmt: skip


def show_files(result: Adaptation) -> None:
    say(f"The run is in {result.files['run']}")
    for name in ("predictions", "report"):
        if name in result.files:
            say(f"  {name}: {result.files[name]}")


def told(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def show_evaluation(result: Evaluation, title: str) -> None:
    from rich.table import Table

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f}"

    table = Table(title=title, title_justify="left")
    columns = {
        "zero_shot": "zero-shot", "prior_corrected": "prior-corrected", "last": "last step", "advised": "advised"
    }  # fmt: skip
    for heading in ("class", "n", *columns.values()):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for name, recall in result.per_class.items():
        table.add_row(name, str(recall.n), *(percent(getattr(recall, column)) for column in columns))
    table.add_section()
    total = (percent(getattr(result, column)) for column in columns)
    table.add_row("accuracy", str(result.n), *total, style="bold")
    out.print(table)


def show_verdict(verdict: Verdict, quiet: bool) -> None:
    """Whether a run can be trusted. A warning is told in any case, on standard error."""
    if not verdict.trusted:
        hint = f" (--use {'chosen' if verdict.chosen else 'last'} overrides.)" if verdict.advised == "zero-shot" else ""
        console.print(f"{verdict}{hint}", style="bold red", markup=False, soft_wrap=True)
    elif not quiet:
        say(str(verdict))


def show_skipped(inputs: list[Unlabelled], run: Path | None) -> None:
    for data in inputs:
        if data.skipped:
            first = min(data.skipped)
            where = f"; all are listed in {run / 'skipped.jsonl'}" if run else ""
            example = f"{data.ids[first]}: {data.skipped[first]}"
            message = f"skipped {len(data.skipped)} of {len(data)} that can't be read, as {example}{where}"
            console.print(message, markup=False, soft_wrap=True)


def tell_json(facts: dict[str, Any]) -> None:
    typer.echo(json.dumps(facts))


def fail(message: str, code: int) -> NoReturn:
    console.print("[bold red]error:[/] ", end="")
    console.print(" ".join(message.split()), markup=False, soft_wrap=True)
    sys.exit(code)
