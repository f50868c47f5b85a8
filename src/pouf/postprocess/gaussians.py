"""Classes as Gaussians or prototypes among the inputs, who follow their neighbours: StatA, TransCLIP, InMaP."""

from __future__ import annotations

import logging
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.losses.information import entropy, normalised_information
from pouf.losses.objective import gated_shares, share_of_classes
from pouf.models.base import Scores
from pouf.postprocess.base import Near, Postprocessor, kappa, nearest_others, weighted_votes
from pouf.postprocess.shares import relaxed_offsets

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


logger = logging.getLogger(__name__)
MIN_INFORMATION = 0.25  # share of what there is to tell about the classes
MAX_ENTROPY = 0.1  # of log k: mean entropy of a prediction
MIN_STATA_AGREEMENT = 0.7  # kappa of StatA with and without the shares
SHARPER = 2.0  # the logits, once what they have in common is taken away and little is left
MAX_BIAS = (
    6.0  # `bias_ratio`: 0.7 at most on sets that a model sees well, 18 and more of photographs' model on sketches
)


def few_classes(features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None) -> Postprocessor:
    """StatA on predictions with their gated shares, then evened as far as is safe.

    A model that can't see most of the classes predicts few of them too, and shares that follow it would empty classes
    that are there. So predictions are left as they are where they are `too_unsure`, unless they are so because the
    model says nearly the same of every input (`bias_ratio`): then it is StatA on logits without that. And where StatA
    without these shares, which holds on to every class, comes to other predictions (a kappa below 0.7), it is what is
    used. A prior that was given is trusted wholly.
    """
    logits = scores.logits.float()
    x, anchors = F.normalize(features.float(), dim=1), F.normalize(prototypes.float(), dim=1)
    near = nearest_others(x, NEIGHBOURS)
    if prior is None and too_unsure(logits) and bias_ratio(logits) > MAX_BIAS:
        return _without_bias(x, anchors, near, logits)
    if prior is None and too_unsure(logits):
        return _nothing(logits, "they are too unsure to tell which of the classes are there")
    shares = gated_shares(logits.softmax(1)) if prior is None else prior.to(logits)
    fitted = fit_anchored(x, anchors, near, logits + shares.log(), shares.log().expand(1, -1))
    # Not less where many classes are rare, as in refinement: here that is what is looked for, and t² is small.
    trust = share_of_classes(logits.softmax(1).mean(0).cpu()) ** 2 if prior is None else 1.0
    moved = fitted(features, logits)
    offsets = relaxed_offsets(moved, prior, trust)
    fitted.bias += offsets
    if prior is None:
        anchored = fit_anchored(x, anchors, near, logits, logits.new_zeros(1, logits.shape[1]))
        if kappa((moved + offsets).argmax(1), anchored(features, logits).argmax(1)) < MIN_STATA_AGREEMENT:
            logger.info("too little is known about which classes occur: no class is removed")
            return anchored
    return fitted


def too_unsure(logits: Tensor) -> bool:
    """Whether predictions (n, k) say too little about single inputs to tell classes that are rare from missing ones:

    I(X; Y) < ¼ H(mean_i p)  and  mean_i H(p_i) > 0.1 log k

    Sure predictions of one class for all inputs tell little as well, but those can be believed.
    """
    unsure = float(entropy(logits)) > MAX_ENTROPY * math.log(logits.shape[1])
    return unsure and normalised_information(logits) < MIN_INFORMATION


def bias_ratio(logits: Tensor) -> float:
    """How much more classes differ in their mean logit than inputs differ in theirs: var_k(m_k) / mean_k var_i(L_ik).

    m_k = mean_i L_ik, rows of L centred. Shares of the classes, however skewed, show in inputs that differ; what is
    said of all inputs alike is the model's.
    """
    own = logits - logits.mean(1, keepdim=True)
    return float(own.mean(0).var() / own.var(0).mean().clamp_min(1e-12))


def _without_bias(x: Tensor, anchors: Tensor, near: Near, logits: Tensor) -> Postprocessor:
    """StatA on logits without their means."""
    logger.info("what the model says of every input alike is taken away: it is most of what it says")
    centred = SHARPER * (logits - logits.mean(0))
    fitted = fit_anchored(x, anchors, near, centred, -SHARPER * logits.mean(0)[None])
    fitted.own = torch.tensor(SHARPER).to(x)
    return fitted


def _nothing(logits: Tensor, why: str) -> Postprocessor:
    logger.warning("predictions stay as they are: %s; if you know the shares of the classes, give a prior", why)
    return Postprocessor(logits.new_zeros(logits.shape[1]))


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


LABEL_PROBABILITY = 0.6  # from here on an assignment counts as a label
SOFTENING = 4.0  # than the model's own temperature: CLIP's .01 becomes .04
RATE, STEPS = 10.0, 200  # of 2,000 published: the others changed 0.5 points at most on five sets


def inmap(
    features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None, steps: int = STEPS
) -> Postprocessor:
    """InMaP: P assigns inputs to classes of equal shares (or the prior's), prototypes W among the inputs follow it.

        P = Sinkhorn(ŷ, 20 rounds), rows above .6 made one-hot
        W ← unit(W - rate / (n τ) · (softmax(X Wᵀ / τ) - P)ᵀ X)         τ = 4 T, from the model's own prototypes

    The rate is halved when the gradient grows. Predictions are X Wᵀ / T. It is for data that hold all classes alike.

    References:
        Qian, Xu & Hu, Intra-modal proxy learning for zero-shot visual categorization with CLIP, NeurIPS 2023.
    """
    x, logits, temperature = F.normalize(features.float(), dim=1), scores.logits.float(), float(scores.temperature)
    k = logits.shape[1]
    wanted = (logits + relaxed_offsets(logits, prior, iterations=20)).softmax(1)
    sure = wanted.max(1).values > LABEL_PROBABILITY
    wanted[sure] = F.one_hot(wanted[sure].argmax(1), k).to(wanted)
    target, softer = wanted.T @ x, SOFTENING * temperature
    rate, before = RATE, torch.tensor(torch.inf).to(x)
    learned = F.normalize(prototypes.float(), dim=1)
    for _ in range(steps):
        gradient = (x @ learned.T / softer).softmax(1).T @ x - target
        norm = gradient.norm()
        rate, before = rate / 2 if norm > before else rate, norm
        learned = F.normalize(learned - rate / (len(x) * softer) * gradient, dim=1)
    return Postprocessor(torch.zeros(k).to(x), learned / temperature, own=torch.zeros(()).to(x))
