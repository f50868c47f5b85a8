"""The loss of a method: a weighted sum of named terms, and the class proportions that they assume or learn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pouf.losses.information import (
    divergence,
    divergence_by_sureness,
    entropy,
    log_marginal,
    mutual_information,
    squared_error,
)
from pouf.losses.transport import COSTS, conditional_transport, optimal_transport

if TYPE_CHECKING:
    from pouf.models.base import Scores
    from pouf.recipe import ObjectiveSettings

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


# Losses of predictions on labelled shots, by `label_loss` of the recipe.
LABEL_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": divergence, "mse": squared_error}
# Class proportions that are learned during a run, by `prior` of the recipe.
PRIORS: dict[str, Callable[[int, int], PaperPrior | PriorEstimate]] = {"paper": PaperPrior, "estimated": PriorEstimate}


class Loss(NamedTuple):
    """The loss of a step, its terms, and the scores it was computed from."""

    total: Tensor  # scalar, differentiable
    terms: dict[str, Tensor]  # scalars before weighting, detached; smaller is better
    scores: Scores  # of the unlabelled batch, detached


# Of a term of the loss: which of the scores of a step it is of, and their targets (n, k).
Targets = Mapping[str, tuple[int, Tensor]]


class Shares(NamedTuple):
    """Class proportions (k,) as the terms assume them; None is uniform."""

    plan: Tensor | None = None  # prior of the transport plan
    marginal: Tensor | None = None  # target of the mean prediction in the mutual information


class Objective:
    """L = transport * L_transport(sim, T) - information * I(logits) + entropy * H(logits) + labels * L_labels(logits)
    + teacher * L_teacher(logits).

    Args:
        settings: the weights, and which transport, labels and prior.
        classes: number of classes k.
        steps: of the run, for the schedule of a learned prior.
        known_shares: (k,), the class proportions of the data, if known.
    """

    def __init__(
        self, settings: ObjectiveSettings, classes: int, steps: int = 1, known_shares: Tensor | None = None
    ) -> None:
        self.settings, self.weights, self.known_shares = settings, settings.weights(), known_shares
        learned = known_shares is None and settings.prior in PRIORS
        self.prior = PRIORS[settings.prior](classes, steps) if learned else None

    def __call__(self, scores: Sequence[Scores], targets: Targets | None = None) -> Loss:
        """The loss of a step, in fp32 or better. Updates the prior if it is learned.

        Args:
            scores: of the unlabelled batch, and of those with labels or answers of a teacher, where these are others.
            targets: class probabilities of the terms `labels` and `teacher`.
        """
        sim, logits, temperature = scores[0]
        settings, terms = self.settings, {}
        with torch.autocast(logits.device.type, enabled=False):
            shares = self._shares(scores[0]) if self.prior is not None or self.known_shares is not None else Shares()
            if settings.transport and settings.plan == "conditional":
                cost = COSTS[settings.cost]
                terms["transport"] = conditional_transport(sim, temperature, shares.plan, cost).cost
            elif settings.transport:
                smooth = (settings.regularisation or temperature.item()) if settings.plan == "sinkhorn" else 0.0
                terms["transport"] = optimal_transport(sim, shares.plan, smooth, COSTS[settings.cost])
            if settings.information:
                terms["information"] = -mutual_information(logits, shares.marginal, self.known_shares is not None)
            if settings.entropy:
                terms["entropy"] = entropy(logits)
            for name, (batch, wanted) in (targets or {}).items():
                loss = divergence_by_sureness if name == "teacher" else LABEL_LOSSES[settings.label_loss]
                terms[name] = loss(scores[batch].logits, wanted)
            total = torch.stack([self.weights[name] * term for name, term in terms.items()]).sum()
        known = {name: term.detach() for name, term in terms.items()}
        return Loss(total, known, type(scores[0])(*(each.detach() for each in scores[0])))

    @property
    def used(self) -> set[str]:
        """The fields of the scores that the loss depends on."""
        names = {"logits"} if self.weights.keys() - {"transport"} else set()
        if self.settings.transport:
            names |= {"sim", "temperature"} if self.settings.plan == "conditional" else {"sim"}
        return names

    def _shares(self, scores: Scores) -> Shares:
        """Proportions to assume with this batch."""
        if self.known_shares is not None:
            if self.settings.prior == "paper":  # appendix: p(w) is set to them; no prior elsewhere
                return Shares(plan=self.known_shares)
            # In one term only: with the prior in the plan as well, the predictions overshoot it.
            return Shares(marginal=self.known_shares)
        if isinstance(self.prior, PaperPrior):
            return Shares(plan=self.prior.update(scores.sim / scores.temperature))
        assert self.prior is not None
        estimate = self.prior.update(scores.logits)
        return Shares(estimate, estimate)

    def state_dict(self) -> dict[str, Any]:
        """The state of a learned prior."""
        return {"prior": dict(vars(self.prior)) if self.prior is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.prior is not None:
            vars(self.prior).update(state["prior"])
