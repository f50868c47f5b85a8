"""Transport between features and prototypes: conditional, the paper's loss, and optimal, its baseline (section 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pouf.errors import optional
from pouf.losses.information import at_least_fp32


def cosine_cost(sim: Tensor) -> Tensor:
    """c = 1 - cos(w, f): the paper's default. Shape in, shape out."""
    return 1 - sim


def exponential_cost(sim: Tensor) -> Tensor:
    """c = exp(-w·f): the paper's ablation, inspired by the radial basis kernel. Shape in, shape out."""
    return (-sim).exp()


COSTS: dict[str, Callable[[Tensor], Tensor]] = {"cosine": cosine_cost, "exponential": exponential_cost}


class Transport(NamedTuple):
    cost: Tensor  # scalar
    forward: Tensor  # (n, k), pi(w|f): rows sum to 1
    backward: Tensor  # (n, k), pi(f|w): columns sum to 1


def conditional_transport(
    sim: Tensor,
    temperature: Tensor | float,
    prior: Tensor | None = None,
    cost: Callable[[Tensor], Tensor] = cosine_cost,
) -> Transport:
    """Bidirectional transport cost between n features and k prototypes.

        forward   pi(w_k|f_i) ∝ p(w_k) exp(sim_ik / T), over classes
        backward  pi(f_i|w_k) ∝        exp(sim_ik / T), over the batch
        cost      mean_i sum_k c_ik pi(w_k|f_i)  +  sum_k p(w_k) sum_i c_ik pi(f_i|w_k)

    Args:
        sim: (n, k) cosine similarity of L2-normalised features and prototypes.
        temperature: T > 0, scalar. The paper's equations leave it out, its pseudocode divides by it; so do we.
        prior: (k,) class proportions that sum to 1; None is uniform, which gives the pseudocode's two means.
        cost: from similarity to transport cost, elementwise.

    References:
        Zheng & Zhou, Exploiting chain rule and Bayes' theorem to compare probability distributions, NeurIPS 2021.
    """
    sim = at_least_fp32(sim)
    c = cost(sim)
    logits = sim / temperature
    # The plans keep their gradients: the paper's optimisation is end to end.
    backward = logits.softmax(0)
    if prior is None:
        forward = logits.softmax(1)
        total = (c * forward).sum(1).mean() + (c * backward).sum(0).mean()
    else:
        prior = prior.to(sim)
        forward = (logits + prior.log()).softmax(1)
        total = (c * forward).sum(1).mean() + prior @ (c * backward).sum(0)
    return Transport(total, forward, backward)


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
