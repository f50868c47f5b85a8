"""A last pass over all predictions together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.losses.information import log_marginal
from pouf.losses.prior import share_of_classes
from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor
from pouf.postprocess.shares import share_offsets
from pouf.postprocess.sinkhorn import relaxed_offsets

WITHIN = 0.03  # of the shares that are given: those of the predictions
RARE = (
    0.25  # of an equal share: what classes with a 10:1 skew still have, nearly, and classes that are not there do not
)
SOME, MANY = 0.12, 0.15  # share of the classes that is rare; of up to seven classes that is one


def trust_in_equal_shares(shares: Tensor) -> float:
    """How far the shares (k,) of predictions may be evened, from 0 to 1: (exp H / k)², less where many are rare.

    exp H / k, the share of the classes that is in use, is the same for data with a skew and for data that lack a third
    of the named classes. Only the latter leave many classes next to nothing; evening would fill these.
    """
    rare = float((shares < RARE / len(shares)).double().mean())
    return share_of_classes(shares) ** 2 * min(1.0, max(0.0, (MANY - rare) / (MANY - SOME)))


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
    """A transductive pass: classes move to the mean of their inputs, and their shares are evened as far as is safe.

        u_ik  ∝ exp(logits_ik + c μ_k·f_i + b_k)             b from `relaxed_offsets` with trust t
        μ_k   = unit vector along  sum_i u_ik f_i + anchor · m_k
        t     = `trust_in_equal_shares` of mean_i p_i

    μ is the mean of a class's inputs, pulled towards m, where the prototypes alone put it; c is `sharpness` / T.
    Evening the shares helps if all classes occur and destroys predictions if few do; t tells these cases apart without
    labels, and leaves data with few classes unchanged. A given prior is trusted fully: b gives these shares to the
    probabilities, and if the predictions are then off by three points, to the predictions.
    """
    unit, logits = F.normalize(features.float(), dim=1), scores.logits.float()
    shares = log_marginal(logits).exp()
    trust = trust_in_equal_shares(shares.cpu()) if prior is None else 1.0
    scale = sharpness / float(scores.temperature)
    start = F.normalize(logits.softmax(1).T @ unit, dim=1)
    weight, moved = torch.zeros_like(start), logits
    bias = relaxed_offsets(logits, prior, trust, iterations=50)
    for _ in range(rounds):
        u = (moved + bias).softmax(1)
        weight = scale * F.normalize(u.T @ unit + anchor * start, dim=1)
        moved = torch.addmm(logits, unit, weight.T)  # (n, k)
        bias = relaxed_offsets(moved, prior, trust, iterations=5, start=bias)
    if prior is not None:
        bias = share_offsets(moved, prior, bias, WITHIN)
    return Postprocessor(bias, weight)
