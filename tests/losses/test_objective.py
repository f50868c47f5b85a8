"""The loss of a method is the weighted sum of its terms."""

import pytest
import torch
import torch.nn.functional as F

from pouf.losses import conditional_transport, entropy, exponential_cost, mutual_information
from pouf.losses.objective import TERMS, Scores, label_terms, total_loss, unlabelled_terms
from pouf.recipe import Objective


def scores() -> Scores:
    sim = 2 * torch.rand(8, 3, generator=torch.Generator().manual_seed(0)) - 1
    return Scores(sim, sim / 0.1, torch.tensor(0.1))


def test_default_loss_is_transport_minus_a_third_of_the_information() -> None:
    s = scores()
    terms = unlabelled_terms(s, Objective())
    expected = conditional_transport(s.sim, 0.1).cost - 0.3 * mutual_information(s.logits)
    assert total_loss(terms, Objective()).item() == pytest.approx(expected.item())
    assert terms.keys() == {"transport", "information"}


def test_tent_is_the_entropy_alone() -> None:
    weights = Objective(transport=0, information=0, entropy=0.3)
    loss = total_loss(unlabelled_terms(scores(), weights), weights)
    assert loss.item() == pytest.approx(0.3 * entropy(scores().logits).item())


def test_the_cost_is_taken_from_the_settings() -> None:
    weights = Objective(information=0, cost="exponential")
    loss = total_loss(unlabelled_terms(scores(), weights), weights)
    assert loss.item() == pytest.approx(conditional_transport(scores().sim, 0.1, cost=exponential_cost).cost.item())


def test_labelled_shots_add_their_own_weighted_term() -> None:
    weights = Objective(labels=0.5)
    targets = torch.eye(3)[[0, 1, 2, 0, 1, 2, 0, 1]]
    terms = unlabelled_terms(scores(), weights)
    loss = total_loss(terms | label_terms(scores(), targets, weights), weights)
    expected = total_loss(terms, weights) + 0.5 * F.cross_entropy(scores().logits, targets.argmax(1))
    assert loss.item() == pytest.approx(expected.item())
    assert label_terms(scores(), targets, Objective()) == {}


def test_every_term_has_a_weight_in_the_recipe() -> None:
    assert all(isinstance(getattr(Objective(), name), float) for name in TERMS)
