"""A table from its name to its files: finished cells are never computed again, failed ones do not stop the rest."""

from __future__ import annotations

import csv
import io
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
from pouf.bench.cells import run_cell, uses_labels
from pouf.bench.tables import TABLES, Cell, Figure, Result, Row, Score, Setting, Table
from pouf.bench.tasks import GRID, GRID_METHODS, TASKS
from pouf.errors import InputError, one_of
from pouf.files import check_writable, write_json, write_text
from pouf.models.load import silence_libraries
from pouf.reporting.figures import lambda_sweep
from pouf.reporting.pages import write_svg

ORACLE = "oracle (peeks at labels)"
DEV = "best on D_dev (needs labels)"
USES_LABELS = "†"
DIFFERS = "‡"
UNLABELLED = {
    "kshot": "the seed's 16 per class, as the paper's (kshot)",
    "train": "the whole training set (train), which is not the paper's setting",
}
TextTable = list[list[str]]  # the header first; bold as in Markdown


def write_tables(folder: Path, name: str, rows: Sequence[Row], setting: Setting) -> list[Path]:
    renderers = {".md": markdown, ".csv": as_csv, ".tex": latex}
    for suffix, render in renderers.items():
        write_text(folder / f"{name}{suffix}", render(TABLES[name], rows, setting))
    return [folder / f"{name}{suffix}" for suffix in renderers]


def markdown(table: Table, rows: Sequence[Row], setting: Setting) -> str:
    about = ["Last step, mean (standard deviation) over seeds."]
    if table.percent:
        about.append("The best is bold, of those without shots and of those with.")
    if any(row.paper is not None for row in rows):
        about.append("The paper's own figure is in brackets.")
    if any(uses_labels(row.method) for row in rows):
        about.append(f"{USES_LABELS} uses labels.")
    parts = [f"# {table.about}", caption(rows, setting), " ".join(about), _lines(_wide(table, rows))]
    parts += _footnotes(rows)
    if table.percent:
        parts += [_where_to_stop(rows), _lines(_long(table, rows))]
    failed = [f"- {row.column}, {row.method}: {error}" for row in rows for error in row.failed]
    if failed:
        parts += ["Failed, and tried again by the next run:", "\n".join(failed)]
    return "\n\n".join(parts) + "\n"


def as_csv(table: Table, rows: Sequence[Row], setting: Setting) -> str:
    records = [_record(row, setting) for row in rows]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, records[0])
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()


