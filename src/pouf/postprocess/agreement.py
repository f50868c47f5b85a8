"""How far two classifiers say the same."""

from __future__ import annotations

from torch import Tensor


def kappa(labels: Tensor, others: Tensor) -> float:
    """Cohen's kappa, agreement of two classifiers beyond chance: (n,), (n,) -> at most 1."""
    from sklearn.metrics import cohen_kappa_score

    if bool((labels == others).all()):
        return 1.0  # also where there is only one class, which leaves nothing to chance
    return float(cohen_kappa_score(labels.cpu().numpy(), others.cpu().numpy()))
