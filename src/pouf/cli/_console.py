"""What a person sees: progress, tables and errors. Results go to standard output, all else to standard error."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console

if TYPE_CHECKING:
    from pouf.cli._inputs import Task
    from pouf.cli._options import OutputOptions
    from pouf.data.base import Unlabelled
    from pouf.training.adaptation import Adaptation
    from pouf.training.search import Search
    from pouf.validation.evaluation import Evaluation
    from pouf.validation.verdict import Verdict

console = Console(stderr=True, highlight=False)
out = Console(highlight=False)
SHOWN = 10  # names of a long list


def speaks() -> bool:
    """Of several processes the first."""
    return os.environ.get("RANK", "0") == "0"


def plain(message: str) -> str:
    """A message that can't command the terminal: of control characters only line ends and tabs stay what they are.

    File names and class names come from anywhere. What turns the direction of writing can make one file look like
    another.
    """
    return "".join(
        character.encode("unicode_escape").decode() if _commands(character) else character for character in message
    )


def _commands(character: str) -> bool:
    turns = "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"
    return character not in "\n\t" and (turns or unicodedata.category(character) in ("Cc", "Cs"))


def say(message: str) -> None:
    """On standard output."""
    out.print(plain(message), markup=False, soft_wrap=True)


def note(message: str, style: str | None = None) -> None:
    """On standard error."""
    console.print(plain(message), markup=False, soft_wrap=True, style=style)


def calm_libraries() -> None:
    from pouf.models.load import calm_libraries

    calm_libraries()


@contextmanager
def messages(show: Callable[[str], None] = note, level: int = logging.WARNING) -> Iterator[None]:
    """While open, this is where the library's messages go."""
    library = logging.getLogger("pouf")
    before = library.level, library.handlers
    handler = _Handler(level)
    handler.show = show
    library.setLevel(level)
    library.handlers = [handler]
    try:
        yield
    finally:
        library.level, library.handlers = before


class _Handler(logging.Handler):
    show: Callable[[str], None]

    def emit(self, record: logging.LogRecord) -> None:
        self.show(record.getMessage())


def show_methods() -> None:
    from pouf.training.methods import METHODS

    for known, entry in METHODS.items():
        say(f"{known:16} {entry.about}{' (needs --shots)' if entry.needs_shots else ''}")


def show_adaptation(result: Adaptation, task: Task, output: OutputOptions) -> None:
    given = [i for i in (task.data, task.shots.inputs if task.shots is not None else None) if i is not None]
    inputs = list(result.sources.values()) or given
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
                f"{last.step:,} steps in {last.seconds:.0f} s; last batch: loss {last.loss:.3f}, "
                f"{last.effective_classes:.1f} of {classes} classes predicted"
            )
        say(f"{told}.")
        _show_end(result, task, inputs)


def _show_end(result: Adaptation, task: Task, inputs: list[Unlabelled]) -> None:
    """What came of a run beside its verdict, and what to do next."""
    show_drift(result)
    show_absent(result.absent, len(task.classifier.classes))
    show_files(result)
    run = shlex.quote(str(result.files["run"]))
    say(
        f"Next:\n  pouf predict {run} {_other(inputs[0])}" + (f"\n  pouf review {run}" if task.data is not None else "")
    )


def _other(data: Unlabelled) -> str:
    """A name for data like these, but not the same: those are predicted already."""
    source = Path(data.source.split("::")[0])
    return shlex.quote(f"more-{source.name}" + ("/" if data.modality == "image" and not source.suffix else ""))


def show_absent(names: list[str], classes: int) -> None:
    """Names that no input seems to bear: a fact about the data, or a wrong name."""
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        say(f"{len(names)} of {classes} class names seem not to occur in the inputs: {', '.join(names[:SHOWN])}{more}")


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
        inputs = list(found.result.sources.values())[:1]
        show_skipped(inputs, found.result.files["run"])
        _show_end(found.result, task, inputs)


