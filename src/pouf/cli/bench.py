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
    limit: Annotated[int, typer.Option(help="Most training and test texts of a language task; 0 takes all.")] = 0,
    jobs: Annotated[int, typer.Option(help="Cells to run in parallel.")] = 1,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the results; a run there is continued.")] = Path(
        "pouf-bench"
    ),
) -> None:
    """Compute a table. Cells that are finished are not computed again; those that failed are."""
    from pouf.bench.cells import Setting
    from pouf.bench.grid import Grid, Outcome
    from pouf.bench.paper import PAPER_MODELS
    from pouf.bench.tables import TABLES, entries, write_tables
    from pouf.cli._console import grid_progress

    console.calm_libraries()
    chosen = one_of("table", table, TABLES)
    if not data.is_dir():
        raise InputError(f"no folder {str(data)!r}: give the one that holds the data sets, or make-data a small one")
    wanted = _some("--tasks", tasks, (*chosen.tasks, *chosen.extra), chosen.tasks)
    cells = chosen.cells(
        table, wanted, _some("--methods", methods, chosen.methods, chosen.methods), _numbers(seeds) or chosen.seeds
    )
    setting = Setting(str(data), model, _changes(settings or []), limit=limit)
    with grid_progress(len(cells), output.hidden) as advance:

        def tell(outcome: Outcome) -> None:
            told = f"{outcome.cell.task} {outcome.cell.method} seed {outcome.cell.seed}"
            advance(told, outcome.error)

        outcomes = Grid(out_dir, cells, setting).run(jobs, tell)
    rows = entries(chosen, outcomes, model.rstrip("/").endswith(PAPER_MODELS))
    files = write_tables(out_dir, table, rows)
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
    papers: list[float | None] = []
    for task in dict.fromkeys(row.column for row in there):
        own = {float(row.method): row for row in there if row.column == task}
        if all(value in own for value in values):
            by_task[task] = [own[value].last[0] for value in values]
            papers = papers or [own[value].paper for value in values]
    known = [figure for figure in papers if figure is not None]
    figure = lambda_sweep(values, by_task, known if len(known) == len(values) else None)
    return [write(figure, folder / "lambda.svg")]


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
