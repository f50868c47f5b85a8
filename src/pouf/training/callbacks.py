"""Callbacks of a run. Subclass `Callback` and override the methods you need.

    class Watch(Callback):
        def on_step(self, step):
            print(step.step, step.loss)

    clf.adapt("photos/", callbacks=[Watch()])

The order of calls: `on_estimate`; `on_start`, `on_resume` where a run goes on, `on_checkpoint(0)`; then for each step
`on_step` and, at some of them, `on_checkpoint`; at last `on_end`, or `on_error` where the run broke off. `on_phase` and
`on_progress` come whenever something long begins and goes on. With several processes, each has its own callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from pouf.errors import InputError

if TYPE_CHECKING:
    from pouf.classifier import Classifier
    from pouf.inference.encode import InferenceConfig
    from pouf.recipe import Recipe
    from pouf.training.adaptation import Adaptation
    from pouf.training.estimate import Estimate


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
    """Nothing here changes what is learned, but that training can be ended early: by any callback, in any process."""

    def on_estimate(self, estimate: Estimate) -> None:
        """Before anything long: how long it will take, and why."""

    def on_phase(self, phase: str, total: int) -> None:
        """Something begins that has so many parts: `encoding images`, 2,000. 0 where their number is not known."""

    def on_progress(self, n: int) -> None:
        """n more parts of the phase are done. Steps of training are reported by `on_step`."""

    def on_start(self, recipe: Recipe, trainable: int, total: int) -> None:
        """Before the first step: all settings, and how many parameters are trained of how many."""

    def on_resume(self, history: list[Step]) -> None:
        """After `on_start`, where a run goes on: the steps that it has behind it."""

    def on_step(self, step: Step) -> bool | None:
        """After each step. True ends the training, and this step is its last."""

    def on_checkpoint(self, step: int, classifier: Classifier) -> bool | None:
        """The classifier as it is after a step at which predictions are recorded; 0 is before training.

        Training continues with this object: `copy.deepcopy` it to store it.

        True ends the training, but at 0.
        """

    def on_end(self, result: Adaptation) -> None:
        """The verdict is made, and the run is written."""

    def on_error(self, error: BaseException) -> None:
        """The run broke off, or was interrupted; the error goes on its way afterwards."""

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on is to know again: numbers, texts, tensors, lists and dictionaries of these."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The same, before `on_resume`."""


class EarlyStopping(Callback):
    """Ends the training once the mean loss of the last `patience` steps is not below that of the `patience` before.

    Args:
        patience: steps that a mean is taken over. The loss of one batch is noisy: rather dozens than a few.
        min_delta: how far it must have fallen to count.
    """

    def __init__(self, patience: int = 50, min_delta: float = 0.0) -> None:
        if patience < 1:
            raise InputError(f"the patience must be at least one step, not {patience}")
        self.patience, self.min_delta = patience, min_delta
        self.losses: list[float] = []

    def on_start(self, recipe: Recipe, trainable: int, total: int) -> None:
        self.losses = []  # of one run: a search has several

    def on_resume(self, history: list[Step]) -> None:
        self.losses = [step.loss for step in history]

    def on_step(self, step: Step) -> bool:
        self.losses = [*self.losses[1 - 2 * self.patience :], step.loss]
        if len(self.losses) < 2 * self.patience:
            return False
        before, now = mean(self.losses[: self.patience]), mean(self.losses[self.patience :])
        return before - now <= self.min_delta


class Callbacks:
    """All of them as one."""

    def __init__(self, callbacks: Any = ()) -> None:
        if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
            raise InputError(f"callbacks must be a list, not {callbacks!r}")
        self.all: list[Callback] = list(callbacks)
        for callback in self.all:
            if not isinstance(callback, Callback):
                raise InputError(f"{callback!r} is no callback: give an object of a subclass of pouf.Callback")

    def notify(self, event: Callable[[Callback], Any]) -> bool:
        """Whether any of them answered with True."""
        from pouf.parallel.process_group import alone  # with torch, which `pouf --help` need not wait for

        with alone():  # a callback of one process may predict
            answers = [event(callback) for callback in self.all]  # all of them, whatever the first one answers
        return True in answers

    def phase(self, phase: str, total: int = 0) -> None:
        self.notify(lambda callback: callback.on_phase(phase, total))

    def broke_off(self, error: BaseException) -> None:
        self.notify(lambda callback: callback.on_error(error))

    def watching(self, inference: InferenceConfig, phase: str) -> InferenceConfig:
        """The same configuration, with its progress reported as this phase."""

        def progress(n: int) -> None:
            self.notify(lambda callback: callback.on_progress(n))

        return replace(inference, on_start=lambda n: self.phase(phase, n), on_batch=progress)

    def state_dict(self) -> dict[str, Any]:
        return {name: state for name, callback in self._named().items() if (state := callback.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, callback in self._named().items():
            if name in state:
                callback.load_state_dict(state[name])

    def _named(self) -> dict[str, Callback]:
        """By class, and by number among those of the same class."""
        kinds = [type(callback).__qualname__ for callback in self.all]
        return {f"{kind} {kinds[:i].count(kind)}": self.all[i] for i, kind in enumerate(kinds)}
