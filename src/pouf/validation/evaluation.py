"""Everything that looks at labels. Nothing here trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.base import INFERENCE, BaseClassifier
from pouf.data.labelled import Labelled
from pouf.errors import InputError
from pouf.inference import InferenceConfig
from pouf.postprocess.prior_correction import prior_correction


class ClassFigures(NamedTuple):
    """Of one class: the share of its samples that were recognised, by each classifier; None where it has none."""

    n: int
    zero_shot: float | None
    prior_corrected: float | None
    last: float | None
    advised: float | None
    precision: float | None  # of what is advised: the share of right ones among those given to the class
    f1: float | None  # of what is advised


class Evaluation(NamedTuple):
    """Accuracies as fractions."""

    n: int
    zero_shot: float
    prior_corrected: float  # zero-shot over its mean prediction: the baseline to beat, without training or labels
    last: float  # at the last step
    advised: float  # what the run advises without labels: the chosen step, the last, or zero-shot
    intervals: dict[str, tuple[float, float]]  # of these accuracies, Wilson's at 95 %
    macro_f1: dict[str, float]  # of each: the mean F1 of all classes that occur, as label or as prediction
    per_class: dict[str, ClassFigures]
    skipped: int
    confusion: list[list[int]]  # (k, k) counts: rows are labels, columns what is advised

    def to_json(self) -> dict[str, Any]:
        """All but the confusion matrix, which grows with the square of the classes."""
        facts = self._asdict() | {"per_class": {name: own._asdict() for name, own in self.per_class.items()}}
        return {name: value for name, value in facts.items() if name != "confusion"}


def compare(
    zero_shot: BaseClassifier,
    last: BaseClassifier,
    advised: BaseClassifier,
    labelled: Labelled,
    inference: InferenceConfig = INFERENCE,
) -> Evaluation:
    """A classifier before and after adaptation, and the label-free correction of the one before."""
    from sklearn.metrics import confusion_matrix, f1_score

    before = zero_shot.encode(labelled.inputs, inference)
    labels = torch.tensor([labelled.labels[index] for index in before.indices])
    scores = zero_shot.scores(before)
    corrected = prior_correction(before.features, zero_shot.prototypes(), scores)
    after = [classifier.infer(labelled.inputs, inference) for classifier in (last, advised)]
    if len(labels) == 0 or any(each.indices != before.indices for each in after):
        raise InputError(f"{labelled.inputs.source}: no labelled input is left, or they changed while they were read")
    guesses = {
        "zero_shot": zero_shot.log_probabilities(before).argmax(1),
        "prior_corrected": corrected(before.features.to(scores.logits.device), scores.logits).argmax(1).cpu(),
        "last": after[0].log_probabilities.argmax(1),
        "advised": after[1].log_probabilities.argmax(1),
    }
    return Evaluation(
        n=len(labels),
        **{name: accuracy(guess, labels) for name, guess in guesses.items()},
        intervals={name: _interval(guess, labels) for name, guess in guesses.items()},
        macro_f1={name: float(f1_score(labels, guess, average="macro")) for name, guess in guesses.items()},
        per_class=_per_class(guesses, labels, advised.classes),
        skipped=len(labelled.inputs.skipped),
        confusion=confusion_matrix(labels, guesses["advised"], labels=range(len(advised.classes))).tolist(),
    )


def _interval(guess: Tensor, labels: Tensor) -> tuple[float, float]:
    return wilson(int((guess == labels).sum()), len(labels))


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share, by Wilson's score."""
    from scipy.stats import binomtest

    if n == 0:
        return 0.0, 1.0
    found = binomtest(right, n).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def accuracy(guess: Tensor, labels: Tensor) -> float:
    return (guess == labels).double().mean().item()


def _per_class(guesses: dict[str, Tensor], labels: Tensor, classes: Sequence[str]) -> dict[str, ClassFigures]:
    found: dict[str, ClassFigures] = {}
    for k, name in enumerate(classes):
        own, given = labels == k, guesses["advised"] == k
        n, right = int(own.sum()), int((own & given).sum())
        recalls = {which: accuracy(guess[own], labels[own]) if n else None for which, guess in guesses.items()}
        precision = right / int(given.sum()) if bool(given.any()) else None
        f1 = 2 * right / (n + int(given.sum())) if n else None
        found[name] = ClassFigures(n, **recalls, precision=precision, f1=f1)
    return found
