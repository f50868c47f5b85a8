"""How likely single predictions are to be right, estimated without labels; and inputs that belong to no class."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.taxonomy import Taxonomy
from pouf.data.views import perturbation
from pouf.errors import InputError
from pouf.inference.encode import FeatureSet, InferenceConfig, View
from pouf.parallel.process_group import processes

PERTURBED_VIEWS = 3  # slightly changed looks at each input
UNKNOWN = "unknown"


def reliability_views(data: Unlabelled) -> list[View]:
    """What the classifier is asked about each input, to be encoded together."""
    return [View(), *(View(perturbation(data.modality, number)) for number in range(PERTURBED_VIEWS))]


def expected_probabilities(
    classifier: Classifier,
    zero_shot: Classifier,
    data: Unlabelled,
    encoded: FeatureSet,
    inference: InferenceConfig,
) -> Tensor:
    """(n, k): the mean over several looks at the input.

    The looks are the classifier's own, three at slightly changed inputs, and zero-shot's. A classifier that was tuned
    without labels is surer than it is right; what it says must also survive small changes, and what zero-shot says
    counts as a voice that tuning could not bend. This is an estimate, not a guarantee.
    """
    looks = [classifier.log_probabilities(encoded).exp()]
    for number in range(PERTURBED_VIEWS):
        view = classifier.store(inference).share(data, perturbation(data.modality, number))
        looks.append(classifier.log_probabilities(view).exp())
    looks.append(zero_shot.log_probabilities(zero_shot.store(inference).share(data)).exp())
    if any(look.shape != looks[0].shape for look in looks):
        raise InputError(f"{data.source} changed while it was being read: try again")
    return torch.stack(looks).mean(0)


def reliability(
    classifier: Classifier,
    zero_shot: Classifier,
    data: Unlabelled,
    encoded: FeatureSet,
    inference: InferenceConfig,
) -> Tensor:
    """(n,): the expected probability of the predicted class."""
    guess = classifier.log_probabilities(encoded).argmax(1, keepdim=True)
    return expected_probabilities(classifier, zero_shot, data, encoded, inference).gather(1, guess).squeeze(1)


def check_rate(rate: float) -> None:
    if not 0 <= rate < 1:
        raise InputError(f"can't abstain at {rate:g}: expected a rate of errors from 0 to below 1, as 0.05")


def within_error_rate(rate: float, estimated: Tensor) -> Tensor:
    """(n,) bool: as many predictions as possible, the surest first, so that their mean estimated error is <= rate."""
    check_rate(rate)
    order = estimated.argsort(descending=True)
    errors = (1 - estimated[order]).cumsum(0) / torch.arange(1, len(order) + 1)
    count = int((errors <= rate + 1e-9).nonzero().max()) + 1 if bool((errors <= rate + 1e-9).any()) else 0
    kept = torch.zeros(len(order), dtype=torch.bool)
    kept[order[:count]] = True
    return kept


class Unreliable(NamedTuple):
    """Of this process's share of the inputs, by position."""

    left_out: list[int]
    reliability: dict[int, float]  # of each input
    parents: dict[int, str]  # where classes are paths: answered with an ancestor, which is reliable enough


def unreliable(
    classifier: Classifier,
    zero_shot: Classifier,
    data: Unlabelled,
    encoded: FeatureSet,
    rate: float,
    inference: InferenceConfig,
) -> Unreliable:
    """What to leave out, so that at most this share of the rest is wrong: of all inputs, also where several processes
    share them.

    Where classes are paths, an input that is left out is answered with the parent of its class, or with an ancestor
    further up, if these answers together are wrong as rarely.
    """
    expected = expected_probabilities(classifier, zero_shot, data, encoded, inference)
    guess = classifier.log_probabilities(encoded).argmax(1)
    estimated = expected.gather(1, guess[:, None]).squeeze(1)
    taxonomy = Taxonomy.from_names(classifier.classes)
    kept = _kept_by_all(rate, estimated)
    left_out = [row for row, stays in enumerate(kept) if not stays]
    parents: dict[int, str] = {}
    if taxonomy is not None:
        rank, sums = {name: i for i, name in enumerate(taxonomy.members)}, taxonomy.sums(expected)
        answers = {row: taxonomy.parent(classifier.classes[int(guess[row])]) for row in left_out}
        for _ in range(max(name.count("/") for name in classifier.classes)):  # as often on each process
            rows = {row: name for row, name in answers.items() if name is not None}
            totals = torch.tensor([float(sums[row, rank[name]]) for row, name in rows.items()])
            for (row, name), stays in zip(rows.items(), _kept_by_all(rate, totals), strict=True):
                if stays:
                    parents[encoded.indices[row]] = name
            answers = {row: taxonomy.parent(name) for row, name in rows.items() if encoded.indices[row] not in parents}
    by_position = dict(zip(encoded.indices, estimated.tolist(), strict=True))
    positions = [encoded.indices[row] for row in left_out]
    return Unreliable([place for place in positions if place not in parents], by_position, parents)


def _kept_by_all(rate: float, estimated: Tensor) -> list[bool]:
    """`within_error_rate` among the inputs of all processes: for those of this one."""
    every = processes().gather_objects(estimated)
    kept: list[bool] = (
        within_error_rate(rate, torch.cat(every)).split([len(part) for part in every])[processes().rank].tolist()
    )
    return kept


def out_of_distribution(classifier: Classifier, encoded: FeatureSet, near: float | None) -> list[int]:
    """Positions of inputs whose cosine with the nearest prototype is below that of 99 % of the run's own inputs."""
    if near is None:
        raise InputError("this run does not know how near inputs usually are: it kept no checkpoints")
    far = (encoded.nearness(classifier.fixed_prototypes()) < near).tolist()
    return [index for index, is_far in zip(encoded.indices, far, strict=True) if is_far]
