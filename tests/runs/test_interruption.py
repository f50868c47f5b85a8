"""A run that is ended at any moment, however hard, goes on to the bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from interruption_cases import CASES, STEPS, run, searched
from PIL import Image
from safetensors.torch import load_file
from small_models import masked_lm, sentence_encoder

from pouf import Callback, Classifier, InputError, Output, Vectors
from pouf.runs.folder import UNFINISHED

SCRIPT = Path(__file__).with_name("interruption_cases.py")
TIMES = ("seconds", "created", "resumed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("interrupted")
    noise = np.random.default_rng(0)
    (there / "images").mkdir()
    for i in range(17):
        Image.fromarray(noise.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(there / "images" / f"{i}.png")
    (there / "images" / "3.png").write_bytes(b"no picture")
    sentence_encoder(there / "encoder")
    masked_lm(there / "lm", "roberta")
    return there


class Ends(Callback):
    """Sends a signal to this process after a step."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.step, self.number = step, number

    def on_step(self, step: object) -> None:
        if step.step == self.step:  # type: ignore[attr-defined]
            os.kill(os.getpid(), self.number)


def outcome(run: Path) -> dict[str, object]:
    """Everything that a run came to: weights to the bit, verdict, what was logged of each step but times."""
    told: dict[str, object] = {}
    for file in sorted(run.rglob("*.safetensors")):
        if UNFINISHED not in file.parts:
            told |= {f"{file.relative_to(run)} {name}": t.numpy().tobytes() for name, t in load_file(file).items()}
    told["verdict"] = json.loads((run / "details/verdict.json").read_text())
    steps = [json.loads(line) for line in (run / "details/metrics.jsonl").read_text().splitlines()]
    told["steps"] = [{name: value for name, value in step.items() if name not in TIMES} for step in steps]
    told["status"] = json.loads((run / "details/run.json").read_text())["status"]
    if (run / "details/search.json").exists():
        told["search"] = json.loads((run / "details/search.json").read_text())
    return told


@pytest.mark.parametrize("kind", CASES)
def test_a_run_that_was_ended_twice_comes_to_the_same_end(folder: Path, tmp_path: Path, kind: str) -> None:
    run(folder, kind, tmp_path / "whole")
    for step in (4, 8):
        with pytest.raises(SystemExit) as ended:
            run(folder, kind, tmp_path / "ended", resume=step > 4, callbacks=[Ends(step)])
        assert ended.value.code == 143
        assert len((tmp_path / "ended" / "details/metrics.jsonl").read_text().splitlines()) == step
        assert json.loads((tmp_path / "ended" / "details/run.json").read_text())["status"] == "interrupted"
    run(folder, kind, tmp_path / "ended", resume=True)
    assert outcome(tmp_path / "ended") == outcome(tmp_path / "whole")


def saved(run: Path) -> float:
    """When something was saved to go on from."""
    with suppress(FileNotFoundError):  # it may go while we look
        return max((file.stat().st_mtime for file in (run / UNFINISHED).rglob("state.safetensors")), default=0.0)
    return 0.0


def finished(run: Path) -> bool:
    manifest = run / "details/run.json"
    there = manifest.exists() and json.loads(manifest.read_text())["status"] == "finished"
    return there and not (run / UNFINISHED).exists()


