"""Entropies, mutual information and divergences of predictions, all in nats."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """Convert half precision to fp32, in which losses are computed; fp32 and fp64 are unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def entropy(logits: Tensor) -> Tensor:
    """mean_i H(p(y|x_i)), how unsure single predictions are: (n, k) -> scalar in [0, log k]. Tent's loss."""
    return _entropy(at_least_fp32(logits).log_softmax(1))


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(1).mean()


def log_marginal(logits: Tensor) -> Tensor:
    """log mean_i p(y|x_i): (n, k) -> (k,).

    The mean is taken in the log domain. A class that no sample chooses has probability 0 in fp32, where the
    derivative of -p log p is infinite; its logarithm is finite, and so is the gradient.
    """
    return _log_mean(at_least_fp32(logits).log_softmax(1))


def _log_mean(log_p: Tensor) -> Tensor:
    return log_p.logsumexp(0) - math.log(len(log_p))


def marginal_entropy(logits: Tensor) -> Tensor:
    """H(mean_i p(y|x_i)), how varied the predictions are together: (n, k) -> scalar in [0, log k]."""
    log_m = log_marginal(logits)
    return -(log_m.exp() * log_m).sum()


def mutual_information(logits: Tensor, prior: Tensor | None = None, known: bool = False) -> Tensor:
    """I(X; Y) = H(mean_i p) - mean_i H(p): (n, k) -> scalar in [0, log k]. Paper eq. 8 with its sign flipped.

    With a prior (k,) the first term pulls towards the prior instead of equal shares: it becomes
    log k - KL(mean_i p || prior), which is the same for a uniform prior. If the prior is known to be right it is
    log k - KL(prior || mean_i p), which is unbounded as a class empties: with the other divergence, a class with 30 %
    of the data ended at 15 % of the predictions.
    """
    log_p = at_least_fp32(logits).log_softmax(1)  # once for both terms, which saves time with many classes
    log_m = _log_mean(log_p)
    if prior is None:
        return -(log_m.exp() * log_m).sum() - _entropy(log_p)
    log_prior = prior.to(log_m).log()
    log_q, log_r = (log_prior, log_m) if known else (log_m, log_prior)  # KL(q || r)
    return math.log(len(log_m)) - (log_q.exp() * (log_q - log_r)).sum() - _entropy(log_p)


def normalised_information(logits: Tensor) -> float:
    """I(X; Y) / H(mean_i p), the share of the marginal entropy that predictions resolve: (n, k) -> [0, 1]."""
    return float(mutual_information(logits) / marginal_entropy(logits).clamp_min(1e-9))


def effective_classes(logits: Tensor) -> Tensor:
    """exp H(mean_i p), the effective number of classes predicted: (n, k) -> scalar in [1, k]; near 1 means collapse."""
    return marginal_entropy(logits).exp()


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
