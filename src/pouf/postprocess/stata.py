"""Statistical anchors: classes as Gaussians that prototypes hold in place, and inputs that ask their neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.models.base import Scores
from pouf.postprocess.base import Near, Postprocessor, nearest_others, weighted_votes

SCALE = 50.0  # of the likelihood against the prediction
NEIGHBOURS = 3


def stata(
    features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None, rounds: int = 10
) -> Postprocessor:
    """StatA: predictions z, and a Gaussian (μ_k, σ_k) per class that starts at its prototype and is pulled towards it.

        z_i ∝ ŷ_i exp{[ℓ_ik - ½ Σ log σ²_k] / 50 + ⅓ Σ_{j near i} cos_ij z_j}       ℓ_ik = -½ Σ (x_i - μ_k)² / σ²_k
        μ_k = unit(β_k unit(mean_z x) + (1 - β_k) t_k)                                β_k = n_k / (n_k + 1)
        σ²_k = β_k var_z + (1 - β_k)(Σ₀ + (t_k - μ_k)²)

    ŷ are the predictions as they are (with the prior, where one is given), n_k the inputs predicted as k. A class
    without inputs stays where its prototype is: that makes it safe where few of the named classes are there.

    References:
        Zanella et al., Realistic test-time adaptation of vision-language models, CVPR 2025.
    """
    logits = scores.logits.float() if prior is None else scores.logits.float() + prior.to(scores.logits).log()
    x, anchors = F.normalize(features.float(), dim=1), F.normalize(prototypes.float(), dim=1)
    near = nearest_others(x, NEIGHBOURS)
    return fit_anchored(x, anchors, near, logits, logits - scores.logits.float(), rounds)


def fit_anchored(
    x: Tensor, anchors: Tensor, near: Near, logits: Tensor, offsets: Tensor, rounds: int = 10
) -> Postprocessor:
    """Of features and prototypes of length 1.

    Args:
        near: each input's nearest others.
        offsets: (n, k) or broadcast, what has been added to the model's own logits before.
    """
    k = logits.shape[1]
    z = logits.softmax(1)
    start = (z.sum(0)[:, None] * anchors**2).sum(0) + (x**2).sum(0) - 2 * (anchors * (z.T @ x)).sum(0)
    start = (start / len(x)).clamp_min(1e-8)  # (d,), mean_i Σ_k z_ik (x_i - t_k)²
    means, variances = anchors, start.expand(k, -1)
    for _ in range(rounds):
        bias, weight, curvature = gaussian(means, variances)
        likelihood = bias + x @ weight.T + x**2 @ curvature.T
        for _ in range(5):
            z = (logits + likelihood + symmetrised(near, z)).softmax(1)
        counts = torch.bincount(z.argmax(1), minlength=k).to(z)[:, None]
        beta, total = counts / (counts + 1), z.sum(0).clamp_min(1e-9)[:, None]
        centre = z.T @ x / total
        means = F.normalize(beta * F.normalize(centre, dim=1) + (1 - beta) * anchors, dim=1)
        spread = z.T @ x**2 / total - 2 * means * centre + means**2
        variances = (beta * spread + (1 - beta) * (start + (anchors - means) ** 2)).clamp_min(1e-8)
    bias, weight, curvature = gaussian(means, variances)
    return Postprocessor(bias + offsets.mean(0), weight, curvature, neighbours=x, pull=z)


def gaussian(means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log-likelihood / 50 as bias (k,), weight (k, d) of x and curvature (k, d) of x²."""
    inverse = 1 / variances
    bias = -0.5 * ((means**2 * inverse).sum(1) + variances.log().sum(1))
    return bias / SCALE, means * inverse / SCALE, -0.5 * inverse / SCALE


def symmetrised(near: Near, z: Tensor) -> Tensor:
    """⅙ (W + Wᵀ) z: what an input's neighbours say, and those whose neighbour it is."""
    votes = weighted_votes(near, z)
    for weights, rows in zip(*(part.unbind(1) for part in near), strict=True):
        votes.index_add_(0, rows, weights[:, None] * z)
    return votes.div_(6)