def _facts(result: Adaptation) -> dict[str, Any]:
    verdict = result.verdict
    return {name: str(file) for name, file in result.files.items()} | {
        "verdict": verdict.message, "advised": verdict.advised, "chosen": verdict.chosen,
        "alarms": [alarm.name for alarm in verdict.alarms],
        "cautions": [caution.name for caution in verdict.cautions],
        "drift": result.drift._asdict() if result.drift is not None else None,
    }  # fmt: skip


def show_drift(result: Adaptation) -> None:
    if result.drift is not None:
        say(f"Beside the task: {result.drift}")


def show_files(result: Adaptation) -> None:
    say(f"The run is in {result.files['run']}")
    for name in ("predictions", "report"):
        if name in result.files:
            say(f"  {name}: {result.files[name]}")


def told(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def show_evaluation(result: Evaluation, title: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f}"

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    columns = {
        "zero_shot": "zero-shot", "prior_corrected": "corrected", "last": "last step", "advised": "advised"
    }  # fmt: skip
    for heading in ("recall", "n", *columns.values(), "precision", "F1"):
        table.add_column(heading, justify="left" if heading == "recall" else "right", no_wrap=heading != "recall")
    for name, own in result.per_class.items():
        recalls = (percent(getattr(own, column)) for column in columns)
        table.add_row(Text(plain(name)), str(own.n), *recalls, percent(own.precision), percent(own.f1))
    table.add_section()
    total = (percent(getattr(result, column)) for column in columns)
    table.add_row("accuracy", str(result.n), *total, style="bold")
    for side, end in enumerate(("from", "to")):
        table.add_row(f"95 % {end}", "", *(percent(result.intervals[column][side]) for column in columns))
    table.add_row("macro-F1", "", *(percent(result.macro_f1[column]) for column in columns))
    say(title)  # not the table's own, which would break a path that is longer than a line
    out.print(table)


MATRIX = 20  # most classes whose confusion matrix fits a terminal


def show_confusion(result: Evaluation) -> None:
    """The matrix, or where it would be too large its largest entries."""
    from rich.table import Table
    from rich.text import Text

    names = list(result.per_class)
    if len(names) > MATRIX:
        mistakes = [(n, i, k) for i, row in enumerate(result.confusion) for k, n in enumerate(row) if n and i != k]
        for n, i, k in sorted(mistakes, reverse=True)[:MATRIX]:
            say(f"{n:6,} {names[i]} taken for {names[k]}")
        say(f"The largest {min(MATRIX, len(mistakes))} of {len(mistakes)} confusions; --json holds all of them")
        return
    table = Table()
    for heading in ("", *names):
        table.add_column(Text(heading), justify="right" if heading else "left")
    for name, row in zip(names, result.confusion, strict=True):
        table.add_row(Text(name), *(str(n) if n else "·" for n in row))
    say("Confusion matrix: true classes in rows, predictions of what the run advises in columns")
    out.print(table)


def show_verdict(verdict: Verdict, quiet: bool) -> None:
    """Whether a run can be trusted. Alarms and cautions are told in any case, on standard error."""
    if verdict.level != "none":
        hint = f" (--use {'chosen' if verdict.chosen else 'last'} overrides.)" if verdict.advised == "zero-shot" else ""
        style = {"alarm": "bold red", "caution": "yellow"}[verdict.level]
        note(f"{verdict}{hint}", style)
    elif not quiet:
        say(str(verdict))


def show_skipped(inputs: list[Unlabelled], run: Path | None) -> None:
    for data in inputs:
        if data.skipped:
            first = min(data.skipped)
            where = f"; all are listed in {run / 'skipped.jsonl'}" if run else ""
            example = f"{data.ids[first]}: {data.skipped[first]}"
            message = f"skipped {len(data.skipped)} of {len(data)} that can't be read, as {example}{where}"
            note(message)


def tell_json(facts: dict[str, Any]) -> None:
    typer.echo(json.dumps(_finite(facts), allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON knows no NaN: a number that is none is null."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fail(message: str, code: int) -> NoReturn:
    console.print("[bold red]error:[/] ", end="")
    note(" ".join(message.split()))
    sys.exit(code)
