"""Class proportions that are learned from the predictions themselves (paper, appendix on class proportions), braked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pouf.losses.information import log_marginal

WARM_UP = 0.1  # share of the steps over which the first estimate is averaged


class PriorEstimate:
    """A prior that follows the predictions without running away with them.

        p̃  = mean_i p(y|x_i) over a batch, without the prior in it
        q  ← a p̃ + (1 - a) q          a falls from 1 to 0 on a cosine, as in the paper
        p(w) ∝ q^(1 - t)               t = exp H(q) / k, fixed after the first tenth of the steps

    As the paper writes it (t = 0, and p in the plan that p̃ is read from) the rich get richer: on real features 72.6 %
    fell to 0.3. Three brakes hold that: p̃ comes from predictions without p; q is a plain mean at first; and the prior
    is pulled back towards uniform by t, the share of classes that the model finds in the data before it has changed
    much. Where it finds nearly all, the prior stays nearly uniform; where it finds few, the prior follows it.
    """

    def __init__(self, classes: int, steps: int) -> None:
        self.steps = steps
        self.warm_up = max(1, round(WARM_UP * steps))
        self.step = 0
        self.trust = 1.0  # in uniform shares
        self.shares = torch.full((classes,), 1 / classes)  # q

    def update(self, logits: Tensor) -> Tensor:
        """Take in (n, k) logits of a batch; returns the prior (k,) to use with it."""
        batch = logits.detach().float().softmax(1).mean(0).cpu()
        self.step += 1
        if self.step <= self.warm_up:
            rate = 1 / self.step  # the plain mean so far
        else:
            rate = 0.5 * (1 + math.cos(math.pi * (self.step - 1) / self.steps))
        self.shares = rate * batch + (1 - rate) * self.shares
        if self.step <= self.warm_up:
            self.trust = share_of_classes(self.shares)
        return self.prior().to(logits.device)

    def prior(self) -> Tensor:
        """(k,), sums to 1; never 0, whatever the shares."""
        return ((1 - self.trust) * self.shares.clamp_min(1e-12).log()).softmax(0)


FLOOR = 1e-4  # a class keeps this much of an equal share: without it, π reaches 0 and its logarithm has no end


def gated_shares(probabilities: Tensor, iterations: int = 50) -> Tensor:
    """π ← (mean_i p_i π / Σ p_i π)^(1 - t²), to sum 1, from equal shares: (n, k) -> (k,). Saerens' EM, gated.

    t = exp H(mean_i p_i) / k is the share of the classes that predictions use before. Where they use nearly all, π
    stays nearly equal; where they use few, it is that of plain EM, which alone would empty classes that are there.
    """
    log_p = probabilities.clamp_min(1e-30).log()
    k = log_p.shape[1]
    t = share_of_classes(probabilities.mean(0).cpu())
    shares = torch.full((k,), 1 / k).to(log_p)
    for _ in range(iterations):
        shares = ((1 - t**2) * log_marginal(log_p + shares.log())).softmax(0)
        shares = (shares + FLOOR / k) / (1 + FLOOR)
    return shares


def share_of_classes(shares: Tensor) -> float:
    """exp H(q) / k: 1 where all k classes are met alike, 1/k where there is only one."""
    return float(torch.special.entr(shares).sum().exp() / len(shares))
