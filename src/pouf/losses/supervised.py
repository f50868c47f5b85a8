"""Losses against hard or soft labels, for labelled shots."""

from __future__ import annotations

import torch
from torch import Tensor

from pouf.losses.information import at_least_fp32


def divergence(logits: Tensor, targets: Tensor) -> Tensor:
    """mean_i KL(t_i || p_i) = mean_i sum_k t_ik (log t_ik - log p_ik), in nats: (n, k), (n, k) -> scalar >= 0.

    0 if the predictions equal the targets; cross-entropy for hard labels.
    """
    log_p = at_least_fp32(logits).log_softmax(1)
    targets = targets.to(log_p)
    t_log_t = torch.special.xlogy(targets, targets)  # 0 at 0
    divergences: Tensor = (t_log_t - targets * log_p).sum(1)
    return divergences.mean()


def squared_error(logits: Tensor, targets: Tensor) -> Tensor:
    """mean_i sum_k (p_ik - t_ik)^2 / 2: (n, k), (n, k) -> scalar. For two classes (p - t)^2."""
    probabilities = at_least_fp32(logits).softmax(1)
    return (probabilities - targets.to(probabilities)).square().sum(1).mean() / 2
