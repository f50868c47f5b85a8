"""A command that is ended while it does anything at all: its work is there, or the same command gets it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ending_sweep import CASES, outcome
from helpers import groups

from pouf import Classifier
from pouf.saving import CARD, SAVED

SWEEP, CASES_SCRIPT = (Path(__file__).with_name(f"{name}.py") for name in ("ending_sweep", "interruption_cases"))
SIGNALS = ("SIGTERM", "SIGKILL", "SIGHUP", "SIGINT")


def sweep(folder: Path, case: str, every: str) -> list[dict[str, object]]:
    command = [sys.executable, str(SWEEP), str(folder), case, every, *SIGNALS]
    said = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert said.returncode == 0, said.stderr[-3000:]
    ends = [json.loads(line) for line in said.stdout.splitlines()]
    assert ends and [end for end in ends if end["wrong"]] == []
    for end in ends:
        codes = {"SIGTERM": 143, "SIGKILL": -9, "SIGHUP": 129, "SIGINT": 130}
        at_the_end = end["moment"] + 8 > end["of"] and end["signal"] != "SIGKILL"  # nothing is left to be interrupted
        assert end["code"] in (codes[end["signal"]], *([0] if at_the_end else [])), end
    return ends


def test_a_run_that_is_ended_where_any_phase_begins_comes_to_the_same_result(tmp_path: Path) -> None:
    ends = sweep(tmp_path, "adapt", "phases")
    assert {"training", "writing predictions and report"} <= {end["what"] for end in ends}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_command_that_is_ended_at_any_moment_comes_to_the_same_result(tmp_path: Path, case: str) -> None:
    sweep(tmp_path, case, "3")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("phase", ["choosing", "writing"])
def test_two_processes_that_are_ended_after_their_last_step_come_to_the_same_result(
    tmp_path: Path, phase: str, name: str
) -> None:
    def act(output: str, ends: str) -> int:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(CASES_SCRIPT),
        ]
        command += [str(tmp_path), "vectors", str(tmp_path / output), "resume"]
        environment = os.environ | {"SLOW": "0", "OMP_NUM_THREADS": "1", "END_IN": ends}
        return subprocess.run(command, env=environment, capture_output=True).returncode

    assert act("run", f"{phase} {name}") != 0
    assert act("run", "") == act("whole", "") == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_classifier_that_is_saved_over_another_is_one_of_both_whenever_the_process_is_killed(tmp_path: Path) -> None:
    """Before every other change of the disk."""
    features, prototypes = groups()
    names = list("abcdef")
    old, new = (Classifier.from_vectors(each, names) for each in (prototypes, prototypes.flip(0)))
    said = {True: new.predict(features), False: old.predict(features)}
    assert said[True] != said[False]
    found: list[bool] = []
    while True:
        folder = tmp_path / str(len(found))
        old.save_pretrained(folder)
        if not (pid := os.fork()):
            left = 2 * len(found)

            def dies(event: str, arguments: tuple[object, ...]) -> None:
                nonlocal left
                if event in ("os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir"):
                    left -= 1
                    if left < 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(dies)
            new.save_pretrained(folder)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        now = Classifier.from_pretrained(folder).predict(features)
        assert now in said.values()
        found.append(now == said[True])
        if not code:
            break
        old.save_pretrained(folder)  # and whoever saves next is not in the way of what was left
        assert Classifier.from_pretrained(folder).predict(features) == said[False]
        assert not (folder / SAVED).exists()
    assert found == sorted(found) and True in found[:-1], "the new one is there before all is in its place"
    assert (folder / CARD).is_file() and not (folder / SAVED).exists()
