"""Class proportions that are learned from the data: as the paper does it (appendix), and ours."""

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
    """The paper's own estimate. It goes with a mutual information that knows of no prior.

    p̃    = mean_i pi(w|f_i) over a batch, with p in the plan
    p(w) ← a p̃ + (1 - a) p(w)      a falls from 1 to 0 on a cosine
    """

    def __init__(self, classes: int, steps: int) -> None:
        self.steps = steps
        self.step = 0
        self.prior = torch.full((classes,), 1 / classes)

    def update(self, logits: Tensor) -> Tensor:
        """Take in the (n, k) similarities over T of a batch; returns the prior (k,) its plan is made with."""
        prior = self.prior.to(logits.device)
        plan = (logits.detach().float() + prior.log()).softmax(1)
        rate = cosine_rate(self.step, self.steps)
        self.step += 1
        # Never 0: a class that no input is near would be lost for good.
        self.prior = (rate * plan.mean(0).cpu() + (1 - rate) * self.prior).clamp_min(1e-12)
        return prior


class PriorEstimate:
    """Ours: a prior that follows the predictions without running away with them.

        p̃  = mean_i p(y|x_i) over a batch, without the prior in it
        q  ← a p̃ + (1 - a) q          a falls from 1 to 0 on a cosine, as in the paper
        p(w) ∝ q^(1 - t)               t = exp H(q) / k, fixed after the first tenth of the steps

    The mutual information that goes with it pulls the predictions towards p. Together with the paper's estimate, where
    p is in the plan that p̃ is read from, that would make the rich richer: on real features 72.6 % fell to 0.3. (The
    paper's estimate with the paper's mutual information does not: see `PaperPrior`.) Three brakes hold that: p̃ comes
    from predictions without p; q is a plain mean at first; and the prior is pulled back towards uniform by t, the share
    of classes that the model finds in the data before it has changed much. Where it finds nearly all, the prior stays
    nearly uniform; where it finds few, the prior follows it.
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
        # At first the plain mean so far.
        rate = 1 / self.step if self.step <= self.warm_up else cosine_rate(self.step - 1, self.steps)
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
