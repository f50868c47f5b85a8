"""Corrections of predictions: each does what it says, applies to single inputs, and is safe where it claims to be."""

import math

import ot
import pytest
import torch
import torch.nn.functional as F

from pouf import InputError
from pouf.losses.objective import share_of_classes
from pouf.models.base import Scores
from pouf.postprocess import POSTPROCESSORS
from pouf.postprocess.base import nearest_others
from pouf.postprocess.clusters import clusters, leave_one_out, refinement, trust_in_equal_shares
from pouf.postprocess.gaussians import bias_ratio, few_classes, inmap, stata, too_unsure, transclip
from pouf.postprocess.propagation import propagation, zlap
from pouf.postprocess.shares import (
    em,
    off_by,
    prior_correction,
    relaxed_offsets,
    share_offsets,
    sinkhorn,
)  # fmt: skip

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


def test_shares_are_evened_with_a_skew_and_left_alone_where_a_third_of_the_classes_is_missing() -> None:
    """Both use as many classes, by their entropy."""
    skewed = torch.logspace(0, -1, 60)  # 10:1
    lacking = torch.cat([torch.ones(40), torch.full((20,), 0.1)])
    skewed, lacking = skewed / skewed.sum(), lacking / lacking.sum()
    assert share_of_classes(skewed) == pytest.approx(share_of_classes(lacking), abs=0.06)
    assert trust_in_equal_shares(skewed) == pytest.approx(share_of_classes(skewed) ** 2) and skewed.min() < 0.3 / 60
    assert trust_in_equal_shares(lacking) == 0
    one_in_eight = torch.cat([torch.ones(70), torch.zeros(10)]) / 70
    assert 0 < trust_in_equal_shares(one_in_eight) < share_of_classes(one_in_eight) ** 2


def test_refinement_trusts_a_prior_that_it_is_given() -> None:
    features, prototypes, scores, labels = world(skew=10)
    shares = torch.bincount(labels, minlength=K) / len(labels)
    told = refinement(features, prototypes, scores, shares)(features, scores.logits)
    assert torch.allclose(told.softmax(1).mean(0), shares, atol=0.02)
    assert accuracy(told, labels) >= accuracy(refinement(features, prototypes, scores)(features, scores.logits), labels)


def test_no_input_has_a_part_in_the_centroids_that_judge_it() -> None:
    features, _, scores, _ = world(each=3)
    q = scores.logits.softmax(1)
    found = leave_one_out(features, q)
    for i in (0, 7):
        others = torch.arange(len(q)) != i
        centroids = F.normalize(q[others].T @ features[others], dim=1)
        assert torch.allclose(found[i], centroids @ features[i], atol=1e-4)


def vague_names(present: int = K):
    """Clear clusters, and prototypes so far off that some of the inputs are given to other classes."""
    features, _, _, labels = world(present, each=30)
    draw = torch.Generator().manual_seed(1)
    centres = torch.stack([features[labels == k].mean(0) if k < present else torch.zeros(D) for k in range(K)])
    off = F.normalize(centres, dim=1) + 0.65 * F.normalize(torch.randn(K, D, generator=draw), dim=1)
    prototypes = F.normalize(off, dim=1)
    sim = features @ prototypes.T
    return features, prototypes, Scores(sim, sim / 0.1, torch.tensor(0.1)), labels


def test_clusters_find_classes_whose_names_are_vague_and_refinement_finds_fewer() -> None:
    features, prototypes, scores, labels = vague_names()
    found = [fit(features, prototypes, scores)(features, scores.logits) for fit in (clusters, refinement)]
    assert accuracy(found[0], labels) > accuracy(found[1], labels) > accuracy(scores.logits, labels)


