"""The loss of a method is the weighted sum of its terms."""

import pytest
import torch

from pouf.losses import conditional_transport, divergence, entropy, exponential_cost, mutual_information
from pouf.losses.objective import Loss, Objective
from pouf.models.base import Scores
from pouf.recipe import ObjectiveSettings

SIM = 2 * torch.rand(8, 3, generator=torch.Generator().manual_seed(0)) - 1
SCORES = Scores(SIM, SIM / 0.1, torch.tensor(0.1))
TARGETS = torch.eye(3)[torch.arange(8) % 3]


def loss(*scores: Scores, targets: dict | None = None, **settings: object) -> Loss:
    return Objective(ObjectiveSettings(**settings), 3)(scores or [SCORES], targets)


def test_default_loss_is_transport_minus_a_third_of_the_information() -> None:
    expected = conditional_transport(SIM, 0.1).cost - 0.3 * mutual_information(SIM / 0.1)
    assert loss().total.item() == pytest.approx(expected.item())
    assert loss().terms.keys() == {"transport", "information"}


def test_tent_is_the_entropy_alone() -> None:
    found = loss(transport=0, information=0, entropy=0.3)
    assert found.total.item() == pytest.approx(0.3 * entropy(SIM / 0.1).item())


def test_the_cost_is_the_one_that_is_asked_for() -> None:
    expected = conditional_transport(SIM, 0.1, cost=exponential_cost).cost
    assert loss(cost="exponential").terms["transport"].item() == pytest.approx(expected.item())


def test_labels_count_for_the_labelled_batch_alone() -> None:
    labelled = Scores(*(each + 1 for each in SCORES))
    both = loss(SCORES, labelled, targets={"labels": (1, TARGETS)}, labels=2.0)
    one = loss(targets={"labels": (0, TARGETS)}, labels=2.0)
    assert both.terms["transport"] == one.terms["transport"] == loss().terms["transport"]
    assert both.terms["labels"] == divergence(labelled.logits, TARGETS)
    assert both.total.item() == pytest.approx((loss().total + 2 * divergence(labelled.logits, TARGETS)).item())


def test_every_term_has_a_weight_in_the_recipe() -> None:
    every = {"transport": 1.0, "information": 1.0, "entropy": 1.0, "labels": 1.0, "teacher": 1.0}
    targets = {"labels": (0, TARGETS), "teacher": (0, TARGETS)}
    assert loss(targets=targets, **every).terms.keys() == ObjectiveSettings(**every).weights().keys() == every.keys()


def test_a_prior_that_is_learned_goes_on_from_its_state() -> None:
    def run(steps: int, state: dict[str, object] | None = None) -> Objective:
        objective = Objective(ObjectiveSettings(prior="estimated"), 3, steps=10)
        if state is not None:
            objective.load_state_dict(state)
        for _ in range(steps):
            objective([SCORES])
        return objective

    assert torch.equal(run(2, run(3).state_dict()).prior.shares, run(5).prior.shares)
    assert not torch.equal(run(2).prior.shares, run(5).prior.shares)
