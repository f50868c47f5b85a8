"""Losses against hard or soft labels, for labelled shots, and against the predictions of a teacher."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pouf.losses.information import at_least_fp32

MIN_SURENESS = 0.01  # mean over the targets, below which they count for less


def divergence(logits: Tensor, targets: Tensor) -> Tensor:
    """mean_i KL(t_i || p_i) = mean_i sum_k t_ik (log t_ik - log p_ik), in nats: (n, k), (n, k) -> scalar >= 0.

    0 if the predictions equal the targets; cross-entropy for hard labels.
    """
    log_p = at_least_fp32(logits).log_softmax(1)
    targets = targets.to(log_p)
    t_log_t = torch.special.xlogy(targets, targets)  # 0 at 0
    divergences: Tensor = (t_log_t - targets * log_p).sum(1)
    return divergences.mean()


def divergence_by_sureness(logits: Tensor, targets: Tensor) -> Tensor:
    """sum_i s_i KL(t_i || p_i) / sum_i s_i with the sureness s_i = 1 - H(t_i) / log k: (n, k), (n, k) -> scalar >= 0.

    A target that says nothing, as equal probabilities do, has no weight; where all say next to nothing, the loss is
    next to 0. A row of zeros is one without a target.
    """
    log_p = at_least_fp32(logits).log_softmax(1)
    targets = targets.to(log_p)
    negative_entropy = torch.special.xlogy(targets, targets).sum(1)
    has_target = targets.sum(1) > 0
    weights = (1 + negative_entropy / math.log(targets.shape[1])).clamp_min(0) * has_target
    divergences: Tensor = weights * (negative_entropy - (targets * log_p).sum(1))
    return divergences.sum() / torch.maximum(weights.sum(), MIN_SURENESS * has_target.sum().clamp_min(1))


def squared_error(logits: Tensor, targets: Tensor) -> Tensor:
    """mean_i sum_k (p_ik - t_ik)^2 / 2: (n, k), (n, k) -> scalar. For two classes (p - t)^2."""
    probabilities = at_least_fp32(logits).softmax(1)
    return (probabilities - targets.to(probabilities)).square().sum(1).mean() / 2
