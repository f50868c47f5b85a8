"""A table as a grid of cells: finished ones are never computed again, failed ones do not stop the rest."""

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

from pouf import METHODS
from pouf.bench.cells import run_cell
from pouf.bench.results import Cell, Result, Score, Setting
from pouf.files import write_json
from pouf.models.load import silence_libraries


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
