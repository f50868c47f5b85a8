"""What predictions before and after adaptation show without labels; the alarms and cautions that follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from pouf.losses.information import log_marginal, mutual_information
from pouf.losses.prior import gated_shares, share_of_classes
from pouf.postprocess.agreement import kappa
from pouf.postprocess.shares import predicted_shares, share_offsets


class SnapshotPredictions(NamedTuple):
    """Predictions for the same inputs, as they are and, for the first m of them, slightly changed."""

    probabilities: Tensor  # (n, k)
    perturbed: Tensor  # (m, k)
    nearness: Tensor  # (n,), cosine with the nearest prototype

    def only(self, rows: list[int]) -> SnapshotPredictions:
        """Some of the inputs, in their order."""
        changed = [row for row in rows if row < len(self.perturbed)]
        return SnapshotPredictions(self.probabilities[rows], self.perturbed[changed], self.nearness[rows])

    def without_bias(self, prior: Tensor | None = None) -> SnapshotPredictions:
        """With what is said of every input alike taken away, p(k|x) / mean_i p(k|x_i) (* prior), as prior correction
        does. With one class for all inputs predictions would agree with nothing but by chance."""
        log_p = self.probabilities.clamp_min(1e-30).log()
        return self.shifted(-log_marginal(log_p) if prior is None else prior.to(log_p).log() - log_marginal(log_p))

    def offsets_to(self, shares: Tensor) -> Tensor:
        """(k,), which give the predicted classes these shares (k,), as the correction `shares` does."""
        return share_offsets(self.probabilities.clamp_min(1e-30).log(), shares)

    def shares(self) -> Tensor:
        """(k,), how much of the inputs each class is predicted for."""
        return predicted_shares(self.probabilities)

    def shifted(self, offsets: Tensor) -> SnapshotPredictions:
        """With offsets (k,) on the log-probabilities."""
        before, changed = (
            each.clamp_min(1e-30).log() + offsets.to(each) for each in (self.probabilities, self.perturbed)
        )
        return self._replace(probabilities=before.softmax(1), perturbed=changed.softmax(1))

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
    information_before: float  # mutual information of inputs and zero-shot's predictions, over log k
    inputs: int  # that were looked at
    perturbed: int  # of these, which were also seen slightly changed
    steps: int = 0  # that were trained; 0 where predictions were corrected only
    convergence: float = 1.0  # kappa of the run's last two thirds with its end, at the lowest
    opinion_fell: float = 0.0  # how far agreement with a clustering fell, where it never rose along the run; else 0
    moved: float = 0.0  # as shift, from zero-shot as it is, without any correction
    one_sided: float = 0.0  # how much of that change is a move of shares: 1 if nothing went the other way, 0 if as much
    known_shares: bool = False  # proportions of the classes were given
    overpredicted: str = ""  # the class that zero-shot was found to predict too often, and no longer does here
    names_near: float = 1.0  # share of sets of random words that are less near to the inputs than the class names
    names_span: float = 1.0  # share of those that tell the inputs less apart
    names_worst: str = ""  # the names that fit worst
    feature_spread: float = 1.0  # of the model's features before training: 0 where all have the same direction


class Finding(NamedTuple):
    """An alarm or a caution."""

    name: str
    message: str  # for people: what was seen and what it may mean
    advice: str = ""  # a sentence on what to do


class Rule(NamedTuple):
    """When a finding is reported; its message and advice are filled in with the diagnostics.

    On an alarm zero-shot is used. A caution is said wherever the verdict is, and changes nothing about what is used.
    """

    name: str
    fires: Callable[[Diagnostics], bool]
    message: str
    advice: str = ""
    level: Literal["alarm", "caution"] = "alarm"


OTHER_NAMES = "Are these the classes in the data? If so, try other words for them, or another template."
SLOWER = "Try a smaller learning rate."
FEW_INPUTS, FEW_STEPS = 30, 10
SAME_DIRECTION = 1e-5  # spread of features: rounding in half precision gives less, the narrowest models 1e-3 and more
FEW_CLASSES = 10  # among hundreds, nearly every change is a move from class to class
# The plainest first: the verdict quotes the first alarm, and its advice. What speaks against zero-shot itself comes
# before what speaks against the run, which can't be better than what it started from. How the limits were set: see
# docs/trust.md.
RULES = (
    Rule(
        "constant features",
        lambda d: d.inputs > 1 and d.feature_spread < SAME_DIRECTION,
        "the model's features of all {d.inputs} inputs that were looked at have the same direction, so that it can't "
        "tell them apart: either the inputs are all the same, or the model is broken",
        "Look at some of the inputs, and get the model again from where it came.",
    ),
    Rule(
        "unfitting names",
        lambda d: d.names_near < 0.05 and d.names_span < 0.5,
        "random words fit these inputs better than the class names: only {d.names_near:.0%} of such sets are "
        "less near to the inputs, {d.names_span:.0%} tell them less apart. The worst fit: {d.names_worst}",
        OTHER_NAMES,
    ),
    Rule(
        "unstable",
        lambda d: d.perturbed >= FEW_INPUTS and d.stability_before + 2 * _standard_error(d) < 0.68,
        "zero-shot itself is unreliable here: only {d.stability_before:.0%} of its predictions survive a small change "
        "of the input",
        "The model may not be able to read inputs of this kind, or the class names may not fit them: try another "
        "model, or other names and templates.",
    ),
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
        "Try a smaller learning rate, or a model and class names that fit these inputs better.",
    ),
    Rule(
        "not converged",
        lambda d: d.convergence < 0.7,
        "predictions have not converged: late in the run they still changed so much that their agreement with its end "
        "is a kappa of only {d.convergence:.2f}",
        SLOWER,
    ),
    Rule("shifted", lambda d: d.shift > 0.5, "{d.shift:.0%} of the predicted shares moved to other classes"),
    Rule(
        "unused classes",
        lambda d: d.unused_after > d.unused_before + 0.3,
        "{d.unused_after:.0%} of the classes are given to no input, {d.unused_before:.0%} before",
    ),
    Rule(
        "overconfident",
        lambda d: d.confidence_after - d.stability_after > 0.4,
        "a mean probability of {d.confidence_after:.2f} for the predicted class, but only {d.stability_after:.0%} of "
        "the predictions survive a small change of the input",
    ),
    Rule(
        "shares moved",
        lambda d: (
            (d.classes <= FEW_CLASSES and not d.known_shares)
            and (d.moved > (0.4 if d.overpredicted else 0.1) and d.one_sided > 0.8)
        ),
        "{d.moved:.0%} of the predictions moved from some classes to others, and hardly any the other way: either "
        "zero-shot favoured the ones, or the others were given shares that the data do not have, which look the same "
        "without labels",
        "If you know the class proportions, give them as the prior; if not, 20 answers to `pouf review` will tell.",
        "caution",
    ),
    Rule(
        "unreliable names",
        lambda d: 0.05 <= d.names_near < 0.5 and d.names_span < 0.5,
        "the class names fit these inputs no better than random words do: {d.names_near:.0%} of such sets are less "
        "near to the inputs, {d.names_span:.0%} tell them less apart. The worst fit: {d.names_worst}",
        OTHER_NAMES,
        "caution",
    ),
    Rule(
        "second opinion fell",
        lambda d: d.opinion_fell > 0.02 and d.agreement < 1.0,
        "agreement of the predictions with a clustering of the inputs fell all along the run, by {d.opinion_fell:.2f}",
        "Fewer steps or a smaller learning rate may do less harm.",
        "caution",
    ),
    Rule(
        "few inputs",
        lambda d: d.inputs < FEW_INPUTS,
        "too few inputs ({d.inputs}) to adapt to or to judge by",
        f"Give at least {FEW_INPUTS}, better hundreds.",
        "caution",
    ),
    Rule(
        "few steps",
        lambda d: 0 < d.steps < FEW_STEPS,
        "too few steps ({d.steps}) to judge by",
        "",
        "caution",
    ),
    Rule(
        "uninformative",
        lambda d: d.inputs >= FEW_INPUTS and d.information_before < 0.01,
        "zero-shot says nearly the same of every input (mutual information of inputs and predictions: "
        "{d.information_before:.1%} of its maximum)",
        "Are the model's weights trained, and is more than one class in the data?",
        "caution",
    ),
    Rule(
        "nothing changed",
        lambda d: d.agreement == 1.0 and d.moved == 0,
        "adaptation changed no prediction of the {d.inputs} inputs that were looked at",
        "If you know the class proportions, give them as the prior.",
        "caution",
    ),
)


def alarms(diagnostics: Diagnostics) -> list[Finding]:
    """What speaks against the adapted classifier."""
    return _findings(diagnostics, "alarm")


def cautions(diagnostics: Diagnostics) -> list[Finding]:
    """What leaves open whether the adapted classifier is any better."""
    return _findings(diagnostics, "caution")


def _findings(diagnostics: Diagnostics, level: str) -> list[Finding]:
    return [
        Finding(rule.name, rule.message.format(d=diagnostics), rule.advice)
        for rule in RULES
        if rule.level == level and rule.fires(diagnostics)
    ]


def _standard_error(d: Diagnostics) -> float:
    """Of the stability before: in a small sample a low one may be chance."""
    return math.sqrt(d.stability_before * (1 - d.stability_before) / d.perturbed)


def diagnose(
    before: SnapshotPredictions,
    after: SnapshotPredictions,
    steps: int = 0,
    convergence: float = 1.0,
    known_shares: bool = False,
    zero_shot: SnapshotPredictions | None = None,
) -> Diagnostics:
    """Of a classifier before and after.

    Args:
        zero_shot: the one before as it is, where that one is corrected.
    """
    k = before.probabilities.shape[1]
    p, labels = before.probabilities, [each.probabilities.argmax(1) for each in (before, after)]
    found = gated_shares(p)  # which of the classes seem to be there at all
    shares = [before.shares(), after.shares()]
    first = zero_shot or before
    moved = shift_of(first.shares(), shares[1])
    return Diagnostics(
        classes=k,
        effective_before=k * min(share_of_classes(p.mean(0)), share_of_classes(found)),
        effective_after=share_of_classes(after.probabilities.mean(0)) * k,
        shift=shift_of(*shares),
        unused_before=max(share(shares[0] == 0), share(found * len(p) < 1)),
        unused_after=share(shares[1] == 0),
        agreement=share(labels[0] == labels[1]),
        chance=float(shares[0] @ shares[1]),
        kappa=kappa(*labels),
        confidence_before=before.probabilities.max(1).values.mean().item(),
        confidence_after=after.probabilities.max(1).values.mean().item(),
        stability_before=before.stability(),
        stability_after=after.stability(),
        information_before=float(mutual_information(p.clamp_min(1e-30).log())) / math.log(k),
        inputs=len(p),
        perturbed=len(before.perturbed),
        steps=steps,
        convergence=convergence,
        moved=moved,
        one_sided=moved / max(1 - share(first.probabilities.argmax(1) == labels[1]), 1e-9),
        known_shares=known_shares,
    )


def shift_of(before: Tensor, after: Tensor) -> float:
    """Half the sum of changes in the shares (k,) of the classes."""
    return float((before - after).abs().sum() / 2)


def spread_of(features: Tensor) -> float:
    """1 minus the length of the mean direction of features (n, d); 0 where all are zeros, which have none."""
    unit = F.normalize(features.double(), dim=1)
    return 1 - unit.mean(0).norm().item() if bool(unit.any()) else 0.0


def share(same: Tensor) -> float:
    return same.double().mean().item()
