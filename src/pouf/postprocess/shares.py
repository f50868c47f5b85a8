"""Offsets per class: the mean prediction removed, shares of the classes estimated by EM, or known and met."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pouf.errors import InputError
from pouf.losses.information import log_marginal
from pouf.losses.objective import gated_shares
from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor, softmax_

FAR = 40.0  # in logarithms, of what single precision still holds exactly


def prior_correction(
    features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None
) -> Postprocessor:
    """log p(k|x) - log mean_i p(k|x_i) (+ log prior): (n, d) features and their scores -> a bias.

    References:
        Zhou et al., Batch calibration, ICLR 2024. Calibration is another thing: probabilities that are right.
    """
    bias = -log_marginal(scores.logits)
    return Postprocessor(bias if prior is None else bias + prior.to(bias).log())


def em(features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None) -> Postprocessor:
    """logits + log π, where π are the shares of the classes at their fixed point; π is the prior where one is given.

    References:
        Saerens, Latinne & Decaestecker, Adjusting the outputs of a classifier to new a priori probabilities, 2002.
    """
    p = scores.logits.float().softmax(1)
    return Postprocessor((gated_shares(p) if prior is None else prior.to(p)).log())


def sinkhorn(features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None) -> Postprocessor:
    """Offsets b with mean_i softmax(logits_i + b) = prior (uniform unless given): every class gets its share.

    It is the entropic optimal assignment of inputs to classes; the offsets are its potentials.
    """
    return Postprocessor(relaxed_offsets(scores.logits.float(), prior, trust=1.0, iterations=1000))


def relaxed_offsets(
    logits: Tensor,
    prior: Tensor | None = None,
    trust: float = 1.0,
    iterations: int = 200,
    start: Tensor | None = None,
) -> Tensor:
    """Offsets b (k,) at the fixed point of b = trust * (b + log prior - log mean_i softmax(logits_i + b)).

    With trust 1 the shares of the classes become those of the prior; with trust 0 nothing happens; between them lies
    the assignment whose shares may differ from the prior at the price of their divergence.
    """
    k = logits.shape[1]
    log_prior = torch.full((k,), -math.log(k)).to(logits) if prior is None else prior.to(logits).log()
    bias = torch.zeros(k).to(logits) if start is None else start
    base, p = bias, softmax_(logits + bias)
    for _ in range(iterations):
        # mean_i softmax(logits_i + b) = w mean_i p_i / (p_i · w) with w = exp(b - base): no new softmax for each b.
        moved = bias - base
        log_shares = moved + (p.T @ (1 / (p @ moved.exp()))).log() - math.log(len(p))
        if moved.abs().max() > FAR or log_shares.min() < -FAR:  # where p or w would be too small for its numbers
            log_shares = log_marginal(logits + bias)
        change = trust * (bias + log_prior - log_shares) - bias
        bias = bias + change
        if change.abs().max() < 1e-5:
            break
    return bias


SHARPER = (1.0, 0.3, 0.1, 0.03)  # temperatures, each starting from the offsets of the last


def shares(features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None) -> Postprocessor:
    """Offsets b with which argmax(logits_i + b) has the shares of the prior (uniform unless given).

    Sinkhorn's offsets give these shares to the probabilities. Here the predictions have them: they are Sinkhorn's at a
    temperature that falls towards 0, where probabilities are 0 or 1.
    """
    logits = scores.logits.float()
    k = logits.shape[1]
    return Postprocessor(share_offsets(logits, torch.full((k,), 1 / k) if prior is None else prior))


def known_shares(proportions: str | Sequence[float] | Tensor, k: int) -> Tensor:
    """The given share of each of k classes in the data, "uniform" or one number per class, checked: (k,), sums to 1."""
    if isinstance(proportions, str):
        if proportions != "uniform":
            raise InputError(f"expected 'uniform' or one share for each of the {k} classes, not {proportions!r}")
        return torch.full((k,), 1 / k)
    shares = torch.as_tensor(proportions, dtype=torch.float32).detach().cpu()
    if shares.shape != (k,) or not bool((shares > 0).all()) or not bool(shares.isfinite().all()):
        raise InputError(f"expected one proportion above 0 for each of the {k} classes, not {list(proportions)}")
    if abs(float(shares.sum()) - 1) > 0.02:
        raise InputError(f"the proportions sum to {float(shares.sum()):.3g}, expected 1: {list(proportions)}")
    return shares / shares.sum()


def share_offsets(logits: Tensor, wanted: Tensor, start: Tensor | None = None, within: float = 0.0) -> Tensor:
    """Logits (n, k), shares (k,) -> offsets (k,) that give the predictions these shares.

    Args:
        start: offsets (k,) to start from.
        within: how far off the share of a class may be: the sharper the offsets, the more they move inputs that the
            model is sure about, so that these are no sharper than they need be. 0 sharpens to the end.
    """
    # A class without any share would need an offset without end.
    wanted = wanted.to(logits).clamp_min(0.1 / len(logits))
    wanted = wanted / wanted.sum()
    offsets = torch.zeros(logits.shape[1]).to(logits) if start is None else start
    for t in SHARPER:
        if off_by(logits + offsets, wanted) < within:
            break
        offsets = t * relaxed_offsets(logits / t, wanted, iterations=500, start=offsets / t)
    return offsets


def off_by(logits: Tensor, wanted: Tensor) -> float:
    """How far the share of a class among the predictions of (n, k) logits is from the wanted one (k,), at most."""
    return float((predicted_shares(logits).to(wanted) - wanted).abs().max())


def predicted_shares(scores: Tensor) -> Tensor:
    """Logits or probabilities (n, k) -> (k,), how much of the inputs each class is predicted for."""
    return torch.bincount(scores.argmax(1), minlength=scores.shape[1]).double() / len(scores)
