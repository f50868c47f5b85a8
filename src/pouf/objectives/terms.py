"""The loss of a method: a weighted sum of named terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from pouf.objectives.information import entropy, mutual_information
from pouf.objectives.transport import COSTS, conditional_transport
from pouf.recipe import Objective


class Scores(NamedTuple):
    """How n inputs and k classes match."""

    sim: Tensor  # (n, k), cosine similarity of features and prototypes
    logits: Tensor  # (n, k), what the model predicts with
    temperature: Tensor  # scalar, T of the transport plan


# Each term is a loss: smaller is better.
TERMS: dict[str, Callable[[Scores, Objective], Tensor]] = {
    "transport": lambda scores, weights: (
        conditional_transport(scores.sim, scores.temperature, cost=COSTS[weights.cost]).cost
    ),
    "information": lambda scores, weights: -mutual_information(scores.logits),
    "entropy": lambda scores, weights: entropy(scores.logits),
}


class Loss(NamedTuple):
    total: Tensor  # scalar
    terms: dict[str, Tensor]  # scalars before weighting; terms that weigh 0 are not computed


def total_loss(scores: Scores, weights: Objective) -> Loss:
    """sum_t weight_t * term_t over the terms of `TERMS`."""
    used = {name: getattr(weights, name) for name in TERMS if getattr(weights, name) != 0}
    terms = {name: TERMS[name](scores, weights) for name in used}
    return Loss(sum((used[name] * term for name, term in terms.items()), start=scores.sim.new_zeros(())), terms)
