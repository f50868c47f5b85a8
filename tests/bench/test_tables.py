"""Tables as grids: every table on the stand-ins, resumed and not recomputed, failures reported, three formats."""

import csv
import io
import json
from pathlib import Path

import pytest

from pouf import EMBEDDED
from pouf.bench import cells
from pouf.bench.cells import Cell, Result, Score, Setting, run_cell
from pouf.bench.grid import Grid, Outcome
from pouf.bench.paper import ABLATION, IMAGES, LANGUAGE, UNSEEN
from pouf.bench.standins import LM, make_data
from pouf.bench.tables import PEEKS, TABLES, as_csv, entries, latex, markdown

QUICK = {"steps": 2, "snapshots": 1, "batch_size": 16}


@pytest.fixture(scope="module")
def standins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("standins"))


@pytest.mark.parametrize("name", [name for name in TABLES if name != "language"])
def test_every_method_of_every_image_table_gives_a_figure(standins: Path, name: str) -> None:
    table = TABLES[name]
    methods = table.methods[:2] if name == "lambda" else table.methods
    task = next(task for task in table.tasks if ":" in task)
    for method in methods:
        result = run_cell(Cell(name, task, method, 0), Setting(str(standins), EMBEDDED, QUICK))
        for score in result.scores.values():
            assert score.oracle >= max(score.last, score.chosen)
            assert name == "cost" or 0 <= score.last <= 1


@pytest.mark.parametrize("task", ["SST-2", "CoLA", "MNLI-mm", "RTE", "STS-B"])
@pytest.mark.parametrize("method", ["majority", "zero-shot", "pouf", "fine-tuning"])
def test_language_tasks_of_every_layout_run(standins: Path, task: str, method: str) -> None:
    setting = Setting(str(standins), str(standins / LM), QUICK, limit=20)
    result = run_cell(Cell("language", task, method, 42), setting)
    assert -1 <= result.scores[task].last <= 1


@pytest.mark.parametrize("method", ["in-context", "lm-bff", "lm-bff-pouf"])
def test_language_methods_that_show_shots_run(standins: Path, method: str) -> None:
    setting = Setting(str(standins), str(standins / LM), QUICK, limit=8)
    assert 0 <= run_cell(Cell("language", "MR", method, 42), setting).scores["MR"].last <= 1


def test_zero_shot_is_not_made_to_train_by_a_change_of_steps(standins: Path) -> None:
    setting = Setting(str(standins), EMBEDDED, {"steps": 3})
    result = run_cell(Cell("images", "office31:dslr", "zero-shot", 0), setting)
    assert result.facts["parameters"] == 0


