"""Class proportions that are learned from the data: the paper's estimate (appendix), and another one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pouf.losses.information import log_marginal

WARM_UP = 0.1  # share of the steps over which the first estimate is averaged


def cosine_rate(step: int, steps: int) -> float:
    """a, falling from 1 at step 0 to 0 at the end."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


class PaperPrior:
    """The paper's estimate, for a mutual information without a prior.

    p̃    = mean_i pi(w|f_i) over a batch, with p in the plan
    p(w) ← a p̃ + (1 - a) p(w)      a falls from 1 to 0 on a cosine
    """

    def __init__(self, classes: int, steps: int) -> None:
        self.steps = steps
        self.step = 0
        self.prior = torch.full((classes,), 1 / classes)

    def update(self, logits: Tensor) -> Tensor:
        """Update with the (n, k) similarities over T of a batch; returns the prior (k,) for its plan."""
        prior = self.prior.to(logits.device)
        plan = (logits.detach().float() + prior.log()).softmax(1)
        rate = cosine_rate(self.step, self.steps)
        self.step += 1
        # Never 0: a class at 0 could not recover.
        self.prior = (rate * plan.mean(0).cpu() + (1 - rate) * self.prior).clamp_min(1e-12)
        return prior


class PriorEstimate:
    """A prior that follows the predictions without reinforcing itself.

        p̃  = mean_i p(y|x_i) over a batch, without the prior in it
        q  ← a p̃ + (1 - a) q          a falls from 1 to 0 on a cosine, as in the paper
        p(w) ∝ q^(1 - t)               t = exp H(q) / k, fixed after the first tenth of the steps

    It is used with a mutual information that pulls the predictions towards p. With the paper's estimate, where p is in
    the plan that p̃ is read from, large classes would grow further: on real features 72.6 % fell to 0.3. (The paper's
    estimate with the paper's mutual information does not: see `PaperPrior`.) Three measures prevent that: p̃ comes
    from predictions without p; q is a plain mean at first; and the prior is pulled back towards uniform by t, the share
    of classes in use before the model has changed much. If nearly all are in use, the prior stays nearly uniform; if
    few are, the prior follows the predictions.
    """

    def __init__(self, classes: int, steps: int) -> None:
        self.steps = steps
        self.warm_up = max(1, round(WARM_UP * steps))
        self.step = 0
        self.trust = 1.0  # in uniform shares
        self.shares = torch.full((classes,), 1 / classes)  # q

    def update(self, logits: Tensor) -> Tensor:
        """Update with the (n, k) logits of a batch; returns the prior (k,) to use with it."""
        batch = logits.detach().float().softmax(1).mean(0).cpu()
        self.step += 1
        # During warm-up the plain mean.
        rate = 1 / self.step if self.step <= self.warm_up else cosine_rate(self.step - 1, self.steps)
        self.shares = rate * batch + (1 - rate) * self.shares
        if self.step <= self.warm_up:
            self.trust = share_of_classes(self.shares)
        return self.prior().to(logits.device)

    def prior(self) -> Tensor:
        """(k,), sums to 1; never 0."""
        return ((1 - self.trust) * self.shares.clamp_min(1e-12).log()).softmax(0)


FLOOR = 1e-4  # minimum share of a class, relative to an equal share: log π must stay finite


def gated_shares(probabilities: Tensor, iterations: int = 50) -> Tensor:
    """π ← (mean_i p_i π / Σ p_i π)^(1 - t²), to sum 1, from equal shares: (n, k) -> (k,). Saerens' EM, gated.

    t = exp H(mean_i p_i) / k is the share of classes in use before. If nearly all are in use, π stays nearly equal; if
    few are, it is that of plain EM, which on its own would empty classes that do occur.
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
    """exp H(q) / k, the share of classes in use: 1 if all k are equally frequent, 1/k if there is only one."""
    return float(torch.special.entr(shares).sum().exp() / len(shares))
