"""The figures that language tasks are judged by: predicted and true probabilities (n, k), (n, k) -> one number."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def accuracy(predicted: Tensor, targets: Tensor) -> float:
    """Share of samples whose most likely class is right."""
    return (predicted.argmax(1) == targets.argmax(1)).double().mean().item()


def f1(predicted: Tensor, targets: Tensor) -> float:
    """Harmonic mean of precision and recall of the last class, as "equivalent" of MRPC; 0 where it is never right."""
    from sklearn.metrics import f1_score

    positive = predicted.shape[1] - 1
    truth, guess = (targets.argmax(1) == positive).numpy(), (predicted.argmax(1) == positive).numpy()
    return float(f1_score(truth, guess, zero_division=0.0))


def matthews(predicted: Tensor, targets: Tensor) -> float:
    """Matthews' correlation of classes, in [-1, 1]; 0 where one class alone is predicted."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(targets.argmax(1).numpy(), predicted.argmax(1).numpy()))


def pearson(predicted: Tensor, targets: Tensor) -> float:
    """Correlation of the last class's probability with its target; 0 where either never changes."""
    return _correlation("pearsonr", predicted, targets)


def spearman(predicted: Tensor, targets: Tensor) -> float:
    """Correlation of the ranks of the last class's probability and of its target; 0 where either never changes."""
    return _correlation("spearmanr", predicted, targets)


def _correlation(name: str, predicted: Tensor, targets: Tensor) -> float:
    from scipy import stats

    x, y = predicted[:, -1].double().numpy(), targets[:, -1].double().numpy()
    if len(x) < 2 or x.max() == x.min() or y.max() == y.min():
        return 0.0
    return float(getattr(stats, name)(x, y).statistic)


TASK_METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
