"""Classes as Gaussians of one shape that no prototype holds in place, and inputs that follow their neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor, nearest_others
from pouf.postprocess.stata import NEIGHBOURS, SCALE, symmetrised

SUREST_PER_CLASS = 8  # inputs of each class that its mean starts from


def transclip(
    features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None, rounds: int = 10
) -> Postprocessor:
    """TransCLIP: predictions z, a mean μ_k per class and one diagonal Σ of all.

        z_i ∝ ŷ_i exp{ℓ_ik / 50 + ⅓ Σ_{j near i} cos_ij z_j}       ℓ_ik = -½ Σ (x_i - μ_k)² / σ²
        μ_k = unit(mean_z x)                σ² = mean_i Σ_k z_ik (x_i - μ_k)²

    μ starts as the mean of the eight inputs of which ŷ is surest, σ² at 1/d. Every class is moved to some inputs, so
    that it is for data that hold all of the named classes: `stata` is its successor for other data.

    References:
        Zanella et al., Boosting vision-language models with transduction, NeurIPS 2024.
    """
    x, own = F.normalize(features.float(), dim=1), scores.logits.float()
    logits = own if prior is None else own + prior.to(own).log()
    z = logits.softmax(1)
    surest = z.topk(min(SUREST_PER_CLASS, len(x)), dim=0).indices  # (8, k)
    means = F.normalize(x[surest].mean(0), dim=1)
    variance = torch.full((x.shape[1],), 1 / x.shape[1]).to(x)
    near, squares = nearest_others(x, NEIGHBOURS), (x**2).mean(0)
    for _ in range(rounds):
        bias, weight = _likelihood(means, variance)
        likelihood = bias + x @ weight.T
        for _ in range(5):
            z = (logits + likelihood + symmetrised(near, z)).softmax(1)
        sums, shares = z.T @ x, z.sum(0)[:, None]
        means = F.normalize(sums, dim=1)
        variance = squares + (shares * means**2 - 2 * means * sums).sum(0) / len(x)
        variance = variance.clamp_min(1e-8)
    bias, weight = _likelihood(means, variance)
    return Postprocessor(bias if prior is None else bias + prior.to(bias).log(), weight, neighbours=x, pull=z)


def _likelihood(means: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """ℓ / 50 as bias (k,) and weight (k, d); what x² adds is the same for all classes."""
    weight = means / variance / SCALE
    return -0.5 * (means * weight).sum(1), weight
