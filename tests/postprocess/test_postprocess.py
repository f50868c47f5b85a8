"""Corrections of predictions: each does what it says, applies to single inputs, and is safe where it claims to be."""

import ot
import pytest
import torch
import torch.nn.functional as F

from pouf import InputError
from pouf.models.base import Scores
from pouf.postprocess import POSTPROCESSORS
from pouf.postprocess.prior_correction import prior_correction
from pouf.postprocess.propagation import propagation
from pouf.postprocess.refinement import refinement
from pouf.postprocess.sinkhorn import sinkhorn

K, D, T = 12, 16, 0.05


def world(present: int = K, each: int = 20, skew: float = 1.0, seed: int = 0):
    """Inputs around class centres, and prototypes that are off: some classes are favoured for all inputs alike."""
    draw = torch.Generator().manual_seed(seed)
    centres = F.normalize(torch.randn(K, D, generator=draw), dim=1)
    labels = torch.cat([torch.full((max(1, round(each * skew ** (-k / K))),), k) for k in range(present)])
    features = F.normalize(centres[labels] + 0.28 * torch.randn(len(labels), D, generator=draw), dim=1)
    prototypes = F.normalize(
        centres + 0.5 * torch.randn(1, D, generator=draw) * torch.rand(K, 1, generator=draw), dim=1
    )
    sim = features @ prototypes.T
    return features, Scores(sim, sim / T, torch.tensor(T)), labels


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return (logits.argmax(1) == labels).float().mean().item()


@pytest.mark.parametrize("name", POSTPROCESSORS)
def test_an_input_alone_gets_what_it_gets_among_others(name: str) -> None:
    features, scores, _ = world()
    postprocessor = POSTPROCESSORS[name](features, scores, None)
    together = postprocessor(features, scores.logits)
    alone = torch.cat([postprocessor(features[[i]], scores.logits[[i]]) for i in range(len(features))])
    assert torch.allclose(together, alone, atol=1e-4)
    assert not torch.allclose(together.softmax(1), scores.logits.softmax(1), atol=1e-2), "it changes something"


@pytest.mark.parametrize("name", POSTPROCESSORS)
def test_each_helps_where_the_model_favours_classes_and_all_are_present(name: str) -> None:
    features, scores, labels = world()
    adjusted = POSTPROCESSORS[name](features, scores, None)(features, scores.logits)
    assert accuracy(adjusted, labels) > accuracy(scores.logits, labels) + 0.02


def test_prior_correction_takes_the_mean_prediction_away() -> None:
    features, scores, _ = world()
    expected = scores.logits.log_softmax(1) - scores.logits.softmax(1).mean(0).log()
    found = prior_correction(features, scores)(features, scores.logits)
    assert torch.allclose(found.log_softmax(1), expected.log_softmax(1), atol=1e-4)


@pytest.mark.parametrize("prior", [None, torch.arange(1.0, K + 1) / torch.arange(1.0, K + 1).sum()])
def test_sinkhorn_gives_every_class_its_share_and_is_pots_plan(prior: torch.Tensor | None) -> None:
    features, scores, labels = world()
    probabilities = sinkhorn(features, scores, prior)(features, scores.logits).softmax(1)
    wanted = torch.full((K,), 1 / K) if prior is None else prior
    assert torch.allclose(probabilities.mean(0), wanted, atol=1e-4)
    n = len(labels)
    plan = ot.sinkhorn(
        torch.full((n,), 1 / n).double(), wanted.double() / wanted.double().sum(), -scores.logits.double(), 1.0,
        method="sinkhorn_log", numItermax=5000, warn=False,
    )  # fmt: skip
    assert torch.allclose(probabilities.double() / n, plan, atol=1e-6)


@pytest.mark.parametrize("present", [1, 3])
def test_refinement_is_safe_where_few_classes_are_there_and_sinkhorn_is_not(present: int) -> None:
    features, scores, labels = world(present)
    before = accuracy(scores.logits, labels)
    refined = refinement(features, scores)(features, scores.logits)
    assigned = sinkhorn(features, scores)(features, scores.logits)
    assert accuracy(refined, labels) >= before - 0.05
    assert accuracy(assigned, labels) < before - 0.2


def test_refinement_trusts_a_prior_that_it_is_given() -> None:
    features, scores, labels = world(skew=10)
    shares = torch.bincount(labels, minlength=K) / len(labels)
    told = refinement(features, scores, shares)(features, scores.logits)
    assert torch.allclose(told.softmax(1).mean(0), shares, atol=0.02)
    assert accuracy(told, labels) >= accuracy(refinement(features, scores)(features, scores.logits), labels)


def test_propagation_equals_its_closed_form() -> None:
    """Z = (I - S/2)^-1 P/2."""
    features, scores, _ = world(each=4)
    n = len(features)
    near = features @ features.T
    near.fill_diagonal_(-2)
    top = near.topk(10, dim=1)
    graph = torch.zeros(n, n).scatter(1, top.indices, top.values.clamp_min(1e-6))
    graph = graph / graph.sum(1, keepdim=True)
    expected = torch.linalg.solve(torch.eye(n) - graph / 2, scores.logits.softmax(1) / 2)
    assert torch.allclose(propagation(features, scores, rounds=60).votes, expected, atol=1e-4)


def test_propagation_of_one_input_is_refused() -> None:
    with pytest.raises(InputError, match="at least two inputs"):
        propagation(torch.ones(1, 3), Scores(torch.ones(1, 2), torch.ones(1, 2), torch.tensor(1.0)))


def test_what_was_fitted_moves_with_the_classifier_and_is_saved_with_it() -> None:
    features, scores, _ = world()
    fitted = propagation(features, scores)
    assert set(fitted.state_dict()) == {"bias", "neighbours", "votes"}
    assert all(tensor.dtype == torch.float64 for tensor in fitted.double().state_dict().values())