def test_clusters_that_disagree_with_the_names_are_left_alone() -> None:
    """Of other inputs the names say nothing, and most of the classes are not there."""
    features, prototypes, scores, _ = vague_names()
    noise = F.normalize(torch.randn(len(features), D, generator=torch.Generator().manual_seed(2)), dim=1)
    few = vague_names(present=3)
    for x, p, s in ((noise, prototypes, Scores(noise @ prototypes.T, noise @ prototypes.T / 0.1, scores.temperature)),
                    few[:3]):  # fmt: skip
        fitted, refined = clusters(x, p, s), refinement(x, p, s)
        assert torch.equal(fitted(x, s.logits), refined(x, s.logits))


def test_clusters_keep_to_shares_that_are_given() -> None:
    features, prototypes, scores, _ = vague_names()
    given = torch.logspace(0, -0.5, K) / torch.logspace(0, -0.5, K).sum()
    assert off_by(clusters(features, prototypes, scores, given)(features, scores.logits), given) < 0.03


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
    assert torch.allclose(propagation(features, prototypes, scores).votes, expected, atol=1e-4)


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


def graph_of(features: torch.Tensor, count: int) -> torch.Tensor:
    """(n, n): the cosines of each input's nearest others, in its row."""
    cosines, n = features @ features.T, len(features)
    cosines.fill_diagonal_(-2)
    graph = torch.zeros(n, n)
    for i in range(n):
        for j in cosines[i].topk(count).indices:
            graph[i, j] = cosines[i, j]
    return graph


def test_statas_first_round_is_that_of_a_plain_loop() -> None:
    features, prototypes, scores, _ = world(each=3)
    n = len(features)
    y = scores.logits.softmax(1)
    start = sum(y[i, k] * (features[i] - prototypes[k]) ** 2 for i in range(n) for k in range(K)) / n
    graph = graph_of(features, 3)
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


def one_favoured():
    """All classes are there, each as often. The model favours one, as if the data held mostly that one."""
    features, _, _, labels = world(seed=1)
    centres = F.normalize(torch.stack([features[labels == k].mean(0) for k in range(K)]), dim=1)
    sim = features @ centres.T
    return features, centres, Scores(sim, sim / 0.2 - 4.0 * (torch.arange(K) > 0), torch.tensor(0.2)), labels


def test_refined_predictions_have_the_shares_that_are_given() -> None:
    """Not only their probabilities: where these are soft they can have them while the predictions are far off."""
    features, centres, scores, _ = one_favoured()
    soft = Scores(scores.sim, scores.sim / 0.5, torch.tensor(0.5))
    given = torch.logspace(0, -1, K) / torch.logspace(0, -1, K).sum()
    moved = soft.logits + relaxed_offsets(soft.logits, given)
    assert torch.allclose(moved.softmax(1).mean(0), given, atol=1e-3) and off_by(moved, given) > 0.1
    fitted = refinement(features, centres, soft, given)
    assert off_by(fitted(features, soft.logits), given) < 0.03


def test_few_classes_does_not_follow_predictions_that_do_not_tell_which_are_there() -> None:
    features, centres, favoured, labels = one_favoured()
    sim = favoured.sim
    followed = em(features, centres, favoured)(features, favoured.logits)
    assert accuracy(followed, labels) < accuracy(favoured.logits, labels) - 0.2, (
        "shares that follow it empty the others"
    )
    anchored = few_classes(features, centres, favoured)(features, favoured.logits)
    assert accuracy(anchored, labels) > accuracy(favoured.logits, labels)
    assert torch.equal(anchored, stata(features, centres, favoured)(features, favoured.logits))
    vague = Scores(sim, sim, torch.tensor(1.0))
    assert torch.equal(few_classes(features, centres, vague)(features, vague.logits), vague.logits)
    given = torch.full((K,), 1 / K)
    assert accuracy(few_classes(features, centres, favoured, given)(features, favoured.logits), labels) > 0.8


