"""Label propagation among neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor, nearest, vote


def propagation(
    features: Tensor,
    prototypes: Tensor,
    scores: Scores,
    prior: Tensor | None = None,
    *,
    neighbours: int = 10,
    rounds: int = 20,
) -> Postprocessor:
    """Label propagation: every input believes half itself and half its nearest neighbours, until they agree.

    Z ← ½ S Z + ½ P, where P are the predictions and S (n, n) holds each input's nearest neighbours by cosine, its rows
    summing to 1. A later input asks those that were there.
    """
    unit = F.normalize(features.float(), dim=1)
    start = scores.logits.float().softmax(1)
    weights, places = nearest(unit, unit, itself=False, count=neighbours)
    near = (weights / weights.sum(1, keepdim=True), places)
    votes = start
    for _ in range(rounds):
        votes = vote(near, votes, start)
    return Postprocessor(torch.zeros(start.shape[1]).to(start), neighbours=unit, votes=votes)
