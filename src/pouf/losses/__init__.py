"""Losses as pure functions on tensors: no model, no data, no files."""

from pouf.losses.information import effective_classes, entropy, marginal_entropy, mutual_information
from pouf.losses.optimal_transport import optimal_transport, transport_plan
from pouf.losses.prior import PaperPrior, PriorEstimate
from pouf.losses.supervised import divergence, squared_error
from pouf.losses.transport import COSTS, Transport, conditional_transport, cosine_cost, exponential_cost

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
