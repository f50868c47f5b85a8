"""For data that hold few of the named classes, where zero-shot can tell that they do."""

from __future__ import annotations

import logging

import torch.nn.functional as F
from torch import Tensor

from pouf.losses.information import share_told
from pouf.losses.prior import gated_shares, share_of_classes
from pouf.models.base import Scores
from pouf.postprocess.agreement import kappa
from pouf.postprocess.base import Postprocessor, nearest
from pouf.postprocess.sinkhorn import relaxed_offsets
from pouf.postprocess.stata import NEIGHBOURS, fit_anchored

logger = logging.getLogger(__name__)
VAGUE = 0.25  # share of what there is to tell about the classes: predictions that tell less are too unsure
AGREED = 0.7  # kappa of StatA with and without the shares


def few_classes(features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None) -> Postprocessor:
    """StatA on predictions with their gated shares, then evened as far as is safe. Nothing, where that is in doubt.

    A model that can't see most of the classes predicts few of them too, and shares that follow it would empty classes
    that are there. So predictions are left as they are where they tell less than a quarter of what there is to tell,

        I(X; Y) < ¼ H(mean_i p),

    and where StatA without these shares, which holds on to every class, comes to other predictions: a kappa below 0.7.
    A prior that was given is trusted wholly.
    """
    logits = scores.logits.float()
    if prior is None and share_told(logits) < VAGUE:
        return _nothing(logits, "predictions are too unsure to tell which of the classes are there")
    x, anchors = F.normalize(features.float(), dim=1), F.normalize(prototypes.float(), dim=1)
    near = nearest(x, x, itself=False, count=NEIGHBOURS)
    shares = gated_shares(logits.softmax(1)) if prior is None else prior.to(logits)
    fitted = fit_anchored(x, anchors, near, logits + shares.log(), shares.log().expand(1, -1))
    trust = share_of_classes(logits.softmax(1).mean(0).cpu()) ** 2 if prior is None else 1.0
    fitted.bias += relaxed_offsets(fitted(features, logits), prior, trust)
    if prior is None:
        plain = fit_anchored(x, anchors, near, logits, logits.new_zeros(1, logits.shape[1]))
        if kappa(*(each(features, logits).argmax(1) for each in (fitted, plain))) < AGREED:
            return _nothing(logits, "two ways to find out which of the classes are there come to different ones")
    return fitted


def _nothing(logits: Tensor, why: str) -> Postprocessor:
    logger.warning("predictions stay as they are: %s; if you know their shares, give a prior", why)
    return Postprocessor(logits.new_zeros(logits.shape[1]))