def test_few_classes_takes_away_what_a_model_says_of_every_input_alike() -> None:
    """Nearly all of what it says: shares of the data, however skewed, show in inputs that differ."""
    features, centres, _, labels = one_favoured()
    sim = features @ centres.T
    logits = sim / 2.0 + 1.2 * torch.linspace(0, 1, K)
    scores = Scores(sim, logits, torch.tensor(2.0))
    assert bias_ratio(logits) > 6 and too_unsure(logits)
    found = few_classes(features, centres, scores)(features, logits)
    assert accuracy(found, labels) > accuracy(logits, labels) + 0.3
    for skew in (1.0, 10.0, 1000.0):
        assert bias_ratio(world(skew=skew)[2].logits) < 1


def two_groups(seed: int = 0):
    """Two classes whose prototypes are far off, in features with two groups: 70 of the one and 130 of the other."""
    draw = torch.Generator().manual_seed(seed)
    labels = (torch.arange(200) >= 70).long()
    centres = F.normalize(torch.randn(2, D, generator=draw), dim=1)
    features = F.normalize(centres[labels] + 0.25 * torch.randn(200, D, generator=draw), dim=1)
    prototypes = F.normalize(centres + 0.4 * torch.randn(2, D, generator=draw), dim=1)
    sim = features @ prototypes.T
    return features, prototypes, Scores(sim, sim / 0.3, torch.tensor(0.3)), labels


@pytest.mark.parametrize("seed", range(3))
def test_two_classes_follow_two_gaussians_and_keep_their_shares(seed: int) -> None:
    features, prototypes, scores, labels = two_groups(seed)
    wanted = torch.bincount(labels) / len(labels)
    kept = (scores.logits + share_offsets(scores.logits, wanted)).argmax(1)
    found = clusters(features, prototypes, scores, wanted)(features, scores.logits)
    assert off_by(found, wanted) < 0.01
    assert accuracy(found, labels) > (kept == labels).float().mean().item() + 0.02


def test_few_classes_follows_clear_predictions_of_few() -> None:
    features, prototypes, scores, _ = world(present=3)
    fitted = few_classes(features, prototypes, scores)(features, scores.logits)
    assert set(fitted.argmax(1).tolist()) == {0, 1, 2} < set(scores.logits.argmax(1).tolist())


def test_transclip_is_that_of_a_plain_loop() -> None:
    """Two rounds: means and the one variance of all are updated once."""
    features, prototypes, scores, _ = world(each=6)
    n, y, graph = len(features), scores.logits.softmax(1), graph_of(features, 3)
    means = torch.stack([F.normalize(features[y[:, k].topk(8).indices].mean(0), dim=0) for k in range(K)])
    variance, z = torch.full((D,), 1 / D), y
    for _ in range(2):
        density = torch.stack([-0.5 * ((features - means[k]) ** 2 / variance).sum(1) for k in range(K)], dim=1)
        for _ in range(5):
            z = (y.log() + (density + 50 / 6 * (graph.T @ z + graph @ z)) / 50).softmax(1)
        means = torch.stack([F.normalize((z[:, [k]] * features).sum(0), dim=0) for k in range(K)])
        variance = sum(z[i, k] * (features[i] - means[k]) ** 2 for i in range(n) for k in range(K)) / n
    assert torch.allclose(transclip(features, prototypes, scores, rounds=2).pull, z, atol=1e-4)


def test_zlap_solves_its_equation() -> None:
    features, prototypes, scores, _ = world(each=3)
    n = len(features)
    graph = torch.zeros(K + n, K + n)
    graph[K:, K:] = graph_of(features, 5)
    for i in range(n):
        for k in scores.sim[i].topk(5).indices:
            graph[K + i, k] = max(0, scores.sim[i, k]) ** 5
    graph = graph + graph.T
    degree = graph.sum(1)
    graph = torch.stack([graph[i] / (degree[i] * degree).sqrt() for i in range(K + n)])
    solved = torch.linalg.solve(torch.eye(K + n) - 0.3 * graph, torch.eye(K + n, K))[K:]
    expected = (solved / solved.sum(1, keepdim=True)).clamp_min(1e-12).log()
    found = zlap(features, prototypes, scores)(features, scores.logits)
    scale = found.min() / expected.min()
    assert torch.allclose(found, scale * expected, atol=1e-2)
    sure = [each.softmax(1).max(1).values.mean().item() for each in (found, scores.logits)]
    assert sure[0] == pytest.approx(sure[1], abs=0.01)


