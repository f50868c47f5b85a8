"""What predictions before and after adaptation show without labels, and the alarms that follow from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pouf.losses.prior import gated_shares, share_of_classes


class SnapshotPredictions(NamedTuple):
    """Predictions for the same inputs, as they are and, for the first m of them, slightly changed."""

    probabilities: Tensor  # (n, k)
    perturbed: Tensor  # (m, k)
    nearness: Tensor  # (n,), cosine with the nearest prototype

    def stability(self) -> float:
        same = self.perturbed.argmax(1) == self.probabilities[: len(self.perturbed)].argmax(1)
        return same.double().mean().item() if len(same) else 1.0


class Diagnostics(NamedTuple):
    """Shares from 0 to 1 unless said otherwise."""

    classes: int
    effective_before: float  # exp H(mean p): the number of classes in use, or that EM finds, whichever is smaller
    effective_after: float
    shift: float  # half the sum of changes in the predicted shares: 0 the same, 1 none in common
    unused_before: float  # share of classes that no input is given to, or less than one by EM, whichever is larger
    unused_after: float
    agreement: float  # of zero-shot and adapted
    chance: float  # what that would be if they had nothing in common but their shares of the classes
    kappa: float  # Cohen's: agreement beyond chance, 1 the same, 0 nothing in common
    confidence_before: float  # mean probability of the predicted class
    confidence_after: float
    stability_before: float  # share of predictions that survive a small change of the input
    stability_after: float
    convergence: float = 1.0  # kappa of the run's last two thirds with its end, at the lowest


class Alarm(NamedTuple):
    name: str
    message: str  # for people: what was seen and what it may mean
    advice: str = ""  # a sentence on what to do


class Rule(NamedTuple):
    """When an alarm is raised; its message and advice are filled in with the diagnostics."""

    name: str
    fires: Callable[[Diagnostics], bool]
    message: str
    advice: str = ""


SLOWER = "Try a smaller learning rate."
# The plainest first. How the limits were set: see docs/trust.md.
RULES = (
    Rule(
        "collapse",
        lambda d: d.effective_after < 0.5 * d.effective_before,
        "predictions use {d.effective_after:.1f} of {d.classes} classes, zero-shot used {d.effective_before:.1f}: the "
        "run has collapsed",
        SLOWER,
    ),
    Rule(
        "confidence lost",
        lambda d: d.confidence_after < 0.5 * d.confidence_before,
        "the mean probability of the predicted class fell from {d.confidence_before:.2f} to {d.confidence_after:.2f}: "
        "the run has lost what the model knew",
        SLOWER,
    ),
    Rule(
        "disagrees with zero-shot",
        lambda d: d.kappa < 0.2,
        "zero-shot and adapted agree on {d.agreement:.0%} of the inputs, by chance it would be {d.chance:.0%}: either "
        "zero-shot is near chance, or the run has gone astray",
        SLOWER,
    ),
    Rule(
        "not converged",
        lambda d: d.convergence < 0.7,
        "predictions have not converged: late in the run they still changed so much that they agree with its end by a "
        "kappa of {d.convergence:.2f} only",
        SLOWER,
    ),
    Rule("shifted", lambda d: d.shift > 0.5, "{d.shift:.0%} of the predicted shares moved to other classes"),
    Rule(
        "unused classes",
        lambda d: d.unused_after > d.unused_before + 0.3,
        "{d.unused_after:.0%} of the classes are given to no input, {d.unused_before:.0%} before",
    ),
    Rule(
        "unstable",
        lambda d: d.stability_before < 0.62,
        "only {d.stability_before:.0%} of zero-shot's predictions survive a small change of the input",
        "Are the classes that were named the ones in the data, and more than one of them?",
    ),
    Rule(
        "overconfident",
        lambda d: d.confidence_after - d.stability_after > 0.4,
        "a mean probability of {d.confidence_after:.2f} for the predicted class, but only {d.stability_after:.0%} of "
        "the predictions survive a small change of the input",
    ),
)


def alarms(diagnostics: Diagnostics) -> list[Alarm]:
    """What speaks against the adapted classifier."""
    return [
        Alarm(rule.name, rule.message.format(d=diagnostics), rule.advice) for rule in RULES if rule.fires(diagnostics)
    ]


def diagnose(before: SnapshotPredictions, after: SnapshotPredictions, convergence: float = 1.0) -> Diagnostics:
    k = before.probabilities.shape[1]
    p, labels = before.probabilities, [each.probabilities.argmax(1) for each in (before, after)]
    found = gated_shares(p)  # which of the classes seem to be there at all
    shares = [torch.bincount(each, minlength=k).double() / len(each) for each in labels]
    return Diagnostics(
        classes=k,
        effective_before=k * min(share_of_classes(p.mean(0)), share_of_classes(found)),
        effective_after=share_of_classes(after.probabilities.mean(0)) * k,
        shift=float((shares[0] - shares[1]).abs().sum() / 2),
        unused_before=max(share(shares[0] == 0), share(found * len(p) < 1)),
        unused_after=share(shares[1] == 0),
        agreement=share(labels[0] == labels[1]),
        chance=float(shares[0] @ shares[1]),
        kappa=kappa(*labels),
        confidence_before=before.probabilities.max(1).values.mean().item(),
        confidence_after=after.probabilities.max(1).values.mean().item(),
        stability_before=before.stability(),
        stability_after=after.stability(),
        convergence=convergence,
    )


def kappa(labels: Tensor, others: Tensor) -> float:
    """Cohen's kappa, agreement of two classifiers beyond chance: (n,), (n,) -> at most 1."""
    from sklearn.metrics import cohen_kappa_score

    if bool((labels == others).all()):
        return 1.0  # also where there is only one class, which leaves nothing to chance
    return float(cohen_kappa_score(labels.numpy(), others.numpy()))


def share(same: Tensor) -> float:
    return same.double().mean().item()
