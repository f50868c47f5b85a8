"""The way from a batch to its loss is short, and the docs show it."""

import re
import sys
from pathlib import Path
from types import FrameType, FunctionType

from helpers import train
from PIL import Image

import pouf
from pouf import EMBEDDED, Callback, Classifier, Images, Recipe, Step
from pouf.demo import DIGITS
from pouf.training.two_pass import whole

SOURCES = Path(pouf.__file__).parent
PAGE = SOURCES.parents[1] / "CONTRIBUTING.md"


class Walk(Callback):
    """Which functions of pouf the second step calls, from its batch to its loss.

    Private helpers, comprehensions and properties are part of the function that uses them.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.inside, self.loss_known = 0, False

    def on_step(self, step: Step) -> None:
        sys.setprofile(self.trace if step.step == 1 else None)

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code is whole.__code__:
            self.inside += {"call": 1, "return": -1}.get(event, 0)
        if self.inside and not self.loss_known and event == "call" and Path(code.co_filename).is_relative_to(SOURCES):
            name = code.co_name
            if (
                not name.startswith("<")
                and (not name.startswith("_") or name.startswith("__"))
                and not is_property(frame)
            ):
                self.calls.append((Path(code.co_filename).relative_to(SOURCES).as_posix(), qualified_name(frame)))
        if event == "return" and self.calls and qualified_name(frame) == "Objective.__call__":
            self.loss_known = True


def owner(frame: FrameType) -> type | None:
    """The class that defines the method of a frame."""
    kinds = type(frame.f_locals["self"]).__mro__ if "self" in frame.f_locals else ()
    return next((kind for kind in kinds if frame.f_code.co_name in vars(kind)), None)


def is_property(frame: FrameType) -> bool:
    kind = owner(frame)
    return kind is not None and not isinstance(vars(kind)[frame.f_code.co_name], FunctionType)


def qualified_name(frame: FrameType) -> str:
    kind = owner(frame)
    return frame.f_code.co_name if kind is None else f"{kind.__name__}.{frame.f_code.co_name}"


def walk(pictures: list[Image.Image], tune: str) -> list[tuple[str, str]]:
    steps = Walk()
    recipe = Recipe(steps=2, batch_size=8, augment="none", snapshots=0).with_settings({"tuner.name": tune})
    try:
        train(Classifier.from_pretrained(EMBEDDED, DIGITS), Images(pictures), recipe, callbacks=[steps])
    finally:
        sys.setprofile(None)
    return list(dict.fromkeys(steps.calls))


def test_a_batch_comes_to_its_loss_in_twelve_calls_and_eight_files(pictures: list[Image.Image]) -> None:
    for tune in ("full", "layernorm", "prompt", "prototypes"):
        calls = walk(pictures, tune)
        assert len(calls) <= 12 and len({file for file, _ in calls}) <= 8, tune


def test_the_docs_show_the_way_of_a_batch_as_it_is(pictures: list[Image.Image]) -> None:
    shown = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert shown == walk(pictures, "full")
