"""Shares of the classes by expectation maximisation, for data that hold few of the named classes."""

from __future__ import annotations

import torch
from torch import Tensor

from pouf.losses.information import log_marginal
from pouf.losses.prior import share_of_classes
from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor

FLOOR = 1e-4  # a class keeps this much of an equal share: without it, π reaches 0 and its logarithm has no end


def em(features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None) -> Postprocessor:
    """logits + log π, where π are the shares of the classes at their fixed point; π is the prior where one is given.

    References:
        Saerens, Latinne & Decaestecker, Adjusting the outputs of a classifier to new a priori probabilities, 2002.
    """
    return Postprocessor((gated_shares(scores.logits.float()) if prior is None else prior.to(scores.logits)).log())


def gated_shares(logits: Tensor, iterations: int = 50) -> Tensor:
    """π ← (mean_i softmax(logits_i + log π))^(1 - t²), to sum 1, from equal shares: (n, k) -> (k,).

    t = exp H(mean_i p_i) / k is the share of the classes that predictions use before. Where they use nearly all, π
    stays nearly equal; where they use few, it is that of plain EM, which alone would empty classes that are there.
    """
    k = logits.shape[1]
    t = share_of_classes(log_marginal(logits).exp().cpu())
    shares = torch.full((k,), 1 / k).to(logits)
    for _ in range(iterations):
        shares = ((1 - t**2) * log_marginal(logits + shares.log())).softmax(0)
        shares = (shares + FLOOR / k) / (1 + FLOOR)
    return shares
