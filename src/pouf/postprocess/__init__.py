"""Label-free correction of predictions, without training: baselines that any adaptation has to beat, and refinement."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pouf.errors import InputError, one_of
from pouf.models.base import Scores
from pouf.parallel.process_group import processes
from pouf.postprocess.base import Postprocessor
from pouf.postprocess.clusters import clusters, refinement
from pouf.postprocess.gaussians import few_classes, inmap, stata, transclip
from pouf.postprocess.propagation import propagation, zlap
from pouf.postprocess.shares import em, prior_correction, shares, sinkhorn

if TYPE_CHECKING:
    from pouf.classifier import Classifier
    from pouf.inference.encode import FeatureSet

__all__ = ["POSTPROCESSORS", "Postprocessor", "fit_correction"]

# Features (n, d), prototypes (k, d), their scores and a prior or None -> a correction.
POSTPROCESSORS: dict[str, Callable[[Tensor, Tensor, Scores, Tensor | None], Postprocessor]] = {
    "prior-correction": prior_correction,
    "sinkhorn": sinkhorn,
    "shares": shares,
    "propagation": propagation,
    "refinement": refinement,
    "clusters": clusters,
    "em": em,
    "stata": stata,
    "few-classes": few_classes,
    "transclip": transclip,
    "zlap": zlap,
    "inmap": inmap,
}


@torch.no_grad()
def fit_correction(
    name: str, classifier: Classifier, encoded: FeatureSet, seed: int = 0, prior: Tensor | None = None
) -> Postprocessor:
    """One of `POSTPROCESSORS`, fitted on these features; on a random part where they are very many.

    Args:
        encoded: from `FeatureStore.share`, where several processes share the work.
        prior: (k,), shares of the classes, where they are known.
    """
    fit = one_of("postprocessor", name, POSTPROCESSORS)
    encoded = classifier.store().some(encoded, seed)
    if len(encoded.indices) < 2:
        raise InputError("a correction is of many inputs together: give more than one")
    features = encoded.features.to(classifier.device).float()
    fitted = fit(features, classifier.fixed_prototypes(), classifier.scores(encoded), prior)
    # On the CPU: a tensor of a GPU would stay on that one.
    return processes().broadcast(fitted.cpu()).to(classifier.device)  # type: ignore[no-any-return]
