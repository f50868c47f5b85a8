"""Labels that spread among neighbours, or over a graph of inputs and classes (ZLaP)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor, nearest_others, vote
from pouf.postprocess.shares import relaxed_offsets

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


GRAPH_NEIGHBOURS = 5
POWER = 5  # of the cosines of inputs and classes, which lie closer together than those among inputs
SPREAD = 0.3
SPREADINGS = 20  # 0.3^20 is below the precision of a float


def zlap(features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None) -> Postprocessor:
    """ZLaP: (I - 0.3 S) Z = Y, where S = D^-½ (W + Wᵀ) D^-½ and Y marks each class's own node: (k + n, k).

    W holds each input's five nearest inputs, by their cosines, and its five nearest prototypes, by cosine to the power
    5. The rows of Z that belong to inputs tell their classes; a later input asks the five nearest. Z ranks and is no
    probability: log Z is scaled until predictions are as sure as the model's own, on average.

    References:
        Stojnić et al., Label propagation for zero-shot classification with vision-language models, CVPR 2024.
    """
    x, own = F.normalize(features.float(), dim=1), scores.logits.float()
    n, k = own.shape
    cosines, others = nearest_others(x, GRAPH_NEIGHBOURS)
    sims, classes = scores.sim.float().topk(min(GRAPH_NEIGHBOURS, k), dim=1)
    weights = torch.cat([cosines, sims.clamp_min(0) ** POWER], dim=1).flatten()
    ends = torch.cat([others + k, classes], dim=1).flatten()
    starts = torch.arange(k, k + n, device=x.device).repeat_interleave(len(ends) // n)
    starts, ends, weights = torch.cat([starts, ends]), torch.cat([ends, starts]), weights.repeat(2)
    degree = torch.zeros(k + n).to(x).index_add_(0, starts, weights).clamp_min(1e-12)
    weights = weights / (degree[starts] * degree[ends]).sqrt()
    nodes = (k + n, k + n)
    graph = torch.sparse_coo_tensor(torch.stack([starts, ends]), weights, nodes, check_invariants=False).coalesce()
    marks = torch.cat([torch.eye(k), torch.zeros(n, k)]).to(x)
    z = marks
    for _ in range(SPREADINGS):
        z = marks + SPREAD * torch.sparse.mm(graph, z)
    ranks = (z[k:] / z[k:].sum(1, keepdim=True).clamp_min(1e-30)).clamp_min(1e-12).log()
    answers = ranks * _as_sure_as(own, ranks)
    bias = torch.zeros(k).to(x) if prior is None else relaxed_offsets(answers, prior)
    return Postprocessor(bias, neighbours=x, answers=answers, own=torch.zeros(()).to(x))


def _as_sure_as(logits: Tensor, others: Tensor) -> float:
    """The factor of the others that gives their largest probability the same mean as the logits'."""

    def sureness(scores: Tensor) -> float:
        return float(scores.softmax(1).max(1).values.mean())

    wanted, low, high = sureness(logits), 0.1, 100.0
    for _ in range(20):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sureness(middle * others) < wanted else (low, middle)
    return high
