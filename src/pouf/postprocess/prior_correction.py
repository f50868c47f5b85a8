"""What the model says of every input alike is taken away."""

from __future__ import annotations

from torch import Tensor

from pouf.losses.information import log_marginal
from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor


def prior_correction(
    features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None
) -> Postprocessor:
    """log p(k|x) - log mean_i p(k|x_i) (+ log prior): (n, d) features and their scores -> a bias.

    References:
        Zhou et al., Batch calibration, ICLR 2024. Calibration is another thing: probabilities that are right.
    """
    bias = -log_marginal(scores.logits)
    return Postprocessor(bias if prior is None else bias + prior.to(bias).log())
