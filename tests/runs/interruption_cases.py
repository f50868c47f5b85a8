"""Adaptations of every kind that are small and take a while, to be interrupted.

python tests/runs/interruption_cases.py FOLDER KIND OUTPUT [resume]   # under torchrun as well
python tests/runs/interruption_cases.py FOLDER KIND OUTPUT in-writes 1 5 9   # see `killed_in_writes`
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import REVIEWS, groups
from PIL import Image

from pouf import EMBEDDED, Callback, Classifier, Output, Recipe, Stream, Texts, Vectors
from pouf.data.labels import Shots
from pouf.demo import DIGITS

STEPS = 12


def recipe(tune: str, **settings: Any) -> Recipe:
    usual = Recipe(steps=STEPS, batch_size=7, augment="none", temperature=0.1, snapshots=4)
    return usual.with_settings({"tuner.name": tune, "optimisation.lr": 1e-2, "optimisation.clip": 1.0, **settings})


Case = tuple[Classifier, Any, dict[str, Any]]


def images(folder: Path, tune: str, **settings: Any) -> Case:
    return Classifier.from_pretrained(EMBEDDED, DIGITS), folder / "images", {"recipe": recipe(tune, **settings)}


def streamed(folder: Path) -> Case:
    pictures = [Image.open(path) for path in sorted((folder / "images").glob("1*.png"))]
    return Classifier.from_pretrained(EMBEDDED, DIGITS), Stream(lambda: pictures, "image", buffer=7), {
        "recipe": recipe("full", snapshots=0)
    }  # fmt: skip


def texts(folder: Path, tune: str, **settings: Any) -> Case:
    classifier = Classifier.from_pretrained(folder / "encoder", ["good", "bad"], ["it is {}"])
    return classifier, Texts(REVIEWS), {"recipe": recipe(tune, **settings)}


def cloze(folder: Path, tune: str, **settings: Any) -> Case:
    classifier = Classifier.from_pretrained(folder / "lm", ["bad", "good"], ["{text} it was [MASK]."])
    shots = Shots(Texts(REVIEWS[:5]), F.one_hot(torch.tensor([1, 0, 0, 1, 1]), 2).float())
    weighed = recipe(tune, **{"objective.labels": 1.0, "optimisation.dropout": True, **settings})
    return classifier, Texts(REVIEWS), {"recipe": weighed, "shots": shots}


def vectors(folder: Path, tune: str, **settings: Any) -> Case:
    features, prototypes = groups(n=61)
    classifier = Classifier.from_vectors(prototypes, list("abcdef"), temperature=0.05)
    return classifier, Vectors(features), {"recipe": recipe(tune, **settings)}


CASES: dict[str, Callable[[Path], Case]] = {
    "full": lambda folder: images(folder, "full", augment="crop-flip"),
    "full, chunks": lambda folder: images(folder, "full", **{"compute.chunk": 3, "compute.workers": 1}),
    "prompt": lambda folder: images(folder, "prompt", augment="crop-flip"),
    "prompt, views": lambda folder: images(folder, "prompt", augment="crop-flip", views=2),
    "prototypes": lambda folder: images(folder, "prototypes"),
    "vectors": lambda folder: vectors(folder, "prototypes", postprocess="refinement"),
    "vectors, adamw": lambda folder: vectors(folder, "map", **{"optimisation.name": "adamw"}),
    "vectors, estimated": lambda folder: vectors(folder, "prototypes", **{"objective.prior": "estimated"}),
    "vectors, paper": lambda folder: vectors(folder, "prototypes", **{"objective.prior": "paper"}),
    "text": lambda folder: texts(folder, "full", postprocess="prior-correction"),
    "text, upper": lambda folder: texts(folder, "upper", postprocess="prior-correction"),
    "cloze": lambda folder: cloze(folder, "full"),
    "cloze, upper": lambda folder: cloze(
        folder, "upper", **{"optimisation.dropout": False, "compute.chunk": 3, "compute.precision": "bf16"}
    ),
    "stream": streamed,
}


class Slow(Callback):
    """Leaves time to be killed in, after each step and before it is counted."""

    def on_step(self, step: Any) -> None:
        time.sleep(float(os.environ["SLOW"]))


class EndsIn(Callback):
    """Sends a signal to this process where a phase begins, as `choosing SIGTERM`; none by default."""

    def on_phase(self, phase: str, total: int) -> None:
        wanted, _, name = os.environ.get("END_IN", "").partition(" ")
        if name and phase.startswith(wanted):
            os.kill(os.getpid(), getattr(signal, name))


def run(
    folder: Path, kind: str, output_dir: Path, resume: bool = False, report: bool = False, overwrite: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    classifier, data, how = CASES[kind](folder)
    return classifier.adapt(data, **how, output=Output(output_dir, resume, overwrite, report), **options)


def searched(folder: Path, output_dir: Path, resume: bool = False, overwrite: bool = False, **options: Any) -> Any:
    classifier, data, how = CASES["vectors"](folder)
    grid = {"optimisation.lr": [1e-3, 1e-2, 3e-2]}
    return classifier.search(data, grid, **how, output=Output(output_dir, resume, overwrite, False), **options)


def killed_in_writes(folder: Path, kind: str, output_dir: Path, moments: list[int]) -> None:
    """Runs that are killed in the middle of the n-th file they write, and then gone on with to their end.

    Every other one dies when its file is whole but not yet in its place, the others right after that. All are children
    of this process, which has computed nothing itself: starting Python for each would take minutes.
    """
    import sklearn.cluster
    import sklearn.metrics  # noqa: F401

    from pouf.training import state

    state.SHARE = 0  # saved after each step, however long that takes: the n-th file is the same on every machine
    act = searched if kind == "search" else partial(run, kind=kind)

    def child(place: Path, moment: int | None) -> int:
        if pid := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        move, moves = os.replace, 0

        def dies(*names: Any) -> None:
            nonlocal moves
            moves += 1
            if moves != moment:
                move(*names)
                return
            if moment % 2:
                move(*names)
            os.kill(os.getpid(), signal.SIGKILL)

        os.replace = dies
        torch.set_num_threads(1)
        act(folder, output_dir=place, resume=True, settings={"compute.save_every": 0.0})
        os._exit(0)

    for moment in moments:
        place = output_dir / str(moment)
        print(moment, child(place, moment), child(place, None), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    folder, kind, output_dir = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if sys.argv[4:5] == ["in-writes"]:
        killed_in_writes(folder, kind, output_dir, [int(moment) for moment in sys.argv[5:]])
        return
    # The state is saved after each step: whenever the process is killed, there is something to go on from.
    options: dict[str, Any] = {"callbacks": [Slow(), EndsIn()], "settings": {"compute.save_every": 0.0}}
    if kind == "search":
        searched(folder, output_dir, sys.argv[4:] == ["resume"], **options)
    else:
        run(folder, kind, output_dir, sys.argv[4:] == ["resume"], report="END_IN" in os.environ, **options)


if __name__ == "__main__":
    main()
