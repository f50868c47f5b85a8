"""Two real processes take the steps of one."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed_cases import CASES, weights
from PIL import Image
from safetensors.torch import load_file
from small_models import masked_lm, sentence_encoder

from pouf import EMBEDDED
from pouf.demo import DIGITS
from pouf.distributed import World

HERE = Path(__file__).parent


def torchrun(folder: Path, processes: int = 2, **environment: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launch, str(HERE / "distributed_cases.py"), str(folder)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases by two processes. One picture can't be read: whoever meets it, all must know."""
    folder = tmp_path_factory.mktemp("distributed")
    noise = np.random.default_rng(0)
    (folder / "images").mkdir()
    for i in range(17):
        pixels = noise.integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
    (folder / "images" / "3.png").write_bytes(b"no picture")
    sentence_encoder(folder / "encoder")
    masked_lm(folder / "lm", "roberta")
    result = torchrun(folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_processes_take_the_same_steps_as_one(ran: Path, name: str) -> None:
    together, alone = load_file(ran / f"{name}.safetensors"), weights(CASES[name](ran))
    assert together.keys() == alone.keys()
    for parameter, value in alone.items():
        assert torch.allclose(together[parameter], value, atol=1e-5), parameter


def test_one_process_that_fails_in_a_step_ends_all_with_its_error(ran: Path) -> None:
    """The other one waits for its features and would wait for ever."""
    start = time.perf_counter()
    result = torchrun(ran, FAILS_ON_RANK="1")
    assert result.returncode != 0
    assert "this process fails on purpose" in result.stderr
    assert time.perf_counter() - start < 120


def test_the_command_line_writes_and_speaks_once(ran: Path, tmp_path: Path) -> None:
    def pouf(*arguments: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *(launch if processes > 1 else []), "-m", "pouf", *arguments, "--device", "cpu"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "POUF_CACHE": str(tmp_path / f"cache{processes}")}
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
        assert result.returncode == 0, result.stderr[-3000:]
        return result

    result = pouf(
        "adapt", "--model", EMBEDDED, "--images", str(ran / "images"), "--classes", ",".join(DIGITS), "--json",
        "--recipe", "demo", "--steps", "2", "--batch-size", "8", "--chunk", "3", "--out", "run",
    )  # fmt: skip
    facts = json.loads(result.stdout)
    assert (facts["n"], facts["steps"]) == (17, 2)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    facts = json.loads(pouf("predict", "run", str(ran / "images"), "--json", "--out", "two.csv").stdout)
    assert (facts["n"], facts["unreadable"]) == (16, ["3.png"])
    pouf("predict", "run", str(ran / "images"), "--out", "one.csv", processes=1)
    assert _classes(tmp_path / "two.csv") == _classes(tmp_path / "one.csv")
    # The cache of one process serves two.
    pouf("predict", "run", str(ran / "images"), "--cache", "cache1", "--out", "two.csv")
    assert (tmp_path / "two.csv").read_text() == (tmp_path / "one.csv").read_text()


def _classes(file: Path) -> list[list[str]]:
    return [line.split(",")[:2] for line in file.read_text().splitlines()]


@pytest.mark.parametrize("n", [0, 1, 7, 8])
def test_shares_are_the_whole_in_its_order(n: int) -> None:
    items = list(range(n))
    shares = [World(rank, 3).share(items) for rank in range(3)]
    assert [item for share in shares for item in share] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
