"""What a person sees: progress, tables and errors. Results go to standard output, all else to standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress

    from pouf.data.base import Unlabelled
    from pouf.training.trainer import Step
    from pouf.validation.evaluation import Evaluation

console = Console(stderr=True, highlight=False)
out = Console(highlight=False)


@contextmanager
def training_progress(steps: int, hidden: bool) -> Iterator[tuple[Callable[[str], None], Callable[[Step], None]]]:
    """A bar with loss, effective classes and the time left; yields what to call with a message and with a step."""
    with _progress("{task.fields[facts]}", hidden) as progress:
        task = progress.add_task("adapting", total=steps, facts="")

        def show(step: Step) -> None:
            facts = f"loss {step.loss:.3f}  {step.effective_classes:.1f} classes in use"
            progress.update(task, completed=step.step, facts=facts)

        yield lambda message: None if hidden else progress.console.print(message), show


@contextmanager
def bar(title: str, total: int, hidden: bool) -> Iterator[Callable[[int], None]]:
    with _progress("", hidden) as progress:
        task = progress.add_task(title, total=total)
        yield lambda n: progress.advance(task, n)


@contextmanager
def grid_progress(total: int, hidden: bool) -> Iterator[Callable[[str, str], None]]:
    """A bar over the cells of a table, with the time left; yields what to call with a cell's name and its error."""
    with _progress("{task.fields[facts]}", hidden) as progress:
        task = progress.add_task("cells", total=total, facts="")

        def advance(name: str, error: str) -> None:
            progress.update(task, advance=1, facts=name)
            if error and not hidden:
                progress.console.print(f"failed: {name}: {error}", markup=False, soft_wrap=True)

        yield advance


def _progress(facts: str, hidden: bool) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(facts))
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=hidden)


def show_evaluation(result: Evaluation, title: str) -> None:
    from rich.table import Table

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f}"

    table = Table(title=title, title_justify="left")
    columns = {
        "zero_shot": "zero-shot", "calibrated": "calibrated", "adapted": "adapted (last step)", "used": "advised"
    }  # fmt: skip
    if result.used is None:
        del columns["used"]
    for heading in ("class", "n", *columns.values()):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for name, recall in result.per_class.items():
        table.add_row(name, str(recall.n), *(percent(getattr(recall, column)) for column in columns))
    table.add_section()
    total = (percent(getattr(result, column)) for column in columns)
    table.add_row("accuracy", str(result.n), *total, style="bold")
    out.print(table)


def tell_trust(words: str, trusted: bool, quiet: bool) -> None:
    """Whether a run can be trusted. A warning is told in any case, on standard error."""
    if not trusted:
        console.print(words, style="bold red", markup=False, soft_wrap=True)
    elif not quiet:
        out.print(words, markup=False, soft_wrap=True)


def tell_skipped(data: Unlabelled, listed_in: Path | None) -> None:
    if data.skipped:
        first = min(data.skipped)
        where = f"; all are listed in {listed_in}" if listed_in else ""
        example = f"{data.ids[first]}: {data.skipped[first]}"
        message = f"skipped {len(data.skipped)} of {len(data)} that can't be read, as {example}{where}"
        console.print(message, markup=False, soft_wrap=True)


def fail(message: str, code: int) -> NoReturn:
    console.print("[bold red]error:[/] ", end="")
    console.print(" ".join(message.split()), markup=False, soft_wrap=True)
    sys.exit(code)


def calm_libraries() -> None:
    """Our progress bars and messages are the ones to see, not those of the libraries."""
    import logging

    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
