"""Evaluation against labels. Nothing here trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.classifier import INFERENCE, Classifier
from pouf.data.base import Unlabelled
from pouf.data.class_names import normalise_name
from pouf.data.labels import Labelled
from pouf.errors import InputError, plural
from pouf.inference.cache import InMemoryFeatureCache
from pouf.inference.encode import FeatureSet, InferenceConfig
from pouf.parallel.process_group import processes

SCORED_AT_ONCE = 8192  # samples


class ClassFigures(NamedTuple):
    """Figures of one class: recall by each classifier; None if it has no samples."""

    n: int
    zero_shot: float | None
    prior_corrected: float | None
    last: float | None
    advised: float | None
    precision: float | None  # of the advised classifier
    f1: float | None  # of the advised classifier


class Evaluation(NamedTuple):
    """Accuracies as fractions."""

    n: int
    zero_shot: float
    prior_corrected: float  # zero-shot divided by its mean prediction: the baseline without training or labels
    last: float  # the last step
    advised: float  # by the run, without labels: the chosen step, the last, or zero-shot
    intervals: dict[str, tuple[float, float]]  # of these accuracies, Wilson's at 95 %
    macro_f1: dict[str, float]  # of each, over the classes that occur as label or prediction
    per_class: dict[str, ClassFigures]
    skipped: dict[str, str]  # id → why it can't be read
    confusion: list[list[int]]  # (k, k) counts: rows are labels, columns predictions of the advised classifier

    def to_json(self) -> dict[str, Any]:
        """All fields but the confusion matrix (quadratic in the classes) and the list of skipped inputs."""
        per_class = {name: own._asdict() for name, own in self.per_class.items()}
        facts = self._asdict() | {"per_class": per_class, "skipped": len(self.skipped)}
        return {name: value for name, value in facts.items() if name != "confusion"}


def compare(
    zero_shot: Classifier,
    last: Classifier,
    advised: Classifier,
    labelled: Labelled,
    inference: InferenceConfig = INFERENCE,
) -> Evaluation:
    """Evaluate a classifier before and after adaptation, and the label-free prior correction of zero-shot.

    With several processes, each scores its share of the inputs, and only counts are exchanged.
    """
    inputs, group = labelled.inputs.with_own_skipped(), processes()
    if inference.cache is None:
        inference = replace(inference, cache=InMemoryFeatureCache())
    before = zero_shot.store(inference).share(inputs)
    labels = torch.tensor([labelled.labels[index] for index in before.indices], dtype=torch.long)
    prototypes = zero_shot.fixed_prototypes()
    marginal = _log_marginal(zero_shot, before, prototypes)

    def counted(classifier: Classifier, own: FeatureSet, prototypes: Tensor, bias: Tensor | None = None) -> Counts:
        counts = Counts.none(len(classifier.classes))
        rows = iter(labels.split(SCORED_AT_ONCE))
        for block in classifier.score_blocks(own, prototypes, SCORED_AT_ONCE):
            logs = block.log_probabilities if bias is None else block.log_probabilities - bias
            counts.add(logs.argmax(1), next(rows))
        return counts

    found, changed = {"zero_shot": counted(zero_shot, before, prototypes)}, False
    found["prior_corrected"] = counted(zero_shot, before, prototypes, marginal)
    for name, classifier in (("last", last), ("advised", advised)):
        after = classifier.store(inference).share(inputs)
        if any(group.gather_objects(after.indices != before.indices)):
            changed = True
            break
        found[name] = counted(classifier, after, classifier.fixed_prototypes())
    if changed or not sum(group.gather_objects(len(labels))):
        raise InputError(
            f"{inputs.source}: no labelled input could be read, or the inputs changed while they were read"
        )
    total = {name: Counts(group.sum(counts.pairs)) for name, counts in found.items()}
    n = int(total["advised"].pairs.sum())
    return Evaluation(
        n=n,
        **{name: counts.right / n for name, counts in total.items()},
        intervals={name: wilson(counts.right, n) for name, counts in total.items()},
        macro_f1={name: counts.macro_f1() for name, counts in total.items()},
        per_class=_per_class(total, advised.classes),
        skipped={inputs.ids[i]: inputs.skipped[i] for i in sorted(inputs.skipped)},
        confusion=total["advised"].pairs.tolist(),
    )


class LabelledScore(NamedTuple):
    """Accuracy and macro-F1 on labelled inputs; `print` shows it in a line."""

    n: int
    accuracy: float
    interval: tuple[float, float]  # of the accuracy, Wilson's at 95 %
    macro_f1: float
    recall: dict[str, float | None]  # by class; None if it has no label

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"accuracy {self.accuracy:.1%} (95 % confidence interval {low:.1%} to {high:.1%}), "
            f"macro-F1 {self.macro_f1:.1%}, on {plural(self.n, 'input')}"
        )


def score(classifier: Classifier, inputs: Unlabelled, labels: Sequence[str | int]) -> LabelledScore:
    """Compare predictions with labels, which are class names or indices."""
    if len(labels) != len(inputs):
        raise InputError(f"{plural(len(inputs), 'input')} and {plural(len(labels), 'label')}: give one label per input")
    classes = classifier.classes
    known = {normalise_name(name): k for k, name in enumerate(classes)}
    truth = [label if isinstance(label, int) else known.get(normalise_name(str(label)), -1) for label in labels]
    if wrong := [label for label, k in zip(labels, truth, strict=True) if not 0 <= k < len(classes)]:
        raise InputError(f"label {wrong[0]!r} is no class: expected one of {', '.join(classes[:20])}, or its index")
    found, counts = classifier.infer(inputs), Counts.none(len(classes))
    counts.add(found.log_probabilities.argmax(1), torch.tensor([truth[i] for i in found.indices]))
    n, right, recall = len(found.indices), counts.pairs.diagonal().tolist(), counts.pairs.sum(1).tolist()
    shares = {name: right[k] / recall[k] if recall[k] else None for k, name in enumerate(classes)}
    return LabelledScore(n, counts.right / n, wilson(counts.right, n), counts.macro_f1(), shares)


class Counts(NamedTuple):
    """A confusion matrix."""

    pairs: Tensor  # (k, k): rows are labels, columns predictions

    @classmethod
    def none(cls, k: int) -> Counts:
        return cls(torch.zeros(k, k, dtype=torch.long))

    def add(self, guess: Tensor, labels: Tensor) -> None:
        k = len(self.pairs)
        self.pairs.add_(torch.bincount(labels * k + guess, minlength=k * k).view(k, k))

    @property
    def right(self) -> int:
        return int(self.pairs.diagonal().sum())

    def macro_f1(self) -> float:
        """The mean of 2 · right / (labels + predictions) over the classes that occur as label or prediction."""
        both = self.pairs.sum(0) + self.pairs.sum(1)
        return float((2 * self.pairs.diagonal()[both > 0] / both[both > 0].double()).mean())


@torch.no_grad()
def _log_marginal(classifier: Classifier, own: FeatureSet, prototypes: Tensor) -> Tensor:
    """log mean_i p(y|x_i) over the inputs of all processes: (k,)."""
    sums = [block.log_probabilities.logsumexp(0) for block in classifier.score_blocks(own, prototypes, SCORED_AT_ONCE)]
    per_rank = processes().gather_objects((sums, len(own.indices)))
    blocks = [block for rank_sums, _ in per_rank for block in rank_sums]
    n = sum(count for _, count in per_rank)
    return torch.stack(blocks).logsumexp(0) - math.log(n) if blocks else torch.zeros(len(classifier.classes))


def wilson(right: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a share."""
    from scipy.stats import binomtest

    if n == 0:
        return 0.0, 1.0
    found = binomtest(right, n).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def _per_class(counts: dict[str, Counts], classes: Sequence[str]) -> dict[str, ClassFigures]:
    found: dict[str, ClassFigures] = {}
    pairs = counts["advised"].pairs
    given, labelled = pairs.sum(0).tolist(), pairs.sum(1).tolist()
    right = {name: each.pairs.diagonal().tolist() for name, each in counts.items()}
    for k, name in enumerate(classes):
        n, hits = labelled[k], right["advised"][k]
        recalls = {which: own[k] / n if n else None for which, own in right.items()}
        precision = hits / given[k] if given[k] else None
        f1 = 2 * hits / (n + given[k]) if n else None
        found[name] = ClassFigures(n, **recalls, precision=precision, f1=f1)
    return found
