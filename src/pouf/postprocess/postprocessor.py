"""Label-free correction of predictions, without training: baselines that any adaptation has to beat, and refinement.

An adjustment is fitted on the predictions for many inputs together and then applies to any input, alone too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.errors import InputError
from pouf.losses.information import log_marginal
from pouf.losses.objective import Scores
from pouf.losses.prior import share_of_classes

ROWS = 2048  # of a matrix of similarities that are in memory at once
FITTED_ON = 2**14  # inputs that an adjustment is fitted on at most, drawn at random


def calibrate(log_probabilities: Tensor) -> Tensor:
    """s_ik = log p(k|x_i) - mean_j log p(k|x_j): no class is favoured on average. (n, k) -> (n, k).

    The scores are for ranking classes; they are no probabilities.
    """
    return log_probabilities - log_probabilities.mean(0)


@dataclass(frozen=True)
class Postprocessor:
    """logits'_k = logits_k + weight_k · f + bias_k, and then a vote of the nearest neighbours where there are some.

    Args:
        bias: (k,).
        weight: (k, d), of the feature at length 1.
        neighbours: (m, d), features of length 1 whose classes were found together.
        votes: (m, k), those classes, rows sum to 1.
    """

    bias: Tensor
    weight: Tensor | None = None
    neighbours: Tensor | None = None
    votes: Tensor | None = None

    def __call__(self, features: Tensor, logits: Tensor) -> Tensor:
        """(n, d) features, (n, k) logits -> (n, k) logits."""
        unit = F.normalize(features.float(), dim=1)
        logits = logits.float() + self.bias.to(logits.device)
        if self.weight is not None:
            logits = logits + unit @ self.weight.to(unit).T
        if self.neighbours is not None and self.votes is not None:
            near = _nearest(unit, self.neighbours.to(unit), itself=True)
            logits = _vote(near, self.votes.to(logits), logits.softmax(1)).log()
        return logits

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


def prior_correction(features: Tensor, scores: Scores, prior: Tensor | None = None) -> Postprocessor:
    """log p(k|x) - log mean_i p(k|x_i) (+ log prior): what the model says of every input alike is taken away."""
    bias = -log_marginal(scores.logits)
    return Postprocessor(bias if prior is None else bias + prior.to(bias).log())


def sinkhorn(features: Tensor, scores: Scores, prior: Tensor | None = None) -> Postprocessor:
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
    for _ in range(iterations):
        change = trust * (bias + log_prior - log_marginal(logits + bias)) - bias
        bias = bias + change
        if change.abs().max() < 1e-5:
            break
    return bias


def refinement(
    features: Tensor,
    scores: Scores,
    prior: Tensor | None = None,
    *,
    sharpness: float = 0.1,
    anchor: float = 1.0,
    rounds: int = 10,
) -> Postprocessor:
    """A transductive pass: classes are seen where their inputs lie, and their shares are evened as far as is safe.

        u_ik  ∝ exp(logits_ik + c μ_k·f_i + b_k)             b from `relaxed_offsets` with trust t
        μ_k   = unit vector along  sum_i u_ik f_i + anchor · m_k
        t     = (exp H(mean_i p_i) / k)²                      share of the classes that the predictions use

    μ is where a class's inputs lie, held by m, where the prototypes alone put it; c is `sharpness` / T. Evening the
    shares helps where all classes are there and destroys predictions where few are; t tells these apart without labels,
    and leaves data with few classes as they are. A prior that was given is trusted wholly.
    """
    unit, logits = F.normalize(features.float(), dim=1), scores.logits.float()
    shares = log_marginal(logits).exp()
    trust = share_of_classes(shares.cpu()) ** 2 if prior is None else 1.0
    scale = sharpness / float(scores.temperature)
    held = F.normalize(logits.softmax(1).T @ unit, dim=1)
    weight = torch.zeros_like(held)
    bias = relaxed_offsets(logits, prior, trust, iterations=50)
    for _ in range(rounds):
        u = (logits + unit @ weight.T + bias).softmax(1)
        weight = scale * F.normalize(u.T @ unit + anchor * held, dim=1)
        bias = relaxed_offsets(logits + unit @ weight.T, prior, trust, iterations=5, start=bias)
    return Postprocessor(bias.cpu(), weight.cpu())


def propagation(
    features: Tensor, scores: Scores, prior: Tensor | None = None, *, neighbours: int = 10, rounds: int = 20
) -> Postprocessor:
    """Label propagation: every input believes half itself and half its nearest neighbours, until they agree.

    Z ← ½ S Z + ½ P, where P are the predictions and S (n, n) holds each input's nearest neighbours by cosine, its rows
    summing to 1. A later input asks those that were there.
    """
    unit = F.normalize(features.float(), dim=1)
    start = scores.logits.float().softmax(1)
    near = _nearest(unit, unit, itself=False, neighbours=neighbours)
    votes = start
    for _ in range(rounds):
        votes = _vote(near, votes, start)
    return Postprocessor(torch.zeros(start.shape[1]), neighbours=unit.cpu(), votes=votes.cpu())


def _nearest(queries: Tensor, keys: Tensor, itself: bool, neighbours: int = 10) -> tuple[Tensor, Tensor]:
    """Weights that sum to 1 and positions, (n, m) each, of the nearest keys by cosine."""
    count = min(neighbours, len(keys) - (not itself))
    if count < 1:
        raise InputError("label propagation needs at least two inputs")
    weights, places = [], []
    for start in range(0, len(queries), ROWS):
        near = queries[start : start + ROWS] @ keys.T
        if not itself:
            near[torch.arange(len(near)), torch.arange(start, start + len(near))] = -2
        top = near.topk(count, dim=1)
        weights.append(top.values.clamp_min(1e-6))
        places.append(top.indices)
    weight = torch.cat(weights)
    return weight / weight.sum(1, keepdim=True), torch.cat(places)


def _vote(near: tuple[Tensor, Tensor], votes: Tensor, own: Tensor) -> Tensor:
    weights, places = near
    # One neighbour after the other: (n, m, k) would not fit for many classes.
    heard = sum((weights[:, [j]] * votes[places[:, j]] for j in range(weights.shape[1])), torch.zeros_like(own))
    return (heard + own).clamp_min(1e-12) / 2


# Features (n, d), their scores and a prior or None -> an adjustment.
POSTPROCESSORS: dict[str, Callable[[Tensor, Scores, Tensor | None], Postprocessor]] = {
    "calibration": prior_correction,
    "sinkhorn": sinkhorn,
    "propagation": propagation,
    "refinement": refinement,
}
