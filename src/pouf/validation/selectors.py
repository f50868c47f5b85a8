"""Choosing a step without labels: which of a run's predictions to believe.

What resembles the training loss favours over-training. The choice here is agreement with an ensemble of snapshots (as
EnsV does): errors that come and go are outvoted. Two second opinions come from the features instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.losses.prior import share_of_classes
from pouf.postprocess.base import kappa
from pouf.validation.diagnostics import share

GROUPS = 64  # that the inputs are clustered into at most


class Snapshot(NamedTuple):
    """What is known of a step without labels."""

    step: int  # 0 is zero-shot
    agreement: float  # share of inputs on which it says what the snapshots that vote say together
    neighbourhood: float  # soft neighbourhood density of its predictions: higher where neighbours agree surely
    clustering: float  # adjusted mutual information with a clustering of the features before training
    effective_classes: float  # exp H(mean p)
    agreement_with_zero_shot: float


class Choice(NamedTuple):
    step: int
    snapshots: list[Snapshot]
    convergence: float  # agreement beyond chance (kappa) of the run's last two thirds with its end, at the lowest

    @property
    def chosen(self) -> Snapshot:
        return next(snapshot for snapshot in self.snapshots if snapshot.step == self.step)


def opinion_fell(snapshots: Sequence[Snapshot]) -> float:
    """How far the agreement with a clustering fell from the first to the last; 0 where it rose on the way."""
    opinions = [snapshot.clustering for snapshot in snapshots]
    fell = all(later <= earlier + 0.005 for earlier, later in pairwise(opinions))
    return max(0.0, opinions[0] - opinions[-1]) if fell and opinions else 0.0


def snapshot_steps(steps: int, count: int) -> list[int]:
    """0, the last step, and others between them at equal distances: count + 1 in all where there are enough steps."""
    if not count:
        return []
    count = max(1, min(count, steps))
    return sorted({round(i * steps / count) for i in range(count + 1)})


def votes(predictions: Mapping[int, Tensor], last: int) -> Tensor | None:
    """(n,), what the second half of a run says together; None before it has begun.

    The first half has no vote: a run that gets better all along would be pulled back to its middle by its beginnings.
    """
    voters = [probabilities for step, probabilities in predictions.items() if 2 * step >= last]
    return ensemble_labels(voters) if voters else None


def choose(predictions: Mapping[int, Tensor], features: Tensor, among: Collection[int] | None = None) -> Choice:
    """The step that agrees most with the mean prediction of the run's second half; of equals the latest.

    Args:
        among: the steps that can be chosen, by default all.
    """
    last = max(predictions)
    ensemble = votes(predictions, last)
    assert ensemble is not None  # the last one votes
    first = predictions[min(predictions)]
    clusters = cluster(features, first.shape[1])
    judged = []
    for step, probabilities in predictions.items():
        labels = probabilities.argmax(1)
        judged.append(
            Snapshot(
                step=step,
                agreement=share(labels == ensemble),
                neighbourhood=soft_neighbourhood_density(probabilities),
                clustering=cluster_agreement(labels, clusters),
                effective_classes=share_of_classes(probabilities.mean(0)) * probabilities.shape[1],
                agreement_with_zero_shot=share(labels == first.argmax(1)),
            )
        )
    candidates = [snapshot for snapshot in judged if among is None or snapshot.step in among]
    best = max(candidates, key=lambda snapshot: (snapshot.agreement, snapshot.step))
    late = [probabilities.argmax(1) for step, probabilities in predictions.items() if last <= 3 * step < 3 * last]
    convergence = min((kappa(labels, predictions[last].argmax(1)) for labels in late), default=1.0)
    return Choice(best.step, judged, convergence)


def ensemble_labels(predictions: Sequence[Tensor]) -> Tensor:
    """What all say together: (n, k) each -> (n,)."""
    return torch.stack(list(predictions)).mean(0).argmax(1)


def soft_neighbourhood_density(probabilities: Tensor, temperature: float = 0.05) -> float:
    """Mean entropy of each input's similarities to the others' predictions (SND, ICCV 2021): (n, k) -> nats.

    It is high where predictions form dense groups and low where they are scattered.
    """
    if len(probabilities) < 2:
        return 0.0  # no neighbours
    unit = F.normalize(probabilities.float(), dim=1)
    near = unit @ unit.T / temperature
    near.fill_diagonal_(-torch.inf)
    log_p = near.log_softmax(1)
    log_p.fill_diagonal_(0)
    p = near.softmax(1)
    return float(-(p * log_p).sum(1).mean())


def cluster(features: Tensor, k: int) -> Tensor:
    """(n, d) -> (n,), k-means groups of features of length 1; the same for the same features.

    At most `GROUPS`, and at least eight inputs to a group: as many groups as classes would say nothing about a sample
    that holds each class once or not at all, and take most of the time of the run.
    """
    from sklearn.cluster import KMeans

    unit = F.normalize(features.float(), dim=1).numpy()
    groups = max(min(k, len(unit), 2), min(k, GROUPS, len(unit) // 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fewer different inputs than groups: then there are fewer groups
        found = KMeans(groups, n_init=3, random_state=0).fit(unit).labels_
    return torch.from_numpy(found).long()


def cluster_agreement(labels: Tensor, clusters: Tensor) -> float:
    """Adjusted mutual information of predictions and clusters: 1 where they are the same but for names, 0 by chance."""
    from sklearn.metrics import adjusted_mutual_info_score

    return float(adjusted_mutual_info_score(labels.numpy(), clusters.numpy()))
