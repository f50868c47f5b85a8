"""Prototypes that are learned among the inputs, from an assignment to classes of equal shares."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor
from pouf.postprocess.sinkhorn import relaxed_offsets

LABEL_PROBABILITY = 0.6  # from here on an assignment counts as a label
SOFTENING = 4.0  # than the model's own temperature: CLIP's .01 becomes .04
RATE, STEPS = 10.0, 200  # of 2,000 published: the others changed 0.5 points at most on five sets


def inmap(
    features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None, steps: int = STEPS
) -> Postprocessor:
    """InMaP: P assigns inputs to classes of equal shares (or the prior's), prototypes W among the inputs follow it.

        P = Sinkhorn(ŷ, 20 rounds), rows above .6 made one-hot
        W ← unit(W - rate / (n τ) · (softmax(X Wᵀ / τ) - P)ᵀ X)         τ = 4 T, from the model's own prototypes

    The rate is halved when the gradient grows. Predictions are X Wᵀ / T. It is for data that hold all classes alike.

    References:
        Qian, Xu & Hu, Intra-modal proxy learning for zero-shot visual categorization with CLIP, NeurIPS 2023.
    """
    x, logits, temperature = F.normalize(features.float(), dim=1), scores.logits.float(), float(scores.temperature)
    k = logits.shape[1]
    wanted = (logits + relaxed_offsets(logits, prior, iterations=20)).softmax(1)
    sure = wanted.max(1).values > LABEL_PROBABILITY
    wanted[sure] = F.one_hot(wanted[sure].argmax(1), k).to(wanted)
    target, softer = wanted.T @ x, SOFTENING * temperature
    rate, before = RATE, torch.tensor(torch.inf).to(x)
    learned = F.normalize(prototypes.float(), dim=1)
    for _ in range(steps):
        gradient = (x @ learned.T / softer).softmax(1).T @ x - target
        norm = gradient.norm()
        rate, before = rate / 2 if norm > before else rate, norm
        learned = F.normalize(learned - rate / (len(x) * softer) * gradient, dim=1)
    return Postprocessor(torch.zeros(k).to(x), learned / temperature, own=torch.zeros(()).to(x))
