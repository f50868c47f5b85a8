"""Every class gets its share of the inputs: the entropic optimal assignment."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pouf.losses.information import log_marginal
from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor

FAR = 40.0  # in logarithms, of what single precision still holds exactly


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
    base, p = bias, (logits + bias).softmax(1)
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