def started(folder: Path, kind: str, output: Path, *more: str, processes: int = 1, slow: float = 0.5):
    """A process of its own that has taken its first step."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*(launch if processes > 1 else [sys.executable]), str(SCRIPT), str(folder), kind, str(output), *more]
    environment = os.environ | {"SLOW": str(slow), "OMP_NUM_THREADS": "1"}
    before = saved(output)
    # A shell that runs the tests in the background makes its children ignore Ctrl-C.
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while process.poll() is None and saved(output) == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def ended_at_random(
    folder: Path, kind: str, output: Path, draw: random.Random, processes: int = 1, longest: float = 0.8
) -> None:
    """Start a run, or go on with it, and end it at a random moment between two of its steps or within one."""
    number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    process = started(folder, kind, output, "resume", processes=processes)
    time.sleep(draw.uniform(0, longest))
    assert process.poll() is None, "it is alive: this kill counts"
    # The launcher's processes have sessions of their own: where it is killed, they would finish the run.
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split() if processes > 1 else []
    os.killpg(process.pid, number) if processes > 1 else process.send_signal(number)
    for worker in workers if number == signal.SIGKILL else ():
        with suppress(ProcessLookupError):
            os.kill(int(worker), number)
    said = process.communicate(timeout=120)[1]
    if processes == 1:  # after SIGINT Python ends by the signal itself
        assert process.returncode in (-number, {signal.SIGTERM: 143, signal.SIGHUP: 129}.get(number)), said


def goes_on(folder: Path, kind: str, tmp_path: Path, kills: int, processes: int = 1, longest: float = 0.8) -> None:
    """However often it was ended, it comes to the end of one that was not."""
    draw = random.Random(kind)
    for _ in range(kills):
        ended_at_random(folder, kind, tmp_path / "run", draw, processes, longest)
    for output in ("whole", "run"):
        if processes > 1:
            started(folder, kind, tmp_path / output, "resume", processes=processes, slow=0).communicate(timeout=300)
        else:
            act = searched if kind == "search" else partial(run, kind=kind)
            act(folder, output_dir=tmp_path / output, resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert not list((tmp_path / "run").rglob(".*.partial")) and not (tmp_path / "run" / UNFINISHED).exists()


def killed_in_writes(folder: Path, kind: str, tmp_path: Path, moments: list[int]) -> None:
    """See `interruption_cases.killed_in_writes`."""
    command = [sys.executable, str(SCRIPT), str(folder), kind, str(tmp_path), "in-writes", *map(str, moments)]
    said = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    expected = [f"{moment} {-signal.SIGKILL} 0" for moment in moments]
    assert said.stdout.splitlines() == expected, said.stderr[-3000:]
    (searched if kind == "search" else partial(run, kind=kind))(folder, output_dir=tmp_path / "whole")
    for moment in moments:
        assert outcome(tmp_path / str(moment)) == outcome(tmp_path / "whole"), moment
        assert not list((tmp_path / str(moment)).rglob(".*.partial"))


def test_a_run_that_is_killed_while_it_writes_goes_on_to_the_bit(folder: Path, tmp_path: Path) -> None:
    killed_in_writes(folder, "vectors", tmp_path, [2, 5, 12, 17])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vectors", "prompt", "search"])
def test_runs_of_every_kind_that_are_killed_while_they_write_go_on(folder: Path, tmp_path: Path, kind: str) -> None:
    killed_in_writes(folder, kind, tmp_path, list(range(1, 26)))


def test_a_process_that_is_ended_at_random_moments_goes_on_to_the_bit(folder: Path, tmp_path: Path) -> None:
    goes_on(folder, "vectors", tmp_path, kills=3, longest=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "prompt", "text", "cloze", "search"])
def test_processes_of_every_kind_that_are_ended_at_random_moments_go_on(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    goes_on(folder, kind, tmp_path, kills=5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "vectors", "search"])
def test_two_processes_that_are_ended_at_random_moments_go_on(folder: Path, tmp_path: Path, kind: str) -> None:
    goes_on(folder, kind, tmp_path, kills=3, processes=2)


def test_a_search_goes_on_with_the_trial_that_was_under_way(folder: Path, tmp_path: Path) -> None:
    whole, told = [], []
    searched(folder, tmp_path / "whole", on_trial=whole.append)

    class InTheSecond(Ends):
        trials = 0

        def on_start(self, *_: object) -> None:
            self.trials += 1

        def on_step(self, step: object) -> None:
            if self.trials == 2:
                super().on_step(step)

    with pytest.raises(SystemExit):
        searched(folder, tmp_path / "ended", callbacks=[InTheSecond(5)])
    assert len(json.loads((tmp_path / "ended" / "details/search.json").read_text())["trials"]) == 1
    assert json.loads((tmp_path / "ended" / "details/run.json").read_text())["status"] == "interrupted"
    steps: list[int] = []

    class Counting(Callback):
        def on_step(self, step: object) -> None:
            steps.append(step.step)  # type: ignore[attr-defined]

    searched(folder, tmp_path / "ended", resume=True, callbacks=[Counting()], on_trial=told.append)
    assert outcome(tmp_path / "ended") == outcome(tmp_path / "whole")
    assert steps[: STEPS - 5] == list(range(6, STEPS + 1)), "the second trial goes on after its fifth step"
    assert told[:2] == whole[1:3], "the first is not run again before the vote"


def test_signals_end_in_their_codes_and_a_second_one_at_once(folder: Path, tmp_path: Path) -> None:
    for number, error in ((signal.SIGHUP, SystemExit), (signal.SIGINT, KeyboardInterrupt)):
        with pytest.raises(error) as ended:
            run(folder, "vectors", tmp_path / str(number), callbacks=[Ends(3, number)])
        assert error is KeyboardInterrupt or ended.value.code == 129
        assert Classifier.from_pretrained(tmp_path / str(number)).classes == tuple("abcdef")

    class Twice(Ends):
        def on_step(self, step: object) -> None:
            super().on_step(step)
            super().on_step(step)

    with pytest.raises(KeyboardInterrupt):
        run(folder, "vectors", tmp_path / "twice", callbacks=[Twice(3, signal.SIGINT)])
    assert not (tmp_path / "twice" / "model").exists(), "nothing is saved"
    run(folder, "vectors", tmp_path / "twice", resume=True)
    run(folder, "vectors", tmp_path / "whole")
    assert outcome(tmp_path / "twice") == outcome(tmp_path / "whole")


def test_handlers_of_others_are_left_alone(folder: Path, tmp_path: Path) -> None:
    arrived: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    try:
        run(folder, "vectors", tmp_path / "run", callbacks=[Ends(3)])
    finally:
        theirs = signal.signal(signal.SIGTERM, before)
    assert arrived == [signal.SIGTERM] and theirs is not before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_there_is_resumed_or_overwritten_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(folder, "vectors", tmp_path / "run", callbacks=[Ends(3)])
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    with pytest.raises(InputError, match="already exists: give resume=True"):
        run(folder, "vectors", tmp_path / "run")
    with pytest.raises(InputError, match=r"can't go on with this run, since this has changed: seed, optimisation.lr"):
        run(folder, "vectors", tmp_path / "run", resume=True, settings={"optimisation.lr": 0.5, "seed": 3})
    classifier, data, how = CASES["vectors"](folder)
    with pytest.raises(InputError, match="can't go on with this run, since this has changed: the data"):
        classifier.adapt(Vectors(data.array[:50]), **how, output=Output(tmp_path / "run", resume=True))
    after = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert after == before, "an error changes nothing"
    (tmp_path / "run" / "review.csv").write_text("id,text,label\n1,,a\n")
    run(folder, "vectors", tmp_path / "run", overwrite=True)
    assert "resumed" not in json.loads((tmp_path / "run" / "details/run.json").read_text())
    assert (tmp_path / "run" / "review.csv").read_text().endswith("1,,a\n"), "people's labels stay"
    with pytest.raises(InputError, match="is finished: there is nothing to resume"):
        run(folder, "vectors", tmp_path / "run", resume=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("ten years")
    for how in ({"overwrite": True}, {"resume": True}):
        with pytest.raises(InputError, match="holds files, but no run"):
            run(folder, "vectors", tmp_path / "mine", **how)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "ten years"


def test_two_processes_do_not_write_into_one_folder(folder: Path, tmp_path: Path) -> None:
    process = started(folder, "vectors", tmp_path / "run", slow=30)
    try:
        for how in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(InputError, match="another process is writing into"):
                run(folder, "vectors", tmp_path / "run", **how)
            with pytest.raises(InputError, match="another process is writing into"):
                searched(folder, tmp_path / "run", **how)
    finally:
        process.kill()
        process.communicate()
    run(folder, "vectors", tmp_path / "run", resume=True)
