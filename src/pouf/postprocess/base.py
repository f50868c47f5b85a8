"""A correction of predictions that was fitted on many inputs together and applies to any input, alone too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pouf.errors import InputError

ROWS = 2048  # of a matrix of similarities that are in memory at once


class Postprocessor(nn.Module):
    """logits'_k = own · logits_k + bias_k + weight_k · f + curvature_k · f², and what the nearest neighbours say.

    Args:
        bias: (k,).
        weight, curvature: (k, d), of the feature at length 1 and of its squares.
        neighbours: (m, d), features of length 1 whose classes were found together.
        votes: (m, k), those classes, rows sum to 1: the mean of ten neighbours' counts as much as the input's own.
        pull: (m, k), those classes: a third of what three neighbours say is added to the logits.
        answers: (m, k), logits of the neighbours; an input gets those of its five nearest, weighted by
            1 / (1 - cos), so that an input that was among them gets its own.
        own: how much the logits themselves count, 1 unless given.
    """

    bias: Tensor
    weight: Tensor | None
    curvature: Tensor | None
    neighbours: Tensor | None
    votes: Tensor | None
    pull: Tensor | None
    answers: Tensor | None
    own: Tensor | None

    def __init__(
        self,
        bias: Tensor,
        weight: Tensor | None = None,
        curvature: Tensor | None = None,
        neighbours: Tensor | None = None,
        votes: Tensor | None = None,
        pull: Tensor | None = None,
        answers: Tensor | None = None,
        own: Tensor | None = None,
    ) -> None:
        super().__init__()
        parts = {"bias": bias, "weight": weight, "curvature": curvature, "neighbours": neighbours}
        for name, tensor in (parts | {"votes": votes, "pull": pull, "answers": answers, "own": own}).items():
            self.register_buffer(name, tensor)
        self.eval()  # as the classifier that it becomes a part of

    def forward(self, features: Tensor, logits: Tensor) -> Tensor:
        """(n, d) features, (n, k) logits -> (n, k) logits."""
        unit = F.normalize(features.float(), dim=1)
        logits = (logits.float() if self.own is None else self.own * logits.float()) + self.bias
        if self.weight is not None:
            logits = logits + unit @ self.weight.T
        if self.curvature is not None:
            logits = logits + unit**2 @ self.curvature.T
        if self.neighbours is not None and self.pull is not None:
            logits = logits + weighted_votes(nearest(unit, self.neighbours, itself=True, count=3), self.pull) / 3
        if self.neighbours is not None and self.answers is not None:
            cosines, rows = nearest(unit, self.neighbours, itself=True, count=5)
            weights = 1 / (1 - cosines).clamp_min(1e-6)
            logits = logits + weighted_votes((weights / weights.sum(1, keepdim=True), rows), self.answers)
        if self.neighbours is not None and self.votes is not None:
            near, rows = nearest(unit, self.neighbours, itself=True)
            logits = vote((near / near.sum(1, keepdim=True), rows), self.votes, logits.softmax(1)).log()
        return logits


Near = tuple[Tensor, Tensor]  # cosines and positions of the nearest, (n, m) each


def nearest(queries: Tensor, keys: Tensor, itself: bool, count: int = 10) -> Near:
    """Cosines (at least 1e-6) and positions of the nearest keys, (n, m) each."""
    count = min(count, len(keys) - (not itself))
    if count < 1:
        raise InputError("one input alone has no neighbours: give at least two inputs")
    weights, rows = [], []
    # An exported graph has no number of rows to count to.
    blocks = [queries] if torch.compiler.is_exporting() else queries.split(ROWS)
    for number, block in enumerate(blocks):
        near = block @ keys.T
        if not itself:
            own = torch.arange(len(near))
            near[own, own + number * ROWS] = -2
        top = near.topk(count, dim=1)
        weights.append(top.values.clamp_min(1e-6))
        rows.append(top.indices)
    return torch.cat(weights), torch.cat(rows)


def weighted_votes(near: Near, votes: Tensor) -> Tensor:
    """Σ_j weight_ij votes_j: (n, k)."""
    weights, rows = near
    # One neighbour after the other: (n, m, k) would not fit for many classes.
    start = torch.zeros(len(weights), votes.shape[1]).to(votes)
    return sum((weights[:, [j]] * votes[rows[:, j]] for j in range(weights.shape[1])), start)


def vote(near: Near, votes: Tensor, own: Tensor) -> Tensor:
    """Half the neighbours' votes and half one's own."""
    return (weighted_votes(near, votes) + own).clamp_min(1e-12) / 2


def kappa(labels: Tensor, others: Tensor) -> float:
    """Cohen's kappa, agreement of two classifiers beyond chance: (n,), (n,) -> at most 1."""
    from sklearn.metrics import cohen_kappa_score

    if bool((labels == others).all()):
        return 1.0  # also where there is only one class, which leaves nothing to chance
    return float(cohen_kappa_score(labels.cpu().numpy(), others.cpu().numpy()))