def test_inmaps_prototypes_are_those_of_a_plain_loop() -> None:
    features, prototypes, scores, _ = world(each=6)
    n, wanted, learned = len(features), scores.logits.softmax(1), prototypes.clone()
    for _ in range(20):
        wanted = wanted / wanted.sum(0) / K
        wanted = wanted / wanted.sum(1, keepdim=True)
    for i in range(n):
        if wanted[i].max() > 0.6:
            wanted[i] = torch.eye(K)[wanted[i].argmax()]
    rate, before = 10.0, float("inf")
    for _ in range(30):
        gradient = torch.zeros(K, D)
        for i in range(n):
            p = (learned @ features[i] / (4 * T)).softmax(0)
            gradient += (p - wanted[i])[:, None] * features[i]
        rate, before = rate / 2 if gradient.norm() > before else rate, gradient.norm()
        learned = F.normalize(learned - rate / (n * 4 * T) * gradient, dim=1)
    found = inmap(features, prototypes, scores, steps=30)(features, scores.logits)
    assert torch.allclose(found, features @ learned.T / T, atol=1e-2)


@pytest.mark.parametrize("name", ["zlap", "inmap"])
def test_known_shares_are_those_of_the_predictions(name: str) -> None:
    features, prototypes, scores, labels = world(skew=5)
    shares = torch.bincount(labels, minlength=K) / len(labels)
    told = POSTPROCESSORS[name](features, prototypes, scores, shares)(features, scores.logits)
    untold = POSTPROCESSORS[name](features, prototypes, scores, None)(features, scores.logits)
    off = [(each.softmax(1).mean(0) - shares).abs().sum() for each in (told, untold)]
    assert off[0] < 0.5 * off[1]


@pytest.mark.parametrize("prior", [None, [0.7, 0.2] + [0.01] * 10])
def test_shares_are_those_of_the_predictions(prior: list[float] | None) -> None:
    """Sinkhorn's are those of the probabilities, which says little about the predictions where many are unsure."""
    features, prototypes, scores, _ = world(skew=10.0)
    wanted = torch.tensor(prior) if prior is not None else torch.full((K,), 1 / K)

    def missed(name: str) -> float:
        adjusted = POSTPROCESSORS[name](features, prototypes, scores, wanted)(features, scores.logits)
        return float((torch.bincount(adjusted.argmax(1), minlength=K) / len(features) - wanted).abs().max())

    assert missed("shares") < 1.5 / len(features) < missed("sinkhorn")


@pytest.mark.parametrize("n", [2, 4, 5000])
def test_nearest_others_are_those_of_the_whole_matrix(n: int) -> None:
    """5,000 are more than two blocks, which are looked through for both sides at once."""
    x = F.normalize(torch.randn(n, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    whole = (x @ x.T).fill_diagonal_(-2).topk(min(3, n - 1), dim=1)
    cosines, rows = nearest_others(x, 3)
    assert torch.equal(rows, whole.indices) and torch.allclose(cosines, whole.values.clamp_min(1e-6), atol=1e-6)


@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_relaxed_offsets_are_those_of_the_log_domain(spread: float) -> None:
    """With a wide spread no single precision holds the probabilities of a class that nothing is near."""
    logits = spread * torch.randn(50, K, generator=torch.Generator().manual_seed(0)) - spread * torch.arange(K)
    bias = torch.zeros(K)
    for _ in range(30):
        bias = 0.9 * (bias - math.log(K) - (logits + bias).log_softmax(1).logsumexp(0) + math.log(50))
    found = relaxed_offsets(logits, None, 0.9, iterations=30)
    assert torch.allclose(found, bias, rtol=1e-4, atol=1e-3)
