"""Losses against labels, hard and soft."""

import math

import pytest
import torch
import torch.nn.functional as F

from pouf.losses import divergence, squared_error
from pouf.losses.information import divergence_by_sureness


def logits(n: int = 6, k: int = 3) -> torch.Tensor:
    return 3 * torch.randn(n, k, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def soft(n: int = 6, k: int = 3) -> torch.Tensor:
    return torch.rand(n, k, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(1)


def test_divergence_is_the_sum_of_t_log_t_over_p() -> None:
    p, t = logits().softmax(1).tolist(), soft().tolist()
    rows = [sum(t[i][k] * math.log(t[i][k] / p[i][k]) for k in range(3)) for i in range(6)]
    assert divergence(logits(), soft()).item() == pytest.approx(sum(rows) / 6)


def test_for_hard_labels_divergence_is_cross_entropy() -> None:
    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    hard = F.one_hot(labels, 3)
    assert divergence(logits(), hard).item() == pytest.approx(F.cross_entropy(logits(), labels).item())


def test_divergence_is_least_and_zero_where_predictions_are_the_targets() -> None:
    """The published code's KL for STS-B has its optimum elsewhere."""
    at_target = soft().log().requires_grad_()
    loss = divergence(at_target, soft())
    (slope,) = torch.autograd.grad(loss, at_target)
    assert loss.item() == pytest.approx(0, abs=1e-12) and slope.abs().max() < 1e-12
    assert divergence(at_target + 0.1 * logits(), soft()) > 0


def test_squared_error_of_two_classes_is_that_of_one_probability() -> None:
    p, t = logits(6, 2).softmax(1)[:, 1], soft(6, 2)[:, 1]
    assert squared_error(logits(6, 2), soft(6, 2)).item() == pytest.approx((p - t).square().mean().item())


@pytest.mark.parametrize("loss", [divergence, squared_error])
def test_gradients_are_right(loss) -> None:
    assert torch.autograd.gradcheck(lambda x: loss(x, soft()), logits().requires_grad_())


@pytest.mark.parametrize("loss", [divergence, squared_error])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_logits_and_hard_labels_stay_finite(loss, dtype: torch.dtype) -> None:
    x = torch.tensor([[1e4, -1e4], [-1e4, 1e4]], dtype=dtype, requires_grad=True)
    value = loss(x, torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    value.backward()
    assert value.isfinite() and x.grad is not None and x.grad.isfinite().all()


def test_a_teachers_targets_count_for_as_much_as_they_are_sure() -> None:
    given = logits(4)
    targets = torch.tensor([[0.8, 0.1, 0.1], [1 / 3, 1 / 3, 1 / 3], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    total = weights = 0.0
    for row in (0, 3):
        t, log_p = targets[row], given[row].log_softmax(0)
        entropy = -sum(float(p) * math.log(float(p)) for p in t if p > 0)
        sure = 1 - entropy / math.log(3)
        total += sure * (-entropy - float((t * log_p).sum()))
        weights += sure
    assert divergence_by_sureness(given, targets).item() == pytest.approx(total / weights, rel=1e-5)
    assert divergence_by_sureness(given, targets[[1, 1, 1, 2]]).item() == pytest.approx(0, abs=1e-5)
