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

    def is_control(c: str) -> bool:
        return "\u202a" <= c <= "\u202e" or "\u2066" <= c <= "\u2069" or unicodedata.category(c) in ("Cc", "Cs")

    return "".join(c.encode("unicode_escape").decode() if c not in "\n\t" and is_control(c) else c for c in message)


def print_out(message: str, style: str | None = None) -> None:
    """On standard output."""
    out.print(plain(message), markup=False, soft_wrap=True, style=style)


def print_err(message: str, style: str | None = None) -> None:
    """On standard error."""
    console.print(plain(message), markup=False, soft_wrap=True, style=style)


@contextmanager
def messages(show: Callable[[str], None] = print_err, level: int = logging.WARNING) -> Iterator[None]:
    """While open, pass the library's log messages to `show`."""
    library, handler = logging.getLogger("pouf"), logging.Handler(level)
    handler.emit = lambda record: show(record.getMessage())  # type: ignore[method-assign]
    before = library.level, library.handlers
    library.setLevel(level)
    library.handlers = [handler]
    try:
        yield
    finally:
        library.setLevel(before[0])  # not by the attribute: loggers remember what was enabled
        library.handlers = before[1]


def show_result(facts: dict[str, Any], text: str, output: OutputOptions) -> None:
    """Print the result of a command as one JSON object, as text, or not at all (--quiet)."""
    if output.as_json:
        print_json(facts)
    elif not output.quiet:
        print_out(text)


def show_adaptation(result: Adaptation, inputs: AdaptInputs, output: OutputOptions) -> None:
    """Print the result of `pouf adapt`."""
    last, classes = (result.history[-1] if result.history else None), len(inputs.classifier.classes)
    facts = {
        "method": result.method, "n": sum(map(len, result.sources.values())),
        "skipped": sum(len(each.skipped) for each in result.sources.values()), "steps": len(result.history),
        "loss": last and last.loss, "effective_classes": last and last.effective_classes,
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
    lines = [f"not believed: {format_settings(t.settings)}: {t.why_not}" for t in found.trials if t.why_not]
    if found.settings is not None:
        lines.append(f"Chosen without labels: {format_settings(found.settings)}.")
    facts = {"settings": found.settings, "step": found.ranking.step, "trials": len(found.trials)}
    _show_run(found.result, facts, lines, inputs, output)


def format_settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def _show_run(
    result: Adaptation, facts: dict[str, Any], lines: list[str], inputs: AdaptInputs, output: OutputOptions
) -> None:
    """Print the verdict, skipped inputs, the command's own lines, drift, absent names, files, and next steps."""
    verdict, run = result.verdict, result.files["run"]
    show_verdict(verdict, output.hidden)
    if output.as_json:
        print_json({name: str(file) for name, file in result.files.items()} | {
            "verdict": verdict.message, "advised": verdict.advised, "chosen": verdict.chosen,
            "alarms": [alarm.name for alarm in verdict.alarms],
            "cautions": [caution.name for caution in verdict.cautions],
            "drift": result.drift._asdict() if result.drift is not None else None,
        } | facts)  # fmt: skip
        return
    for data in result.sources.values():
        skipped = {data.ids[i]: data.skipped[i] for i in sorted(data.skipped)}
        show_unreadable(skipped, len(data) - len(skipped), run)
    if output.quiet:
        return
    if result.drift is not None:
        lines.append(f"Outside of the task: {result.drift}")
    lines += _absent(result.absent, len(inputs.classifier.classes))
    lines.append(f"The run is in {run}")
    lines += [f"  {name}: {result.files[name]}" for name in ("predictions", "report") if name in result.files]
    lines += ["Next:", f"  pouf predict {shlex.quote(str(run))} {_example(next(iter(result.sources.values())))}"]
    if inputs.data is not None:
        lines.append(f"  pouf review {shlex.quote(str(run))}")
    print_out("\n".join(lines))


def _example(data: Unlabelled) -> str:
    """An argument for `pouf predict`: an image of the run, a text, or the file of vectors."""
    if data.modality == "text":
        return '"a text of your own"'
    source = Path(data.source.split("::")[0])
    image = next((source / name for name in islice(data.ids, 100) if (source / name).is_file()), source)
    return shlex.quote(str(image if data.modality == "image" and source.is_dir() else source))


def _absent(names: list[str], classes: int) -> list[str]:
    """A line with the names of classes that no input seems to belong to, if there are any."""
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    listed = ", ".join(names[:MAX_LISTED_NAMES])
    return [f"{len(names)} of {classes} classes seem to be absent from the inputs: {listed}{more}"] if names else []


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
    lines = _absent(found.absent, len(run.card.classes))
    if "unknown" in found.counts:
        lines.append(
            f"{plural(found.counts['unknown'], 'input')} marked unknown: farther from all prototypes than 99 % of the "
            "run's own inputs"
        )
    if "abstained" in found.counts:
        lines.append(
            f"{found.counts['abstained']:,} are marked abstained, so that about {100 * (abstain or 0):g} % of the rest "
            "are wrong. This is estimated without labels, from how confident and stable the predictions of the "
            "adapted model and of zero-shot are: check it with pouf review"
        )
    if file is not None:
        model = "zero-shot" if found.by == "zero-shot" else "the adapted model"
        if run.verdict.last == 0 and found.by != "zero-shot":
            model = "zero-shot with corrected predictions"
        lines.append(f"{plural(found.n, 'prediction')} in {file}, by {model}")
    for line in lines:
        print_out(line)


def _format_prediction(row: Mapping[str, Any], named: bool) -> str:
    """`great: 97.1 %, then bad: 2.9 %`, with the input where there are several."""
    text = f"{row['class']}: {row['probability']:.1%}, then {row['runner_up']}: {row['runner_up_probability']:.1%}"
    if row.get("abstained"):
        text += " (abstained)"
    name = next(str(row[key]) for key in ("text", *row) if key in row)
    return f"{text}  {name}" if named else text


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


def show_unreadable(skipped: Mapping[str, str], n: int, run: Path | None = None) -> None:
    """Print how many inputs can't be read, with one as an example."""
    if skipped:
        name, why = next(iter(skipped.items()))
        where = f"; all are listed in {run / 'details' / 'skipped.jsonl'}" if run else ""
        print_err(f"skipped {len(skipped)} of {len(skipped) + n} inputs that can't be read, as {name}: {why}{where}")


def print_json(facts: dict[str, Any]) -> None:
    def finite(value: Any) -> Any:  # JSON lacks NaN and infinity
        if isinstance(value, dict):
            return {name: finite(inner) for name, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    typer.echo(json.dumps(finite(facts), allow_nan=False))


def fail(message: str, code: int) -> NoReturn:
    """Print an error and exit."""
    console.print("[bold red]error:[/] ", end="")
    print_err(" ".join(message.split()))
    sys.exit(code)
