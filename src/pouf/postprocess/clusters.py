"""Classes at the means of their inputs, where clusters of the features agree with the names; also in a second space."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.losses.information import log_marginal
from pouf.losses.objective import share_of_classes
from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor, kappa, nearest_others, softmax_
from pouf.postprocess.gaussians import NEIGHBOURS, symmetrised
from pouf.postprocess.shares import relaxed_offsets, share_offsets

WITHIN = 0.03  # of the shares that are given: those of the predictions
# Of an equal share: what classes with a 10:1 skew still have, nearly, and classes that are not there do not.
RARE = 0.25
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


logger = logging.getLogger(__name__)
MIN_AGREEMENT = 0.8  # kappa of the names with clusters that an input has no part in
MIN_USAGE = 0.75  # exp H(mean p) / k, as of `min_class_usage` in the recipes
MAX_TEMPERATURE = 0.05  # of the softmax: the T = 0.1 of texts leaves predictions too soft to tell clusters by
OWN = 0.4  # weight of the predictions, beside that of the clusters
PER_CLASS = 2  # inputs of a class, with which shares are evened half as far as with many
COMPONENTS = 8  # of the features, in which two classes are two Gaussians
LIKELIHOOD = 0.25  # weight of theirs beside the predictions


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
    not there would draw inputs away from others: then it is `refinement`. So it is with two classes, or `two_gaussians`
    where their shares are given. A prior that was given is trusted wholly.
    """
    x = F.normalize(features.float(), dim=1)
    sharper, logits = sharpened(scores)
    k = logits.shape[1]
    if k == 2:  # whose groups need not be the classes: what they differ in most may be another thing
        return refinement(features, prototypes, scores) if prior is None else two_gaussians(x, sharper, logits, prior)
    own = logits - logits.mean(1, keepdim=True)
    spread, usage = own.std(1).mean(), logits.softmax(1).mean(0).cpu()
    trust = _trust(logits) if prior is None else 1.0
    bias = relaxed_offsets(own, prior, trust, iterations=50)
    q = own + bias
    labels, q = q.argmax(1), softmax_(q)
    agreement = kappa(labels, leave_one_out(x, q).argmax(1))
    if agreement < MIN_AGREEMENT or share_of_classes(usage) < MIN_USAGE:
        logger.info(
            "clusters of the features agree too little with the class names: predictions are refined without clusters"
        )
        return refinement(features, prototypes, scores, prior)
    near = nearest_others(x, NEIGHBOURS)
    for _ in range(rounds):
        moved = scaled(leave_one_out(x, q), spread).mul_(1 - OWN).add_(own, alpha=OWN).add_(symmetrised(near, q))
        bias = relaxed_offsets(moved, prior, trust, iterations=10, start=bias)
        q = softmax_(moved.add_(bias))
    centroids = F.normalize(q.T @ x, dim=1)
    del q
    cosines = x @ centroids.T
    scale = (1 - OWN) * spread / _spread(cosines)
    moved = cosines.mul_(scale).add_(own, alpha=OWN)
    bias = relaxed_offsets(moved, prior, trust, iterations=10, start=bias)
    if prior is not None:
        bias = share_offsets(moved, prior, bias, WITHIN)
    return Postprocessor(bias, scale * centroids, own=torch.tensor(OWN * sharper).to(x))


def two_gaussians(x: Tensor, sharper: float, logits: Tensor, prior: Tensor, rounds: int = 30) -> Postprocessor:
    """Two classes as Gaussians of one width σ in the first 8 principal components z of the features, by EM.

        m_ik = L_ik + b_k + ¼ [log π_k - ½ |z_i - μ_k|² / σ²]        q_i = softmax(m_i), b gives L the prior
        π_k  = mean_i q_ik        μ_k = mean_q z        σ² = mean_i Σ_k q_ik |z_i - μ_k|² / 8

    At full weight the Gaussians would be whatever two groups the inputs fall into; at a quarter they decide where the
    predictions are unsure. These have the shares of the prior.

    Args:
        x: (n, d) of length 1.
        sharper: how many times the model's own the logits are.
        logits: (n, 2).
        prior: (2,), of the predictions.
    """
    centre = x.mean(0)
    axes = torch.linalg.eigh((x - centre).T @ (x - centre)).eigenvectors[:, -COMPONENTS:]  # (d, 8)
    z = (x - centre) @ axes
    bias = share_offsets(logits, prior)
    start = logits + bias
    q, weight, offsets = start.softmax(1), torch.zeros(2, z.shape[1]).to(x), torch.zeros(2).to(x)
    for _ in range(rounds):
        counts = q.sum(0).clamp_min(1e-6)
        means = q.T @ z / counts[:, None]
        variance = ((z**2).sum() - (counts * (means**2).sum(1)).sum()) / z.numel()
        weight = LIKELIHOOD * means / variance.clamp_min(1e-6)
        offsets = LIKELIHOOD * (counts / len(x)).log() - (weight * means).sum(1) / 2
        q = (start + offsets + z @ weight.T).softmax(1)
    weight = weight @ axes.T
    offsets = bias + offsets - weight @ centre
    offsets = offsets + share_offsets(logits + offsets + x @ weight.T, prior)
    return Postprocessor(offsets, weight, own=torch.tensor(sharper).to(x))


def sharpened(scores: Scores) -> tuple[float, Tensor]:
    """A factor, and the logits times it: at T <= 0.05."""
    sharper = max(1.0, float(scores.temperature) / MAX_TEMPERATURE)
    logits = scores.logits.float()
    return sharper, logits if sharper == 1 else sharper * logits


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


SECOND_ROUNDS = 10


def second_space(scores: Scores, features: Tensor, prior: Tensor | None = None) -> tuple[Tensor, float]:
    """Class probabilities (n, k), and the weight a that the second space has in them.

        q_i  = softmax((1 - a) L_i + a S_i + b)      L the logits at T <= 0.05, b from `relaxed_offsets`
        S_ik = cos(g_i, sum_j≠i q_jk g_j)            rows centred, with the spread of L

    a is Cohen's kappa of L and S before the first round, how far both spaces see the same: a second one that knows
    nothing of the classes has no part; times n / (n + 2 k), since few inputs make poor centroids. Two classes keep the
    shares that L has, unless others are known.

    Args:
        scores: of the first space.
        features: (n, d), of the second one.
    """
    x, logits = F.normalize(features.float(), dim=1), sharpened(scores)[1]
    n, k = logits.shape
    many = n / (n + PER_CLASS * k)
    own = logits - logits.mean(1, keepdim=True)
    spread = own.std(1).mean()
    shares = log_marginal(logits).exp()
    trust = 1.0 if prior is not None or k == 2 else trust_in_equal_shares(shares.cpu()) * many
    wanted = shares if prior is None and k == 2 else prior
    bias = relaxed_offsets(own, wanted, trust)
    q = (own + bias).softmax(1)
    others = scaled(leave_one_out(x, q), spread)
    a = max(0.0, kappa((own + bias).argmax(1), others.argmax(1))) * many
    for _ in range(SECOND_ROUNDS if a else 0):
        moved = (1 - a) * own + a * others
        bias = relaxed_offsets(moved, wanted, trust, iterations=20, start=bias)
        q = (moved + bias).softmax(1)
        others = scaled(leave_one_out(x, q), spread)
    return q, a
