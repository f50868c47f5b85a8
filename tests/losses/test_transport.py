"""Conditional transport against a plain loop, the paper's pseudocode, closed forms and its own invariants."""

import math

import pytest
import torch
from torch import Tensor

from pouf.losses import COSTS, conditional_transport, cosine_cost, exponential_cost


def random_sim(n: int = 7, k: int = 4, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(n, k, generator=generator, dtype=torch.float64) - 1


def loop_transport(sim: Tensor, temperature: float, prior: list[float], cost: str) -> float:
    """The definition, one number at a time."""
    n, k = sim.shape
    price = {"cosine": lambda s: 1 - s, "exponential": lambda s: math.exp(-s)}[cost]
    total = 0.0
    for i in range(n):
        weights = [prior[j] * math.exp(sim[i, j].item() / temperature) for j in range(k)]
        total += sum(price(sim[i, j].item()) * weights[j] / sum(weights) for j in range(k)) / n
    for j in range(k):
        weights = [math.exp(sim[i, j].item() / temperature) for i in range(n)]
        total += prior[j] * sum(price(sim[i, j].item()) * weights[i] / sum(weights) for i in range(n))
    return total


@pytest.mark.parametrize("cost", ["cosine", "exponential"])
@pytest.mark.parametrize("prior", [[0.25] * 4, [0.1, 0.2, 0.3, 0.4]])
def test_transport_equals_a_plain_loop_over_its_definition(cost: str, prior: list[float]) -> None:
    sim = random_sim()
    result = conditional_transport(sim, 0.3, torch.tensor(prior, dtype=torch.float64), COSTS[cost])
    assert result.cost.item() == pytest.approx(loop_transport(sim, 0.3, prior, cost), rel=1e-12)


def test_transport_with_uniform_prior_equals_the_papers_pseudocode() -> None:
    """The appendix's `compute_transport_loss`: its forward_plan runs over the batch, its backward_plan over classes."""
    sim, temperature = random_sim(), 0.2
    cost = 1 - sim
    forward_plan = torch.softmax(sim / temperature, dim=0)
    backward_plan = torch.softmax(sim / temperature, dim=1)
    expected = (cost * forward_plan).sum(0).mean() + (cost * backward_plan).sum(1).mean()
    uniform = torch.full((4,), 0.25, dtype=torch.float64)
    assert torch.allclose(conditional_transport(sim, temperature).cost, expected, rtol=1e-14)
    assert torch.allclose(conditional_transport(sim, temperature, uniform).cost, expected, rtol=1e-14)


def test_plans_are_conditional_distributions() -> None:
    plan = conditional_transport(random_sim(), 0.1, torch.tensor([0.1, 0.2, 0.3, 0.4]))
    assert torch.allclose(plan.forward.sum(1), torch.ones(7, dtype=torch.float64))
    assert torch.allclose(plan.backward.sum(0), torch.ones(4, dtype=torch.float64))


def test_a_class_with_prior_zero_gets_no_feature_and_no_cost() -> None:
    sim = random_sim().requires_grad_()
    with_it = conditional_transport(sim, 0.5, torch.tensor([0.5, 0.5, 0.0, 0.0]))
    without = conditional_transport(sim[:, :2], 0.5)
    assert torch.equal(with_it.forward[:, 2:], torch.zeros(7, 2, dtype=torch.float64))
    assert torch.allclose(with_it.cost, without.cost)
    (gradient,) = torch.autograd.grad(with_it.cost, sim)
    assert gradient.isfinite().all()


def test_perfect_alignment_costs_nothing_as_the_temperature_falls() -> None:
    sim = 2 * torch.eye(5, dtype=torch.float64) - 1  # each feature on its own prototype, opposite to all others
    assert conditional_transport(sim, 1e-3).cost.item() == pytest.approx(0, abs=1e-12)


def test_high_temperature_gives_twice_the_mean_cost() -> None:
    sim = random_sim()
    assert conditional_transport(sim, 1e9).cost.item() == pytest.approx(2 * (1 - sim).mean().item(), rel=1e-6)


def test_order_of_samples_and_classes_does_not_matter() -> None:
    sim, prior = random_sim(), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    rows, columns = torch.randperm(7), torch.randperm(4)
    shuffled = conditional_transport(sim[rows][:, columns], 0.2, prior[columns]).cost
    assert torch.allclose(shuffled, conditional_transport(sim, 0.2, prior).cost)


def test_costs_at_known_points() -> None:
    sim = torch.tensor([1.0, 0.0, -1.0])
    assert torch.allclose(cosine_cost(sim), torch.tensor([0.0, 1.0, 2.0]))
    assert torch.allclose(exponential_cost(sim), torch.tensor([math.exp(-1), 1.0, math.e]))


@pytest.mark.parametrize("cost", [cosine_cost, exponential_cost])
def test_gradient_flows_through_the_plans_and_the_temperature(cost: object) -> None:
    sim = random_sim().requires_grad_()
    temperature = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    prior = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s, t: conditional_transport(s, t, prior, cost).cost, (sim, temperature))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 3), (6, 1), (1, 3), (1, 1)])
@pytest.mark.parametrize("cost", [cosine_cost, exponential_cost])
def test_transport_is_finite_for_logits_of_ten_thousand(
    dtype: torch.dtype, shape: tuple[int, int], cost: object
) -> None:
    sim = torch.ones(shape)
    sim.view(-1)[::2] = -1
    sim = sim.to(dtype).requires_grad_()
    result = conditional_transport(sim, 1e-4, cost=cost)  # logits of ±1e4
    result.cost.backward()
    assert result.cost.dtype == torch.float32
    assert result.cost.isfinite()
    assert sim.grad is not None and sim.grad.isfinite().all()
