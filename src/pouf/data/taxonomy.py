"""Class names that are paths: `animal/dog` is a dog, which is an animal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Taxonomy(NamedTuple):
    """The common ancestors of k classes with paths as names."""

    classes: tuple[str, ...]
    members: dict[str, list[int]]  # classes below each ancestor, by its path; highest ancestors first

    @classmethod
    def from_names(cls, classes: Sequence[str]) -> Taxonomy | None:
        """None for flat names: without a /, or where no two share an ancestor."""
        members: dict[str, list[int]] = {}
        for k, name in enumerate(classes):
            for ancestor in ancestors_of(name):
                members.setdefault(ancestor, []).append(k)
        if all(len(below) < 2 for below in members.values()):
            return None
        for k, name in enumerate(classes):
            if name in members:  # the class itself is an ancestor
                members[name].append(k)
        return cls(tuple(classes), dict(sorted(members.items(), key=lambda entry: entry[0].count("/"))))

    def texts(self, k: int) -> tuple[str, ...]:
        """The names of a class in prompts: its own, then those of its ancestors, nearest first."""
        name = self.classes[k]
        return tuple(part.strip() for part in reversed(name.split("/"))) if ancestors_of(name) else (name,)

    def parent(self, name: str) -> str | None:
        above = ancestors_of(name)
        return above[-1] if above and above[-1] in self.members else None

    def sums(self, probabilities: Tensor) -> Tensor:
        """Probabilities of the ancestors, in the order of `members`: (n, k) -> (n, m)."""
        belongs = torch.zeros(len(self.members), len(self.classes), dtype=probabilities.dtype)
        for row, below in enumerate(self.members.values()):
            belongs[row, below] = 1.0
        return probabilities @ belongs.T.to(probabilities.device)


def ancestors_of(name: str) -> list[str]:
    """Paths of the ancestors, the highest first; none if a part of the name is empty."""
    parts = name.split("/")
    if not all(part.strip() for part in parts):
        return []
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]
