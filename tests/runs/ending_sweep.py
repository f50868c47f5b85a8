"""A command that is ended at every moment: after each change that it makes to the disk, and where each phase begins.

python tests/runs/ending_sweep.py FOLDER CASE EVERY SIGNAL…   # every n-th moment; or "phases", where one begins, and
                                                              # the last ones

Signals take turns. For each moment one line of JSON: the signal, what the command was doing, how it ended, and what was
wrong afterwards, if anything.
All are children of this process, which has computed nothing itself: starting Python for each would take minutes.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from helpers import groups
from safetensors.torch import load_file

from pouf import Classifier
from pouf.cli import main
from pouf.files import LOCK
from pouf.runs.folder import UNFINISHED
from pouf.saving import is_saved
from pouf.training import state

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link")
TASK = ("--features", "f.npy", "--prototypes", "p.npz")
TRAINING = ("--steps", "4", "--save-every", "0.001", "--seed", "0", "--out", "run", "--quiet")
COMMANDS = {
    "adapt": ("adapt", *TASK, *TRAINING),
    "search": ("search", *TASK, *TRAINING, "--lrs", "1e-3,1e-2", "--no-report"),
    "predict": ("predict", "whole", "f.npy", "--out", "run/predictions.csv", "--overwrite", "--quiet"),
    "evaluate": ("evaluate", "whole", "labelled.npz", "--json"),
}
# What stands in the folder before: nothing, a run that was ended after two steps, or one that is to be replaced.
CASES = {
    "adapt": ("adapt", None), "adapt, resumed": ("adapt", "ended"), "adapt, overwriting": ("adapt", "other"),
    "search": ("search", None), "search, resumed": ("search", "ended"), "predict": ("predict", "other"),
    "evaluate": ("evaluate", None),
}  # fmt: skip
TIMES = ("seconds", "created", "resumed", "command")


class Moments:
    """Counts changes of the disk, and signals this process at one of them; phases count as well, and some reads."""

    def __init__(self, number: int, at: int | None, reads: bool) -> None:
        self.number, self.at, self.reads = number, at, reads
        self.names: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        file = Path(str(arguments[0])) if arguments else Path("/")
        if event in CHANGES or (self.reads and event == "open" and not file.is_absolute()):
            self.passed(f"{event} {file.name}")

    def passed(self, what: str) -> None:
        self.names.append(what)
        if len(self.names) == self.at:
            os.kill(os.getpid(), self.number)


def child(command: tuple[str, ...], number: int = 0, at: int | None = None) -> int:
    """Run a command in a process of its own -> its exit code."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # not those of a shell that runs this in the background
        signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
    torch.set_num_threads(1)
    state.SHARE = 0  # saved after each step, however long that takes: moments are the same on every machine
    moments = Moments(number, at, reads=command[0] in ("predict", "evaluate"))
    sys.addaudithook(moments)
    from pouf.cli._progress import ProgressReporter

    phase = ProgressReporter.on_phase
    ProgressReporter.on_phase = lambda self, name, *n, **m: (moments.passed(name), phase(self, name, *n, **m))[1]  # type: ignore
    sys.argv = ["pouf", *command]
    try:
        main()
    except SystemExit as ended:
        if at is None:
            Path("moments").write_text("\n".join(moments.names))
            Path("modules").write_text("\n".join(sys.modules))
        sys.stdout.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 1)


def outcome(run: Path) -> dict[str, Any]:
    """Everything that a command came to, but for times."""
    there: dict[str, Any] = {}
    for file in sorted(run.rglob("*")):
        name = str(file.relative_to(run))
        if not file.is_file() or file.suffix in (".html", ".md"):  # they show times
            continue
        if ".partial" in str(file) or UNFINISHED in file.parts or file.name == LOCK:  # left behind, and never read
            continue
        if file.suffix == ".safetensors":
            there |= {f"{name} {key}": tensor.numpy().tobytes() for key, tensor in load_file(file).items()}
        elif file.name == "run.json":
            there[name] = {key: value for key, value in json.loads(file.read_text()).items() if key not in TIMES}
        elif file.name == "metrics.jsonl":
            steps = [json.loads(line) for line in file.read_text().splitlines()]
            there[name] = [{key: value for key, value in step.items() if key not in TIMES} for step in steps]
        else:
            there[name] = file.read_bytes()
    return there


