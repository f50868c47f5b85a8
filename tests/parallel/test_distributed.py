"""Several real processes take the steps of one, by DDP and by FSDP2.

pytest tests/parallel/test_distributed.py                # some cases, two processes
pytest -m slow tests/parallel/test_distributed.py        # all cases, two and three processes
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import cli_runner
import numpy as np
import pandas as pd
import pytest
import torch
from distributed_cases import CASES, diverged, state, used, whole_run
from helpers import train, weights
from PIL import Image
from safetensors.torch import load_file
from small_models import masked_lm, sentence_encoder

from pouf import EMBEDDED, Classifier, FeatureCache, Images, InputError, Recipe
from pouf.demo import DIGITS
from pouf.inference.encode import InferenceConfig
from pouf.parallel.process_group import ProcessGroup, check_launch, timeout
from pouf.training.model import as_launched

HERE = Path(__file__).parent
SCRIPT = str(HERE / "distributed_cases.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
QUICK = ["images full", "few readable, chunks", "descriptions, chunks", "cloze full", "vectors, refined", "views",
         "decay", "other start", "other choice", "demonstrations", "resumed", "resumed, adamw",
         "anchored, ended by one", "temperature unused", "cloze upper"]  # fmt: skip
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: false
  fsdp_offload_params: false
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
"""


def launched(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    several = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=several)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures and models. One picture can't be read: whoever meets it, all must know."""
    folder = tmp_path_factory.mktemp("distributed")
    noise = np.random.default_rng(0)
    for name in ("images", "mostly broken"):
        (folder / name).mkdir()
        for i in range(17):
            pixels = noise.integers(0, 256, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
            if i == 3 or (name == "mostly broken" and i % 5):
                (folder / name / f"{i}.png").write_bytes(f"no picture {i}".encode())
    sentence_encoder(folder / "encoder")
    masked_lm(folder / "lm", "roberta")
    return folder


@pytest.fixture(scope="module")
def ran(folder: Path) -> Path:
    """Some cases by two processes, with both engines."""
    result = launched([*TORCHRUN, "2", SCRIPT, str(folder), str(folder / "two"), "--engines", "ddp", "fsdp",
                       "--runs", "--cases", *QUICK])  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path):
    return cache(lambda name: state(CASES[name](folder)))


def assert_same_as_one(out: Path, name: str, alone) -> None:
    together = load_file(out / f"{name}.safetensors")
    assert together.keys() == alone(name).keys()
    for parameter, value in alone(name).items():
        assert torch.allclose(together[parameter], value, atol=1e-5), parameter


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", QUICK)
def test_two_processes_take_the_same_steps_as_one(ran: Path, engine: str, name: str, alone) -> None:
    assert_same_as_one(ran / "two" / engine, name, alone)


def test_the_engines_are_those_asked_for(ran: Path) -> None:
    facts = json.loads((ran / "two" / "facts.json").read_text())
    assert (facts["ddp"]["model"], facts["ddp"]["share"]) == ("DistributedDataParallel", 1.0)
    assert facts["fsdp"]["model"].startswith("FSDP")
    assert 0.4 < facts["fsdp"]["share"] < 0.6, "half of the weights is here, the other half is there"


def facts_of(ran: Path, engine: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ran / "two" / "facts.json").read_text())[engine]
    return found


def test_no_process_holds_more_than_its_shards_after_a_run(ran: Path) -> None:
    """Of all tensors that are alive, as a multiple of the weights: half of the matrices, and what is no matrix."""
    assert all(0.99 < share < 1.1 for share in facts_of(ran, "ddp")["held"])
    assert all(share < 0.55 for share in facts_of(ran, "fsdp")["held"])


@pytest.fixture(scope="module")
def one_run(folder: Path) -> Path:
    """What two processes do with folders, by this one alone and without an interruption."""
    out = folder / "one"
    whole_run(folder, out / "run", interrupted=False)
    diverged(folder, out / "diverged")
    (out / "evaluation.json").write_text(json.dumps(used(folder, out / "run", out / "p.parquet", False)))
    return out


