"""Signs that an adapted classifier should not be believed, read without labels."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pouf.inference import Transform
from pouf.losses.prior import share_of_classes


class Diagnostics(NamedTuple):
    """What predictions before and after adaptation show, as shares from 0 to 1 unless said otherwise."""

    classes: int
    effective_before: float  # exp H(mean p): the number of classes in use
    effective_after: float
    shift: float  # half the sum of changes in the predicted shares: 0 the same, 1 none in common
    unused_before: float  # share of classes that no input is given to
    unused_after: float
    agreement: float  # of zero-shot and adapted
    chance: float  # what that would be if they had nothing in common but their shares of the classes
    confidence_before: float  # mean probability of the predicted class
    confidence_after: float
    stability_before: float  # share of predictions that survive a small change of the input
    stability_after: float

    @property
    def kappa(self) -> float:
        return beyond_chance(self.agreement, self.chance)


class Alarm(NamedTuple):
    name: str
    words: str  # for people: what was seen and what it may mean
    advice: str = ""  # a sentence on what to do


class SnapshotPredictions(NamedTuple):
    """Predictions for the same inputs, as they are and, for the first m of them, slightly changed."""

    probabilities: Tensor  # (n, k)
    perturbed: Tensor  # (m, k)
    nearness: Tensor  # (n,), cosine with the nearest prototype

    def stability(self) -> float:
        same = self.perturbed.argmax(1) == self.probabilities[: len(self.perturbed)].argmax(1)
        return same.double().mean().item() if len(same) else 1.0


def diagnose(before: SnapshotPredictions, after: SnapshotPredictions) -> Diagnostics:
    k = before.probabilities.shape[1]
    labels = [seen.probabilities.argmax(1) for seen in (before, after)]
    shares = [torch.bincount(each, minlength=k).double() / len(each) for each in labels]
    return Diagnostics(
        classes=k,
        effective_before=share_of_classes(before.probabilities.mean(0)) * k,
        effective_after=share_of_classes(after.probabilities.mean(0)) * k,
        shift=float((shares[0] - shares[1]).abs().sum() / 2),
        unused_before=float((shares[0] == 0).double().mean()),
        unused_after=float((shares[1] == 0).double().mean()),
        agreement=(labels[0] == labels[1]).double().mean().item(),
        chance=float(shares[0] @ shares[1]),
        confidence_before=before.probabilities.max(1).values.mean().item(),
        confidence_after=after.probabilities.max(1).values.mean().item(),
        stability_before=before.stability(),
        stability_after=after.stability(),
    )


def beyond_chance(agreement: float, chance: float) -> float:
    """Cohen's kappa: 1 the same, 0 nothing in common."""
    return 1.0 if chance >= 1 else (agreement - chance) / (1 - chance)


def kappa(labels: Tensor, others: Tensor) -> float:
    """Agreement of two classifiers beyond chance: (n,), (n,) -> at most 1."""
    k = int(max(labels.max(), others.max())) + 1
    shares = [torch.bincount(each, minlength=k).double() / len(each) for each in (labels, others)]
    return beyond_chance((labels == others).double().mean().item(), float(shares[0] @ shares[1]))


def alarms(diagnostics: Diagnostics, settled: float = 1.0) -> list[Alarm]:
    """What speaks against the adapted classifier, the plainest first. How the limits were set: see docs/trust.md.

    Args:
        settled: of `Choice`, where this is the end of a run.
    """
    slower = "Try a smaller learning rate."
    found = []
    if diagnostics.effective_after < 0.5 * diagnostics.effective_before:
        words = (
            f"predictions use {diagnostics.effective_after:.1f} of {diagnostics.classes} classes, zero-shot used "
            f"{diagnostics.effective_before:.1f}: the run has collapsed"
        )
        found.append(Alarm("collapse", words, slower))
    if diagnostics.confidence_after < 0.5 * diagnostics.confidence_before:
        words = (
            f"the mean probability of the predicted class fell from {diagnostics.confidence_before:.2f} to "
            f"{diagnostics.confidence_after:.2f}: the run has lost what the model knew"
        )
        found.append(Alarm("undecided", words, slower))
    if diagnostics.kappa < 0.2:
        words = (
            f"zero-shot and adapted agree on {100 * diagnostics.agreement:.0f} % of the inputs, by chance it would be "
            f"{100 * diagnostics.chance:.0f} %: either zero-shot is near chance, or the run has gone astray"
        )
        found.append(Alarm("estranged", words, slower))
    if settled < 0.7:
        words = (
            "the run has not settled: late in it, predictions still changed so much that they agree with its end by a "
            f"kappa of {settled:.2f} only"
        )
        found.append(Alarm("restless", words, slower))
    if diagnostics.shift > 0.5:
        found.append(
            Alarm("shifted", f"{100 * diagnostics.shift:.0f} % of the predicted shares moved to other classes")
        )
    if diagnostics.unused_after > diagnostics.unused_before + 0.3:
        words = (
            f"{100 * diagnostics.unused_after:.0f} % of the classes are given to no input, "
            f"{100 * diagnostics.unused_before:.0f} % before"
        )
        found.append(Alarm("unchosen", words))
    if diagnostics.stability_before < 0.62:
        words = (
            f"{100 * (1 - diagnostics.stability_before):.0f} % of zero-shot's predictions change with a small change "
            "of the input"
        )
        question = "Are the classes that were named the ones in the data, and more than one of them?"
        found.append(Alarm("unsteady", words, question))
    if diagnostics.confidence_after - diagnostics.stability_after > 0.4:
        words = (
            f"a mean probability of {diagnostics.confidence_after:.2f} for the predicted class, but only "
            f"{100 * diagnostics.stability_after:.0f} % of the predictions survive a small change of the input"
        )
        found.append(Alarm("overconfident", words))
    return found


def perturbation(modality: str) -> Transform:
    """A small change that should not matter: a picture a little cropped, one word in ten left out, a little noise."""
    if modality == "image":
        return Transform("disturbed", _crop)
    if modality == "text":
        return Transform("disturbed", _fewer_words)
    return Transform("disturbed", _noise)


def _crop(image: Image.Image, seed: int) -> Image.Image:
    draw = random.Random(seed)
    width, height = (round(side * 0.9) for side in image.size)
    left, top = draw.randint(0, image.width - width), draw.randint(0, image.height - height)
    return image.resize(image.size, Image.Resampling.BILINEAR, (left, top, left + width, top + height))


def _fewer_words(sample: Any, seed: int) -> Any:
    draw = random.Random(seed)
    if isinstance(sample, tuple):
        return tuple(_fewer_words(part, seed + i) for i, part in enumerate(sample))
    words = str(sample).split()
    kept = [word for word in words if draw.random() > 0.1]
    if len(kept) == len(words) > 2:
        del kept[draw.randrange(len(kept))]
    return " ".join(kept) or str(sample)


def _noise(vector: Any, seed: int) -> Any:
    noise = np.random.default_rng(seed).normal(size=vector.shape)
    return vector + (0.3 * np.linalg.norm(vector) * noise / np.linalg.norm(noise)).astype(vector.dtype)
