"""The loss of a method: a weighted sum of named terms, and the class proportions that they assume or learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pouf.losses.information import divergence, divergence_by_sureness, entropy, mutual_information, squared_error
from pouf.losses.prior import PaperPrior, PriorEstimate
from pouf.losses.transport import COSTS, conditional_transport, optimal_transport

if TYPE_CHECKING:
    from pouf.models.base import Scores
    from pouf.recipe import ObjectiveSettings

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
