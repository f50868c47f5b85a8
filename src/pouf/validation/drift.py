"""How much of what the model knew beside the task is left: names outside of it, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Subset, Unlabelled
from pouf.data.class_names import Classes, class_set, read_classes, same_name
from pouf.data.labelled import Labelled
from pouf.errors import InputError
from pouf.inference.encode import InferenceConfig
from pouf.validation.diagnostics import share
from pouf.validation.names import ordinary_words

WORDS = "words"  # the list that comes with the package
SAMPLE = 512  # inputs of the task that are looked at, where there are no others


class Drift(NamedTuple):
    """What zero-shot with names outside of the task says before and after."""

    names: int
    inputs: int
    agreement: float  # share of the inputs that get the same of these names
    accuracy_before: float | None = None  # where the inputs have labels
    accuracy_after: float | None = None

    def __str__(self) -> str:
        told = f"{self.agreement:.0%} of {self.inputs:,} inputs keep their prediction among {self.names:,} other names"
        if self.accuracy_before is None or self.accuracy_after is None:
            return told
        return f"{told}; accuracy there went from {self.accuracy_before:.1%} to {self.accuracy_after:.1%}"


def other_names(given: Classes | str, classifier: Classifier) -> tuple[str, ...]:
    """Names that are not those of the task: a list, a file, or "words" for ordinary ones.

    For a masked language model, those of them that are one token to it.
    """
    if not classifier.backbone.reads_names:
        raise InputError("other names can't be kept: there is no text side here that could read them")
    if isinstance(given, str):
        names = ordinary_words() if given == WORDS else read_classes(given).names
    else:
        names = class_set(given).names
    own = {same_name(name) for name in classifier.classes}
    left = [name for name in names if same_name(name) not in own and classifier.backbone.can_name(name)]
    if len(left) < 2:
        raise InputError(
            f"of the names to keep, {len(left)} are left once those of the task (and, for a masked language model, "
            "those of several tokens) are taken out: give at least two others"
        )
    return tuple(left)


class DriftBaseline:
    """Predictions of a classifier among other names, as it is before training.

    Args:
        inputs: what to classify: of the other names, with labels, or a part of the task's own.
    """

    def __init__(
        self,
        classifier: Classifier,
        names: Sequence[str],
        inputs: Labelled | Unlabelled,
        inference: InferenceConfig,
        seed: int = 0,
    ) -> None:
        self.names, self.inference = names, inference
        self.labels = inputs.labels if isinstance(inputs, Labelled) else None
        self.inputs = inputs.inputs.for_one_reader() if isinstance(inputs, Labelled) else _some(inputs, seed)
        self.before = self._look(classifier, inference)

    def drift(self, classifier: Classifier) -> Drift:
        """Against what the classifier says now."""
        after = self._look(classifier, replace(self.inference, cache=None))
        there = sorted(self.before.keys() & after.keys())
        before, now = (torch.tensor([side[i] for i in there]) for side in (self.before, after))
        right: tuple[float | None, float | None] = (None, None)
        if self.labels is not None:
            truth = torch.tensor([self.labels[i] for i in there])
            right = share(before == truth), share(now == truth)
        return Drift(len(self.names), len(there), share(before == now), *right)

    @torch.no_grad()
    def _look(self, classifier: Classifier, inference: InferenceConfig) -> dict[int, int]:
        """The name of each input that can be read, by position."""
        encoded = classifier.encode(self.inputs, inference)
        features = encoded.features.to(classifier.device).float()
        best = (features @ name_prototypes(classifier, self.names).T).argmax(1)
        return dict(zip(encoded.indices, best.tolist(), strict=True))


def name_prototypes(classifier: Classifier, names: Sequence[str]) -> Tensor:
    """(m, d): names as if they were classes, in the classifier's templates, by its weights of now.

    Context vectors and prototypes that were learned for the classes have no part in it.
    """
    found = classifier.backbone.name_prototypes(names, classifier.templates).float()
    return F.normalize(found, dim=1) if classifier.backbone.unit_prototypes else found


def _some(data: Unlabelled, seed: int) -> Unlabelled:
    if data.streamed:
        raise InputError("the data are a stream, which can't be looked at twice: give labelled inputs of other names")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:SAMPLE]
    return Subset(data, sorted(order.tolist()))
