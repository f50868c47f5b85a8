"""Disks that are full, folders and inputs that go while a run is under way: a clear error, and nothing good is lost."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_runner import one_line_error, pouf
from helpers import groups, same, weights
from interruption_cases import STEPS, run
from PIL import Image

from pouf import EMBEDDED, Callback, Classifier, Images, InputError, Recipe
from pouf.demo import DIGITS
from pouf.runs.folder import CHECKPOINTS, UNFINISHED
from pouf.training.state import STATE
from pouf.validation.checkpoints import ZERO_SHOT

SAVING = {"compute.save_every": 0.0}
# A limit on the size of files is a full disk to whoever writes: the first large file fails in the middle.
FULL_DISK = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from interruption_cases import Callback, run

class Full(Callback):
    def on_step(self, step):
        if step.step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))

run(Path("."), "vectors", Path(sys.argv[2]), callbacks=[Full()], settings={"compute.save_every": 0.0})
"""


class At(Callback):
    """Does something after a step."""

    def __init__(self, step: int, act) -> None:
        self.step, self.act = step, act

    def on_step(self, step) -> None:
        if step.step == self.step:
            self.act()


def result_of(run: Path) -> tuple[dict, Classifier]:
    return json.loads((run / "details/verdict.json").read_text()), Classifier.from_pretrained(run, use="last")


def test_a_run_that_met_a_full_disk_goes_on_once_there_is_room(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(Path(__file__).parent), str(tmp_path / "run")]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"SLOW": "0"})
    assert said.returncode == 1 and "File too large" in said.stderr.splitlines()[-1], said.stderr
    assert not list((tmp_path / "run").rglob(".*.partial"))
    run(tmp_path, "vectors", tmp_path / "run", resume=True)
    run(tmp_path, "vectors", tmp_path / "whole")
    (verdict, there), (expected, whole) = result_of(tmp_path / "run"), result_of(tmp_path / "whole")
    assert verdict == expected and same(weights(there), weights(whole))


def test_a_full_disk_is_one_line(tmp_path: Path, few_digits: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", small]).returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        error = one_line_error(
            pouf(
                "adapt", "--model", EMBEDDED, "--images", few_digits, "--classes", ",".join(DIGITS), "--recipe", "demo",
                "--steps", 2, "--out", small / "run", "--quiet", cwd=tmp_path, code=1,
            )
        )  # fmt: skip
        assert "No space left on device" in error
    finally:
        subprocess.run(["umount", small], check=True)


def test_an_error_of_any_kind_saves_what_was_learned_and_the_run_goes_on(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, "vectors", tmp_path / "run", callbacks=[At(6, lambda: 1 / 0)], settings=SAVING)
    told = json.loads((tmp_path / "run" / "details/run.json").read_text())
    assert (told["status"], told["error"]) == ("failed", "division by zero")
    assert Classifier.from_pretrained(tmp_path / "run").tuner_settings is not None
    run(tmp_path, "vectors", tmp_path / "run", resume=True)
    run(tmp_path, "vectors", tmp_path / "whole")
    assert same(weights(result_of(tmp_path / "run")[1]), weights(result_of(tmp_path / "whole")[1]))


def test_a_folder_that_is_removed_while_the_run_goes_on_is_an_error_and_the_weights_are_saved(tmp_path: Path) -> None:
    removing = At(6, lambda: shutil.rmtree(tmp_path / "run"))
    with pytest.raises(OSError, match="was removed while the run was under way"):
        run(tmp_path, "vectors", tmp_path / "run", callbacks=[removing])
    assert Classifier.from_pretrained(tmp_path / "run").tuner_settings is not None


def test_where_nothing_can_be_written_is_said_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match=r"is a file(: choose|\. Choose) another"):
            run(tmp_path, "vectors", place)
    assert (tmp_path / "file").read_text() == "not a folder"


def test_an_empty_name_is_not_the_current_folder(tmp_path: Path, in_folder: Callable[[Path], None]) -> None:
    in_folder(tmp_path)
    features, prototypes = groups()
    classifier = Classifier.from_vectors(prototypes, list("abcdef"))
    for act in (lambda: classifier.adapt(features, output=""), lambda: classifier.save_pretrained("")):
        with pytest.raises(InputError, match="empty"):
            act()
    assert not list(tmp_path.iterdir())


def test_a_damaged_state_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, "vectors", tmp_path / "run", callbacks=[At(6, lambda: 1 / 0)], settings=SAVING)
    file = tmp_path / "run" / UNFINISHED / CHECKPOINTS / STATE
    whole = file.read_bytes()
    for damaged in (b"", whole[:1000], b"{}" * 50, whole[:8] + b"\xff" * 100 + whole[108:]):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=r"the state in .* can't be read .*overwrite the run"):
            run(tmp_path, "vectors", tmp_path / "run", resume=True)
    assert Classifier.from_pretrained(tmp_path / "run").tuner_settings is not None, "what was saved is still there"


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("tune", ["full", "prompt"])
def test_inputs_that_go_while_a_run_is_under_way_are_left_out_of_it(tmp_path: Path, tune: str, chunk: int) -> None:
    noise = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for i in range(17):
        Image.fromarray(noise.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(tmp_path / "images" / f"{i:02}.png")

    def remove() -> None:
        for i in (2, 5, 16):
            (tmp_path / "images" / f"{i:02}.png").unlink()

    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    recipe = Recipe(steps=STEPS, batch_size=7, augment="crop-flip", temperature=0.1, snapshots=4).with_settings(
        {"tuner.name": tune, "optimisation.lr": 1e-3, "compute.chunk": chunk}
    )
    result = classifier.adapt(tmp_path / "images", recipe=recipe, output=tmp_path / "run", callbacks=[At(4, remove)])
    classifier = result.classifier
    checkpoints = result.checkpoints
    there = 14 if tune == "full" else 17  # features that training leaves alone were computed before
    assert {len(seen.probabilities) for seen in checkpoints.predictions.values()} == {there}
    judged = (ZERO_SHOT, checkpoints.at_step(result.verdict.chosen or STEPS))
    assert {len(checkpoints.predictions[checkpoint].perturbed) for checkpoint in judged} == {there}
    skipped = [json.loads(line)["id"] for line in (tmp_path / "run" / "details/skipped.jsonl").read_text().splitlines()]
    assert skipped == ["02.png", "05.png", "16.png"]
    assert len((tmp_path / "run" / "predictions.csv").read_text().splitlines()) == 15, "a header and those there"
    # Rows still mean the same inputs: what the sample says of them is what anyone would say.
    inputs = [checkpoints.sample.inputs.ids[i] for i in checkpoints.sample.before.indices]
    left = [name for name in inputs if name not in skipped]
    anyone = result.at("last").predict_proba(Images([tmp_path / "images" / name for name in left]))
    rows = [inputs.index(name) for name in left]
    assert np.allclose(checkpoints.predictions[checkpoints.last].probabilities[rows], anyone, atol=1e-5)
