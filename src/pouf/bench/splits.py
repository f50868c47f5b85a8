"""K-shot splits: a few labelled examples for training, as many for development, the same for the same seed."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from pouf.bench.language import SHOTS
from pouf.data.base import Subset
from pouf.data.labelled import Shots
from pouf.errors import InputError
from pouf.models.cloze import Sample


class FewShot(NamedTuple):
    train: Shots
    dev: Shots


def few_shot(data: Shots, seed: int, shots: int = SHOTS, held_out: Collection[Sample] = ()) -> FewShot:
    """`shots` examples of each class for training and as many others for development, drawn as LM-BFF draws them.

    No text stands in both, nor in `held_out`, the test texts: a text that comes twice is taken once. A soft label
    counts as its most likely class.
    """
    items = [data.inputs.read(i) for i in range(len(data.inputs))]
    labels = data.targets.argmax(1).tolist()
    order = list(range(len(items)))
    np.random.RandomState(seed).shuffle(order)
    used = set(held_out)
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
    """Some examples, in the order given."""
    return Shots(Subset(data.inputs, indices), data.targets[indices])
