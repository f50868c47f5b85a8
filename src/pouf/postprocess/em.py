"""Shares of the classes by expectation maximisation, for data that hold few of the named classes."""

from __future__ import annotations

from torch import Tensor

from pouf.losses.prior import gated_shares
from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor


def em(features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None) -> Postprocessor:
    """logits + log π, where π are the shares of the classes at their fixed point; π is the prior where one is given.

    References:
        Saerens, Latinne & Decaestecker, Adjusting the outputs of a classifier to new a priori probabilities, 2002.
    """
    p = scores.logits.float().softmax(1)
    return Postprocessor((gated_shares(p) if prior is None else prior.to(p)).log())
