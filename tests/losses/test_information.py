"""Entropies and mutual information against plain loops, closed forms and bounds."""

import math

import pytest
import torch
from torch import Tensor

from pouf.losses import effective_classes, entropy, marginal_entropy, mutual_information

FUNCTIONS = [entropy, marginal_entropy, mutual_information, effective_classes]


def random_logits(n: int = 9, k: int = 5, seed: int = 0) -> Tensor:
    return 3 * torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loop_entropies(logits: Tensor) -> tuple[float, float]:
    """Mean conditional and marginal entropy, one number at a time."""
    n, k = logits.shape
    rows = []
    for i in range(n):
        weights = [math.exp(logits[i, j].item()) for j in range(k)]
        rows.append([w / sum(weights) for w in weights])
    conditional = sum(-sum(p * math.log(p) for p in row) for row in rows) / n
    mean = [sum(row[j] for row in rows) / n for j in range(k)]
    return conditional, -sum(p * math.log(p) for p in mean)


def test_entropies_equal_a_plain_loop() -> None:
    logits = random_logits()
    conditional, marginal = loop_entropies(logits)
    assert entropy(logits).item() == pytest.approx(conditional, rel=1e-12)
    assert marginal_entropy(logits).item() == pytest.approx(marginal, rel=1e-12)
    assert mutual_information(logits).item() == pytest.approx(marginal - conditional, rel=1e-10)
    assert effective_classes(logits).item() == pytest.approx(math.exp(marginal), rel=1e-12)


def test_mutual_information_is_the_papers_mi_loss_with_its_sign_flipped() -> None:
    logits, eps = random_logits(), 1e-12
    p = torch.softmax(logits, dim=1)
    entropy_loss = torch.sum(-p * torch.log(p + eps), dim=1).mean()
    mean = p.mean(0)
    expected = entropy_loss - torch.sum(-mean * torch.log(mean + eps))
    assert -mutual_information(logits).item() == pytest.approx(expected.item(), rel=1e-9)


def test_sure_and_evenly_spread_predictions_carry_log_k() -> None:
    logits = 1e4 * torch.eye(4)
    assert mutual_information(logits).item() == pytest.approx(math.log(4))
    assert entropy(logits).item() == 0
    assert effective_classes(logits).item() == pytest.approx(4)


def test_predictions_that_do_not_depend_on_the_input_carry_nothing() -> None:
    logits = random_logits()[:1].expand(6, -1)
    assert mutual_information(logits).item() == pytest.approx(0, abs=1e-12)


def test_collapse_onto_one_class_shows_as_one_effective_class() -> None:
    logits = torch.zeros(8, 5)
    logits[:, 2] = 50
    assert effective_classes(logits).item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_mutual_information_lies_between_zero_and_log_k(seed: int) -> None:
    information = mutual_information(random_logits(seed=seed)).item()
    assert 0 <= information <= math.log(5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_right(function: object) -> None:
    assert torch.autograd.gradcheck(function, (random_logits().requires_grad_(),))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 3), (6, 1), (1, 3), (1, 1)])
def test_values_and_gradients_are_finite_for_logits_of_ten_thousand(
    function: object, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """No sample chooses the last class: its marginal is exactly 0 in fp32, where -p log p has no finite slope."""
    logits = torch.full(shape, 1e4)
    logits[:, -1] = -1e4
    logits = logits.to(dtype).requires_grad_()
    value = function(logits)
    value.backward()
    assert value.dtype == torch.float32
    assert value.isfinite()
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(6, 1), (1, 3)])
def test_one_class_or_one_sample_carries_no_information(shape: tuple[int, int]) -> None:
    assert mutual_information(torch.randn(shape)).item() == pytest.approx(0, abs=1e-6)
