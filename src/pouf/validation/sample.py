"""The inputs that a run is judged on: how many, which, and what a classifier predicts for them."""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Subset, Unlabelled
from pouf.data.labels import Teacher
from pouf.data.views import perturbation
from pouf.inference.cache import FeatureCache
from pouf.inference.encode import FeatureSet, InferenceConfig
from pouf.recipe import Recipe
from pouf.validation.diagnostics import SnapshotPredictions

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
