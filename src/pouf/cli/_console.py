"""Printing: tables, results and errors. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console

from pouf.errors import plural

if TYPE_CHECKING:
    from pouf.cli._options import OutputOptions
    from pouf.cli.adapt import AdaptInputs
    from pouf.data.base import Unlabelled
    from pouf.runs.folder import Run
    from pouf.runs.predict import Predicted
    from pouf.training.adaptation import Adaptation
    from pouf.training.plan import Plan
    from pouf.training.search import Search
    from pouf.validation.evaluation import Evaluation
    from pouf.validation.verdict import Verdict

console = Console(stderr=True, highlight=False)
out = Console(highlight=False)
MAX_LISTED_NAMES = 10  # of classes in a list


def is_main() -> bool:
    """Whether this is the first of the processes, the only one that prints."""
    return os.environ.get("RANK", "0") == "0"


def plain(message: str) -> str:
    """A message with control characters escaped, except line ends and tabs: file and class names may contain them.

    Characters that change the text direction are escaped too: they can make one file name look like another.
    """
    return "".join(
        character.encode("unicode_escape").decode() if _is_control(character) else character for character in message
    )


def _is_control(character: str) -> bool:
    changes_direction = "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"
    return character not in "\n\t" and (changes_direction or unicodedata.category(character) in ("Cc", "Cs"))


def print_out(message: str, style: str | None = None) -> None:
    """On standard output."""
    out.print(plain(message), markup=False, soft_wrap=True, style=style)


def print_err(message: str, style: str | None = None) -> None:
    """On standard error."""
    console.print(plain(message), markup=False, soft_wrap=True, style=style)


def silence_libraries() -> None:
    from pouf.models.load import silence_libraries

    silence_libraries()


@contextmanager
def messages(show: Callable[[str], None] = print_err, level: int = logging.WARNING) -> Iterator[None]:
    """While open, pass the library's log messages to `show`."""
    library = logging.getLogger("pouf")
    before = library.level, library.handlers
    handler = _Handler(level)
    handler.show = show
    library.setLevel(level)
    library.handlers = [handler]
    try:
        yield
    finally:
        library.setLevel(before[0])  # not by the attribute: loggers remember what was enabled
        library.handlers = before[1]


class _Handler(logging.Handler):
    show: Callable[[str], None]

    def emit(self, record: logging.LogRecord) -> None:
        self.show(record.getMessage())


def show_methods() -> None:
    """Print all methods with their descriptions."""
    from pouf.training.methods import METHODS

    for known, entry in METHODS.items():
        print_out(f"{known:16} {entry.about}{' (needs --shots)' if entry.needs_shots else ''}")


def show_plan(plan: Plan, inputs: AdaptInputs, output: OutputOptions) -> None:
    """Everything that would be done, by a run of the same options without --plan."""
    show_result(plan.to_json(), str(plan), output)


def show_adaptation(result: Adaptation, inputs: AdaptInputs, output: OutputOptions) -> None:
    """Print the result of `pouf adapt`."""
    last, classes = (result.history[-1] if result.history else None), len(inputs.classifier.classes)
    facts = {
        "method": result.method, "n": sum(map(len, result.sources.values())),
        "skipped": sum(len(each.skipped) for each in result.sources.values()), "steps": len(result.history),
        "loss": last.loss if last else None, "effective_classes": last.effective_classes if last else None,
        "seconds": round(last.seconds, 1) if last else 0.0, "trainable": result.trainable, "total": result.total,
    }  # fmt: skip
    line = "Nothing was trained."
    if last is not None:
        line = (
            f"{plural(last.step, 'step')} in {last.seconds:.0f} s; last batch: loss {last.loss:.3f}, "
            f"{last.effective_classes:.1f} of {classes} classes predicted."
        )
    _show_run(result, facts, [line], inputs, output)


