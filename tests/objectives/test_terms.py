"""The loss of a method is the weighted sum of its terms."""

import pytest
import torch

from pouf.objectives import conditional_transport, entropy, exponential_cost, mutual_information
from pouf.objectives.terms import TERMS, Scores, total_loss
from pouf.recipe import Objective


def scores() -> Scores:
    sim = 2 * torch.rand(8, 3, generator=torch.Generator().manual_seed(0)) - 1
    return Scores(sim, sim / 0.1, torch.tensor(0.1))


def test_default_loss_is_transport_minus_a_third_of_the_information() -> None:
    s = scores()
    loss = total_loss(s, Objective())
    expected = conditional_transport(s.sim, 0.1).cost - 0.3 * mutual_information(s.logits)
    assert loss.total.item() == pytest.approx(expected.item())
    assert loss.terms.keys() == {"transport", "information"}


def test_tent_is_the_entropy_alone() -> None:
    loss = total_loss(scores(), Objective(transport=0, information=0, entropy=0.3))
    assert loss.total.item() == pytest.approx(0.3 * entropy(scores().logits).item())


def test_the_cost_is_taken_from_the_settings() -> None:
    loss = total_loss(scores(), Objective(information=0, cost="exponential"))
    assert loss.total.item() == pytest.approx(
        conditional_transport(scores().sim, 0.1, cost=exponential_cost).cost.item()
    )


def test_every_term_has_a_weight_in_the_recipe() -> None:
    assert all(isinstance(getattr(Objective(), name), float) for name in TERMS)