def test_coop_is_not_judged_on_its_shots(standins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged, learned = set(), set()
    original, adapt = cells._accuracy, cells.adapt

    def judging(classifier, inputs, labels, batch_size):
        judged.update(inputs.ids)
        return original(classifier, inputs, labels, batch_size)

    def learning(classifier, data, recipe, *, shots, **more):
        assert data is None
        learned.update(shots.inputs.ids)
        return adapt(classifier, data, recipe, shots=shots, **more)

    monkeypatch.setattr(cells, "_accuracy", judging)
    monkeypatch.setattr(cells, "adapt", learning)
    run_cell(Cell("images", "office31:dslr", "coop", 0), Setting(str(standins), EMBEDDED, QUICK))
    assert learned and judged and not learned & judged


def grid(folder: Path, standins: Path, *methods: str, **changes: object) -> Grid:
    wanted = [Cell("images", "office31:dslr", method, 0) for method in methods]
    return Grid(folder, wanted, Setting(str(standins), EMBEDDED, {**QUICK, **changes}))


def test_finished_cells_are_not_computed_again_and_failed_ones_are(
    standins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    real = cells.CELLS["images"]

    def counted(cell: Cell, setting: Setting) -> Result:
        ran.append(cell.method)
        if cell.method == "upl" and ran.count("upl") == 1:
            raise MemoryError("not enough")
        return real(cell, setting)

    monkeypatch.setitem(cells.CELLS, "images", counted)
    first = grid(tmp_path, standins, "zero-shot", "upl", "tent").run()
    assert [outcome.error for outcome in first] == ["", "MemoryError: not enough", ""]
    again = grid(tmp_path, standins, "zero-shot", "upl", "tent").run()
    assert ran == ["zero-shot", "upl", "tent", "upl"]
    assert [outcome.error for outcome in again] == [""] * 3
    assert again[0].result == first[0].result
    grid(tmp_path, standins, "zero-shot", batch_size=17).run()
    assert ran[-1] == "zero-shot", "another setting is another cell"


def test_an_interrupted_run_goes_on_where_it_was(
    standins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def interrupted(cell: Cell, setting: Setting) -> Result:
        ran.append(cell.method)
        if ran == ["zero-shot", "tent"]:
            raise KeyboardInterrupt
        return Result({cell.task: Score(0.5, 0.5, 0.5)}, {})

    monkeypatch.setitem(cells.CELLS, "images", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grid(tmp_path, standins, "zero-shot", "tent").run()
    grid(tmp_path, standins, "zero-shot", "tent").run()
    assert ran == ["zero-shot", "tent", "tent"]


def test_cells_run_side_by_side_in_processes(standins: Path, tmp_path: Path) -> None:
    together = grid(tmp_path / "a", standins, "zero-shot", "prior-correction").cells
    outcomes = Grid(tmp_path / "a", together, Setting(str(standins), EMBEDDED, QUICK)).run(jobs=2)
    alone = grid(tmp_path / "b", standins, "zero-shot").run()
    assert outcomes[0].result == alone[0].result
    assert "prior-correction" in [outcome.cell.method for outcome in outcomes]


def outcomes() -> list[Outcome]:
    made = [
        Outcome(Cell("images", task, method, seed), Result({task: Score(value + seed / 100, value, value + 0.1)}, {}))
        for task in ("office31:amazon", "office31:dslr")
        for method, value in (("zero-shot", 0.7), ("pouf-full", 0.8))
        for seed in (0, 1)
    ]
    return [*made, Outcome(Cell("images", "office31:dslr", "upl", 0), None, "InputError: no luck")]


def test_tables_show_the_mean_the_best_the_paper_and_what_failed() -> None:
    text = markdown(TABLES["images"], entries(TABLES["images"], outcomes(), papers_model=True))
    assert "| pouf-full | **80.5 (0.7)** [84.4] | **80.5 (0.7)** [91.1] |" in text
    assert "| office31:amazon | pouf-full | 2 | 80.5 (0.7) | 80.0 (0.0) | 90.0 (0.0) | 84.4 |  |" in text
    assert PEEKS in text and "office31:dslr, upl: seed 0: InputError: no luck" in text
    assert "office31 average" in text
    assert "[84.4]" not in markdown(TABLES["images"], entries(TABLES["images"], outcomes(), papers_model=False))


def test_csv_and_latex_hold_the_same() -> None:
    rows = entries(TABLES["images"], outcomes(), papers_model=True)
    lines = list(csv.DictReader(io.StringIO(as_csv(TABLES["images"], rows))))
    assert float(lines[1]["last_mean"]) == pytest.approx(80.5) and lines[1]["paper"] == "84.4"
    assert float(lines[1]["oracle_peeks_at_labels_mean"]) == pytest.approx(90.0)
    tex = latex(TABLES["images"], rows)
    assert r"\textbf{80.5 (0.7)}" in tex and tex.count(r"\\") == 1 + 3 and "office31:amazon" in tex


def test_the_papers_figures_are_where_they_belong() -> None:
    assert IMAGES["office31:webcam", "pouf-full"] == 91.3 and IMAGES["domainnet:quickdraw", "zero-shot"] == 14.0
    assert LANGUAGE["MNLI-mm", "pouf"] == 56.3 and LANGUAGE["STS-B", "lm-bff-pouf"] == 82.1
    assert ("STS-B", "majority") not in LANGUAGE
    assert ABLATION["RTE", "sinkhorn"] == 63.3
    assert UNSEEN["office31:amazon>webcam unseen", "seen+unseen"] == 93.1
    for table in TABLES.values():
        assert {method for _, method in table.figures} <= set(table.methods)


def test_cells_are_files_that_tell_how_they_came_about(standins: Path, tmp_path: Path) -> None:
    grid(tmp_path, standins, "zero-shot").run()
    (file,) = (tmp_path / "cells").glob("*.json")
    facts = json.loads(file.read_text())
    assert facts["cell"] == {"table": "images", "task": "office31:dslr", "method": "zero-shot", "seed": 0}
    assert facts["versions"].keys() >= {"torch", "pouf"} and facts["setting"]["changes"]["steps"] == 2
