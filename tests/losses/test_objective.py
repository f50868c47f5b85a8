"""The loss of a method is the weighted sum of its terms."""

import pytest
import torch

from pouf.losses import conditional_transport, entropy, exponential_cost, mutual_information
from pouf.losses.objective import total_loss, unlabelled_terms
from pouf.recipe import Objective

SIM = 2 * torch.rand(8, 3, generator=torch.Generator().manual_seed(0)) - 1
SCORES = (SIM, SIM / 0.1, torch.tensor(0.1))


def test_default_loss_is_transport_minus_a_third_of_the_information() -> None:
    weights = Objective().weights()
    terms = unlabelled_terms(*SCORES, wanted=weights)
    expected = conditional_transport(SIM, 0.1).cost - 0.3 * mutual_information(SIM / 0.1)
    assert total_loss(terms, weights).item() == pytest.approx(expected.item())
    assert terms.keys() == {"transport", "information"}


def test_tent_is_the_entropy_alone() -> None:
    weights = Objective(transport=0, information=0, entropy=0.3).weights()
    loss = total_loss(unlabelled_terms(*SCORES, wanted=weights), weights)
    assert loss.item() == pytest.approx(0.3 * entropy(SIM / 0.1).item())


def test_the_cost_is_the_one_that_is_asked_for() -> None:
    terms = unlabelled_terms(*SCORES, wanted=["transport"], cost="exponential")
    assert terms["transport"].item() == pytest.approx(
        conditional_transport(SIM, 0.1, cost=exponential_cost).cost.item()
    )


def test_labels_are_no_unlabelled_term() -> None:
    assert unlabelled_terms(*SCORES, wanted={"labels": 1.0, "entropy": 1.0}).keys() == {"entropy"}


def test_every_term_has_a_weight_in_the_recipe() -> None:
    every = Objective(transport=1, information=1, entropy=1, labels=1).weights()
    assert unlabelled_terms(*SCORES, wanted=every).keys() | {"labels"} == every.keys()