def latex(table: Table, rows: Sequence[Row], setting: Setting) -> str:
    header, *body = [" & ".join(map(_tex, line)) + r" \\" for line in _wide(table, rows)]
    text = " ".join([f"{table.about}. {caption(rows, setting)}", *_footnotes(rows)])
    columns = "c" * len({row.column for row in rows})
    lines = [
        "% needs \\usepackage{booktabs}", r"\begin{table}[t]", r"\centering", rf"\caption{{{_tex(text)}}}",
        rf"\begin{{tabular}}{{l{columns}}}", r"\toprule", header, r"\midrule", *body, r"\bottomrule", r"\end{tabular}",
        r"\end{table}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def caption(rows: Sequence[Row], setting: Setting) -> str:
    """The model, the number of steps, and what else the figures depend on."""
    lengths = sorted({row.steps for row in rows if row.steps})
    parts = [f"Model {_model(setting.model)}", f"{' and '.join(f'{n:,}' for n in lengths) or 'no'} steps"]
    if any(row.column in TASKS for row in rows):
        parts.append(f"unlabelled texts: {UNLABELLED[setting.unlabelled]}")
    if setting.limit:
        parts.append(f"judged on {setting.limit:,} test texts at most, drawn once and the same for all rows")
    if setting.grid:
        parts.append(
            f"{' and '.join(GRID_METHODS)}: the best on D_dev of batch sizes 2, 4, 8 and rates 1e-5, 2e-5, 5e-5"
        )
    if setting.demo_filter:
        parts.append(f"demonstrations from the half of each class most like the text, by {_model(setting.demo_filter)}")
    if setting.changes:
        parts.append("changed: " + ", ".join(f"{name}={value}" for name, value in setting.changes.items()))
    return "; ".join(parts) + "."


def is_few_shot(method: str) -> bool:
    """The paper's second category. Majority is in the first, although it needs the labels of the training set."""
    return uses_labels(method) and method != "majority"


def _wide(table: Table, rows: Sequence[Row]) -> TextTable:
    """Methods down, tasks across, last step; the best of a category in bold, the paper's in brackets."""
    columns = list(dict.fromkeys(row.column for row in rows))
    by_key = {(row.column, row.method): row for row in rows}
    grid = [["", *columns]]
    for method in dict.fromkeys(row.method for row in rows):
        line = [_name(method)]
        for column in columns:
            row = by_key.get((column, method))
            text = "–" if row is None else _format(row.last, table.percent)
            if table.percent and method in _best(rows, column, is_few_shot(method)):
                text = f"**{text}**"
            line.append(text + (f" [{_papers(row, table.percent)}]" if row is not None and row.paper else ""))
        grid.append(line)
    return grid


def _best(rows: Sequence[Row], column: str, few_shot: bool) -> set[str]:
    """The best of a column, among those with shots or those without: all that are printed as equal."""
    own = [row for row in rows if row.column == column and is_few_shot(row.method) == few_shot]
    means = {row.method: round(row.last.mean, 3) for row in own if row.last is not None}
    return {method for method, mean in means.items() if mean == max(means.values())} if len(means) > 1 else set()


def _long(table: Table, rows: Sequence[Row]) -> TextTable:
    """One line for each task and method, with the ways to stop side by side."""
    dev = _has_dev(rows)
    grid = [["task", "method", "seeds", "steps", "last step", "chosen without labels", *[DEV] * dev, ORACLE, "paper",
             "failed"]]  # fmt: skip
    for row in rows:
        ways = [(row.last, "failed"), (row.chosen, ""), *[(row.dev, "–")] * dev, (row.oracle, "")]
        cells = [_format(figure, table.percent, none or ("–" if row.seeds else "failed")) for figure, none in ways]
        grid.append([
            row.column, _name(row.method), str(row.seeds), f"{row.steps:,}", *cells, _papers(row, table.percent),
            "; ".join(row.failed),
        ])  # fmt: skip
    return grid


def _record(row: Row, setting: Setting) -> dict[str, object]:
    """A line of the CSV, by column."""
    labels = "yes" if uses_labels(row.method) else "no"
    record: dict[str, object] = {"task": row.column, "method": row.method, "uses_labels": labels, "seeds": row.seeds}
    ways = {"last": row.last, "chosen": row.chosen, "dev_needs_labels": row.dev, "oracle_peeks_at_labels": row.oracle}
    for name, figure in ways.items():
        for part, value in zip(("mean", "std"), figure or (None, None), strict=True):
            record[f"{name}_{part}"] = None if value is None else f"{value:.4f}"
    record["paper"], record["paper_std"] = row.paper or (None, None)
    unlabelled = setting.unlabelled if row.column in TASKS else None
    return record | {
        "model": _model(setting.model), "steps": row.steps, "unlabelled": unlabelled, "paper_differs": row.differs,
    }  # fmt: skip


def _format(figure: Figure | None, percent: bool, none: str = "failed") -> str:
    if figure is None:
        return none
    if percent:
        return f"{figure.mean:.1f}" + (f" ({figure.std:.1f})" if figure.std is not None else "")
    # 149,620,737 as it is, a part of a second to the thousandth.
    return f"{figure.mean:,.0f}" if float(figure.mean).is_integer() else f"{figure.mean:,.3f}".rstrip("0")


def _papers(row: Row, percent: bool) -> str:
    """The paper's figure, marked where it was made in another way."""
    return "" if row.paper is None else _format(row.paper, percent) + DIFFERS * bool(row.differs)


def _footnotes(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(f"{DIFFERS} {row.method}: {row.differs}." for row in rows if row.differs))


def _name(method: str) -> str:
    return f"{method} {USES_LABELS}" if uses_labels(method) else method


def _has_dev(rows: Sequence[Row]) -> bool:
    return any(row.dev is not None for row in rows)


def _model(name: str) -> str:
    """Its name on the hub, or that of its folder without the path to it."""
    return Path(name).resolve().name if Path(name).is_dir() else name


def _lines(grid: TextTable) -> str:
    lines = [grid[0], ["---"] * len(grid[0]), *grid[1:]]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _tex(text: str) -> str:
    for character in "&%_#":
        text = text.replace(character, f"\\{character}")
    text = text.replace(">", "$>$").replace("–", "--").replace(f" {USES_LABELS}", r"$^\dagger$")
    return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text.replace(DIFFERS, r"$^\ddagger$"))


def _where_to_stop(rows: Sequence[Row]) -> str:
    parts = [
        "Where to stop: the last step and the choice without labels need none; that choice is what `pouf adapt` would "
        "use, zero-shot where an alarm speaks against the run.",
        f"*{DEV}* takes the checkpoint that is best on as many other labelled texts as the shots: so the paper's "
        "figures for language were chosen, without shots as well.",
        f"The *{ORACLE}* takes the best checkpoint by the labels of the test, which nobody has: so the paper's "
        "figures for images were chosen. It is there to show what is lost without them.",
    ]
    return " ".join(part for part in parts if _has_dev(rows) or not part.startswith(f"*{DEV}"))


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
