"""Metrics against their definitions."""

import math

import pytest
import torch
import torch.nn.functional as F

from pouf.bench.tasks import TASK_METRICS, TASKS

TRUTH = torch.tensor([1, 1, 1, 0, 0, 1, 0, 1])
GUESS = torch.tensor([1, 0, 1, 0, 1, 1, 0, 1])
PREDICTED, TARGETS = F.one_hot(GUESS, 2) * 0.6 + 0.2, F.one_hot(TRUTH, 2).float()
TP, TN, FP, FN = 4, 2, 1, 1


def test_classification_metrics_are_those_of_the_confusion_matrix() -> None:
    assert TASK_METRICS["accuracy"](PREDICTED, TARGETS) == pytest.approx((TP + TN) / 8)
    assert TASK_METRICS["f1"](PREDICTED, TARGETS) == pytest.approx(2 * TP / (2 * TP + FP + FN))
    product = (TP + FP) * (TP + FN) * (TN + FP) * (TN + FN)
    assert TASK_METRICS["matthews"](PREDICTED, TARGETS) == pytest.approx((TP * TN - FP * FN) / math.sqrt(product))


def test_correlations_are_of_the_last_class() -> None:
    x = torch.tensor([0.1, 0.4, 0.2, 0.9])
    predicted, targets = torch.stack([1 - x, x], 1), torch.stack([1 - x**3, x**3], 1)
    assert TASK_METRICS["spearman"](predicted, targets) == pytest.approx(1)
    a, b = x - x.mean(), x**3 - (x**3).mean()
    assert TASK_METRICS["pearson"](predicted, targets) == pytest.approx(((a * b).sum() / (a.norm() * b.norm())).item())
    assert TASK_METRICS["pearson"](predicted.flip(1), targets) == pytest.approx(
        -TASK_METRICS["pearson"](predicted, targets)
    )


@pytest.mark.parametrize("name", ["f1", "matthews", "pearson", "spearman"])
def test_a_constant_prediction_is_worth_nothing(name: str) -> None:
    constant = torch.tensor([[0.9, 0.1]] * 8)
    assert TASK_METRICS[name](constant, TARGETS) == 0


def test_every_task_is_judged_by_a_metric_that_exists() -> None:
    assert {metric for task in TASKS.values() for metric in task.metrics} <= TASK_METRICS.keys()
