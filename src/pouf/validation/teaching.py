"""What speaks for a teacher and against it, found without labels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.losses.prior import share_of_classes
from pouf.postprocess.agreement import kappa
from pouf.postprocess.clusters import leave_one_out
from pouf.validation.diagnostics import share

AGREED = 0.5  # kappa of teacher and zero-shot with the two exchanged
SWAPPED = 8  # inputs of a pair of classes, with fewer of which an exchange may be chance


def teacher_facts(teacher: Tensor, zero_shot: Tensor, features: Tensor, classes: tuple[str, ...]) -> dict[str, Any]:
    """Fields of `Diagnostics`: predictions (n, k) of both, of inputs that the teacher answered, and features (n, d)."""
    if not len(teacher):
        return {}
    labels, others = teacher.argmax(1), zero_shot.argmax(1)
    x, k = F.normalize(features.float(), dim=1), teacher.shape[1]
    hard = F.one_hot(labels, k).to(x)
    return {
        "teacher_inputs": len(teacher),
        "teacher_zero_shot": share(labels == others),
        "teacher_kappa": kappa(labels, others),
        "teacher_clusters": kappa(labels, leave_one_out(x, hard).argmax(1)) if len(labels.unique()) > 1 else 0.0,
        "teacher_usage": share_of_classes(hard.mean(0)) / share_of_classes(F.one_hot(others, k).float().mean(0)),
        "teacher_swapped": _swapped(labels, others, classes),
    }


def _swapped(labels: Tensor, others: Tensor, classes: tuple[str, ...]) -> str:
    """Two classes that teacher and zero-shot have the other way round: most inputs of each are the other's.

    Where they agree on little else, an exchange tells nothing.
    """
    k = len(classes)
    counts = torch.bincount(labels * k + others, minlength=k * k).view(k, k)
    own = counts.diagonal()
    crossed = torch.minimum(counts, counts.T)
    worst = crossed.triu(1).flatten().argmax()
    a, b = divmod(int(worst), k)
    exchanged = int(counts[a, b] + counts[b, a])
    if exchanged < SWAPPED or crossed[a, b] <= max(own[a], own[b]):
        return ""
    exchanged_labels = torch.where(labels == a, b, torch.where(labels == b, a, labels))
    if kappa(exchanged_labels, others) < AGREED:
        return ""
    return f"{classes[a]!r} and {classes[b]!r}"
