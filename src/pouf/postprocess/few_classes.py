"""For data that hold few of the named classes, where predictions can tell that they do."""

from __future__ import annotations

import logging
import math

import torch.nn.functional as F
from torch import Tensor

from pouf.losses.information import entropy, normalised_information
from pouf.losses.prior import gated_shares, share_of_classes
from pouf.models.base import Scores
from pouf.postprocess.agreement import kappa
from pouf.postprocess.base import Postprocessor, nearest_others
from pouf.postprocess.sinkhorn import relaxed_offsets
from pouf.postprocess.stata import NEIGHBOURS, fit_anchored

logger = logging.getLogger(__name__)
MIN_INFORMATION = 0.25  # share of what there is to tell about the classes
MAX_ENTROPY = 0.1  # of log k: mean entropy of a prediction
MIN_AGREEMENT = 0.7  # kappa of StatA with and without the shares


def few_classes(features: Tensor, prototypes: Tensor, scores: Scores, prior: Tensor | None = None) -> Postprocessor:
    """StatA on predictions with their gated shares, then evened as far as is safe.

    A model that can't see most of the classes predicts few of them too, and shares that follow it would empty classes
    that are there. So predictions are left as they are where they are `too_unsure`; and where StatA without these
    shares, which holds on to every class, comes to other predictions (a kappa below 0.7), it is what is used. A prior
    that was given is trusted wholly.
    """
    logits = scores.logits.float()
    x, anchors = F.normalize(features.float(), dim=1), F.normalize(prototypes.float(), dim=1)
    near = nearest_others(x, NEIGHBOURS)
    if prior is None and too_unsure(logits):
        return _nothing(logits, "they are too unsure to tell which of the classes are there")
    shares = gated_shares(logits.softmax(1)) if prior is None else prior.to(logits)
    fitted = fit_anchored(x, anchors, near, logits + shares.log(), shares.log().expand(1, -1))
    # Not less where many classes are rare, as in refinement: here that is what is looked for, and t² is small.
    trust = share_of_classes(logits.softmax(1).mean(0).cpu()) ** 2 if prior is None else 1.0
    moved = fitted(features, logits)
    offsets = relaxed_offsets(moved, prior, trust)
    fitted.bias += offsets
    if prior is None:
        anchored = fit_anchored(x, anchors, near, logits, logits.new_zeros(1, logits.shape[1]))
        if kappa((moved + offsets).argmax(1), anchored(features, logits).argmax(1)) < MIN_AGREEMENT:
            logger.info("too little is known about which classes occur: no class is removed")
            return anchored
    return fitted


def too_unsure(logits: Tensor) -> bool:
    """Whether predictions (n, k) say too little about single inputs to tell classes that are rare from missing ones:

    I(X; Y) < ¼ H(mean_i p)  and  mean_i H(p_i) > 0.1 log k

    Sure predictions of one class for all inputs tell little as well, but those can be believed.
    """
    unsure = float(entropy(logits)) > MAX_ENTROPY * math.log(logits.shape[1])
    return unsure and normalised_information(logits) < MIN_INFORMATION


def _nothing(logits: Tensor, why: str) -> Postprocessor:
    logger.warning("predictions stay as they are: %s; if you know the shares of the classes, give a prior", why)
    return Postprocessor(logits.new_zeros(logits.shape[1]))
