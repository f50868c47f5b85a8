"""A first run as a newcomer starts it: a folder or a file, the names of the classes, and something to see all along."""

from __future__ import annotations

import logging
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runner import one_line_error, pouf
from helpers import REVIEWS

from pouf.cli import _progress
from pouf.demo import DIGITS
from pouf.models.load import DEFAULT_MODELS, embedded_folder
from pouf.recipe import Recipe

NAMES = ",".join(DIGITS)
# The command line with a short patience: what takes minutes elsewhere takes seconds here.
QUICK = "from pouf.cli import _progress as p, main; p.FIRST_LINE_AFTER, p.LINE_EVERY = 0.001, 0.3; main()"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model for images, small, as a cache of the hub holds it after a download."""
    home = tmp_path_factory.mktemp("home")
    repository = home / "hub" / f"models--{DEFAULT_MODELS['image'].replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(embedded_folder(), snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    return home


def environment(hub: Path) -> dict[str, str]:
    return os.environ | {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "COLUMNS": "160", "OMP_NUM_THREADS": "1"}


def test_a_folder_and_names_are_enough_and_a_log_file_shows_every_phase(
    hub: Path, few_digits: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", QUICK, "adapt", few_digits, "--classes", NAMES, "--no-cache"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment(hub), timeout=300)
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    assert f"no --model given: {DEFAULT_MODELS['image']}" in lines
    assert "150 unlabelled images, 10 classes" in lines
    assert "less than a minute: 150 images to encode, then 100 steps" in lines
    order = ["loading laion", "encoding: ", "training: ", "choosing", "writing predictions"]
    first = [next((i for i, line in enumerate(lines) if line.startswith(phase)), phase) for phase in order]
    assert not [phase for phase in first if isinstance(phase, str)], lines
    assert first == sorted(first), lines
    assert not any("\x1b" in line for line in lines), "plain lines"
    assert Recipe.load(tmp_path / "pouf-run" / "details/recipe.toml") == Recipe.preset("fast", "image")
    card = (tmp_path / "pouf-run" / "model/pouf.json").read_text()
    assert DEFAULT_MODELS["image"] in card


def test_a_terminal_shows_a_bar_from_the_first_second(hub: Path, few_digits: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pouf", "adapt", few_digits, "--classes", NAMES, "--no-cache", "--no-report"]
    settings = environment(hub) | {"TERM": "xterm-256color"}
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=theirs, env=settings)
    os.close(theirs)
    output = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other side has been closed
            break
        if not part:
            break
        output += part
    os.close(ours)
    assert process.wait(timeout=300) == 0, output.decode()
    text = output.decode()
    places = [text.index(phase) for phase in ("reading", "loading", "encoding", "training", "choosing")]
    assert places == sorted(places) and "\x1b[" in text


@pytest.mark.parametrize("kind", sorted(DEFAULT_MODELS))
def test_each_kind_of_data_has_a_model_and_without_a_network_the_error_names_it(
    kind: str, few_digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "reviews.csv").write_text("text\n" + "".join(f"{text}\n" for text in REVIEWS))
    data, classes = (few_digits, NAMES) if kind == "image" else ("reviews.csv", "bad,good")
    more = ["--template", "{text} it was [MASK]."] if kind == "cloze" else []
    result = pouf("adapt", data, "--classes", classes, *more, cwd=tmp_path, code=2)
    *_, error = result.stderr.strip().splitlines()
    assert error.startswith(f"error: can't load model '{DEFAULT_MODELS[kind]}'") and "Traceback" not in result.stderr
    assert "local folder" in error and not (tmp_path / "pouf-run").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["--preset", "fats"],
            "unknown preset 'fats': choose one of fast, light, balanced, paper. Did you mean 'fast'?",
        ),
        (["--preset", "fast", "--recipe", "demo"], "give only one of --preset and --recipe, not both"),
        (["--preset", "fast", "--max-minutes", "3"], "give only one of --preset and --max-minutes"),
        (["--max-minutes", "0.00001"], "even the preset 'fast' needs more than the 1e-05 minutes allowed"),
        (["--images", "."], "give either DATA or one of"),
    ],
)
def test_what_does_not_go_together_is_said(given: list[str], words: str, few_digits: Path, tmp_path: Path) -> None:
    result = pouf("adapt", few_digits, "--model", "pouf/tiny-clip", "--classes", NAMES, *given, cwd=tmp_path, code=2)
    assert words in result.stderr.splitlines()[-1]


def test_missing_data_is_one_line(tmp_path: Path) -> None:
    assert "nowhere" in one_line_error(pouf("adapt", "nowhere", "--classes", "a,b", cwd=tmp_path, code=2))
    assert "nowhere" in one_line_error(pouf("adapt", "nowhere.csv", "--classes", "a,b", cwd=tmp_path, code=2))


def test_a_preset_by_option_is_the_recipe_by_name(few_digits: Path, tmp_path: Path) -> None:
    usual = [
        "adapt",
        few_digits,
        "--model",
        "pouf/tiny-clip",
        "--classes",
        NAMES,
        "--steps",
        2,
        "--no-report",
        "--quiet",
    ]
    for out, given in (
        ("a", ["--preset", "balanced"]),
        ("b", ["--recipe", "images-prompt"]),
        ("c", ["--max-minutes", 9]),
    ):
        pouf(*usual, *given, "--out", out, cwd=tmp_path)
    recipes = [Recipe.load(tmp_path / out / "details/recipe.toml") for out in "abc"]
    assert recipes[0] == recipes[1] == Recipe.preset("balanced", "image").with_settings(steps=2)
    assert recipes[2] == Recipe.preset("paper", "image").with_settings(steps=2), "two steps of it take no time"


def test_the_clock_of_the_training_goes_on_after_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    from pouf.training.callbacks import Step
    from pouf.training.trainer import LOOKING, TRAINING

    now = [0.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    reporter = _progress.ProgressReporter(hidden=True)
    reporter.on_phase(LOOKING, 512)
    reporter.on_start(Recipe(steps=100), 1, 2)
    reporter.on_phase(TRAINING, 100)
    for step in range(1, 51):
        now[0] += 1.0
        if step == 50:
            reporter.on_phase(LOOKING, 512)
        reporter.on_step(Step(step, 1.0, {}, 2.0, 0.1, 0.1, now[0]))
    assert reporter.line(now[0] - reporter.began).startswith("training: 50 of 100 after 50 s")
    assert "less than a minute left" in reporter.line(now[0] - reporter.began)


def test_what_is_logged_for_several_steps_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with _progress.progress(hidden=False):
        for _ in range(3):
            logging.getLogger("pouf.postprocess").info("the clusters say nothing")
    assert capsys.readouterr().err.count("the clusters say nothing") == 1
