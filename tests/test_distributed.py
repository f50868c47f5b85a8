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
from distributed_cases import CASES, state
from PIL import Image
from safetensors.torch import load_file
from small_models import masked_lm, sentence_encoder

from pouf import EMBEDDED, Classifier, FeatureCache, Images
from pouf.demo import DIGITS
from pouf.distributed import World
from pouf.inference import InferenceConfig

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
    together, alone = load_file(ran / f"{name}.safetensors"), state(CASES[name](ran))
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
    def pouf(*arguments: str) -> subprocess.CompletedProcess[str]:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pouf"]
        command = [*launch, *arguments, "--device", "cpu"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "POUF_CACHE": str(tmp_path / "cache2")}
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
    told = pouf("predict", "run", str(ran / "images"), "--use", "last", "--json", "--out", "two.csv").stdout
    assert (json.loads(told)["n"], json.loads(told)["unreadable"]) == (16, ["3.png"])
    # The cache of two processes serves one.
    alone = Classifier.from_pretrained(tmp_path / "run", use="last")
    cache = FeatureCache(tmp_path / "cache2")
    before = len(list(cache.folder.rglob("*.npy")))
    predictions = alone.infer(Images.from_folder(ran / "images"), InferenceConfig(cache=cache))
    assert len(list(cache.folder.rglob("*.npy"))) == before
    said = [line.split(",")[1] for line in (tmp_path / "two.csv").read_text().splitlines()[1:]]
    assert said == [DIGITS[k] for k in predictions.log_probabilities.argmax(1).tolist()]
    result = pouf(
        "search", "--model", EMBEDDED, "--images", str(ran / "images"), "--classes", ",".join(DIGITS), "--json",
        "--recipe", "demo", "--steps", "2", "--batch-size", "8", "--lrs", "1e-3,1e-2", "--out", "tuned", "--no-report",
    )  # fmt: skip
    assert json.loads(result.stdout)["trials"] == 2
    assert json.loads((tmp_path / "tuned" / "run.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("n", [0, 1, 7, 8])
def test_shares_are_the_whole_in_its_order(n: int) -> None:
    items = list(range(n))
    shares = [World(rank, 3).share(items) for rank in range(3)]
    assert [item for share in shares for item in share] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
