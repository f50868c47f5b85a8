"""The loss of a method: a weighted sum of named terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pouf.losses.information import entropy, mutual_information
from pouf.losses.optimal_transport import optimal_transport
from pouf.losses.supervised import divergence, squared_error
from pouf.losses.transport import COSTS, conditional_transport

# How far predictions are from what labelled shots say.
LABEL_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": divergence, "mse": squared_error}


class Shares(NamedTuple):
    """Class proportions (k,) as the terms assume them; None is uniform."""

    plan: Tensor | None = None  # of the transport plan
    marginal: Tensor | None = None  # that the mutual information pulls the predictions as a whole towards
    known: bool = False  # they are right, not an estimate


UNIFORM = Shares()


def unlabelled_terms(
    sim: Tensor,
    logits: Tensor,
    temperature: Tensor,
    shares: Shares = UNIFORM,
    *,
    wanted: Iterable[str] = ("transport", "information"),
    plan: str = "conditional",
    cost: str = "cosine",
    regularisation: float = 0.0,
) -> dict[str, Tensor]:
    """The terms that need no labels, before weighting; each is a loss: smaller is better.

    Args:
        sim: (n, k) cosine similarity of features and prototypes.
        logits: (n, k), what the model predicts with.
        temperature: scalar, T of the transport plan.
        shares: what is assumed of the class proportions.
        wanted: some of transport, information and entropy.
        plan: conditional, or exact and sinkhorn for optimal transport.
        regularisation: of Sinkhorn's plan; 0 takes T.
    """

    def transport() -> Tensor:
        if plan == "conditional":
            return conditional_transport(sim, temperature, shares.plan, COSTS[cost]).cost
        smooth = (regularisation or temperature.item()) if plan == "sinkhorn" else 0.0
        return optimal_transport(sim, shares.plan, smooth, COSTS[cost])

    terms: dict[str, Callable[[], Tensor]] = {
        "transport": transport,
        "information": lambda: -mutual_information(logits, shares.marginal, shares.known),
        "entropy": lambda: entropy(logits),
    }
    return {name: terms[name]() for name in wanted if name in terms}


def total_loss(terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """sum_t weight_t * term_t, scalar."""
    return torch.stack([weights[name] * term for name, term in terms.items()]).sum()
