"""Class proportions: estimated with a brake, and mutual information that pulls towards them."""

import math

import pytest
import torch

from pouf.losses import PaperPrior, PriorEstimate, conditional_transport, mutual_information
from pouf.losses.objective import Objective, share_of_classes
from pouf.models.base import Scores
from pouf.recipe import ObjectiveSettings


def logits_of(shares: list[float], n: int = 1000) -> torch.Tensor:
    """Sure predictions with these shares."""
    labels = torch.multinomial(torch.tensor(shares), n, replacement=True, generator=torch.Generator().manual_seed(0))
    return 20.0 * torch.nn.functional.one_hot(labels, len(shares)).float()


def test_with_a_uniform_prior_it_is_mutual_information() -> None:
    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    assert mutual_information(logits, torch.full((5,), 0.2)).item() == pytest.approx(mutual_information(logits).item())


def test_predictions_with_the_priors_shares_are_best() -> None:
    prior = torch.tensor([0.7, 0.3])
    right, equal = logits_of([0.7, 0.3]), logits_of([0.5, 0.5])
    assert mutual_information(right, prior) > mutual_information(equal, prior)
    assert mutual_information(right, prior).item() == pytest.approx(math.log(2), abs=1e-2)
    assert mutual_information(right) < mutual_information(equal)


def test_the_gradient_is_finite_where_a_class_is_never_chosen() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]] * 3, requires_grad=True)
    mutual_information(logits, torch.tensor([0.5, 0.3, 0.2])).backward()
    assert logits.grad.isfinite().all()


def test_few_classes_are_followed_and_many_are_held_near_uniform() -> None:
    def after(shares: list[float]) -> torch.Tensor:
        estimate = PriorEstimate(len(shares), steps=50)
        for _ in range(50):
            prior = estimate.update(logits_of(shares))
        return prior

    few = after([0.49, 0.49, *[0.0025] * 8])
    assert few[:2].sum() > 0.8
    nearly_all = after([0.13, 0.07, *[0.1] * 8])
    assert (nearly_all - 0.1).abs().max() < 0.01
    assert nearly_all[0] > nearly_all[1]


def test_the_estimate_does_not_run_away_with_itself() -> None:
    """Predictions that were pulled to the prior: read from a plan with the prior in it, one class would take all."""
    evidence = torch.randn(500, 10, generator=torch.Generator().manual_seed(0))
    braked = PriorEstimate(10, steps=200)
    prior = torch.full((10,), 0.1)
    runaway = torch.full((10,), 0.1)
    for step in range(200):
        prior = braked.update(evidence + prior.log())
        rate = 0.5 * (1 + math.cos(math.pi * step / 200))
        runaway = rate * (evidence + 2 * runaway.log()).softmax(1).mean(0) + (1 - rate) * runaway
    assert share_of_classes(runaway) < 0.3, "there is something to brake"
    assert share_of_classes(prior) > 0.9


def test_the_prior_is_never_zero_and_sums_to_one() -> None:
    estimate = PriorEstimate(3, steps=4)
    for _ in range(4):
        prior = estimate.update(torch.tensor([[1e4, 0.0, 0.0]]))
        assert (prior > 0).all() and prior.sum().item() == pytest.approx(1)


def test_the_papers_estimate_is_the_papers_two_lines() -> None:
    """p̃ = mean of the plan with p in it; p ← a p̃ + (1 - a) p with a on a cosine; recomputed with plain loops."""
    draw = torch.Generator().manual_seed(0)
    estimate, p, steps = PaperPrior(4, steps=5), torch.full((4,), 0.25), 5
    for step in range(steps):
        sim = torch.randn(7, 4, generator=draw)
        prior = estimate.update(sim / 0.1)
        assert torch.allclose(prior, p)
        plan = conditional_transport(sim, 0.1, p).forward
        a = 0.5 * (1 + math.cos(math.pi * step / steps))
        p = a * plan.mean(0) + (1 - a) * p


def test_the_papers_information_has_no_prior() -> None:
    sim = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)).tanh()
    known, t = torch.tensor([0.7, 0.2, 0.1]), torch.tensor(0.1)

    def terms(prior: str, known_shares: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        objective = Objective(ObjectiveSettings(prior=prior), 3, known_shares=known_shares)
        return objective([Scores(sim, sim / t, t)]).terms

    plain, papers, ours = terms("uniform"), terms("paper", known), terms("uniform", known)
    assert papers["transport"].item() == pytest.approx(conditional_transport(sim, 0.1, known).cost.item())
    assert papers["transport"] != plain["transport"] == ours["transport"]
    assert papers["information"] == plain["information"] == -mutual_information(sim / t)
    assert ours["information"] == -mutual_information(sim / t, known, known=True) != plain["information"]
