"""Corrections of predictions: each does what it says, applies to single inputs, and is safe where it claims to be."""

import ot
import pytest
import torch
import torch.nn.functional as F

from pouf import InputError
from pouf.models.base import Scores
from pouf.postprocess import POSTPROCESSORS
from pouf.postprocess.em import em
from pouf.postprocess.prior_correction import prior_correction
from pouf.postprocess.propagation import propagation
from pouf.postprocess.refinement import refinement
from pouf.postprocess.sinkhorn import sinkhorn
from pouf.postprocess.stata import stata

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
    return features, prototypes, Scores(sim, sim / T, torch.tensor(T)), labels


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return (logits.argmax(1) == labels).float().mean().item()


@pytest.mark.parametrize("name", POSTPROCESSORS)
def test_an_input_alone_gets_what_it_gets_among_others(name: str) -> None:
    features, prototypes, scores, _ = world()
    postprocessor = POSTPROCESSORS[name](features, prototypes, scores, None)
    together = postprocessor(features, scores.logits)
    alone = torch.cat([postprocessor(features[[i]], scores.logits[[i]]) for i in range(len(features))])
    assert torch.allclose(together, alone, atol=1e-4)
    assert not torch.allclose(together.softmax(1), scores.logits.softmax(1), atol=1e-2), "it changes something"


@pytest.mark.parametrize(
    "name", [name for name in POSTPROCESSORS if name != "em"]
)  # which would have the favoured classes be frequent
def test_each_helps_where_the_model_favours_classes_and_all_are_present(name: str) -> None:
    features, prototypes, scores, labels = world()
    adjusted = POSTPROCESSORS[name](features, prototypes, scores, None)(features, scores.logits)
    assert accuracy(adjusted, labels) > accuracy(scores.logits, labels) + 0.02


def test_prior_correction_takes_the_mean_prediction_away() -> None:
    features, prototypes, scores, _ = world()
    expected = scores.logits.log_softmax(1) - scores.logits.softmax(1).mean(0).log()
    found = prior_correction(features, prototypes, scores)(features, scores.logits)
    assert torch.allclose(found.log_softmax(1), expected.log_softmax(1), atol=1e-4)


@pytest.mark.parametrize("prior", [None, torch.arange(1.0, K + 1) / torch.arange(1.0, K + 1).sum()])
def test_sinkhorn_gives_every_class_its_share_and_is_pots_plan(prior: torch.Tensor | None) -> None:
    features, prototypes, scores, labels = world()
    probabilities = sinkhorn(features, prototypes, scores, prior)(features, scores.logits).softmax(1)
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
    features, prototypes, scores, labels = world(present)
    before = accuracy(scores.logits, labels)
    refined = refinement(features, prototypes, scores)(features, scores.logits)
    assigned = sinkhorn(features, prototypes, scores)(features, scores.logits)
    assert accuracy(refined, labels) >= before - 0.05
    assert accuracy(assigned, labels) < before - 0.2


def test_refinement_trusts_a_prior_that_it_is_given() -> None:
    features, prototypes, scores, labels = world(skew=10)
    shares = torch.bincount(labels, minlength=K) / len(labels)
    told = refinement(features, prototypes, scores, shares)(features, scores.logits)
    assert torch.allclose(told.softmax(1).mean(0), shares, atol=0.02)
    assert accuracy(told, labels) >= accuracy(refinement(features, prototypes, scores)(features, scores.logits), labels)


def test_propagation_equals_its_closed_form() -> None:
    """Z = (I - S/2)^-1 P/2."""
    features, prototypes, scores, _ = world(each=4)
    n = len(features)
    near = features @ features.T
    near.fill_diagonal_(-2)
    top = near.topk(10, dim=1)
    graph = torch.zeros(n, n).scatter(1, top.indices, top.values.clamp_min(1e-6))
    graph = graph / graph.sum(1, keepdim=True)
    expected = torch.linalg.solve(torch.eye(n) - graph / 2, scores.logits.softmax(1) / 2)
    assert torch.allclose(propagation(features, prototypes, scores, rounds=60).votes, expected, atol=1e-4)


def test_propagation_of_one_input_is_refused() -> None:
    with pytest.raises(InputError, match="at least two inputs"):
        propagation(torch.ones(1, 3), torch.ones(2, 3), Scores(torch.ones(1, 2), torch.ones(1, 2), torch.tensor(1.0)))


def test_what_was_fitted_moves_with_the_classifier_and_is_saved_with_it() -> None:
    features, prototypes, scores, _ = world()
    fitted = propagation(features, prototypes, scores)
    assert set(fitted.state_dict()) == {"bias", "neighbours", "votes"}
    assert all(tensor.dtype == torch.float64 for tensor in fitted.double().state_dict().values())


def test_em_finds_the_shares_of_the_classes_that_are_there() -> None:
    """Three of twelve classes: the fixed point of π = (mean softmax(logits + log π))^(1 - t²)."""
    features, prototypes, scores, labels = world(3)
    bias = em(features, prototypes, scores).bias
    shares = bias.exp()
    assert shares.sum() == pytest.approx(1, abs=1e-4) and shares[:3].sum() > 0.95
    p = (scores.logits + bias).softmax(1).mean(0)
    t = float(torch.special.entr(scores.logits.softmax(1).mean(0)).sum().exp()) / K
    assert torch.allclose((p ** (1 - t**2) / (p ** (1 - t**2)).sum())[:3], shares[:3], atol=1e-3)
    assert accuracy(scores.logits + bias, labels) >= accuracy(scores.logits, labels)


def test_statas_first_round_is_that_of_a_plain_loop() -> None:
    features, prototypes, scores, _ = world(each=3)
    n = len(features)
    y = scores.logits.softmax(1)
    start = sum(y[i, k] * (features[i] - prototypes[k]) ** 2 for i in range(n) for k in range(K)) / n
    cosines = features @ features.T
    cosines.fill_diagonal_(-2)
    graph = torch.zeros(n, n)
    for i in range(n):
        for j in cosines[i].topk(3).indices:
            graph[i, j] = cosines[i, j]
    density = torch.stack(
        [-0.5 * (((features - prototypes[k]) ** 2) / start + start.log()).sum(1) for k in range(K)], dim=1
    )
    z = y
    for _ in range(5):
        z = (y.log() + (density + 50 / 6 * (graph.T @ z + graph @ z)) / 50).softmax(1)
    assert torch.allclose(stata(features, prototypes, scores, rounds=1).pull, z, atol=1e-4)


@pytest.mark.parametrize("name", ["stata", "few-classes"])
@pytest.mark.parametrize("present", [2, 3])
def test_anchors_are_safe_where_few_classes_are_there(present: int, name: str) -> None:
    features, prototypes, scores, labels = world(present)
    fitted = POSTPROCESSORS[name](features, prototypes, scores, None)(features, scores.logits)
    assert accuracy(fitted, labels) >= accuracy(scores.logits, labels)
