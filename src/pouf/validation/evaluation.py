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


class ClassRecall(NamedTuple):
    """Share of a class's samples that were recognised; None for a class without samples."""

    n: int
    zero_shot: float | None
    prior_corrected: float | None
    last: float | None
    advised: float | None


class Evaluation(NamedTuple):
    """Accuracies as fractions."""

    n: int
    zero_shot: float
    prior_corrected: float  # zero-shot over its mean prediction: the baseline to beat, without training or labels
    last: float  # at the last step
    advised: float  # what the run advises without labels: the chosen step, the last, or zero-shot
    per_class: dict[str, ClassRecall]
    skipped: int

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"per_class": {name: recall._asdict() for name, recall in self.per_class.items()}}


def compare(
    zero_shot: BaseClassifier,
    last: BaseClassifier,
    advised: BaseClassifier,
    labelled: Labelled,
    inference: InferenceConfig = INFERENCE,
) -> Evaluation:
    """A classifier before and after adaptation, and the label-free correction of the one before."""
    before = zero_shot.encode(labelled.inputs, inference)
    labels = torch.tensor([labelled.labels[index] for index in before.indices])
    scores = zero_shot.scores(before)
    corrected = prior_correction(before.features, zero_shot.prototypes(), scores)
    after = [classifier.infer(labelled.inputs, inference) for classifier in (last, advised)]
    if len(labels) == 0 or any(each.indices != before.indices for each in after):
        raise InputError(f"{labelled.inputs.source}: no labelled input could be read twice; is the folder changing?")
    guesses = {
        "zero_shot": zero_shot.log_probabilities(before).argmax(1),
        "prior_corrected": corrected(before.features.to(scores.logits.device), scores.logits).argmax(1).cpu(),
        "last": after[0].log_probabilities.argmax(1),
        "advised": after[1].log_probabilities.argmax(1),
    }
    return Evaluation(
        n=len(labels),
        **{name: accuracy(guess, labels) for name, guess in guesses.items()},
        per_class=_recalls(guesses, labels, advised.classes),
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
