"""Few labelled examples: splits as LM-BFF draws them, and demonstrations as its published code shows them."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pouf import Classifier, Demonstrations, InputError, Shots
from pouf.bench.language import SHOTS
from pouf.data.base import Subset

if TYPE_CHECKING:
    from pouf.models.templates import Example, TextSample

FILTER_RATE = 0.5  # of the shots of a class


class FewShot(NamedTuple):
    train: Shots
    dev: Shots


def few_shot(data: Shots, seed: int, shots: int = SHOTS, excluded: Collection[TextSample] = ()) -> FewShot:
    """`shots` examples of each class for training and as many others for development, drawn as LM-BFF draws them.

    No text is in both, nor in `excluded`, the test texts; duplicates are taken once. A soft label
    counts as its most likely class.
    """
    items = [data.inputs.read(i) for i in range(len(data.inputs))]
    labels = data.targets.argmax(1).tolist()
    order = list(range(len(items)))
    np.random.RandomState(seed).shuffle(order)
    used = set(excluded)
    by_class: dict[int, list[int]] = {k: [] for k in range(data.targets.shape[1])}
    for index in order:
        if items[index] not in used:
            used.add(items[index])
            by_class[labels[index]].append(index)
    poorest = min(by_class, key=lambda k: len(by_class[k]))
    if len(by_class[poorest]) < 2 * shots:
        raise InputError(
            f"class number {poorest} has {len(by_class[poorest])} different examples in {data.inputs.source}, "
            f"{2 * shots} are needed for {shots} shots to train on and {shots} to develop with. Splits that are drawn "
            f"already belong in <task>/{shots}-<seed>/"
        )
    train = [index for indices in by_class.values() for index in indices[:shots]]
    dev = [index for indices in by_class.values() for index in indices[shots : 2 * shots]]
    return FewShot(subset(data, train), subset(data, dev))


def subset(data: Shots, indices: list[int]) -> Shots:
    """Some examples, in this order."""
    return Shots(Subset(data.inputs, indices), data.targets[indices])


class SimilarityFilter:
    """LM-BFF's `demo_filter`: of each class the half of the shots whose embeddings are most like the sample's.

    Args:
        model: any sentence encoder, by name or folder. Both texts of a pair are joined.
    """

    def __init__(self, model: str) -> None:
        encoder = Classifier.from_pretrained(model, ["a", "b"])  # only for features; any vocabulary has letters
        if encoder.kind != "text":
            raise InputError(f"{model!r} is no sentence encoder: filter demonstrations with one, as all-MiniLM-L6-v2")
        self.encoder = encoder
        self._known: dict[TextSample, Tensor] = {}

    def __call__(
        self, sample: TextSample, shots: tuple[tuple[TextSample, int], ...]
    ) -> tuple[tuple[TextSample, int], ...]:
        """The most similar shots of each class, the sample itself left out."""
        others = [shot for shot in shots if shot[0] != sample]
        classes = sorted({label for _, label in others})
        most = max(1, int(len(others) // len(classes) * FILTER_RATE))
        similarity = torch.stack([self._embedding(text) for text, _ in others]) @ self._embedding(sample)
        order = similarity.argsort(descending=True, stable=True).tolist()
        return tuple(shot for k in classes for shot in [others[i] for i in order if others[i][1] == k][:most])

    def _embedding(self, sample: TextSample) -> Tensor:
        if sample not in self._known:
            text = sample if isinstance(sample, str) else " ".join(sample)
            self._known[sample] = self.encoder.features([text])[0]
        return self._known[sample]


@dataclass(frozen=True)
class PublishedDemonstrations(Demonstrations):
    """What is too long loses the far end of its shots: the tail, or the head where they stand before the sample.

    Args:
        similar: which shots are drawn from, for a sample; None draws from all.
    """

    similar: SimilarityFilter | None = None

    def show(self, sample: TextSample, draw: random.Random) -> Example:
        drawn_from = self if self.similar is None else replace(self, shots=self.similar(sample, self.shots))
        return super(PublishedDemonstrations, drawn_from).show(sample, draw)._replace(cut_solved=True)
