"""What cells give to the public calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from pouf import Classifier, Recipe


class NotRun(Exception):
    """Enough has been seen."""


class Spy:
    """What cells give to `Classifier.adapt`, the last time, and to `Classifier.infer`."""

    classifier: Classifier
    data: Any
    recipe: Recipe
    shots: Any

    def __init__(self) -> None:
        self.calls = 0
        self.judged: list[Any] = []
        self.before: Callable[[], None] = lambda: None  # is called before anything is adapted

    def asked(self, act: Callable[[], object]) -> Spy:
        """What `act` gives to adapt, which is not carried out."""

        def stop() -> None:
            raise NotRun

        self.before = stop
        with suppress(NotRun):
            act()
            pytest.fail("nothing was adapted")
        return self