def show_search(found: Search, inputs: AdaptInputs, output: OutputOptions) -> None:
    """Print the result of `pouf search`."""
    lines = [
        f"not believed: {format_settings(trial.settings)}: {trial.why_not}" for trial in found.trials if trial.why_not
    ]
    if found.settings is not None:
        lines.append(f"Chosen without labels: {format_settings(found.settings)}.")
    facts = {"settings": found.settings, "step": found.ranking.step, "trials": len(found.trials)}
    _show_run(found.result, facts, lines, inputs, output)


def _show_run(
    result: Adaptation, facts: dict[str, Any], lines: list[str], inputs: AdaptInputs, output: OutputOptions
) -> None:
    """Print the verdict, skipped inputs, the command's own lines, and next steps."""
    show_verdict(result.verdict, output.hidden)
    if output.as_json:
        print_json(_facts(result) | facts)
        return
    sources = list(result.sources.values())
    show_skipped(sources, result.files["run"])
    if not output.quiet:
        print_out("\n".join(lines))
        _show_end(result, inputs, sources)


def _show_end(result: Adaptation, inputs: AdaptInputs, sources: list[Unlabelled]) -> None:
    """Print drift, absent names, files, and next steps."""
    show_drift(result)
    show_absent(result.absent, len(inputs.classifier.classes))
    show_files(result)
    run = shlex.quote(str(result.files["run"]))
    review = f"\n  pouf review {run}" if inputs.data is not None else ""
    print_out(f"Next:\n  pouf predict {run} {_example(sources[0])}{review}")


def _example(data: Unlabelled) -> str:
    """An argument for `pouf predict`: an image of the run, a text, or the file of vectors."""
    if data.modality == "text":
        return '"a text of your own"'
    source = Path(data.source.split("::")[0])
    image = next((source / name for name in islice(data.ids, 100) if (source / name).is_file()), source)
    return shlex.quote(str(image if data.modality == "image" and source.is_dir() else source))


def show_absent(names: list[str], classes: int) -> None:
    """Print the names of classes that no input seems to belong to."""
    if names:
        more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
        listed = ", ".join(names[:MAX_LISTED_NAMES])
        print_out(f"{len(names)} of {classes} classes seem to be absent from the inputs: {listed}{more}")


def show_result(facts: dict[str, Any], text: str, output: OutputOptions) -> None:
    """Print the result of a command as one JSON object, as text, or not at all (--quiet)."""
    if output.as_json:
        print_json(facts)
    elif not output.quiet:
        print_out(text)


def show_predictions(
    found: Predicted, verdict: Verdict | None, run: Run, file: Path | None, abstain: float | None, output: OutputOptions
) -> None:
    """Print predictions or their file, and how many are marked.

    Args:
        verdict: of the run, if its advice was followed.
        file: of the predictions; None prints them.
    """
    if verdict is not None:
        remind(verdict, run)
    if output.as_json:
        facts = found.to_json() | ({"verdict": verdict.message} if verdict is not None else {})
        print_json(facts if file is None else facts | {"predictions": str(file)})
        return
    show_unreadable(found.skipped, found.n)
    for row in found.rows:
        print_out(_format_prediction(row, named=len(found.rows) > 1))
    if output.quiet:
        return
    show_absent(found.absent, len(run.card.classes))
    if "unknown" in found.counts:
        print_out(
            f"{plural(found.counts['unknown'], 'input')} marked unknown: farther from all prototypes than 99 % of the "
            "run's own inputs"
        )
    if "abstained" in found.counts:
        print_out(
            f"{found.counts['abstained']:,} are marked abstained, so that about {100 * (abstain or 0):g} % of the rest "
            "are wrong. This is estimated without labels, from how confident and stable the predictions of the "
            "adapted model and of zero-shot are: check it with pouf review"
        )
    if file is not None:
        print_out(f"{plural(found.n, 'prediction')} in {file}, by {_display_use(found.by, run)}")


def _display_use(use: str, run: Run) -> str:
    if use != "zero-shot" and run.verdict.last == 0:
        return "zero-shot with corrected predictions"
    return "zero-shot" if use == "zero-shot" else "the adapted model"


