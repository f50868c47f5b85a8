"""A run of a table that is killed, and the one that goes on in its folder."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_runner import one_line_error, pouf

from pouf import EMBEDDED
from pouf.bench.standins import make_data

METHODS = "zero-shot,tent,pouf-prompt,pouf-full,coop"


def command(*more: object) -> list[str]:
    """Five cells, of which those that train take seconds."""
    usual = ["bench", "run", "images", "--data", "data", "--model", EMBEDDED, "--tasks", "office31:dslr", "--seeds", 0]
    return [str(word) for word in (*usual, "--methods", METHODS, "--set", "steps=8", "--out", "out", *more)]


def cells(folder: Path) -> dict[str, int]:
    """The finished ones, and when they were written."""
    return {file.name: file.stat().st_mtime_ns for file in (folder / "out" / "cells").glob("*.json")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_data(tmp_path / "data")
    return tmp_path


def test_a_killed_run_is_resumed_without_computing_a_finished_cell_again(folder: Path) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pouf", *command("--quiet")], cwd=folder, env=environment, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 240
    while len(cells(folder)) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL, process.stderr and process.stderr.read()
    before = cells(folder)
    assert 2 <= len(before) < 5 and not (folder / "out" / "images.md").exists()
    output = pouf(*command("--resume"), cwd=folder).stdout
    after = cells(folder)
    assert len(after) == 5 and {name: after[name] for name in before} == before
    assert "0 of 5 cells failed" in output
    pouf(*command("--resume", "--quiet"), cwd=folder)
    assert cells(folder) == after


POOL = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from pouf.bench.run import _end_with_parent
if __name__ == "__main__":
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _end_with_parent) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(600)
"""


def test_processes_of_a_killed_run_do_not_stay_behind(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text(POOL)
    parent = subprocess.Popen([sys.executable, tmp_path / "pool.py"], stdout=subprocess.PIPE, text=True)
    child = Path("/proc") / parent.stdout.readline().strip()
    assert child.name and child.exists()
    parent.kill()
    deadline = time.monotonic() + 30
    while child.exists() and "Z" not in (child / "stat").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert time.monotonic() < deadline


def test_results_of_other_settings_are_added_to_with_resume_only(folder: Path) -> None:
    quick = ("--methods", "zero-shot", "--quiet")
    pouf(*command(*quick), cwd=folder)
    pouf(*command(*quick), cwd=folder)  # the same settings go on
    first = cells(folder)
    error = one_line_error(pouf(*command(*quick, "--set", "batch_size=7"), cwd=folder, code=2))
    assert "'out' holds results of images with other settings" in error and "resume to keep them" in error
    assert cells(folder) == first
    pouf(*command(*quick, "--set", "batch_size=7", "--resume"), cwd=folder)
    assert len(cells(folder)) == 2
    wrong = one_line_error(pouf(*command(*quick, "--unlabelled", "all"), cwd=folder, code=2))
    assert "unknown unlabelled setting 'all': choose one of kshot, train" in wrong


def test_a_part_of_a_table_keeps_what_was_there_and_takes_any_method(folder: Path) -> None:
    usual = ["bench", "run", "images", "--data", "data", "--model", EMBEDDED, "--tasks", "office31:dslr", "--seeds", 0]
    pouf(*usual, "--methods", "zero-shot", "--out", "out", "--quiet", cwd=folder)
    output = pouf(*usual, "--methods", "sinkhorn,majority", "--out", "out", "--json", cwd=folder).stdout
    facts = json.loads(output, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert facts["cells"] == 2 and facts["failed"] == 0
    table = (folder / "out" / "images.md").read_text()
    assert all(f"| {name}" in table for name in ("zero-shot", "sinkhorn", "majority")), table
    assert EMBEDDED in table
    error = one_line_error(pouf(*usual, "--set", "stps=4", "--out", "out", cwd=folder, code=2))
    assert "stps: unknown setting" in error and "Did you mean 'steps'?" in error
