"""Predictions that are taken for labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pouf.classifier import Classifier, Predictions
from pouf.data.base import Subset, Unlabelled
from pouf.data.labels import Shots
from pouf.errors import InputError
from pouf.inference.encode import InferenceConfig
from pouf.parallel.process_group import processes


def pseudo_labelled(
    classifier: Classifier, data: Unlabelled | None, shots: Shots | None, count: int, inference: InferenceConfig
) -> Shots:
    """UPL: each input goes to its most likely class; the `count` surest of each class are taken for labelled."""
    if data is None or shots is not None:
        raise InputError("pseudo-labels are made from unlabelled data alone: give data, and no labelled shots")
    surest = Surest(count)
    for block in classifier.score_blocks(classifier.store(inference).share(data)):
        surest.see(block)
    for others in processes().gather_objects(surest.best):
        surest.add(others)
    indices, labels = processes().broadcast(surest.found())
    return Shots(Subset(data, indices), F.one_hot(torch.tensor(labels), len(classifier.classes)).float())


class Surest:
    """The n surest predictions of each class, met block by block."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.best: dict[int, list[tuple[float, int]]] = {}  # class -> sureness and position, the surest first

    def see(self, block: Predictions) -> None:
        sureness, label = block.log_probabilities.max(1)
        candidates: dict[int, list[tuple[float, int]]] = {}
        for index, value, k in zip(block.indices, sureness.tolist(), label.tolist(), strict=True):
            candidates.setdefault(k, []).append((value, index))
        self.add(candidates)

    def add(self, candidates: dict[int, list[tuple[float, int]]]) -> None:
        """What was met elsewhere, or here already."""
        for k, found in candidates.items():
            every = dict.fromkeys([*self.best.get(k, ()), *found])
            self.best[k] = sorted(every, key=lambda pair: -pair[0])[: self.n]

    def found(self) -> tuple[list[int], list[int]]:
        pairs = [(index, k) for k, found in sorted(self.best.items()) for _, index in found]
        return [index for index, _ in pairs], [k for _, k in pairs]
