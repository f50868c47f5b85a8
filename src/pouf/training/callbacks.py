"""Who is told of a run while it goes on. Subclass `Callback` and write the methods that matter to you."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pouf.recipe import Recipe
    from pouf.training.adaptation import Adaptation


class Step(NamedTuple):
    """What one step of training showed, before its update."""

    step: int  # from 1
    loss: float
    terms: dict[str, float]  # each term of the loss, before weighting
    effective_classes: float  # exp H(mean p) over the batch: near 1 means collapse
    temperature: float
    lr: float
    seconds: float  # since the start


class Callback:
    """Nothing here changes what is learned, but that training can be ended early."""

    def on_start(self, recipe: Recipe, trainable: int, total: int) -> None:
        """Before the first step: all settings, and how many parameters are trained of how many."""

    def on_step(self, step: Step) -> bool | None:
        """After each step. True ends the training, and this step is its last."""

    def on_checkpoint(self, step: int) -> None:
        """The classifier stands at a step that is looked at, and may be looked at here; 0 is before training."""

    def on_end(self, result: Adaptation) -> None:
        """The verdict is made, and the classifier stands where it says."""


class Callbacks:
    """All of them as one."""

    def __init__(self, callbacks: Any = ()) -> None:
        self.all: list[Callback] = list(callbacks)

    def tell(self, event: Callable[[Callback], Any]) -> bool:
        """Whether any of them answered with True."""
        answers = [event(callback) for callback in self.all]  # all are told, whatever the first one answers
        return True in answers
