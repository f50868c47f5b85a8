"""The demo: a model that was trained on printed characters is adapted to handwritten digits, without labels."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from pouf.classifier import Classifier
from pouf.data.labels import read_labelled
from pouf.inference.encode import InferenceConfig
from pouf.models import EMBEDDED
from pouf.options import Output
from pouf.recipe import Recipe
from pouf.reporting.html import write_report
from pouf.training.adaptation import Adaptation
from pouf.training.callbacks import Callback
from pouf.validation.evaluation import Evaluation, compare

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Demo(NamedTuple):
    images: Path  # the digits, one sub-folder per class: `pouf evaluate RUN IMAGES` repeats the figures
    adaptation: Adaptation
    evaluation: Evaluation
    seconds: float


def demo(
    folder: str | Path, recipe: Recipe, *, command: Sequence[str] = (), callbacks: Iterable[Callback] = ()
) -> Demo:
    """Adapt the embedded model to scikit-learn's 1,797 handwritten digits and compare it with zero-shot.

    The labels are used only for the comparison, after training.
    """
    start = time.perf_counter()
    folder, callbacks = Path(folder), list(callbacks)
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    images = write_digits(folder.with_name(folder.name + "-images"))
    result = classifier.adapt(
        images, recipe=recipe, output=Output(folder, report=False), command=command, callbacks=callbacks
    )
    for callback in callbacks:
        callback.on_phase("comparing with labels, writing the report", 0)
    labelled = read_labelled(images, DIGITS, "image")
    inference = InferenceConfig(256)
    zero_shot, last = (Classifier.from_pretrained(folder, use=use) for use in ("zero-shot", "last"))
    evaluation = compare(zero_shot, last, result.classifier, labelled, inference)
    result.files["report"] = write_report(folder, labelled.inputs, labelled.labels, inference=inference, result=result)
    return Demo(images, result, evaluation, time.perf_counter() - start)


def write_digits(folder: str | Path) -> Path:
    """scikit-learn's handwritten digits as 8 x 8 PNG files in `folder/<name>/<number>.png`."""
    from sklearn.datasets import load_digits

    folder = Path(folder)
    digits = load_digits()
    for name in DIGITS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for i, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        # Grey levels are 0 to 16.
        Image.fromarray((pixels * (255 / 16)).round().astype(np.uint8)).save(folder / DIGITS[label] / f"{i:04d}.png")
    return folder
