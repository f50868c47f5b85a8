"""How likely single predictions are to be right, estimated without labels; and inputs that belong to no class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.classifier import Classifier, Predictions
from pouf.data.base import Unlabelled
from pouf.errors import InputError
from pouf.inference import FeatureSet, InferenceConfig, Transform
from pouf.validation.diagnostics import perturbation

VIEWS = 3  # slightly changed looks at each input
UNKNOWN = "unknown"


def reliability(
    classifier: Classifier,
    zero_shot: Classifier,
    data: Unlabelled,
    predictions: Predictions,
    inference: InferenceConfig,
) -> Tensor:
    """(n,): the mean probability of the predicted class over several looks at the input.

    The looks are the classifier's own, three at slightly changed inputs, and zero-shot's. A classifier that was tuned
    without labels is surer than it is right; what it says must also survive small changes, and what zero-shot says
    counts as a voice that tuning could not bend. This is an estimate, not a guarantee.
    """
    guess = predictions.log_probabilities.argmax(1, keepdim=True)
    looks = [predictions.log_probabilities.exp()]
    change = perturbation(data.modality)
    for number in range(VIEWS):
        view = Transform(f"{change.name} {number}", _shifted(change, number))
        looks.append(_probabilities(classifier, classifier.encode(data, inference, change=view)))
    looks.append(_probabilities(zero_shot, zero_shot.encode(data, inference)))
    if any(look.shape != looks[0].shape for look in looks):
        raise InputError(f"{data.source} changed while it was being read: try again")
    return torch.stack([look.gather(1, guess).squeeze(1) for look in looks]).mean(0)


def _shifted(change: Transform, number: int) -> Callable[[Any, int], Any]:
    return lambda sample, seed: change.apply(sample, seed + number)


def _probabilities(classifier: Classifier, encoded: FeatureSet) -> Tensor:
    return torch.cat([block.log_probabilities for block in classifier.score_features(encoded)]).exp()


def check_rate(rate: float) -> None:
    if not 0 <= rate < 1:
        raise InputError(f"--abstain {rate:g}: expected a rate of errors from 0 to below 1, as 0.05")


def kept_at(rate: float, estimated: Tensor) -> Tensor:
    """(n,) bool: as many predictions as possible, the surest first, so that their mean estimated error is <= rate."""
    check_rate(rate)
    order = estimated.argsort(descending=True)
    errors = (1 - estimated[order]).cumsum(0) / torch.arange(1, len(order) + 1)
    count = int((errors <= rate + 1e-9).nonzero().max()) + 1 if bool((errors <= rate + 1e-9).any()) else 0
    kept = torch.zeros(len(order), dtype=torch.bool)
    kept[order[:count]] = True
    return kept


@torch.no_grad()
def nearness(classifier: Classifier, encoded: FeatureSet) -> Tensor:
    """(n,): cosine of each feature with the nearest prototype."""
    prototypes = F.normalize(classifier.prototypes().float(), dim=1)
    features = F.normalize(encoded.features.float().to(prototypes.device), dim=1)
    return (features @ prototypes.T).max(1).values.cpu()
