"""Label-free correction of predictions, without training: baselines that any adaptation has to beat, and refinement."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor
from pouf.postprocess.clusters import clusters, refinement
from pouf.postprocess.gaussians import few_classes, inmap, stata, transclip
from pouf.postprocess.propagation import propagation, zlap
from pouf.postprocess.shares import em, prior_correction, shares, sinkhorn

__all__ = ["POSTPROCESSORS", "Postprocessor"]

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
