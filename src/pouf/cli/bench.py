"""`pouf bench`: the paper's tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pouf.cli import _console as console
from pouf.cli._console import out
from pouf.cli._options import OutputOptions, grouped
from pouf.errors import InputError, one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pouf.bench.tables import Entry

bench = typer.Typer(no_args_is_help=True, help="The paper's tables, on your data or on small stand-ins.")


@bench.command("list")
def list_tables() -> None:
    """The tables, with their tasks and methods."""
    from pouf.bench.tables import TABLES

    for name, table in TABLES.items():
        out.print(f"[bold]{name}[/]  {table.about}", soft_wrap=True)
        out.print(f"  tasks    {' '.join(table.tasks)}", markup=False, soft_wrap=True)
        if table.extra:
            out.print(f"  and      {' '.join(table.extra)}", markup=False, soft_wrap=True)
        out.print(f"  methods  {' '.join(table.methods)}", markup=False, soft_wrap=True)
        out.print(f"  seeds    {' '.join(map(str, table.seeds))}", markup=False)


@bench.command("make-data")
def make_data(folder: Annotated[Path, typer.Argument(help="Folder to write to.")]) -> None:
    """Small stand-ins in the layouts of the paper's data, to try every command offline."""
    from pouf.bench.standins import LM, make_data

    console.calm_libraries()
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"folder {str(folder)!r} is not empty: choose another, or remove it")
    make_data(folder)
    out.print(f"Stand-ins are in {folder}. Try:\n  pouf bench run images --data {folder} --model pouf/tiny-clip")
    out.print(f"  pouf bench run language --data {folder} --model {folder / LM}")


@bench.command("run")
@grouped
def run(
    table: Annotated[str, typer.Argument(help="Name of a table: see pouf bench list.")],
    data: Annotated[Path, typer.Option(help="Folder that holds the data sets.")],
    model: Annotated[str, typer.Option(help="Hub name or local folder.")],
    output: OutputOptions,
    tasks: Annotated[str | None, typer.Option(help="Some tasks, as office31:webcam,RTE.")] = None,
    methods: Annotated[str | None, typer.Option(help="Some methods, as zero-shot,pouf-full.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, as 0,1,2.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Change the recipes, as steps=50 or optimisation.lr=1e-3.")
    ] = None,
    unlabelled: Annotated[
        str,
        typer.Option(help="Texts to adapt to: kshot, the paper's 16 a class of each seed, or train, the training set."),
    ] = "kshot",
    limit: Annotated[int, typer.Option(help="Most training and test texts of a language task; 0 takes all.")] = 0,
    jobs: Annotated[int, typer.Option(help="Cells to run in parallel.")] = 1,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on in a folder that holds results of this table, whatever the settings."),
    ] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the results; a run there is continued.")] = Path(
        "pouf-bench"
    ),
) -> None:
    """Compute a table. Cells that are finished are never computed again; those that failed are.

    A run that was ended, however hard, goes on where it was. A folder with results of other settings is refused, unless
    --resume says that they belong together.
    """
    from pouf.bench.cells import Setting
    from pouf.bench.grid import Grid, Outcome
    from pouf.bench.tables import TABLES, UNLABELLED, entries, write_tables
    from pouf.cli._console import grid_progress

    console.calm_libraries()
    chosen = one_of("table", table, TABLES)
    if not data.is_dir():
        raise InputError(f"no folder {str(data)!r}: give the one that holds the data sets, or make-data a small one")
    wanted = _some("--tasks", tasks, (*chosen.tasks, *chosen.extra), chosen.tasks)
    cells = chosen.cells(table, wanted, _some("--methods", methods, chosen.methods, chosen.methods), _numbers(seeds))
    texts: Any = one_of("--unlabelled", unlabelled, {name: name for name in UNLABELLED})
    setting = Setting(str(data), model, _changes(settings or []), limit=limit, unlabelled=texts)
    grid = Grid(out_dir, cells, setting)
    if not resume and (others := grid.others()):
        raise InputError(
            f"{str(out_dir)!r} holds results of {table} with other settings, as {others[0].name}: give --resume to "
            "keep them and add to them, or another --out"
        )
    with grid_progress(len(cells), output.hidden) as advance:

        def tell(outcome: Outcome) -> None:
            told = f"{outcome.cell.task} {outcome.cell.method} seed {outcome.cell.seed}"
            advance(told, outcome.error)

        outcomes = grid.run(jobs, tell)
    rows = entries(chosen, outcomes, setting)
    files = write_tables(out_dir, table, rows, setting)
    if table == "lambda":
        files += _sweep(rows, out_dir)
    failed = [outcome for outcome in outcomes if outcome.result is None]
    if output.as_json:
        facts = {"cells": len(cells), "failed": len(failed), "files": [str(file) for file in files]}
        typer.echo(json.dumps(facts | {"rows": [row._asdict() for row in rows]}))
    elif not output.quiet:
        out.print(files[0].read_text(encoding="utf-8"), markup=False, soft_wrap=True)
        out.print(f"In {', '.join(map(str, files))}; {len(failed)} of {len(cells)} cells failed")
    if failed and len(failed) == len(outcomes):
        raise InputError(f"no cell could be computed; the first: {failed[0].error}")


def _sweep(rows: Sequence[Entry], folder: Path) -> list[Path]:
    """The figure of accuracy against lambda, for the values that were computed."""
    from pouf.reporting.figures import lambda_sweep
    from pouf.reporting.svg import write

    there = [row for row in rows if row.n]
    values = sorted({float(row.method) for row in there})
    by_task: dict[str, list[float]] = {}
    papers: list[float] = []
    for task in dict.fromkeys(row.column for row in there):
        own = {float(row.method): row for row in there if row.column == task}
        if all(value in own for value in values):
            by_task[task] = [own[value].last.mean for value in values]
            papers = papers or [figure.mean for value in values if (figure := own[value].paper) is not None]
    sweep = lambda_sweep(values, by_task, papers if len(papers) == len(values) else None)
    return [write(sweep, folder / "lambda.svg")]


def _some(option: str, text: str | None, known: tuple[str, ...], usual: tuple[str, ...]) -> tuple[str, ...]:
    if text is None:
        return usual
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise InputError(f"unknown {option} {name!r}: choose from {', '.join(known)}")
    return names


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(value) for value in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"--seeds {text!r}: expected whole numbers as 0,1,2") from None


def _changes(settings: list[str]) -> dict[str, Any]:
    """`steps=50` as {"steps": 50}; what is no number stays a text."""
    changes: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set {setting!r}: expected name=value, as steps=50")
        try:
            changes[name] = json.loads(value)
        except json.JSONDecodeError:
            changes[name] = value
    return changes
