"""Solved examples shown beside each sample: LM-BFF's demonstrations, and in-context learning without training."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pouf.data.base import Unreadable
from pouf.data.labelled import Shots
from pouf.errors import InputError
from pouf.models.cloze import Example, Sample


@dataclass(frozen=True)
class Demonstrations:
    """Labelled shots to draw from, and how.

    Args:
        shots: samples and the positions of their classes.
        place: "after" shows one shot of each class after the sample, as LM-BFF does; "before" up to `count` shots of
            any class before it, as in-context learning does, as many of them as fit.
        samples: how many draws a prediction is averaged over.
        seed: of the draws. They depend on the sample's text, not on its place among others.
        own_limit, shot_limit: most tokens of the sample's first text, and of each text of a shot; None has none.
    """

    shots: tuple[tuple[Sample, int], ...]
    place: Literal["after", "before"] = "after"
    samples: int = 16
    count: int = 32
    seed: int = 0
    own_limit: int | None = None
    shot_limit: int | None = None

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
        alone = Example(sample, own_limit=self.own_limit, shot_limit=self.shot_limit)
        if self.place == "before":
            return alone._replace(before=tuple(draw.sample(others, min(self.count, len(others)))))
        # A class whose only shot is this sample itself has nothing to show.
        of_class = [[shot for shot in others if shot[1] == label] for label in sorted({k for _, k in self.shots})]
        return alone._replace(after=tuple(draw.choice(shots) for shots in of_class if shots))

    def at_random(self, sample: Sample, seed: int) -> Example:
        """For training: other shots for each seed."""
        return self.show(sample, random.Random(seed))

    def view(self, number: int) -> Callable[[Sample, int], Example]:
        """For prediction: always the same shots for the same text, others in each of the `samples` views."""
        return lambda sample, seed: self.show(sample, random.Random(f"{self.seed} {number} {sample}"))

    def to_json(self) -> dict[str, object]:
        return {**self.__dict__, "shots": [[sample, label] for sample, label in self.shots]}

    @classmethod
    def from_json(cls, facts: dict[str, object]) -> Demonstrations:
        shots: list[tuple[str | list[str], int]] = facts["shots"]  # type: ignore[assignment]
        solved = tuple((text if isinstance(text, str) else tuple(text), label) for text, label in shots)
        return cls(**{**facts, "shots": solved})  # type: ignore[arg-type]
