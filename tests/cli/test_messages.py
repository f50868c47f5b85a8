"""Mistakes of the first hour: each is one line that names the cause and what to give, in the words of the command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_runner import one_line_error, pouf
from helpers import REVIEWS
from small_models import sentence_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("messages")
    sentence_encoder(folder / "model")
    (folder / "reviews.csv").write_text("review\n" + "".join(f"{text} {i}\n" for i, text in enumerate(REVIEWS * 4)))
    (folder / "bare.csv").write_text("".join(f"{text} {i}\n" for i, text in enumerate(REVIEWS)))
    os.symlink("gone.csv", folder / "link.csv")
    os.symlink("gone", folder / "photos")
    (folder / "full" / "details").mkdir(parents=True)
    (folder / "full" / "details/run.json").write_text("{}")
    return folder


MISTAKES = {
    "another column": (["reviews.csv"], "has no column 'text', only: review: give --text-column to read another"),
    "a wrong column": (["reviews.csv", "--text-column", "rewiew"], "Did you mean 'review'?"),
    "no header": (["bare.csv"], "if that is a text and not a header, rename the file to .txt"),
    "two columns": (
        ["reviews.csv", "--text-column", "a,b"],
        "--text-column 'a,b' names 2 columns, expected",
    ),
    "a link to nowhere": (["link.csv"], "'link.csv' is a link to 'gone.csv', which does not exist"),
    "a folder's link to nowhere": (["--images", "photos"], "'photos' is a link to 'gone', which does not exist"),
    "semicolons": (["reviews.csv", "--classes", "bad;good"], "separate names by commas: bad,good"),
    "one class": (["reviews.csv", "--classes", "good"], "name at least two, as a,b,c"),
    "a run is there": (
        ["reviews.csv", "--out", "full"],
        "'full' already exists: give --resume to continue the run there, --overwrite to replace it, or another folder",
    ),
    "both": (["reviews.csv", "--out", "full", "--resume", "--overwrite"], "either resumed or overwritten"),
}


@pytest.mark.parametrize("case", sorted(MISTAKES))
def test_a_mistake_is_one_line_with_its_cause(case: str, folder: Path) -> None:
    given, words = MISTAKES[case]
    classes = [] if "--classes" in given else ["--classes", "bad,good"]
    result = pouf("adapt", *given, *classes, "--model", "model", cwd=folder, code=2)
    assert words in one_line_error(result)
    assert not (folder / "pouf-run").exists()


def test_an_input_that_is_not_there_is_told_before_anything_else(folder: Path) -> None:
    error = one_line_error(pouf("predict", "nowhere", "nothere.csv", cwd=folder, code=2))
    assert "no such file or folder: 'nothere.csv'; give a text of one word with --text" in error


def test_a_model_is_no_run(folder: Path) -> None:
    error = one_line_error(pouf("predict", "model", "reviews.csv", cwd=folder, code=2))
    assert "'model' is a model and not a run" in error and "adapt it first" in error


def test_the_end_of_a_run_names_what_can_be_run(folder: Path) -> None:
    with (folder / "reviews.csv").open("a") as file:
        file.write('""\nthe film was so so\n')
    usual = ("adapt", "reviews.csv", "--text-column", "review", "--classes", "bad,good", "--model", "model")
    result = pouf(*usual, "--steps", 1, "--no-report", "--out", "one", cwd=folder)
    assert (
        "1 step in " in result.stdout and '  pouf predict one "a text of your own"\n  pouf review one' in result.stdout
    )
    assert pouf("predict", "one", "a text of your own", cwd=folder).stdout.startswith(("bad: ", "good: "))
    quiet = pouf(*usual, "--steps", 1, "--no-report", "--out", "two", "--quiet", cwd=folder)
    assert "skipped 1 of 34 inputs that can't be read, as 32: the row is blank" in quiet.stderr and quiet.stdout == ""
