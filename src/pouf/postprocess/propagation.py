"""Label propagation among neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor, nearest_others, vote
from pouf.postprocess.sinkhorn import relaxed_offsets

NEIGHBOURS, ROUNDS = 10, 20


def propagation(
    features: Tensor,
    prototypes: Tensor,
    scores: Scores,
    prior: Tensor | None = None,
) -> Postprocessor:
    """Label propagation: every input believes half itself and half its nearest neighbours, until they agree.

    Z ← ½ S Z + ½ P, where P are the predictions (with offsets that give them known shares) and S (n, n) holds each
    input's nearest neighbours by cosine, its rows summing to 1. A later input asks those that were there.
    """
    unit = F.normalize(features.float(), dim=1)
    logits = scores.logits.float()
    bias = torch.zeros(logits.shape[1]).to(logits) if prior is None else relaxed_offsets(logits, prior)
    start = (logits + bias).softmax(1)
    weights, rows = nearest_others(unit, NEIGHBOURS)
    near = (weights / weights.sum(1, keepdim=True), rows)
    votes = start
    for _ in range(ROUNDS):
        votes = vote(near, votes, start)
    return Postprocessor(bias, neighbours=unit, votes=votes)