def wrong(case: str, expected: dict[str, Any]) -> str:
    """What is wrong with the folder as the end left it, or after the same command once more; nothing is wrong: ""."""
    (name, before), run = CASES[case], Path("run")
    trains = name in ("adapt", "search")
    if trains:
        if is_saved(run):
            Classifier.from_pretrained(run, use="last")
        elif before == "other":
            return "neither the old run nor the new one is there"
    elif before == "other" and not (run / "predictions.csv").is_file():
        return "the predictions of before are gone"
    manifest = run / "details/run.json"
    done = manifest.is_file() and json.loads(manifest.read_text())["status"] == "finished"
    if not trains or not done or (run / UNFINISHED).exists() or outcome(run) != expected:
        again = ("--resume",) if (run / UNFINISHED).exists() or not done else ("--overwrite",)
        code = child((*COMMANDS[name], *(again if trains else ())))
        if code:
            return f"the same command again ended with {code}: {Path('log').read_text()[-400:]}"
    now = outcome(run)
    differ = sorted(key for key in now.keys() | expected.keys() if now.get(key) != expected.get(key))
    return f"another result: {', '.join(differ)}" if differ else ""


def swept(folder: Path, case: str, every: str, signals: list[str]) -> None:
    os.chdir(folder)
    name, before = CASES[case]
    command, run = COMMANDS[name], Path("run")

    def prepared() -> None:
        shutil.rmtree(run, ignore_errors=True)
        if before is not None:
            shutil.copytree(f"{before}-{name}", run)

    how = (
        {"other": ("--overwrite",), "ended": ("--resume",)}.get(str(before), ()) if name in ("adapt", "search") else ()
    )
    prepare(name)
    for _ in range(2):  # counted once nothing is left to be imported, since imports make folders of their own
        prepared()
        assert child((*command, *how)) == 0, Path("log").read_text()
        for module in Path("modules").read_text().splitlines():  # what is imported here need not be in each child
            with suppress(ImportError):
                importlib.import_module(module)
    names, expected = Path("moments").read_text().splitlines(), outcome(run)
    if name in ("adapt", "search"):
        assert expected == outcome(Path(f"whole-{name}")), "this is what the command comes to in an empty folder"
    phases = [i for i, what in enumerate(names) if not what.startswith(("os.", "open ")) or i > len(names) - 5]
    for turn, i in enumerate(phases if every == "phases" else range(0, len(names), int(every))):
        prepared()
        sent = signals[turn % len(signals)]
        code = child((*command, *how), getattr(signal, sent), i + 1)
        try:
            told = wrong(case, expected)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        facts = {"moment": i + 1, "of": len(names), "what": names[i], "signal": sent, "code": code, "wrong": told}
        print(json.dumps(facts), flush=True)


def data(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    features, prototypes = groups(n=36, spread=0.4, apart=0.4)
    classes = np.array(list("abcdef"))
    np.save(folder / "f.npy", features.numpy())
    np.savez(folder / "p.npz", prototypes=prototypes.numpy(), classes=classes)
    labels = classes[(features @ prototypes.T).argmax(1).numpy()]
    np.savez(folder / "labelled.npz", features=features.numpy(), labels=labels)


def prepare(name: str) -> None:
    """The runs that the cases start from, once."""

    def made(place: str, act: Callable[[], int], *codes: int) -> None:
        if not Path(place).exists():
            shutil.rmtree("run", ignore_errors=True)
            code = act()
            assert code in codes, (code, Path("log").read_text())
            Path("run").rename(place)

    if name not in ("adapt", "search"):
        Path("run").mkdir(exist_ok=True)
        made("whole", lambda: child(COMMANDS["adapt"]), 0)
        made(f"other-{name}", lambda: Path("run").mkdir() or child(COMMANDS["predict"]), 0)  # type: ignore[func-returns-value]
        return
    made(f"whole-{name}", lambda: child(COMMANDS[name]), 0)
    made(f"other-{name}", lambda: child((*COMMANDS[name], "--seed", "1")), 0)
    halfway = len(Path("moments").read_text().splitlines()) // 2
    made(f"ended-{name}", lambda: child(COMMANDS[name], signal.SIGTERM, halfway), 143)


if __name__ == "__main__":
    import sklearn.cluster
    import sklearn.metrics  # noqa: F401

    data(Path(sys.argv[1]))
    swept(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
