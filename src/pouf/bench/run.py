"""A table from its name to its files: what `pouf bench run` does, for Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pouf import Recipe
from pouf.bench.cells import Setting
from pouf.bench.grid import Grid, Outcome, seeded
from pouf.bench.language import GRID
from pouf.bench.tables import TABLES, UNLABELLED, Entry, Table, entries, write_tables
from pouf.errors import InputError, one_of
from pouf.files import check_writable
from pouf.reporting.figures import lambda_sweep
from pouf.reporting.svg import write_svg


class TableRun(NamedTuple):
    outcomes: list[Outcome]  # one per cell
    rows: list[Entry]
    files: list[Path]  # Markdown first, then CSV, LaTeX and the figure where there is one

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.result is None]


def run_table(
    table: str,
    data: str | Path,
    model: str,
    output_dir: str | Path,
    *,
    tasks: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] = (),
    settings: Mapping[str, Any] | None = None,
    unlabelled: str = "kshot",
    limit: int = 0,
    text_columns: Sequence[str] = (),
    label_column: str = "",
    grid: str = "",
    demo_filter: str = "",
    jobs: int = 1,
    resume: bool = False,
    on_cell: Callable[[Outcome], None] | None = None,
    on_start: Callable[[int], None] = lambda cells: None,
) -> TableRun:
    """Compute a table of the paper. Cells that are finished are never computed again; those that failed are.

    Args:
        table: its name in `TABLES`, which also has its tasks, methods and seeds; some of them can be asked for.
        data: the folder that holds the data sets.
        settings: changes to the recipes, by dotted name.
        unlabelled: texts to adapt to: kshot, the paper's 16 per class of each seed, or train, the training set.
        text_columns, label_column: of the files of language tasks, where they do not have the usual names.
        limit: most test texts of a language task, drawn once and the same for all cells; 0 takes all.
        grid: "paper" trains fine-tuning and LM-BFF with each of Gao et al.'s batch sizes and rates, and takes the best
            on D_dev.
        demo_filter: a sentence encoder, by name or folder: LM-BFF's demonstrations come from the half of each class
            that is most like the text.
        resume: go on in a folder that holds results of this table with other settings.
        on_cell, on_start: are told of each cell that is there, and how many there will be.
    """
    chosen = one_of("table", table, TABLES)
    if not Path(data).is_dir():
        raise InputError(
            f"no folder {str(data)!r}: give the one that holds the data sets, or make small stand-ins first"
        )
    known = (*chosen.tasks, *chosen.extra)
    names = [one_of("task", task, dict.fromkeys(known, task)) for task in tasks or chosen.tasks]
    ways = [one_of("method", method, dict.fromkeys(chosen.all_methods, method)) for method in methods or chosen.methods]
    Recipe().with_settings(settings)  # a wrong name or value is said once, and not by each cell
    texts = one_of("unlabelled setting", unlabelled, {name: name for name in UNLABELLED})
    _check_few_shot(table, grid, demo_filter, settings or {})
    setting = Setting(
        str(data), model, dict(settings or {}), limit=limit, unlabelled=texts, text_columns=tuple(text_columns),
        label_column=label_column, grid="paper" if grid else "", demo_filter=demo_filter,
    )  # fmt: skip
    folder = Path(output_dir)
    check_writable(folder / f"{table}.md")
    cells = chosen.cells(table, names, ways, tuple(seeds))
    cell_files = Grid(folder, cells, setting)
    if not resume and (others := cell_files.others()):
        raise InputError(
            f"{str(folder)!r} holds results of {table} with other settings, as {others[0].name}: resume to keep them "
            "and add to them, or choose another folder"
        )
    on_start(len(cells))
    outcomes = cell_files.run(jobs, on_cell)
    rows = entries(chosen, _with_earlier(cell_files, chosen, table, outcomes), setting)
    files = write_tables(folder, table, rows, setting)
    return TableRun(outcomes, rows, [*files, *([_sweep(rows, folder)] if table == "lambda" else [])])


def _check_few_shot(table: str, grid: str, demo_filter: str, settings: Mapping[str, Any]) -> None:
    if grid:
        one_of("grid", grid, {"paper": "paper"})
    if (grid or demo_filter) and table != "language":
        raise InputError(f"a grid and a filter of demonstrations are for few-shot rows of language, not for {table}")
    if grid and (both := [name for name in GRID if name in settings]):
        raise InputError(f"the grid tries values of {both[0]} itself: leave it out of the settings, or leave the grid")


def _with_earlier(grid: Grid, chosen: Table, table: str, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Also what was computed with the same settings before: a part never replaces a larger table."""
    seeds = sorted({outcome.cell.seed for outcome in outcomes})
    now = {outcome.cell: outcome for outcome in outcomes}
    cells = chosen.cells(table, (*chosen.tasks, *chosen.extra), chosen.all_methods)
    cells += chosen.cells(table, (*chosen.tasks, *chosen.extra), chosen.all_methods, seeds)
    # What no seed changes is of those that were asked for.
    there = [cell for cell in dict.fromkeys(cells) if cell.seed in seeds or seeded(cell)]
    found = (now.pop(cell, None) or grid.finished(cell) for cell in there)
    return [outcome for outcome in found if outcome is not None] + list(now.values())


def _sweep(rows: Sequence[Entry], folder: Path) -> Path:
    """The figure of accuracy against lambda, for the values that were computed."""
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
    return write_svg(sweep, folder / "lambda.svg")
