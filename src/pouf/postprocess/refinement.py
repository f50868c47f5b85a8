"""A last pass over all predictions together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.losses.information import log_marginal
from pouf.losses.prior import share_of_classes
from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor
from pouf.postprocess.sinkhorn import relaxed_offsets


def refinement(
    features: Tensor,
    prototypes: Tensor,
    scores: Scores,
    prior: Tensor | None = None,
    *,
    sharpness: float = 0.1,
    anchor: float = 1.0,
    rounds: int = 10,
) -> Postprocessor:
    """A transductive pass: classes are seen where their inputs lie, and their shares are evened as far as is safe.

        u_ik  ∝ exp(logits_ik + c μ_k·f_i + b_k)             b from `relaxed_offsets` with trust t
        μ_k   = unit vector along  sum_i u_ik f_i + anchor · m_k
        t     = (exp H(mean_i p_i) / k)²                      share of the classes that the predictions use

    μ is where a class's inputs lie, held by m, where the prototypes alone put it; c is `sharpness` / T. Evening the
    shares helps where all classes are there and destroys predictions where few are; t tells these apart without labels,
    and leaves data with few classes as they are. A prior that was given is trusted wholly.
    """
    unit, logits = F.normalize(features.float(), dim=1), scores.logits.float()
    shares = log_marginal(logits).exp()
    trust = share_of_classes(shares.cpu()) ** 2 if prior is None else 1.0
    scale = sharpness / float(scores.temperature)
    held = F.normalize(logits.softmax(1).T @ unit, dim=1)
    weight, moved = torch.zeros_like(held), logits
    bias = relaxed_offsets(logits, prior, trust, iterations=50)
    for _ in range(rounds):
        u = (moved + bias).softmax(1)
        weight = scale * F.normalize(u.T @ unit + anchor * held, dim=1)
        moved = torch.addmm(logits, unit, weight.T)  # (n, k)
        bias = relaxed_offsets(moved, prior, trust, iterations=5, start=bias)
    return Postprocessor(bias, weight)
