"""A correction of predictions that was fitted on many inputs together and applies to any input, alone too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pouf.errors import InputError

ROWS = 2048  # of a matrix of similarities that are in memory at once


class Postprocessor(nn.Module):
    """logits'_k = logits_k + weight_k · f + bias_k, and then a vote of the nearest neighbours where there are some.

    Args:
        bias: (k,).
        weight: (k, d), of the feature at length 1.
        neighbours: (m, d), features of length 1 whose classes were found together.
        votes: (m, k), those classes, rows sum to 1.
    """

    bias: Tensor
    weight: Tensor | None
    neighbours: Tensor | None
    votes: Tensor | None

    def __init__(
        self,
        bias: Tensor,
        weight: Tensor | None = None,
        neighbours: Tensor | None = None,
        votes: Tensor | None = None,
    ) -> None:
        super().__init__()
        parts = {"bias": bias, "weight": weight, "neighbours": neighbours, "votes": votes}
        for name, tensor in parts.items():
            self.register_buffer(name, tensor)

    def forward(self, features: Tensor, logits: Tensor) -> Tensor:
        """(n, d) features, (n, k) logits -> (n, k) logits."""
        unit = F.normalize(features.float(), dim=1)
        logits = logits.float() + self.bias
        if self.weight is not None:
            logits = logits + unit @ self.weight.T
        if self.neighbours is not None and self.votes is not None:
            logits = vote(nearest(unit, self.neighbours, itself=True), self.votes, logits.softmax(1)).log()
        return logits


def nearest(queries: Tensor, keys: Tensor, itself: bool, neighbours: int = 10) -> tuple[Tensor, Tensor]:
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


def vote(near: tuple[Tensor, Tensor], votes: Tensor, own: Tensor) -> Tensor:
    weights, places = near
    # One neighbour after the other: (n, m, k) would not fit for many classes.
    heard = sum((weights[:, [j]] * votes[places[:, j]] for j in range(weights.shape[1])), torch.zeros_like(own))
    return (heard + own).clamp_min(1e-12) / 2