def _format_prediction(row: Mapping[str, Any], named: bool) -> str:
    """`great: 97.1 %, then bad: 2.9 %`, with the input where there are several."""
    text = f"{row['class']}: {row['probability']:.1%}, then {row['runner_up']}: {row['runner_up_probability']:.1%}"
    if row.get("abstained"):
        text += " (abstained)"
    name = next(str(row[key]) for key in ("text", *row) if key in row)
    return f"{text}  {name}" if named else text


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
        print_out(f"Outside of the task: {result.drift}")


def show_files(result: Adaptation) -> None:
    print_out(f"The run is in {result.files['run']}")
    for name in ("predictions", "report"):
        if name in result.files:
            print_out(f"  {name}: {result.files[name]}")


def format_settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def show_evaluation(result: Evaluation, title: str) -> None:
    """Print accuracies and a table of all classes."""
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
    print_out(title)  # not as the table's title, which would wrap long paths
    out.print(table)


MAX_MATRIX_CLASSES = 20  # a larger confusion matrix does not fit a terminal


def show_confusion(result: Evaluation) -> None:
    """Print the confusion matrix, or its largest entries if it is too large."""
    from rich.table import Table
    from rich.text import Text

    names = list(result.per_class)
    if len(names) > MAX_MATRIX_CLASSES:
        mistakes = [(n, i, k) for i, row in enumerate(result.confusion) for k, n in enumerate(row) if n and i != k]
        for n, i, k in sorted(mistakes, reverse=True)[:MAX_MATRIX_CLASSES]:
            print_out(f"{n:6,} {names[i]} predicted as {names[k]}")
        listed = min(MAX_MATRIX_CLASSES, len(mistakes))
        print_out(f"The largest {listed} of {len(mistakes)} confusions; --json prints all of them")
        return
    table = Table()
    for heading in ("", *names):
        table.add_column(Text(heading), justify="right" if heading else "left")
    for name, row in zip(names, result.confusion, strict=True):
        table.add_row(Text(name), *(str(n) if n else "·" for n in row))
    print_out("Confusion matrix of the advised classifier: true classes in rows, predictions in columns")
    out.print(table)


def show_verdict(verdict: Verdict, quiet: bool) -> None:
    """Print the verdict of a run. Alarms and cautions are always printed, on standard error."""
    style = {"alarm": "bold red", "caution": "yellow", "confirmed": "green"}.get(verdict.level)
    if verdict.level in ("alarm", "caution"):
        hint = " (--use adapted overrides.)" if verdict.advised == "zero-shot" else ""
        print_err(f"{verdict}{hint}", style)
    elif not quiet:
        print_out(str(verdict), style)


def remind(verdict: Verdict, run: Run) -> None:
    """Print what speaks against a run: an alarm in full, of cautions the names, since the run has explained them."""
    if verdict.level == "caution" and verdict.cautions:
        names, page = ", ".join(each.name for each in verdict.cautions), run.folder / "report.html"
        where = page if page.is_file() else f"`pouf report {run.folder}`"
        print_err(f"Caution about this run: {names}; see {where}", "yellow")
    else:
        show_verdict(verdict, quiet=True)


def show_skipped(inputs: list[Unlabelled], run: Path | None) -> None:
    """Print how many inputs of each data set are unreadable."""
    for data in inputs:
        skipped = {data.ids[i]: data.skipped[i] for i in sorted(data.skipped)}
        show_unreadable(skipped, len(data) - len(skipped), run)


def show_unreadable(skipped: Mapping[str, str], n: int, run: Path | None = None) -> None:
    if skipped:
        name, why = next(iter(skipped.items()))
        where = f"; all are listed in {run / 'details' / 'skipped.jsonl'}" if run else ""
        print_err(f"skipped {len(skipped)} of {len(skipped) + n} inputs that can't be read, as {name}: {why}{where}")


def print_json(facts: dict[str, Any]) -> None:
    typer.echo(json.dumps(_finite(facts), allow_nan=False))


def _finite(value: Any) -> Any:
    """The value with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fail(message: str, code: int) -> NoReturn:
    """Print an error and exit."""
    console.print("[bold red]error:[/] ", end="")
    print_err(" ".join(message.split()))
    sys.exit(code)
