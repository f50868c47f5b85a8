"""Reviews: choosing inputs to label, and estimating accuracies from the answers."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from pouf.classifier import Classifier
from pouf.data.base import Subset, Unlabelled
from pouf.data.class_names import normalise_name
from pouf.data.labels import Shots
from pouf.data.tables import BadRow, read_table
from pouf.errors import InputError, plural
from pouf.inference.encode import InferenceConfig
from pouf.validation.rules import FEW_CLASSES

DISAGREE, AGREE = "disagree", "agree"  # of zero-shot and adapted; drawn at random
UNSURE = "unsure"  # questions whose answers teach, and are not counted
REVIEW_IMAGE_SIDE = 128  # pixels; images are displayed at up to twice this side
NO_CLASS = "none of these"  # an answer: the input belongs to no class
logger = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)


class ReviewQuestion(NamedTuple):
    """An input to label."""

    id: str
    stratum: str  # agree, disagree or unsure
    zero_shot: str
    adapted: str


class Review(NamedTuple):
    """The questions, and the number of inputs in each stratum."""

    counts: dict[str, dict[str, int]]  # stratum -> class that the adapted model predicts -> inputs
    questions: list[ReviewQuestion]

    @property
    def sizes(self) -> dict[str, int]:
        """Stratum -> inputs."""
        return {stratum: sum(predicted.values()) for stratum, predicted in self.counts.items()}

    def to_json(self) -> dict[str, Any]:
        return {"counts": self.counts, "questions": [question._asdict() for question in self.questions]}


class ShareEstimate(NamedTuple):
    """A share of the inputs with its 95 % confidence interval."""

    value: float
    low: float
    high: float


class ReviewResult(NamedTuple):
    """Accuracies and advice by the answers of a review."""

    answered: int
    zero_shot: ShareEstimate
    adapted: ShareEstimate
    adapted_wins: int  # answered inputs where they disagree and adapted is right
    zero_shot_wins: int
    none_of_these: int  # answers that name no class: every prediction for these inputs is wrong
    better: str | None  # adapted or zero-shot; None if the answers do not decide it
    advice: str
    prior: list[float] | None = None  # shares of the classes by the answers, if those of the predictions differ
    not_asked: int = 0  # answers about inputs outside of the review, which are not counted

    def __str__(self) -> str:
        accuracies = [
            f"{name} is right in {100 * value:.1f} % (95 % confidence interval {100 * low:.1f} to {100 * high:.1f})"
            for name, (value, low, high) in (("zero-shot", self.zero_shot), ("adapted", self.adapted))
        ]
        none = f" Answered {NO_CLASS!r}: {self.none_of_these}." if self.none_of_these else ""
        return f"By {plural(self.answered, 'answer')}, {' and '.join(accuracies)}.{none} {self.advice}"

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"zero_shot": self.zero_shot._asdict(), "adapted": self.adapted._asdict()}


def sample_questions(
    zero_shot: Classifier,
    adapted: Classifier,
    data: Unlabelled,
    n: int = 50,
    *,
    unsure: int = 0,
    answered: Collection[str] = (),
    seed: int = 0,
    inference: InferenceConfig | None = None,
) -> tuple[Review, list[Any]]:
    """Choose n inputs to label, and more that teach; returns the review and the samples for display.

    Only labels of inputs on which zero-shot and the adapted model disagree can show which is better. Two thirds of the
    questions are drawn at random from these, the rest from the others, and the sizes of both strata are stored, so
    that the answers give accuracies on all inputs. With few classes it is one half, since the answers also estimate
    the shares of the classes, and most inputs are in the other stratum.

    Args:
        unsure: more questions, about the inputs with the least distance between the adapted model's two likeliest
            classes. They say most about what to learn and nothing about accuracies, so that they are not counted.
        answered: ids of inputs that were labelled before; they are not asked about again, nor judged on.
    """
    if n < 2:
        raise InputError(f"a review needs at least 2 questions, not {n}")
    predictions = [classifier.infer(data, inference or InferenceConfig()) for classifier in (zero_shot, adapted)]
    before, after = (
        dict(zip(each.indices, each.log_probabilities.argmax(1).tolist(), strict=True)) for each in predictions
    )
    known = {index for index, name in enumerate(data.ids) if name in answered} if answered else set()
    groups: dict[str, list[int]] = {DISAGREE: [], AGREE: []}
    for index in sorted(before.keys() & after.keys() - known):  # a file may be deleted meanwhile
        groups[AGREE if before[index] == after[index] else DISAGREE].append(index)
    if not any(groups.values()):
        raise InputError("every input has an answer: nothing is left to ask about")
    # Each group is shuffled as a whole: a larger n adds questions to those of a smaller one.
    shuffled = {group: random.Random(f"{seed} {group}").sample(rows, len(rows)) for group, rows in groups.items()}
    wanted = n // 2 if len(adapted.classes) <= FEW_CLASSES else round(n * 2 / 3)
    disputed = min(len(groups[DISAGREE]), max(wanted, n - len(groups[AGREE])))
    chosen = [(DISAGREE, index) for index in shuffled[DISAGREE][:disputed]]
    chosen += [(AGREE, index) for index in shuffled[AGREE][: n - disputed]]
    likeliest = predictions[1].log_probabilities.exp().topk(2, dim=1).values
    margins = dict(zip(predictions[1].indices, (likeliest[:, 0] - likeliest[:, 1]).tolist(), strict=True))
    left = {index for group in groups.values() for index in group} - {index for _, index in chosen}
    chosen += [(UNSURE, index) for index in sorted(left, key=lambda index: (margins[index], index))[:unsure]]
    random.Random(seed).shuffle(chosen)
    names = adapted.classes
    questions = [
        ReviewQuestion(data.ids[index], group, names[before[index]], names[after[index]]) for group, index in chosen
    ]
    counts = {group: dict(Counter(names[after[index]] for index in own)) for group, own in groups.items()}
    return Review(counts, questions), [data.show(index, REVIEW_IMAGE_SIDE) for _, index in chosen]


def read_answers(file: str | Path, classes: Sequence[str], id_columns: Sequence[str] = ()) -> dict[str, str]:
    """id -> class or `NO_CLASS`, from a CSV or JSONL file with columns id and label; rows without a label are left out.

    Args:
        id_columns: of the run's data. The first of them may replace the column id, in a table of the user.
    """
    known = {normalise_name(NO_CLASS): NO_CLASS, "none": NO_CLASS} | {normalise_name(name): name for name in classes}
    answers: dict[str, str] = {}
    for identifier, label in _labels(file, id_columns[:1]):
        label = "" if label is None or isinstance(label, BadRow) else str(label).strip()
        if not label:
            continue
        if isinstance(identifier, BadRow):
            raise InputError(f"{str(file)!r}: a row has no id; expected the columns id and label")
        if normalise_name(label) not in known:
            expected = f"{', '.join(classes[:10])}{', …' if len(classes) > 10 else ''}, or {NO_CLASS!r}"
            raise InputError(f"{str(file)!r}: label {label!r} of {identifier} is no class: expected {expected}")
        before = answers.setdefault(str(identifier).strip(), known[normalise_name(label)])
        if before != known[normalise_name(label)]:
            raise InputError(f"{str(file)!r}: {identifier} has two labels, {before} and {label}: keep one")
    return answers


def answered_shots(data: Unlabelled, files: Sequence[str | Path], classes: Sequence[str]) -> Shots:
    """The answers of reviews as labelled examples of their data, without those that are `NO_CLASS`; the last file that
    has an input counts."""
    answers: dict[str, str] = {}
    for file in files:
        answers |= read_answers(file, classes, data.id_columns)
    labels = {name: list(classes).index(label) for name, label in answers.items() if label != NO_CLASS}
    indices = [index for index, name in enumerate(data.ids) if name in labels]
    source = ", ".join(repr(str(file)) for file in files)
    if not indices:
        raise InputError(f"{source} has no answer about {data.source}: give the data that the review was about")
    if len(indices) < len(labels):
        logger.warning("%s: %d of %d answers are about other inputs", source, len(labels) - len(indices), len(labels))
    truth = torch.tensor([labels[data.ids[index]] for index in indices])
    return Shots(Subset(data, indices), (truth[:, None] == torch.arange(len(classes))).float())


def _labels(file: str | Path, alternatives: Sequence[str]) -> list[tuple[Any, Any]]:
    """The columns id and label; without a column id, the first of the alternatives."""
    for name in ("id", *alternatives):
        try:
            table = read_table(file, name, "label")
        except InputError as error:
            if name == "id":
                missing = error
            continue
        return list(zip(table[name], table["label"], strict=True))
    raise missing


def score_answers(review: Review, answers: Mapping[str, str], classes: Sequence[str]) -> ReviewResult:
    """Accuracies of zero-shot and the adapted model by the answers, and the shares of the classes."""
    answered = [each for each in review.questions if each.id in answers and each.stratum in review.sizes]
    if not answers:
        raise InputError("no label is filled in yet: label the inputs you are sure of with the name of a class")
    if not answered:
        raise InputError("none of the answers is about a question of this review: are they from another run?")
    others = sorted(answers.keys() - {question.id for question in review.questions})
    if others:
        logger.warning(
            "%d of %d answers are about inputs outside of the review and are not counted: %s",
            len(others), len(answers), ", ".join(others[:5]) + (", …" if len(others) > 5 else ""),
        )  # fmt: skip

    def right(which: str, stratum: str) -> list[bool]:
        return [getattr(q, which) == answers[q.id] for q in answered if q.stratum == stratum]

    zero_shot, adapted = (
        _stratified_share({stratum: right(which, stratum) for stratum in review.sizes}, review.sizes)
        for which in ("zero_shot", "adapted")
    )
    wins, losses = sum(right("adapted", DISAGREE)), sum(right("zero_shot", DISAGREE))
    none = sum(answers[question.id] == NO_CLASS for question in answered)
    better, advice = _advice(wins, losses)
    prior, correction = _shares_by_answers(review, answers, classes)
    advice = f"{advice} {correction}" if correction else advice
    return ReviewResult(len(answered), zero_shot, adapted, wins, losses, none, better, advice, prior, len(others))


def _shares_by_answers(
    review: Review, answers: Mapping[str, str], classes: Sequence[str]
) -> tuple[list[float] | None, str]:
    """Shares of the classes by the answers and an advice, if a predicted share is outside of its confidence interval.

    Shares are estimated by stratum and predicted class, so that the answers only need to show how often each
    prediction is wrong. Few answers determine few shares, so that nothing is returned for more classes.
    """
    if len(classes) > FEW_CLASSES:
        return None, ""
    sizes = {(stratum, name): n for stratum, counts in review.counts.items() for name, n in counts.items()}
    labels: dict[tuple[str, str], list[str]] = {group: [] for group in sizes}
    for question in review.questions:
        if answers.get(question.id, NO_CLASS) != NO_CLASS:
            labels.setdefault((question.stratum, question.adapted), []).append(answers[question.id])
    total = sum(sizes.values())
    predicted = [sum(n for (_, other), n in sizes.items() if other == name) / total for name in classes]
    shares = [
        # k - 1 comparisons (the shares sum to 1), corrected for a joint error rate of 5 %.
        _stratified_share(
            {group: [each == name for each in given] for group, given in labels.items()}, sizes, len(classes) - 1
        )
        for name in classes
    ]
    off = [i for i, share in enumerate(shares) if not share.low <= predicted[i] <= share.high]
    if not off:
        return None, ""
    worst = max(off, key=lambda i: abs(shares[i].value - predicted[i]))
    value, low, high = (100 * number for number in shares[worst])
    least = 1 / (2 * len(review.questions))  # a class without an answer may still occur
    total_share = sum(max(share.value, least) for share in shares)
    prior = [round(max(share.value, least) / total_share, 3) for share in shares]
    return prior, (
        f"By the answers {value:.0f} % of the inputs are {classes[worst]} ({low:.0f} to {high:.0f}), and "
        f"{100 * predicted[worst]:.0f} % are predicted to be: adapt again with the prior "
        f"{','.join(f'{share:g}' for share in prior)}."
    )


def _stratified_share(right: Mapping[K, list[bool]], sizes: Mapping[K, int], comparisons: int = 1) -> ShareEstimate:
    """The share over all groups, weighted by their sizes. A group without answers may have any share from 0 to 1."""
    from scipy.stats import norm

    total = sum(sizes.values())
    value = low = high = variance = 0.0
    for group, size in sizes.items():
        weight, answers = size / total, right[group]
        if size and not answers:
            value, high = value + weight / 2, high + weight / 2
            low -= weight / 2
            continue
        if answers:
            # One success and one failure added: a few equal answers must not give an interval of width 0.
            share, n = sum(answers) / len(answers), len(answers)
            smoothed = (sum(answers) + 1) / (n + 2)
            value += weight * share
            left = 1 - n / size if size > n else 0.0  # finite population: certain once all are answered
            variance += weight**2 * smoothed * (1 - smoothed) / n * left
    half = float(norm.ppf(1 - 0.025 / max(1, comparisons))) * math.sqrt(variance)
    return ShareEstimate(value, max(0.0, value - half + low), min(1.0, value + half + high))


def _advice(wins: int, losses: int) -> tuple[str | None, str]:
    """The better classifier and a sentence on it, by the sign test on the inputs where they disagree."""
    from scipy.stats import binomtest

    if wins + losses == 0:
        return None, "The answers do not show a difference: on none of these inputs is exactly one of them right."
    score = f"{max(wins, losses)} to {min(wins, losses)}"
    if wins == losses:
        return None, f"They are equal where they differ ({score}): more answers are needed."
    which, leader = ("adapted", "the adapted model") if wins > losses else ("zero-shot", "zero-shot")
    p = binomtest(wins, wins + losses).pvalue
    if p < 0.05:
        return which, f"Use {leader}: it is right {score} where they differ (sign test, p = {p:.2g})."
    start = leader[0].upper() + leader[1:]
    return None, f"{start} leads {score} where they differ, which may be chance: more answers are needed."
