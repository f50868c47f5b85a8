"""Losses as pure functions on tensors: no model, no data, no files."""

from pouf.losses.information import (
    divergence,
    effective_classes,
    entropy,
    marginal_entropy,
    mutual_information,
    squared_error,
)
from pouf.losses.objective import PaperPrior, PriorEstimate
from pouf.losses.transport import (
    COSTS,
    Transport,
    conditional_transport,
    cosine_cost,
    exponential_cost,
    optimal_transport,
    transport_plan,
)

__all__ = [
    "COSTS",
    "PaperPrior",
    "PriorEstimate",
    "Transport",
    "conditional_transport",
    "cosine_cost",
    "divergence",
    "effective_classes",
    "entropy",
    "exponential_cost",
    "marginal_entropy",
    "mutual_information",
    "optimal_transport",
    "squared_error",
    "transport_plan",
]
