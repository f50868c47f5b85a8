"""Label-free correction of predictions, without training: the baseline that any adaptation has to beat."""

from __future__ import annotations

from torch import Tensor


def calibrate(log_probabilities: Tensor) -> Tensor:
    """s_ik = log p(k|x_i) - mean_j log p(k|x_j): no class is favoured on average. (n, k) -> (n, k).

    The scores are for ranking classes; they are no probabilities.
    """
    return log_probabilities - log_probabilities.mean(0)
