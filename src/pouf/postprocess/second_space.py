"""Predictions refined in a second space: features of the same inputs from another encoder, which need know no names."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pouf.losses.information import log_marginal
from pouf.models.base import Scores
from pouf.postprocess.base import kappa
from pouf.postprocess.clusters import PER_CLASS, leave_one_out, scaled, sharpened, trust_in_equal_shares
from pouf.postprocess.shares import relaxed_offsets

ROUNDS = 10


def second_space(scores: Scores, features: Tensor, prior: Tensor | None = None) -> tuple[Tensor, float]:
    """Class probabilities (n, k), and the weight a that the second space has in them.

        q_i  = softmax((1 - a) L_i + a S_i + b)      L the logits at T <= 0.05, b from `relaxed_offsets`
        S_ik = cos(g_i, sum_j≠i q_jk g_j)            rows centred, with the spread of L

    a is Cohen's kappa of L and S before the first round, how far both spaces see the same: a second one that knows
    nothing of the classes has no part; times n / (n + 2 k), since few inputs make poor centroids. Two classes keep the
    shares that L has, unless others are known.

    Args:
        scores: of the first space.
        features: (n, d), of the second one.
    """
    x, logits = F.normalize(features.float(), dim=1), sharpened(scores)[1]
    n, k = logits.shape
    many = n / (n + PER_CLASS * k)
    own = logits - logits.mean(1, keepdim=True)
    spread = own.std(1).mean()
    shares = log_marginal(logits).exp()
    trust = 1.0 if prior is not None or k == 2 else trust_in_equal_shares(shares.cpu()) * many
    wanted = shares if prior is None and k == 2 else prior
    bias = relaxed_offsets(own, wanted, trust)
    q = (own + bias).softmax(1)
    others = scaled(leave_one_out(x, q), spread)
    a = max(0.0, kappa((own + bias).argmax(1), others.argmax(1))) * many
    for _ in range(ROUNDS if a else 0):
        moved = (1 - a) * own + a * others
        bias = relaxed_offsets(moved, wanted, trust, iterations=20, start=bias)
        q = (moved + bias).softmax(1)
        others = scaled(leave_one_out(x, q), spread)
    return q, a
