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
            logits = logits + weighted_votes(nearest(unit, self.neighbours, count=3), self.pull) / 3
        if self.neighbours is not None and self.answers is not None:
            cosines, rows = nearest(unit, self.neighbours, count=5)
            weights = 1 / (1 - cosines).clamp_min(1e-6)
            logits = logits + weighted_votes((weights / weights.sum(1, keepdim=True), rows), self.answers)
        if self.neighbours is not None and self.votes is not None:
            near, rows = nearest(unit, self.neighbours)
            logits = vote((near / near.sum(1, keepdim=True), rows), self.votes, logits.softmax(1)).log()
        return logits


Near = tuple[Tensor, Tensor]  # cosines and positions of the nearest, (n, m) each


def softmax_(logits: Tensor) -> Tensor:
    """Over classes, in the same memory: (n, k) may be 65 MB, and a page that is new takes longer than its softmax."""
    return torch.softmax(logits, 1, out=logits)


def nearest(queries: Tensor, keys: Tensor, count: int = 10) -> Near:
    """Cosines (at least 1e-6) and positions of the nearest keys, (n, m) each."""
    # An exported graph has no number of rows to count to.
    blocks = [queries] if torch.compiler.is_exporting() else queries.split(ROWS)
    tops = [(block @ keys.T).topk(min(count, len(keys)), dim=1) for block in blocks]
    return torch.cat([top.values for top in tops]).clamp_min(1e-6), torch.cat([top.indices for top in tops])


def nearest_others(x: Tensor, count: int) -> Near:
    """Of each of these vectors among the others; both of two blocks are looked through at once."""
    if len(x) < 2:
        raise InputError("one input alone has no neighbours: give at least two inputs")
    count = min(count, len(x) - 1)
    cosines, rows = x.new_full((len(x), count), -2), torch.zeros(len(x), count, dtype=torch.long, device=x.device)
    for first in range(0, len(x), ROWS):
        for second in range(first, len(x), ROWS):
            block = x[first : first + ROWS] @ x[second : second + ROWS].T
            sides = [(first, second, block)]
            if first == second:
                block.fill_diagonal_(-2)
            else:
                sides.append((second, first, block.T.contiguous()))
            for start, other, part in sides:
                own, top = slice(start, start + len(part)), part.topk(min(count, part.shape[1]), dim=1)
                both = torch.cat([cosines[own], top.values], dim=1).topk(count, dim=1)
                cosines[own] = both.values
                rows[own] = torch.cat([rows[own], top.indices + other], dim=1).gather(1, both.indices)
    return cosines.clamp_min(1e-6), rows


def weighted_votes(near: Near, votes: Tensor) -> Tensor:
    """Σ_j weight_ij votes_j: (n, k)."""
    total = votes.new_zeros(len(near[0]), votes.shape[1])
    # One neighbour after the other: (n, m, k) would not fit for many classes.
    for weights, rows in zip(*(part.unbind(1) for part in near), strict=True):
        total.addcmul_(weights[:, None], votes.index_select(0, rows))
    return total


def vote(near: Near, votes: Tensor, own: Tensor) -> Tensor:
    """Half the neighbours' votes and half one's own."""
    return (weighted_votes(near, votes) + own).clamp_min(1e-12) / 2


def kappa(labels: Tensor, others: Tensor) -> float:
    """Cohen's kappa, agreement of two classifiers beyond chance: (n,), (n,) -> at most 1."""
    from sklearn.metrics import cohen_kappa_score

    if bool((labels == others).all()):
        return 1.0  # also where there is only one class, which leaves nothing to chance
    return float(cohen_kappa_score(labels.cpu().numpy(), others.cpu().numpy()))
