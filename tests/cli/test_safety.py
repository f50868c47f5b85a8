"""What a person sees of strange names and of bugs: text that commands nothing, and one line."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from cli_runner import one_line_error, pouf
from helpers import groups

from pouf import Classifier, Output
from pouf.cli._console import plain
from pouf.runs.folder import Run

NAMES = ["[/]", "[bold red]cat", "=1+2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose class names are markup to rich and formulas to a spreadsheet."""
    folder = tmp_path_factory.mktemp("strange") / "[bold]" / "[" / "]"
    folder.mkdir(parents=True)
    features, prototypes = groups(present=3, k=3, n=30, d=8)
    np.save(folder / "x.npy", features.numpy())
    np.savez(folder / "l.npz", features=features.numpy(), label=np.arange(30) % 3)
    classifier = Classifier.from_vectors(prototypes, NAMES)
    classifier.adapt(
        folder / "x.npy", output=Output(folder / "run", report=False), settings={"steps": 2, "snapshots": 1}
    )
    return folder / "run"


def test_names_and_paths_are_no_markup(run: Path) -> None:
    output = pouf("evaluate", run, run.parent / "l.npz", "--no-cache", cwd=run.parent).stdout
    assert "[bold]/[/]/l.npz" in output and "[bold red]cat" in output and re.search(r"^ *\[/\] ", output, re.MULTILINE)
    missing = pouf("predict", run.parent / "[/]missing", "x.npy", cwd=run.parent, code=2)
    assert "[/]missing" in one_line_error(missing)


def test_controls_are_shown_and_not_obeyed() -> None:
    assert plain("a\x1b[31mb\x9b\u202e\ud800\x07") == "a\\x1b[31mb\\x9b\\u202e\\ud800\\x07"
    assert plain("two\nlines\tكلب 👩‍🔬 é") == "two\nlines\tكلب 👩‍🔬 é"


def test_no_control_of_a_name_reaches_the_terminal(tmp_path: Path) -> None:
    result = pouf("predict", "\x1b]0;owned\x07run", ".", cwd=tmp_path, code=2)
    assert "\\x1b]0;owned\\x07run" in one_line_error(result) and "\x1b" not in result.stderr


@pytest.mark.parametrize("safe", [False, True])
def test_formulas_are_neutralised_where_asked_for(run: Path, tmp_path: Path, safe: bool) -> None:
    option = ["--safe-csv"] if safe else []
    pouf("predict", run, run.parent / "x.npy", "--out", "p.csv", *option, "--no-cache", "--quiet", cwd=tmp_path)
    with (tmp_path / "p.csv").open(encoding="utf-8", newline="") as stream:
        names = {row["class"] for row in csv.DictReader(stream)}
    assert names == {"[/]", "[bold red]cat", "'=1+2" if safe else "=1+2"}


def test_a_bug_is_one_line_with_a_hint_and_debug_shows_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pouf.bench.tables.TABLES", None)  # as a bug would leave it
    line = one_line_error(pouf("bench", "list", cwd=tmp_path, code=1))
    assert "unexpected AttributeError" in line and "please report the output of the same command with --debug" in line
    for arguments in (("--debug", "bench", "list"), ("bench", "list", "--debug")):
        output = pouf(*arguments, cwd=tmp_path, code=1).stderr
        assert "Traceback" in output and "in list_tables" in output and "error: unexpected" in output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seed", 2**63], "seed"),
        (["--seed", "-1"], "seed"),
        (["--temperature", "inf"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--workers", "-1"], "workers"),
        (["--workers", "99999"], "workers"),
        (["--batch-size", "-1"], "batch_size"),
        (["--lr", "inf"], "lr"),
        (["--lambda", "nan"], "information"),
    ],
)
def test_settings_out_of_range_are_told_by_name(run: Path, tmp_path: Path, options: list, words: str) -> None:
    features, prototypes = run.parent / "x.npy", tmp_path / "p.npz"
    np.savez(prototypes, prototypes=np.eye(3, 8, dtype=np.float32), names=np.array(["a", "b", "c"]))
    result = pouf("adapt", "--features", features, "--prototypes", prototypes, *options, cwd=tmp_path, code=2)
    assert words in one_line_error(result)
    assert not (tmp_path / "pouf-run").exists()


@pytest.mark.parametrize("options", [["--batch-size", "-1"], ["--batch-size", "0"], ["--workers", "-1"]])
def test_a_prediction_that_could_not_be_one_writes_nothing(run: Path, tmp_path: Path, options: list[str]) -> None:
    one_line_error(pouf("predict", run, run.parent / "x.npy", *options, cwd=tmp_path, code=2))
    assert not (tmp_path / "predictions.csv").exists()


def test_answers_that_contradict_each_other_are_told(run: Path, tmp_path: Path) -> None:
    pouf("review", run, "--n", 4, "--no-cache", cwd=tmp_path)
    first = next(csv.DictReader((run / "review.csv").open(encoding="utf-8")))["id"]
    (tmp_path / "answers.csv").write_text(f"id,label\n{first},[/]\n{first},=1+2\n")
    line = one_line_error(pouf("review", run, "--answers", "answers.csv", cwd=tmp_path, code=2))
    assert f"{first} has two labels, [/] and =1+2: keep one" in line
    (tmp_path / "answers.csv").write_text(f"id,label\n{first},[/]\n{first},[/]\n")
    pouf("review", run, "--answers", "answers.csv", cwd=tmp_path)
    assert Run(run).verdict.message
