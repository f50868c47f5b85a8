"""What predictions before and after adaptation show without labels, and those of a teacher. `rules` judges it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.losses.information import log_marginal, mutual_information
from pouf.losses.objective import gated_shares, share_of_classes
from pouf.postprocess.base import kappa
from pouf.postprocess.clusters import leave_one_out
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
    perturbed: int  # of these, how many were predicted slightly changed as well
    steps: int = 0  # that were trained; 0 where predictions were corrected only
    convergence: float = 1.0  # kappa of the run's last two thirds with its end, at the lowest
    opinion_fell: float = 0.0  # how far agreement with a clustering fell, where it never rose along the run; else 0
    moved: float = 0.0  # as shift, from zero-shot as it is, without any correction
    one_sided: float = 0.0  # how much of that change is a move of shares: 1 if nothing went the other way, 0 if as much
    known_shares: bool = False  # proportions of the classes were given
    largest_share: float = 0.0  # of the predictions, of two classes whose shares are not given
    largest_class: str = ""  # that has it
    uniform_changes: float = 0.0  # share of the predictions that equal shares would change
    overpredicted: str = ""  # the class that zero-shot was found to predict too often, and no longer does here
    corrected_changes: float = 0.0  # share of predictions that zero-shot, corrected without training, has otherwise
    names_agreement: float | None = None  # kappa of zero-shot with the clusters that it makes; None for few inputs
    names_near: float = 1.0  # share of sets of random words that are less near to the inputs than the class names
    names_span: float = 1.0  # share of those that tell the inputs less apart
    names_worst: str = ""  # the names that fit worst
    teacher_inputs: int = 0  # that were looked at and that a teacher answered, where one is learned from
    teacher_zero_shot: float = 1.0  # agreement of teacher and zero-shot
    teacher_adapted: float = 1.0  # of teacher and adapted
    teacher_kappa: float = 1.0  # of teacher and zero-shot, beyond chance
    teacher_clusters: float = 1.0  # kappa of the teacher with the clusters that its answers make of the features
    teacher_usage: float = 1.0  # exp H of the teacher's classes, as a share of zero-shot's
    teacher_swapped: str = ""  # two classes that teacher and zero-shot have the other way round
    feature_spread: float = 1.0  # of the model's features before training: 0 where all have the same direction

    @property
    def changed(self) -> float:
        """Share of inputs that zero-shot and adapted predict differently."""
        return 1 - self.agreement


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


AGREED = 0.5  # kappa of teacher and zero-shot with the two exchanged
SWAPPED = 8  # inputs of a pair of classes, with fewer of which an exchange may be chance


def teacher_facts(teacher: Tensor, zero_shot: Tensor, features: Tensor, classes: tuple[str, ...]) -> dict[str, Any]:
    """Fields of `Diagnostics`: predictions (n, k) of both, of inputs that the teacher answered, and features (n, d)."""
    if not len(teacher):
        return {}
    labels, others = teacher.argmax(1), zero_shot.argmax(1)
    x, k = F.normalize(features.float(), dim=1), teacher.shape[1]
    hard = F.one_hot(labels, k).to(x)
    return {
        "teacher_inputs": len(teacher),
        "teacher_zero_shot": share(labels == others),
        "teacher_kappa": kappa(labels, others),
        "teacher_clusters": kappa(labels, leave_one_out(x, hard).argmax(1)) if len(labels.unique()) > 1 else 0.0,
        "teacher_usage": share_of_classes(hard.mean(0)) / share_of_classes(F.one_hot(others, k).float().mean(0)),
        "teacher_swapped": _swapped(labels, others, classes),
    }


def _swapped(labels: Tensor, others: Tensor, classes: tuple[str, ...]) -> str:
    """Two classes that teacher and zero-shot have the other way round: most inputs of each are the other's.

    Where they agree on little else, an exchange tells nothing.
    """
    k = len(classes)
    counts = torch.bincount(labels * k + others, minlength=k * k).view(k, k)
    own = counts.diagonal()
    crossed = torch.minimum(counts, counts.T)
    worst = crossed.triu(1).flatten().argmax()
    a, b = divmod(int(worst), k)
    exchanged = int(counts[a, b] + counts[b, a])
    if exchanged < SWAPPED or crossed[a, b] <= max(own[a], own[b]):
        return ""
    exchanged_labels = torch.where(labels == a, b, torch.where(labels == b, a, labels))
    if kappa(exchanged_labels, others) < AGREED:
        return ""
    return f"{classes[a]!r} and {classes[b]!r}"
