"""How likely single predictions are to be right, estimated without labels; and inputs that belong to no class."""

from __future__ import annotations

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.perturb import perturbation
from pouf.errors import InputError
from pouf.inference.encode import FeatureSet, InferenceConfig, View
from pouf.parallel.process_group import processes

VIEWS = 3  # slightly changed looks at each input
UNKNOWN = "unknown"


def reliability_views(data: Unlabelled) -> list[View]:
    """What the classifier is asked about each input, to be encoded together."""
    return [View(), *(View(perturbation(data.modality, number)) for number in range(VIEWS))]


def reliability(
    classifier: Classifier,
    zero_shot: Classifier,
    data: Unlabelled,
    encoded: FeatureSet,
    inference: InferenceConfig,
) -> Tensor:
    """(n,): the mean probability of the predicted class over several looks at the input.

    The looks are the classifier's own, three at slightly changed inputs, and zero-shot's. A classifier that was tuned
    without labels is surer than it is right; what it says must also survive small changes, and what zero-shot says
    counts as a voice that tuning could not bend. This is an estimate, not a guarantee.
    """
    looks = [classifier.log_probabilities(encoded).exp()]
    guess = looks[0].argmax(1, keepdim=True)
    for number in range(VIEWS):
        view = classifier.store(inference).share(data, perturbation(data.modality, number))
        looks.append(classifier.log_probabilities(view).exp())
    looks.append(zero_shot.log_probabilities(zero_shot.store(inference).share(data)).exp())
    if any(look.shape != looks[0].shape for look in looks):
        raise InputError(f"{data.source} changed while it was being read: try again")
    return torch.stack([look.gather(1, guess).squeeze(1) for look in looks]).mean(0)


def check_rate(rate: float) -> None:
    if not 0 <= rate < 1:
        raise InputError(f"can't abstain at {rate:g}: expected a rate of errors from 0 to below 1, as 0.05")


def kept_at(rate: float, estimated: Tensor) -> Tensor:
    """(n,) bool: as many predictions as possible, the surest first, so that their mean estimated error is <= rate."""
    check_rate(rate)
    order = estimated.argsort(descending=True)
    errors = (1 - estimated[order]).cumsum(0) / torch.arange(1, len(order) + 1)
    count = int((errors <= rate + 1e-9).nonzero().max()) + 1 if bool((errors <= rate + 1e-9).any()) else 0
    kept = torch.zeros(len(order), dtype=torch.bool)
    kept[order[:count]] = True
    return kept


def unreliable(
    classifier: Classifier,
    zero_shot: Classifier,
    data: Unlabelled,
    encoded: FeatureSet,
    rate: float,
    inference: InferenceConfig,
) -> tuple[list[int], dict[int, float]]:
    """Positions to leave out, so that at most this share of the rest is wrong, and how reliable each input is.

    Of this process's share, where several share the work; the rate is that of all.
    """
    estimated, group = reliability(classifier, zero_shot, data, encoded, inference), processes()
    every = group.gather_objects(estimated)
    kept = kept_at(rate, torch.cat(every)).split([len(part) for part in every])[group.rank].tolist()
    left_out = [index for index, stays in zip(encoded.indices, kept, strict=True) if not stays]
    return left_out, dict(zip(encoded.indices, estimated.tolist(), strict=True))


def out_of_distribution(classifier: Classifier, encoded: FeatureSet, near: float | None) -> list[int]:
    """Positions of inputs whose cosine with the nearest prototype is below that of 99 % of the run's own inputs."""
    if near is None:
        raise InputError("this run does not know how near inputs usually are: it kept no checkpoints")
    far = (encoded.nearness(classifier.fixed_prototypes()) < near).tolist()
    return [index for index, is_far in zip(encoded.indices, far, strict=True) if is_far]
