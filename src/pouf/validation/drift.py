"""Drift: how much predictions among names outside of the task change by training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Subset, Unlabelled
from pouf.data.class_names import Classes, class_set, normalise_name, read_classes
from pouf.data.labels import Labelled
from pouf.errors import InputError
from pouf.inference.encode import InferenceConfig
from pouf.validation.diagnostics import share
from pouf.validation.names import ordinary_words

ORDINARY_WORDS = "words"  # the list that comes with the package
MAX_INPUTS = 512  # inputs of the task that are classified if there are no others


class Drift(NamedTuple):
    """Predictions among names outside of the task, before and after."""

    names: int
    inputs: int
    agreement: float  # share of the inputs with the same predicted name
    accuracy_before: float | None = None  # if the inputs have labels
    accuracy_after: float | None = None

    def __str__(self) -> str:
        text = f"{self.agreement:.0%} of {self.inputs:,} inputs keep their prediction among {self.names:,} other names"
        if self.accuracy_before is None or self.accuracy_after is None:
            return text
        return f"{text}; accuracy there went from {self.accuracy_before:.1%} to {self.accuracy_after:.1%}"


def other_names(given: Classes | str, classifier: Classifier) -> tuple[str, ...]:
    """Names outside of the task: a list, a file, or "words" for ordinary words.

    For a masked language model, only those that are one token.
    """
    if not classifier.backbone.reads_names:
        raise InputError("drift on other names needs a model that encodes names: leave them out")
    if isinstance(given, str):
        names = ordinary_words() if given == ORDINARY_WORDS else read_classes(given).names
    else:
        names = class_set(given).names
    own = {normalise_name(name) for name in classifier.classes}
    left = [name for name in names if normalise_name(name) not in own and classifier.backbone.can_name(name)]
    if len(left) < 2:
        raise InputError(
            f"{len(left)} names are left without those of the task (and, for a masked language model, those of "
            "several tokens): give at least two others"
        )
    return tuple(left)


class DriftBaseline:
    """Predictions of a classifier among other names before training.

    Args:
        inputs: labelled inputs of the other names, or inputs of the task.
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
        self.inputs = inputs.inputs.with_own_skipped() if isinstance(inputs, Labelled) else _sample(inputs, seed)
        self.before = self._predict(classifier, inference)

    def drift(self, classifier: Classifier) -> Drift:
        """The drift of the classifier as it is now."""
        after = self._predict(classifier, replace(self.inference, cache=None))
        common = sorted(self.before.keys() & after.keys())
        before, now = (torch.tensor([side[i] for i in common]) for side in (self.before, after))
        right: tuple[float | None, float | None] = (None, None)
        if self.labels is not None:
            truth = torch.tensor([self.labels[i] for i in common])
            right = share(before == truth), share(now == truth)
        return Drift(len(self.names), len(common), share(before == now), *right)

    @torch.no_grad()
    def _predict(self, classifier: Classifier, inference: InferenceConfig) -> dict[int, int]:
        """Index of an input -> index of its predicted name."""
        encoded = classifier.encode(self.inputs, inference)
        features = encoded.features.to(classifier.device).float()
        best = (features @ name_prototypes(classifier, self.names).T).argmax(1)
        return dict(zip(encoded.indices, best.tolist(), strict=True))


def name_prototypes(classifier: Classifier, names: Sequence[str]) -> Tensor:
    """Prototypes of any names in the classifier's templates, with its current weights: (m, d).

    Context vectors and prototypes that were learned for the classes have no influence.
    """
    found = classifier.backbone.name_prototypes(names, classifier.templates).float()
    return F.normalize(found, dim=1) if classifier.backbone.unit_prototypes else found


def _sample(data: Unlabelled, seed: int) -> Unlabelled:
    if data.streamed:
        raise InputError("the data are a stream, which can't be read twice: give labelled inputs of other names")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:MAX_INPUTS]
    return Subset(data, sorted(order.tolist()))
