"""Optimal transport against hand-made cases, against POT's own cost, and the two plans against each other."""

import numpy as np
import ot
import pytest
import torch

from pouf.losses import exponential_cost, optimal_transport, transport_plan


def random_sim(n: int = 8, k: int = 4) -> torch.Tensor:
    return 2 * torch.rand(n, k, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1


def test_a_case_solved_by_hand() -> None:
    """Three features near prototype 0 and one near 1: with equal shares one of the three must go to 1, the nearest."""
    sim = torch.tensor([[0.9, 0.1], [0.9, 0.2], [0.9, 0.5], [0.1, 0.9]], dtype=torch.float64)
    plan = transport_plan(1 - sim)
    assert torch.allclose(plan * 4, torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]], dtype=torch.float64))
    assert optimal_transport(sim).item() == pytest.approx((0.1 + 0.1 + 0.5 + 0.1) / 4)
    # Told of the true shares, each goes where it belongs.
    with_prior = transport_plan(1 - sim, torch.tensor([0.75, 0.25]))
    assert with_prior.argmax(1).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("prior", [None, torch.tensor([0.1, 0.2, 0.3, 0.4])])
@pytest.mark.parametrize("regularisation", [0.0, 0.05])
def test_marginals_are_the_batch_and_the_prior(prior: torch.Tensor | None, regularisation: float) -> None:
    plan = transport_plan(1 - random_sim(), prior, regularisation)
    columns = torch.full((4,), 0.25) if prior is None else prior
    assert torch.allclose(plan.sum(1), torch.full((8,), 1 / 8, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(plan.sum(0), columns.double(), atol=1e-6)


def test_the_exact_cost_is_pots() -> None:
    cost = (1 - random_sim()).numpy()
    expected = ot.emd2(np.full(8, 1 / 8), np.full(4, 1 / 4), cost)
    assert optimal_transport(random_sim()).item() == pytest.approx(expected)


@pytest.mark.parametrize("regularisation", [0.0, 0.05])
def test_the_cost_is_that_of_the_plan_with_the_prior(regularisation: float) -> None:
    prior, cost = torch.tensor([0.1, 0.2, 0.3, 0.4]), 1 - random_sim()
    expected = (transport_plan(cost, prior, regularisation) * cost).sum().item()
    assert optimal_transport(random_sim(), prior, regularisation).item() == pytest.approx(expected)
    assert optimal_transport(random_sim(), None, regularisation).item() != pytest.approx(expected)


def test_sinkhorn_becomes_exact_as_its_regularisation_goes() -> None:
    sim = random_sim()
    exact = optimal_transport(sim).item()
    gaps = [optimal_transport(sim, regularisation=r).item() - exact for r in (1.0, 0.1, 0.02)]
    assert gaps[0] > gaps[1] > gaps[2] >= -1e-9
    assert gaps[2] < 2e-3


def test_the_gradient_is_that_of_the_cost_under_a_fixed_plan() -> None:
    sim = random_sim().requires_grad_()
    optimal_transport(sim, cost=exponential_cost).backward()
    plan = transport_plan(exponential_cost(sim).detach())
    assert torch.allclose(sim.grad, -plan * (-sim.detach()).exp())
