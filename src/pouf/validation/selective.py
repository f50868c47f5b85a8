"""Selective prediction without labels: reliability of single predictions, and inputs that belong to no class."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.class_names import Taxonomy
from pouf.data.views import perturbation
from pouf.errors import InputError
from pouf.inference.encode import FeatureSet, InferenceConfig
from pouf.inference.views import View
from pouf.parallel.process_group import processes

PERTURBED_VIEWS = 3  # of each input
UNKNOWN = "unknown"


def reliability_views(data: Unlabelled) -> list[View]:
    """The views of each input that are encoded: the input itself and slightly changed ones."""
    return [View(), *(View(perturbation(data.modality, number)) for number in range(PERTURBED_VIEWS))]


def expected_probabilities(
    classifier: Classifier,
    zero_shot: Classifier,
    data: Unlabelled,
    encoded: FeatureSet,
    inference: InferenceConfig,
) -> Tensor:
    """Mean probabilities (n, k) over five predictions of each input.

    These are the classifier's own, three on slightly changed inputs, and zero-shot's. A classifier that was tuned
    without labels is overconfident; changes of the input and the untuned model correct for that. This is an estimate,
    not a guarantee.
    """
    predictions = [classifier.log_probabilities(encoded).exp()]
    for number in range(PERTURBED_VIEWS):
        view = classifier.store(inference).share(data, perturbation(data.modality, number))
        predictions.append(classifier.log_probabilities(view).exp())
    predictions.append(zero_shot.log_probabilities(zero_shot.store(inference).share(data)).exp())
    if any(each.shape != predictions[0].shape for each in predictions):
        raise InputError(f"{data.source} changed while it was being read: try again")
    return torch.stack(predictions).mean(0)


def check_rate(rate: float) -> None:
    """Raise an error unless the rate is from 0 to below 1."""
    if not 0 <= rate < 1:
        raise InputError(f"can't abstain at {rate:g}: expected a rate of errors from 0 to below 1, as 0.05")


def within_error_rate(rate: float, estimated: Tensor) -> Tensor:
    """(n,) bool: as many predictions as possible, the surest first, so that their mean estimated error is <= rate."""
    check_rate(rate)
    order = estimated.argsort(descending=True)
    errors = (1 - estimated[order]).cumsum(0) / torch.arange(1, len(order) + 1)
    count = int((errors <= rate + 1e-9).nonzero().max()) + 1 if bool((errors <= rate + 1e-9).any()) else 0
    reliable = torch.zeros(len(order), dtype=torch.bool)
    reliable[order[:count]] = True
    return reliable


class Unreliable(NamedTuple):
    """Unreliable predictions among this process's share of the inputs, by index."""

    left_out: list[int]
    reliability: dict[int, float]  # of each input
    parents: dict[int, str]  # if classes are paths: inputs with a reliable enough ancestor class


def unreliable(
    classifier: Classifier,
    zero_shot: Classifier,
    data: Unlabelled,
    encoded: FeatureSet,
    rate: float,
    inference: InferenceConfig,
) -> Unreliable:
    """The predictions to leave out so that at most this share of the rest is wrong, over the inputs of all processes.

    If classes are paths, an input that is left out gets the parent of its class, or a higher ancestor, if the error
    rate of these answers is low enough.
    """
    expected = expected_probabilities(classifier, zero_shot, data, encoded, inference)
    guess = classifier.log_probabilities(encoded).argmax(1)
    estimated = expected.gather(1, guess[:, None]).squeeze(1)
    taxonomy = Taxonomy.from_names(classifier.classes)
    reliable = _within_error_rate_of_all(rate, estimated)
    left_out = [row for row, stays in enumerate(reliable) if not stays]
    parents: dict[int, str] = {}
    if taxonomy is not None:
        rank, sums = {name: i for i, name in enumerate(taxonomy.members)}, taxonomy.sums(expected)
        answers = {row: taxonomy.parent(classifier.classes[int(guess[row])]) for row in left_out}
        for _ in range(max(name.count("/") for name in classifier.classes)):  # equally often on each process
            rows = {row: name for row, name in answers.items() if name is not None}
            totals = torch.tensor([float(sums[row, rank[name]]) for row, name in rows.items()])
            for (row, name), stays in zip(rows.items(), _within_error_rate_of_all(rate, totals), strict=True):
                if stays:
                    parents[encoded.indices[row]] = name
            answers = {row: taxonomy.parent(name) for row, name in rows.items() if encoded.indices[row] not in parents}
    by_position = dict(zip(encoded.indices, estimated.tolist(), strict=True))
    positions = [encoded.indices[row] for row in left_out]
    return Unreliable([index for index in positions if index not in parents], by_position, parents)


def _within_error_rate_of_all(rate: float, estimated: Tensor) -> list[bool]:
    """`within_error_rate` over the inputs of all processes; the result is for those of this process."""
    per_rank = processes().gather_objects(estimated)
    parts = within_error_rate(rate, torch.cat(per_rank)).split([len(part) for part in per_rank])
    reliable: list[bool] = parts[processes().rank].tolist()
    return reliable


def out_of_distribution(classifier: Classifier, encoded: FeatureSet, near: float | None) -> list[int]:
    """Indices of inputs with a cosine to the nearest prototype below that of 99 % of the run's own inputs."""
    if near is None:
        raise InputError("can't detect unknown inputs: this run has no checkpoints to take the usual similarity from")
    far = (encoded.nearness(classifier.fixed_prototypes()) < near).tolist()
    return [index for index, is_far in zip(encoded.indices, far, strict=True) if is_far]
