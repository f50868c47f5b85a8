"""The demo as a newcomer runs it. That it gains on every seed is measured by benchmarks/demo.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

from PIL import Image

from pouf.demo import DIGITS, write_digits


def test_the_demo_gains_and_says_so_in_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pouf", "demo", "--seed", "0", "--out", "here", "--json"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=True)
    facts = json.loads(result.stdout)
    assert result.stderr == ""
    assert facts.keys() >= {"n", "zero_shot", "calibrated", "adapted", "per_class", "seconds", "run"}
    assert facts["n"] == 1797 and facts["run"] == "here"
    assert facts["zero_shot"] <= 0.78
    assert facts["adapted"] >= 0.90
    assert (tmp_path / "here" / "metrics.jsonl").is_file()


def test_the_digits_are_written_as_images_a_class_a_folder(tmp_path: Path) -> None:
    folder = write_digits(tmp_path)
    assert {path.name for path in folder.iterdir()} == set(DIGITS)
    paths = list(folder.rglob("*.png"))
    assert len(paths) == 1797
    image = Image.open(paths[0])
    assert (image.size, image.mode, image.getextrema()[1]) == ((8, 8), "L", 255)
