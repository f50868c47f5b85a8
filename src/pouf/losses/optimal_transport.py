"""Optimal transport between features and prototypes, the baseline of conditional transport (paper, section 3.3).

The plan is solved for first, and the cost under it is differentiated, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pouf.errors import optional
from pouf.losses.information import at_least_fp32
from pouf.losses.transport import cosine_cost


def optimal_transport(
    sim: Tensor,
    prior: Tensor | None = None,
    regularisation: float = 0.0,
    cost: Callable[[Tensor], Tensor] = cosine_cost,
) -> Tensor:
    """min_P sum_ik P_ik c_ik over plans with rows 1/n and columns p(w_k), scalar.

    The plan has no gradient; only the cost is differentiated.

    Args:
        sim: (n, k) cosine similarity of features and prototypes.
        prior: (k,) class proportions that sum to 1; None is uniform.
        regularisation: weight of the plan's entropy, > 0 for Sinkhorn; 0 solves the linear programme.
        cost: from similarity to transport cost, elementwise.
    """
    c = cost(at_least_fp32(sim))
    return (transport_plan(c.detach(), prior, regularisation) * c).sum()


def transport_plan(
    cost: Tensor, prior: Tensor | None = None, regularisation: float = 0.0, iterations: int = 100
) -> Tensor:
    """The optimal plan, exact or entropic (in the log domain, limited iterations): (n, k) -> (n, k)."""
    ot = optional("ot", "transport", "optimal transport")  # slow to import and rarely needed

    n, k = cost.shape
    rows = torch.full((n,), 1 / n, dtype=torch.float64)
    columns = torch.full((k,), 1 / k, dtype=torch.float64) if prior is None else prior.detach().cpu().double()
    columns = columns / columns.sum()  # exactly, as the linear programme requires
    costs = cost.detach().cpu().double().numpy()
    if regularisation > 0:
        plan = ot.bregman.sinkhorn_log(
            rows.numpy(), columns.numpy(), costs, regularisation, numItermax=iterations, stopThr=1e-7, warn=False
        )
    else:
        plan = ot.emd(rows.numpy(), columns.numpy(), costs, numItermax=10_000_000)
    return torch.from_numpy(plan).to(cost)