def files(run: Path) -> list[str]:
    return sorted(file.relative_to(run).as_posix() for file in run.rglob("*") if file.is_file())


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["run", "diverged"])
def test_a_run_folder_of_two_processes_is_that_of_one(ran: Path, one_run: Path, engine: str, name: str) -> None:
    """Two processes were ended by a signal that one of them got, and went on."""
    together, alone = ran / "two" / engine / name, one_run / name
    assert files(together) == files(alone)
    for use in ("advised", "last"):
        ours, theirs = (weights(Classifier.from_pretrained(run, use=use)) for run in (together, alone))
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[key], theirs[key], atol=1e-5) for key in ours)
    ours, theirs = (json.loads((run / "details/run.json").read_text()) for run in (together, alone))
    assert ours["status"] == theirs["status"] == {"run": "finished", "diverged": "diverged"}[name]
    assert ("resumed" in ours) is (name == "run")
    if name == "run":
        pd.testing.assert_frame_equal(*(pd.read_csv(run / "predictions.csv") for run in (together, alone)), atol=1e-5)


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_predictions_and_figures_of_two_processes_are_those_of_one(ran: Path, one_run: Path, engine: str) -> None:
    tables = [pd.read_parquet(file) for file in (ran / "two" / engine / "predictions.parquet", one_run / "p.parquet")]
    pd.testing.assert_frame_equal(*tables, check_exact=False, atol=1e-5)
    for name, figure in json.loads((one_run / "evaluation.json").read_text()).items():
        assert facts_of(ran, engine)[name] == figure, name


def test_lists_of_files_must_agree_in_names_and_contents(ran: Path) -> None:
    said = json.loads((ran / "two" / "facts.json").read_text())["disagreeing"]
    assert said == ["processes 0 and 1 see different inputs: give all processes the same"] * 2


def test_accelerate_launch_shards_as_its_config_says(folder: Path, tmp_path: Path, alone) -> None:
    """accelerate itself would use DDP on a CPU, and say nothing."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "config.yaml")]
    cases = ["images full", "texts layernorm", "resumed"]  # layers that stay whole must not outlive a look
    result = launched([*launch, SCRIPT, str(folder), str(tmp_path), "--engines", "launched", "--cases", *cases])
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads((tmp_path / "facts.json").read_text())["launched"]["model"].startswith("FSDP")
    for name in cases:
        assert_same_as_one(tmp_path / "launched", name, alone)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_all_cases_with_two_and_three_processes(folder: Path, tmp_path: Path, processes: int, alone) -> None:
    result = launched([*TORCHRUN, str(processes), SCRIPT, str(folder), str(tmp_path), "--engines", "ddp", "fsdp"])
    assert result.returncode == 0, result.stderr[-3000:]
    for engine in ("ddp", "fsdp"):
        for name in CASES:
            assert_same_as_one(tmp_path / engine, name, alone)


@pytest.mark.parametrize(("signal_name", "message"), [("SIGKILL", "has ended"), ("SIGSTOP", "not answered for 15 s")])
def test_when_one_process_is_lost_the_others_end_in_time_and_say_so(
    folder: Path, tmp_path: Path, signal_name: str, message: str
) -> None:
    """Without a launcher that would end them. A process that stops closes no connection, as a machine that is gone."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "ENDED_BY": signal_name,
             "POUF_PROCESS_TIMEOUT": "15"}  # fmt: skip
    command = [sys.executable, SCRIPT, str(folder), str(tmp_path)]
    both = [
        subprocess.Popen(command, env=os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                         stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]  # fmt: skip
    try:
        stderr = both[0].communicate(timeout=120)[1]
        assert both[0].returncode == 1
        assert "ProcessLost" in stderr
        assert message in stderr
    finally:
        for process in both:
            process.send_signal(signal.SIGKILL)
            process.communicate()


def test_a_time_out_that_is_no_number_is_an_error(environment: Callable[..., None]) -> None:
    environment(POUF_PROCESS_TIMEOUT="soon")
    with pytest.raises(InputError, match="POUF_PROCESS_TIMEOUT is 'soon'"):
        timeout()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", "DeepSpeed"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "gradient_accumulation_steps"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "dynamo_backend"),
        ("ACCELERATE_MIXED_PRECISION", "fp8", "mixed_precision"),
        ("FSDP_VERSION", "1", "fsdp_version"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params"),
        ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP", "fsdp_auto_wrap_policy"),
    ],
)
def test_a_setting_of_accelerate_that_can_not_be_honoured_is_named(
    environment: Callable[..., None], name: str, value: str, told: str
) -> None:
    environment(ACCELERATE_USE_FSDP="true" if name.startswith("FSDP") else "false", FSDP_VERSION=2)
    check_launch()
    environment(**{name: value})
    with pytest.raises(InputError, match=told):
        check_launch()


@pytest.mark.parametrize("setting", [{"compute.compile": True}, {"compute.precision": "fp16"}])
def test_what_does_not_go_with_shards_is_named(setting: dict[str, object]) -> None:
    recipe = Recipe().with_settings(setting)
    as_launched(recipe, ProcessGroup(0, 2))
    with pytest.raises(InputError, match=r"compute\.compile|fp16"):
        as_launched(recipe.with_settings({"compute.shard": True}), ProcessGroup(0, 2))


