"""Solved examples shown beside each sample: LM-BFF's demonstrations, and in-context learning without training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from pouf.cloze import Example, Sample
from pouf.data.base import Unlabelled, Unreadable
from pouf.data.shots import Shots
from pouf.errors import InputError


@dataclass(frozen=True)
class Demonstrations:
    """Labelled shots to draw from, and how.

    Args:
        shots: samples and the positions of their classes.
        place: "after" shows one shot of each class after the sample, as LM-BFF does; "before" up to `count` shots of
            any class before it, as in-context learning does, as many of them as fit.
        samples: how many draws a prediction is averaged over.
        seed: of the draws. They depend on the sample's text, not on its place among others.
    """

    shots: tuple[tuple[Sample, int], ...]
    place: Literal["after", "before"] = "after"
    samples: int = 16
    count: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.place not in ("after", "before"):
            raise InputError(f"unknown place {self.place!r} of demonstrations: choose after or before")
        if self.samples < 1 or self.count < 1:
            raise InputError("demonstrations need at least one sample and a count of at least one")

    @classmethod
    def from_shots(cls, shots: Shots, **settings: object) -> Demonstrations:
        """A soft label counts as its most likely class."""
        labels = shots.targets.argmax(1).tolist()
        solved = []
        for index, label in enumerate(labels):
            try:
                solved.append((shots.inputs.read(index), label))
            except Unreadable as error:
                shots.inputs.skipped[index] = str(error)
        missing = set(range(shots.targets.shape[1])) - {label for _, label in solved}
        if missing:
            raise InputError(
                f"no shot of class number {min(missing)} in {shots.inputs.source}: demonstrations need one of each"
            )
        return cls(tuple(solved), **settings)  # type: ignore[arg-type]

    def show(self, sample: Sample, draw: random.Random) -> Example:
        """The sample with shots around it, itself never among them."""
        others = [shot for shot in self.shots if shot[0] != sample]
        if self.place == "before":
            return Example(sample, before=tuple(draw.sample(others, min(self.count, len(others)))))
        # A class whose only shot is this sample itself has nothing to show.
        of_class = [[shot for shot in others if shot[1] == label] for label in sorted({k for _, k in self.shots})]
        return Example(sample, after=tuple(draw.choice(shots) for shots in of_class if shots))

    def views(self, data: Unlabelled) -> list[Demonstrated]:
        """The same data once for each draw of a prediction."""
        return [Demonstrated(data, self, f"{self.seed} {i}") for i in range(self.samples)]

    def to_json(self) -> dict[str, object]:
        return {**self.__dict__, "shots": [[sample, label] for sample, label in self.shots]}

    @classmethod
    def from_json(cls, facts: dict[str, object]) -> Demonstrations:
        shots: list[tuple[str | list[str], int]] = facts["shots"]  # type: ignore[assignment]
        solved = tuple((text if isinstance(text, str) else tuple(text), label) for text, label in shots)
        return cls(**{**facts, "shots": solved})  # type: ignore[arg-type]


class Demonstrated(Unlabelled):
    """Data whose every sample comes with shots around it.

    Args:
        seed: with one, a sample always has the same shots around it; with a generator, new ones at each reading.
    """

    modality = "text"

    def __init__(self, data: Unlabelled, demonstrations: Demonstrations, seed: str | torch.Generator) -> None:
        super().__init__(data.ids, data.source)
        self.skipped = data.skipped  # shared: what can't be read is the same
        self.data = data
        self.demonstrations = demonstrations
        self.seed = seed

    def read(self, index: int) -> Example:
        sample = self.data.read(index)
        if isinstance(self.seed, str):
            draw = random.Random(f"{self.seed} {sample}")
        else:
            draw = random.Random(int(torch.randint(2**31, (1,), generator=self.seed)))
        return self.demonstrations.show(sample, draw)

    def content_order(self) -> list[int]:
        return self.data.content_order()

    def reading_order(self) -> Sequence[int]:
        return self.data.reading_order()
