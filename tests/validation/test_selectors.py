"""A step is chosen without labels: by agreement with the others of its run."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import sure

from pouf.validation.selectors import (
    GROUPS,
    choose,
    cluster,
    cluster_agreement,
    snapshot_steps,
    soft_neighbourhood_density,
)

K, N = 4, 60


def test_the_step_that_agrees_with_the_others_is_chosen() -> None:
    truth = torch.arange(N) % K
    noisy = {step: truth.clone() for step in (0, 10, 20, 30)}
    for step, wrong in ((0, 24), (10, 9), (20, 3), (30, 12)):
        places = torch.randperm(N, generator=torch.Generator().manual_seed(step))[:wrong]
        noisy[step][places] = (noisy[step][places] + 1) % K
    features = F.one_hot(truth, K).float() + 0.01 * torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    choice = choose({step: sure(labels) for step, labels in noisy.items()}, features)
    assert choice.step == 20
    assert choice.chosen.agreement == max(s.agreement for s in choice.snapshots)
    by_clusters = max(choice.snapshots, key=lambda snapshot: snapshot.clustering)
    assert by_clusters.step == 20, "the second opinion sees it too"


def test_beginnings_have_no_vote() -> None:
    """A run that gets better all along: each step keeps what is right and mends some of the rest."""
    truth = torch.arange(N) % K
    steps = {step: truth.clone() for step in range(0, 110, 10)}
    for step, labels in steps.items():
        wrong = (100 - step) // 3
        labels[:wrong] = (labels[:wrong] + 1) % K
    choice = choose({step: sure(labels) for step, labels in steps.items()}, torch.randn(N, 3))
    assert choice.step >= 70


def test_of_equals_the_latest_is_chosen() -> None:
    same = sure(torch.arange(N) % K)
    assert choose({0: same, 5: same, 10: same}, torch.randn(N, 3)).step == 10


def test_snapshots_are_spread_over_the_run() -> None:
    assert snapshot_steps(100, 4) == [0, 25, 50, 75, 100]
    assert snapshot_steps(3, 10) == [0, 1, 2, 3]
    assert snapshot_steps(100, 0) == []


def test_dense_predictions_have_dense_neighbourhoods() -> None:
    labels = torch.arange(N) % K
    # 15 of each class: the 14 others are equally near, and no one else is.
    assert soft_neighbourhood_density(sure(labels)) == pytest.approx(math.log(14), abs=0.01)
    assert soft_neighbourhood_density(torch.full((N, K), 1 / K)) == pytest.approx(math.log(N - 1), abs=0.01)
    assert soft_neighbourhood_density(sure(labels[:1])) == 0


def test_clusters_know_no_names() -> None:
    labels = torch.arange(N) % K
    clusters = cluster(F.one_hot(labels, K).float(), K)
    assert cluster_agreement((labels + 1) % K, clusters) == pytest.approx(1.0)
    assert abs(cluster_agreement(labels[torch.randperm(N, generator=torch.Generator().manual_seed(0))], clusters)) < 0.2


def test_only_what_can_be_gone_back_to_is_chosen() -> None:
    same = sure(torch.arange(N) % K)
    assert choose({0: same, 5: same, 10: same}, torch.randn(N, 3), among={0, 5}).step == 5


def test_many_classes_do_not_make_many_groups() -> None:
    """512 inputs of 1,000 classes: as many groups as inputs would agree with anything."""
    features = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    assert len(cluster(features, 1000).unique()) == GROUPS
    assert len(cluster(features[:40], 10).unique()) == 5 and len(cluster(features[:3], 2).unique()) == 2


def test_a_single_input_gives_numbers() -> None:
    choice = choose({0: sure(torch.tensor([1])), 5: sure(torch.tensor([2]))}, torch.randn(1, 3))
    json.loads(json.dumps([snapshot._asdict() for snapshot in choice.snapshots], allow_nan=False))


def test_more_looks_than_steps_are_one_after_each_step() -> None:
    assert snapshot_steps(2, 10**9) == [0, 1, 2] and snapshot_steps(0, 10**9) == [0] and snapshot_steps(9, 0) == []
