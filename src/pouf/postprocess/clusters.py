"""The clusters of the features, where they agree with the class names."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.losses.prior import share_of_classes
from pouf.models.base import Scores
from pouf.postprocess.agreement import kappa
from pouf.postprocess.base import Postprocessor, nearest_others
from pouf.postprocess.refinement import WITHIN, refinement, trust_in_equal_shares
from pouf.postprocess.shares import share_offsets
from pouf.postprocess.sinkhorn import relaxed_offsets
from pouf.postprocess.stata import NEIGHBOURS, symmetrised

logger = logging.getLogger(__name__)
MIN_AGREEMENT = 0.8  # kappa of the names with clusters that an input has no part in
MIN_USAGE = 0.75  # exp H(mean p) / k, as of `min_class_usage` in the recipes
MAX_TEMPERATURE = 0.05  # of the softmax: the T = 0.1 of texts leaves predictions too soft to tell clusters by
OWN = 0.4  # weight of the predictions, beside that of the clusters
PER_CLASS = 2  # inputs of a class, with which shares are evened half as far as with many


def clusters(
    features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None, rounds: int = 10
) -> Postprocessor:
    """Soft centroids of the features as second prototypes, where they agree with the class names.

        q_i  = softmax(0.4 L_i + 0.6 S_i + ⅙ (W + Wᵀ) q + b)      L the logits at T <= 0.05, b from `relaxed_offsets`
        S_ik = a cos(f_i, Σ_j≠i q_jk f_j)                         a gives S the spread of L, rows centred
        t    = `trust_in_equal_shares` of mean_i p_i, times n / (n + 2 k)

    An input has no part in the centroids that judge it, so that a class of few inputs does not confirm itself. For the
    same reason Cohen's kappa of S and L before the first round tells whether clusters and names are about the same
    thing. Below 0.8, and where predictions use less than three quarters of the classes, centroids of classes that are
    not there would draw inputs away from others: then, and with two classes, it is `refinement`. A prior that was given
    is trusted wholly.
    """
    x = F.normalize(features.float(), dim=1)
    sharper, logits = sharpened(scores)
    k = logits.shape[1]
    if k == 2:  # whose groups need not be the classes: what they differ in most may be another thing
        return refinement(features, prototypes, scores, prior)
    own = logits - logits.mean(1, keepdim=True)
    spread, usage = own.std(1).mean(), logits.softmax(1).mean(0).cpu()
    trust = _trust(logits) if prior is None else 1.0
    bias = relaxed_offsets(own, prior, trust, iterations=50)
    q = (own + bias).softmax(1)
    agreement = kappa((own + bias).argmax(1), leave_one_out(x, q).argmax(1))
    if agreement < MIN_AGREEMENT or share_of_classes(usage) < MIN_USAGE:
        logger.info("clusters of the features agree too little with the class names (kappa %.2f)", agreement)
        return refinement(features, prototypes, scores, prior)
    near = nearest_others(x, NEIGHBOURS)
    for _ in range(rounds):
        moved = scaled(leave_one_out(x, q), spread).mul_(1 - OWN).add_(own, alpha=OWN).add_(symmetrised(near, q))
        bias = relaxed_offsets(moved, prior, trust, iterations=10, start=bias)
        q = moved.add_(bias).softmax(1)
        del moved  # its memory is for the next round
    centroids = F.normalize(q.T @ x, dim=1)
    cosines = x @ centroids.T
    weight = (1 - OWN) * spread / _spread(cosines) * centroids
    moved = OWN * logits + x @ weight.T
    bias = relaxed_offsets(moved, prior, trust, iterations=10, start=bias)
    if prior is not None:
        bias = share_offsets(moved, prior, bias, WITHIN)
    return Postprocessor(bias, weight, own=torch.tensor(OWN * sharper).to(x))


def sharpened(scores: Scores) -> tuple[float, Tensor]:
    """A factor, and the logits times it: at T <= 0.05."""
    sharper = max(1.0, float(scores.temperature) / MAX_TEMPERATURE)
    return sharper, sharper * scores.logits.float()


def names_agreement(features: Tensor, scores: Scores) -> float:
    """Cohen's kappa of predictions and of the soft centroids that they make, each without the input it judges."""
    x, logits = F.normalize(features.float(), dim=1), sharpened(scores)[1]
    moved = logits + relaxed_offsets(logits, None, _trust(logits), iterations=50)
    others = leave_one_out(x, moved.softmax(1))
    labels = moved.argmax(1)
    return kappa(labels, others.argmax(1)) if len(labels.unique()) > 1 else 0.0  # one class agrees with anything


def _trust(logits: Tensor) -> float:
    """In equal shares, less of few inputs, whose shares are uneven by chance."""
    n, k = logits.shape
    return trust_in_equal_shares(logits.softmax(1).mean(0).cpu()) * n / (n + PER_CLASS * k)


def leave_one_out(x: Tensor, q: Tensor) -> Tensor:
    """cos(x_i, Σ_j≠i q_jk x_j): (n, d) of length 1, (n, k) -> (n, k)."""
    sums = q.T @ x  # (k, d)
    dots = x @ sums.T
    squares = torch.sub(q, dots, alpha=2).mul_(q).add_((sums**2).sum(1))
    return dots.sub_(q).div_(squares.clamp_min_(1e-6).sqrt_())


def _spread(cosines: Tensor) -> Tensor:
    return cosines.std(1).mean().clamp_min(1e-6)


def scaled(cosines: Tensor, spread: Tensor) -> Tensor:
    """Rows centred, with the given mean standard deviation, in the same memory."""
    scale = spread / _spread(cosines)
    return cosines.sub_(cosines.mean(1, keepdim=True)).mul_(scale)
