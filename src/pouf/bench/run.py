"""A table from its name to its files: what `pouf bench run` does, for Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pouf import Recipe
from pouf.bench.grid import Grid, depends_on_seed
from pouf.bench.language import GRID
from pouf.bench.render import UNLABELLED, write_tables
from pouf.bench.results import Result, Setting
from pouf.bench.tables import TABLES, Row, Table
from pouf.errors import InputError, one_of
from pouf.files import check_writable
from pouf.reporting.figures import lambda_sweep
from pouf.reporting.svg import write_svg


class TableRun(NamedTuple):
    results: list[Result]  # one per cell
    rows: list[Row]
    files: list[Path]  # Markdown first, then CSV, LaTeX and the figure where there is one

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.error]


def run_table(
    name: str,
    setting: Setting,
    output_dir: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] = (),
    jobs: int = 1,
    resume: bool = False,
    on_cell: Callable[[Result], None] = lambda result: None,
    on_start: Callable[[int], None] = lambda cells: None,
) -> TableRun:
    """Compute a table of the paper. Cells that are finished are never computed again; those that failed are.

    Args:
        name: in `TABLES`, which also has its tasks, methods and seeds; some of them can be chosen.
        resume: continue in a folder that holds results of this table with other settings.
        on_cell, on_start: called with each result, and with the number of cells.
    """
    table = one_of("table", name, TABLES)
    _check(name, setting)
    tasks = [one_of("task", task, dict.fromkeys(table.all_tasks, task)) for task in tasks or table.tasks]
    methods = [one_of("method", m, dict.fromkeys(table.all_methods, m)) for m in methods or table.methods]
    folder = Path(output_dir)
    check_writable(folder / f"{name}.md")
    grid = Grid(folder, table.cells(name, tasks, methods, seeds), setting)
    if not resume and (others := grid.others()):
        raise InputError(
            f"{str(folder)!r} holds results of {name} with other settings, as {others[0].name}: resume to keep them "
            "and add to them, or choose another folder"
        )
    on_start(len(grid.cells))
    results = grid.run(jobs, on_cell)
    rows = table.rows(_with_earlier(grid, table, name, results), setting)
    files = write_tables(folder, name, rows, setting)
    if name == "lambda":
        files.append(_sweep(rows, folder))
    return TableRun(results, rows, files)


def _check(name: str, setting: Setting) -> None:
    """A wrong setting is an error at once, and not one of each cell."""
    if not Path(setting.data).is_dir():
        raise InputError(
            f"no folder {setting.data!r}: give the one that holds the data sets, or make small stand-ins first"
        )
    Recipe().with_settings(setting.changes)
    one_of("unlabelled setting", setting.unlabelled, UNLABELLED)
    if setting.grid:
        one_of("grid", setting.grid, {"paper": "paper"})
    if (setting.grid or setting.demo_filter) and name != "language":
        raise InputError(f"a grid and a filter of demonstrations are for few-shot rows of language, not for {name}")
    if setting.grid and (both := [each for each in GRID if each in setting.changes]):
        raise InputError(f"the grid tries values of {both[0]} itself: leave it out of the settings, or leave the grid")


def _with_earlier(grid: Grid, table: Table, name: str, results: Sequence[Result]) -> list[Result]:
    """Also what was computed with the same settings before: a part never replaces a larger table."""
    seeds = sorted({result.cell.seed for result in results})
    new = {result.cell: result for result in results}
    cells = table.cells(name, table.all_tasks, table.all_methods)
    cells += table.cells(name, table.all_tasks, table.all_methods, seeds)
    # What depends on no seed counts for the seeds of this run.
    cells = [cell for cell in dict.fromkeys(cells) if cell.seed in seeds or depends_on_seed(cell)]
    found = (new.pop(cell, None) or grid.finished(cell) for cell in cells)
    return [result for result in found if result is not None] + list(new.values())


def _sweep(rows: Sequence[Row], folder: Path) -> Path:
    """The figure of accuracy against lambda, for the values that were computed."""
    means = {(row.column, float(row.method)): row.last.mean for row in rows if row.last is not None}
    values = sorted({value for _, value in means})
    by_task = {
        task: [means[task, value] for value in values]
        for task in dict.fromkeys(task for task, _ in means)
        if all((task, value) in means for value in values)
    }
    papers = {float(row.method): row.paper.mean for row in rows if row.paper is not None and row.column in by_task}
    dashed = [papers[value] for value in values] if by_task and len(papers) == len(values) else None
    return write_svg(lambda_sweep(values, by_task, dashed), folder / "lambda.svg")
