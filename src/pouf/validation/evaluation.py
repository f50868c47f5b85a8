"""Everything that looks at labels. Nothing here trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.classifier import INFERENCE, Classifier
from pouf.data.labelled import Labelled
from pouf.errors import InputError
from pouf.inference import InferenceConfig
from pouf.postprocess.postprocessor import calibrate


class ClassRecall(NamedTuple):
    """Share of a class's samples that were recognised; None for a class without samples."""

    n: int
    zero_shot: float | None
    calibrated: float | None
    adapted: float | None
    used: float | None = None


class Evaluation(NamedTuple):
    """Accuracies as fractions."""

    n: int
    zero_shot: float
    calibrated: float
    adapted: float  # at the last step
    per_class: dict[str, ClassRecall]
    skipped: int
    used: float | None = None  # what the run advises without labels: the chosen step, or zero-shot

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"per_class": {name: recall._asdict() for name, recall in self.per_class.items()}}


def evaluate(
    zero_shot: Classifier,
    adapted: Classifier,
    labelled: Labelled,
    inference: InferenceConfig = INFERENCE,
    used: Classifier | None = None,
) -> Evaluation:
    """Compare a classifier before and after adaptation, the label-free calibration of the one before, and one more."""
    before = zero_shot.infer(labelled.inputs, inference)
    after = adapted.infer(labelled.inputs, inference)
    labels = torch.tensor([labelled.labels[index] for index in before.indices])
    if len(labels) == 0 or before.indices != after.indices:
        raise InputError(f"{labelled.inputs.source}: no labelled input could be read twice; is the folder changing?")
    guesses = {
        "zero_shot": before.log_probabilities.argmax(1),
        "calibrated": calibrate(before.log_probabilities).argmax(1),
        "adapted": after.log_probabilities.argmax(1),
    }
    if used is not None:
        guesses["used"] = used.infer(labelled.inputs, inference).log_probabilities.argmax(1)
    return Evaluation(
        n=len(labels),
        **{name: accuracy(guess, labels) for name, guess in guesses.items()},
        per_class=_recalls(guesses, labels, adapted.classes),
        skipped=len(labelled.inputs.skipped),
    )


def accuracy(guess: Tensor, labels: Tensor) -> float:
    return (guess == labels).double().mean().item()


def _recalls(guesses: dict[str, Tensor], labels: Tensor, classes: Sequence[str]) -> dict[str, ClassRecall]:
    recalls: dict[str, ClassRecall] = {}
    for k, name in enumerate(classes):
        own = labels == k
        n = int(own.sum())
        recall = {which: accuracy(guess[own], labels[own]) if n else None for which, guess in guesses.items()}
        recalls[name] = ClassRecall(n, **recall)
    return recalls
