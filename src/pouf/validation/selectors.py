"""Choosing a step without labels: the inputs that steps are compared on, and which of their predictions to believe.

What resembles the training loss favours over-training. The choice here is agreement with an ensemble of snapshots (as
EnsV does): errors that come and go are outvoted. Two second opinions come from the features instead.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Subset, Unlabelled
from pouf.data.labels import Teacher
from pouf.data.views import perturbation
from pouf.inference.cache import FeatureCache
from pouf.inference.encode import FeatureSet, InferenceConfig
from pouf.losses.objective import share_of_classes
from pouf.postprocess.base import kappa
from pouf.recipe import Recipe
from pouf.validation.diagnostics import SnapshotPredictions, share

BUDGET = 0.15  # of what the training costs, for judging it
FORWARD_AND_BACKWARD = 3  # what a trained input costs, in inputs that are only encoded
MIN_INPUTS, MAX_INPUTS, MAX_PERTURBED = 100, 512, 256
logger = logging.getLogger(__name__)


class SampleSize(NamedTuple):
    inputs: int  # that are predicted at each checkpoint
    perturbed: int  # of these, which are also encoded slightly changed: for zero-shot, and for what the verdict is on


def sample_size(n: int, classes: int, recipe: Recipe, changing: bool) -> SampleSize:
    """How many of n inputs a run is judged on, so that this costs at most 15 % of its training.

    Where each step encodes a batch, a run of s steps with batches of b costs as much as encoding 3 s b inputs. Judging
    it encodes m inputs at zero-shot and at c checkpoints, and m changed ones at zero-shot and at the end:

        (c + 3) m <= 0.15 * 3 s b,  100 <= m <= 512

    Where features are looked up, training costs n encodings, and judging it only those of changed inputs, once:
    m = 0.15 n. The lower bound is for the diagnostics: shares of fewer inputs say little.

    Args:
        changing: inputs are encoded at each step: see `changes_features`.
    """
    if changing:
        batch = min(max(recipe.batch_size, recipe.batch_per_class * classes), n)
        encodings = BUDGET * FORWARD_AND_BACKWARD * recipe.steps * batch
        inputs = min(n, MAX_INPUTS, max(MIN_INPUTS, int(encodings / (min(recipe.snapshots, recipe.steps) + 3))))
        return SampleSize(inputs, min(inputs, MAX_PERTURBED))
    return SampleSize(min(n, MAX_INPUTS), min(n, MAX_PERTURBED, max(MIN_INPUTS, int(BUDGET * n))))


def changes_features(classifier: Classifier, recipe: Recipe) -> bool:
    """Whether inputs are encoded at each step: their features change with the weights, or with demonstrations."""
    name, backbone = recipe.tuner.name, classifier.backbone
    prototypes_alone = name == "prototypes" or (name == "prompt" and backbone.text_side is not None)
    return recipe.steps > 0 and (not prototypes_alone or classifier.demonstrations is not None)


def sample_positions(data: Unlabelled, seed: int, size: SampleSize, teacher: Teacher | None = None) -> list[int]:
    """Positions of the inputs that checkpoints are judged on; the first ones are also perturbed.

    As many have a teacher's answer as among all, but at least half of them, if there are so many.
    """
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    by_content = data.content_order()
    positions = [by_content[position] for position in order.tolist()]
    answered = set(teacher.answered.nonzero().flatten().tolist()) if teacher is not None else set()
    first = [position for position in positions if position in answered][: size.inputs // 2]
    chosen = set(first)
    return (first + [position for position in positions if position not in chosen])[: size.inputs]


class Sample:
    """Some inputs, the same for the same data and seed, and what a classifier predicts for them."""

    def __init__(
        self,
        classifier: Classifier,
        data: Unlabelled,
        seed: int,
        size: SampleSize,
        inference: InferenceConfig,
        teacher: Teacher | None = None,
    ) -> None:
        self.inputs = Subset(data, sample_positions(data, seed, size, teacher))
        self.few = Subset(self.inputs, range(min(size.perturbed, len(self.inputs))))
        self.perturbation = perturbation(data.modality)
        self.inference = inference
        self.before = classifier.encode(self.inputs, inference)
        self.before_perturbed = classifier.encode(self.few, inference, transform=self.perturbation)
        # The changed ones stand for the first of the others: what can't be read must not shift them.
        self.narrow(self._in_both(self.before, self.before_perturbed))

    @property
    def features(self) -> Tensor:
        """(n, d), as they were before training."""
        return self.before.features

    def _in_both(self, plain: FeatureSet, perturbed: FeatureSet) -> set[int]:
        changed = set(perturbed.indices)
        return {i for i in plain.indices if i >= len(self.few) or i in changed}

    def narrow(self, readable: Set[int]) -> None:
        """Leave out those that can't be read any more."""
        lost = len(set(self.before.indices) - readable)
        if lost:
            logger.warning("%d of the %d inputs that checkpoints are judged on can't be read any more",
                           lost, len(self.before.indices))  # fmt: skip
        self.before, self.before_perturbed = (each.only(readable) for each in (self.before, self.before_perturbed))

    def predict(self, classifier: Classifier, changed: bool, cache: FeatureCache | None = None) -> SnapshotPredictions:
        """Predictions for the inputs as they are.

        Args:
            changed: the classifier has other features than zero-shot, which have to be computed.
            cache: which may have them.
        """
        encoded = self.before
        if changed:
            encoded = classifier.encode(self.inputs, replace(self.inference, cache=cache, skip_not_finite=False))
            self.narrow(set(encoded.indices))
            encoded = encoded.only(set(self.before.indices))
        prototypes = classifier.fixed_prototypes()
        probabilities = classifier.log_probabilities(encoded, prototypes).exp()
        return SnapshotPredictions(probabilities, probabilities[:0], encoded.nearness(prototypes))

    def predict_perturbed(self, classifier: Classifier, changed: bool) -> Tensor:
        """(m, k), for the perturbed inputs."""
        encoded = self.before_perturbed
        if changed:
            fresh = replace(self.inference, cache=None, skip_not_finite=False)
            encoded = classifier.encode(self.few, fresh, transform=self.perturbation)
            self.narrow(self._in_both(self.before, encoded))
            encoded = encoded.only(set(self.before_perturbed.indices))
        return classifier.log_probabilities(encoded).exp()


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
