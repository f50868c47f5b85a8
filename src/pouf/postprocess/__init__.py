"""Label-free correction of predictions, without training: baselines that any adaptation has to beat, and refinement."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pouf.models.base import Scores
from pouf.postprocess.base import Postprocessor
from pouf.postprocess.clusters import clusters
from pouf.postprocess.em import em
from pouf.postprocess.few_classes import few_classes
from pouf.postprocess.inmap import inmap
from pouf.postprocess.prior_correction import prior_correction
from pouf.postprocess.propagation import propagation
from pouf.postprocess.refinement import refinement
from pouf.postprocess.shares import shares
from pouf.postprocess.sinkhorn import sinkhorn
from pouf.postprocess.stata import stata
from pouf.postprocess.transclip import transclip
from pouf.postprocess.zlap import zlap

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
