"""A table from its name to its files: finished cells are never computed again, failed ones do not stop the rest."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from pouf import METHODS, Recipe
from pouf.bench.cells import run_cell
from pouf.bench.render import UNLABELLED, write_tables
from pouf.bench.tables import TABLES, Cell, Result, Row, Score, Setting, Table
from pouf.bench.tasks import GRID
from pouf.errors import InputError, one_of
from pouf.files import check_writable, write_json
from pouf.models.load import silence_libraries
from pouf.reporting.figures import lambda_sweep
from pouf.reporting.pages import write_svg


class Grid:
    """Cells in a folder, one file each.

    Args:
        folder: `folder/cells/<task>-<method>-<seed>-<setting>.json`; another setting makes other files. What no seed
            can change is computed once, for all of them.
    """

    def __init__(self, folder: Path, cells: Sequence[Cell], setting: Setting) -> None:
        self.folder, self.cells, self.setting = folder / "cells", list(cells), setting
        facts = json.dumps([Path(setting.data).resolve().as_posix(), *list(vars(setting).values())[1:]], default=str)
        self.mark = blake2b(facts.encode(), digest_size=4).hexdigest()
        self.folder.mkdir(parents=True, exist_ok=True)

    def file(self, cell: Cell) -> Path:
        seed = cell.seed if depends_on_seed(cell) else "any"
        name = re.sub(r"[^\w.+-]+", "_", f"{cell.table}-{cell.task}-{cell.method}-{seed}")
        return self.folder / f"{name}-{self.mark}.json"

    def others(self) -> list[Path]:
        """Results of the same tables with another setting."""
        tables = {cell.table for cell in self.cells}
        files = sorted(file for table in tables for file in self.folder.glob(f"{table}-*.json"))
        return [file for file in files if not file.stem.endswith(f"-{self.mark}")]

    def finished(self, cell: Cell) -> Result | None:
        """The result of a cell that was computed before; one that failed is tried again."""
        if not self.file(cell).is_file():
            return None
        stored = json.loads(self.file(cell).read_text(encoding="utf-8"))
        if stored["error"]:
            return None
        scores = {column: Score(*values) for column, values in stored["scores"].items()}
        return Result(cell, scores, stored["facts"], seconds=stored["seconds"])

    def run(self, jobs: int = 1, on_cell: Callable[[Result], None] = lambda result: None) -> list[Result]:
        """All results, in the order of the cells; missing ones are computed, `jobs` in parallel."""
        results = {cell: result for cell in self.cells if (result := self.finished(cell)) is not None}
        missing: dict[Path, list[Cell]] = {}
        for cell in self.cells:
            if cell not in results:
                missing.setdefault(self.file(cell), []).append(cell)
        for result in results.values():
            on_cell(result)
        for result in self._compute([same[0] for same in missing.values()], jobs):
            self._save(result)
            for cell in missing[self.file(result.cell)]:
                results[cell] = result._replace(cell=cell)
                on_cell(results[cell])
        return [results[cell] for cell in self.cells]

    def _compute(self, cells: Sequence[Cell], jobs: int) -> Iterator[Result]:
        if jobs <= 1 or len(cells) <= 1:
            yield from (attempt(cell, self.setting) for cell in cells)
            return
        # Processes of their own: a cell that takes the memory of all does not take the others with it. Each has its
        # share of the cores.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _end_with_parent) as pool:
            waiting = {pool.submit(attempt, cell, self.setting): cell for cell in cells}
            for done in as_completed(waiting):
                try:
                    yield done.result()
                except Exception as error:  # the process died; `attempt` itself raises nothing
                    yield Result(waiting[done], {}, {}, f"{type(error).__name__}: {error}")

    def _save(self, result: Result) -> None:
        versions = {name: version(name) for name in ("pouf", "torch", "transformers")}
        shared = {"cell": vars(result.cell), "setting": vars(self.setting), "versions": versions}
        write_json(self.file(result.cell), result._asdict() | shared)


def _end_with_parent() -> None:
    """In a process of the pool: it would wait for ever for the next cell of a parent that was killed."""

    def watch() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def depends_on_seed(cell: Cell) -> bool:
    """Whether a cell depends on its seed: it is trained, or something is drawn for it."""
    method = METHODS.get(cell.method)
    if cell.table not in ("images", "language") or method is None:
        return True
    return method.settings.get("steps") != 0 or bool(method.demonstrations)


def attempt(cell: Cell, setting: Setting) -> Result:
    """Run a cell; an error becomes part of the result."""
    silence_libraries()
    start = time.perf_counter()
    try:
        result = run_cell(cell, setting)
    except Exception as error:
        result = Result(cell, {}, {}, " ".join(f"{type(error).__name__}: {error}".split()))
    return result._replace(seconds=round(time.perf_counter() - start, 1))


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
    cells = [cell for own in (None, seeds) for cell in table.cells(name, table.all_tasks, table.all_methods, own)]
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