def test_the_precision_is_what_accelerate_says(folder: Path, environment: Callable[..., None]) -> None:
    def adapted(**settings: object) -> dict[str, torch.Tensor]:
        classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
        plain = Recipe(steps=2, batch_size=7, augment="none", snapshots=0)
        train(classifier, Images.from_folder(folder / "images"), plain.with_settings(**settings))
        return weights(classifier)

    exact, half = adapted(), {name: adapted(**{"compute.precision": name}) for name in ("bf16", "fp16")}
    for name, rounded in half.items():
        environment(ACCELERATE_MIXED_PRECISION=name)
        told = adapted()
        assert all(torch.equal(told[key], rounded[key]) for key in rounded)
        assert any(not torch.equal(told[key], exact[key]) for key in exact)
        assert all(torch.allclose(told[key], exact[key], atol=1e-3) for key in exact)
    with pytest.raises(InputError, match="mixed_precision fp16, the recipe for bf16"):
        adapted(**{"compute.precision": "bf16"})


@pytest.mark.slow
def test_one_process_that_fails_in_a_step_ends_all_with_its_error(ran: Path, tmp_path: Path) -> None:
    """The other one waits for its features and would wait for ever."""
    start = time.perf_counter()
    result = launched([*TORCHRUN, "2", SCRIPT, str(ran), str(tmp_path), "--cases", "images full"], FAILS_ON_RANK="1")
    assert result.returncode != 0
    assert "this process fails on purpose" in result.stderr
    assert time.perf_counter() - start < 120


def pouf(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line by two processes."""
    command = [*TORCHRUN, "2", "-m", "pouf", *arguments, "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "POUF_CACHE": str(cwd / "cache2")}
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def test_the_command_line_writes_and_speaks_once(folder: Path, tmp_path: Path) -> None:
    result = pouf(
        tmp_path,
        "adapt", "--model", EMBEDDED, "--images", str(folder / "images"), "--classes", ",".join(DIGITS), "--json",
        "--recipe", "demo", "--steps", "2", "--batch-size", "8", "--chunk", "3", "--out", "run",
    )  # fmt: skip
    facts = json.loads(result.stdout)
    assert (facts["n"], facts["steps"]) == (17, 2)
    assert json.loads((tmp_path / "run" / "details/run.json").read_text())["status"] == "finished"
    assert len((tmp_path / "run" / "details/metrics.jsonl").read_text().splitlines()) == 2
    whole = (tmp_path / "run" / "predictions.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in whole[1:]] == [name for name in Images.from_folder(folder / "images").ids
                                                          if name != "3.png"]  # fmt: skip
    (tmp_path / "two.parquet").write_text("of an earlier run")
    printed = pouf(
        tmp_path, "predict", "run", str(folder / "images"), "--use", "last", "--json", "--out", "two.parquet",
        "--overwrite", "--abstain", "0.2", "--unknown",
    ).stdout  # fmt: skip
    assert (json.loads(printed)["n"], [each["id"] for each in json.loads(printed)["unreadable"]]) == (16, ["3.png"])
    # The cache of two processes serves one.
    alone = Classifier.from_pretrained(tmp_path / "run", use="last")
    cache = FeatureCache(tmp_path / "cache2")
    before = len(list(cache.folder.rglob("*.npy")))
    predictions = alone.infer(Images.from_folder(folder / "images"), InferenceConfig(cache=cache))
    assert len(list(cache.folder.rglob("*.npy"))) == before
    assert sorted(file.name for file in (tmp_path / "two.parquet").iterdir()) == [
        "part-00000-of-00002.parquet", "part-00001-of-00002.parquet",
    ]  # fmt: skip
    table = pd.read_parquet(tmp_path / "two.parquet")
    expected = [DIGITS[k] for k in predictions.log_probabilities.argmax(1).tolist()]
    assert [said for said, e in zip(table["class"], expected, strict=True) if said not in (e, "unknown")] == []
    cli_runner.pouf("predict", "run", folder / "images", "--use", "last", "--out", "one.parquet", "--abstain", "0.2",
                    "--unknown", cwd=tmp_path)  # fmt: skip
    one = pd.read_parquet(tmp_path / "one.parquet")
    pd.testing.assert_frame_equal(one, table, check_exact=False, atol=1e-5)


@pytest.mark.slow
def test_two_processes_search_together(folder: Path, tmp_path: Path) -> None:
    result = pouf(
        tmp_path,
        "search", "--model", EMBEDDED, "--images", str(folder / "images"), "--classes", ",".join(DIGITS), "--json",
        "--recipe", "demo", "--steps", "2", "--batch-size", "8", "--lrs", "1e-3,1e-2", "--out", "tuned", "--no-report",
    )  # fmt: skip
    assert json.loads(result.stdout)["trials"] == 2
    assert json.loads((tmp_path / "tuned" / "details/run.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("n", [0, 1, 7, 8])
def test_shares_are_the_whole_in_its_order(n: int) -> None:
    items = list(range(n))
    shares = [ProcessGroup(rank, 3).share(items) for rank in range(3)]
    assert [item for share in shares for item in share] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
