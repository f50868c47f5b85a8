"""The loss of a method: a weighted sum of named terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pouf.losses.information import entropy, mutual_information
from pouf.losses.optimal_transport import optimal_transport
from pouf.losses.supervised import divergence, squared_error
from pouf.losses.transport import COSTS, conditional_transport
from pouf.recipe import Objective


class Scores(NamedTuple):
    """How n inputs and k classes match."""

    sim: Tensor  # (n, k), cosine similarity of features and prototypes
    logits: Tensor  # (n, k), what the model predicts with
    temperature: Tensor  # scalar, T of the transport plan


Prior = Tensor | None  # (k,) class proportions; None is uniform


def _conditional(scores: Scores, weights: Objective, prior: Prior) -> Tensor:
    return conditional_transport(scores.sim, scores.temperature, prior, COSTS[weights.cost]).cost


def _exact(scores: Scores, weights: Objective, prior: Prior) -> Tensor:
    return optimal_transport(scores.sim, prior, cost=COSTS[weights.cost])


def _sinkhorn(scores: Scores, weights: Objective, prior: Prior) -> Tensor:
    regularisation = weights.regularisation or scores.temperature.item()
    return optimal_transport(scores.sim, prior, regularisation, COSTS[weights.cost])


TRANSPORTS: dict[str, Callable[[Scores, Objective, Prior], Tensor]] = {
    "conditional": _conditional, "exact": _exact, "sinkhorn": _sinkhorn,
}  # fmt: skip

# Each term is a loss: smaller is better.
TERMS: dict[str, Callable[[Scores, Objective, Prior], Tensor]] = {
    "transport": lambda scores, weights, prior: TRANSPORTS[weights.plan](scores, weights, prior),
    "information": lambda scores, weights, prior: -mutual_information(scores.logits, prior),
    "entropy": lambda scores, weights, prior: entropy(scores.logits),
}


# How far predictions are from what labelled shots say.
LABEL_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": divergence, "mse": squared_error}


def needs_unlabelled(weights: Objective) -> bool:
    """Whether any term looks at data without labels."""
    return any(getattr(weights, name) != 0 for name in TERMS)


def unlabelled_terms(scores: Scores, weights: Objective, prior: Prior = None) -> dict[str, Tensor]:
    """The terms that need no labels and weigh something, before weighting."""
    return {name: term(scores, weights, prior) for name, term in TERMS.items() if getattr(weights, name) != 0}


def label_terms(scores: Scores, targets: Tensor, weights: Objective) -> dict[str, Tensor]:
    """The term of labelled shots: targets (n, k), rows sum to 1."""
    return {"labels": LABEL_LOSSES[weights.label_loss](scores.logits, targets)} if weights.labels != 0 else {}


def total_loss(terms: dict[str, Tensor], weights: Objective) -> Tensor:
    """sum_t weight_t * term_t, scalar."""
    return torch.stack([getattr(weights, name) * term for name, term in terms.items()]).sum()
