"""Every class is predicted for its share of the inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor
from pouf.postprocess.sinkhorn import relaxed_offsets

SHARPER = (1.0, 0.3, 0.1, 0.03)  # temperatures, each starting from the offsets of the last


def shares(features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None) -> Postprocessor:
    """Offsets b with which argmax(logits_i + b) has the shares of the prior (uniform unless given).

    Sinkhorn's offsets give these shares to the probabilities. Here the predictions have them: they are Sinkhorn's at a
    temperature that falls towards 0, where probabilities are 0 or 1.
    """
    logits = scores.logits.float()
    k = logits.shape[1]
    return Postprocessor(share_offsets(logits, torch.full((k,), 1 / k) if prior is None else prior))


def share_offsets(logits: Tensor, wanted: Tensor) -> Tensor:
    """(n, k), shares (k,) -> offsets (k,)."""
    wanted = wanted.clamp_min(0.1 / len(logits))  # a class without any share would need an offset without end
    offsets = torch.zeros(logits.shape[1]).to(logits)
    for t in SHARPER:
        offsets = t * relaxed_offsets(logits / t, wanted / wanted.sum(), iterations=500, start=offsets / t)
    return offsets
