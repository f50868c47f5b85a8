"""A small grid of settings, and a choice among all their steps without labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pouf.adaptation import Adaptation, Step, adapt
from pouf.alarms import alarms
from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.cache import FeatureCache
from pouf.encoding import Reading
from pouf.errors import Diverged, InputError
from pouf.recipe import Recipe
from pouf.runs import write_json
from pouf.selection import ensemble_labels

SUMMARY = "tune.json"


class Trial(NamedTuple):
    """One setting, and its snapshots that no alarm speaks against."""

    settings: dict[str, Any]
    adaptation: Adaptation | None  # None where it diverged
    believable: dict[int, Tensor]  # step -> (n, k) probabilities; without zero-shot
    why_not: str = ""


class Tuning(NamedTuple):
    trials: list[Trial]
    best: int | None  # position of the chosen trial; None is zero-shot
    step: int
    agreement: dict[tuple[int, int], float]  # of each trial and step with all that are believable

    def to_json(self) -> dict[str, Any]:
        told = []
        for i, trial in enumerate(self.trials):
            steps = {str(step): value for (which, step), value in self.agreement.items() if which == i}
            told.append({"settings": trial.settings, "agreement": steps, "why_not": trial.why_not})
        return {"best": self.best, "step": self.step, "trials": told}


def grid(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """All combinations, by dotted name of a setting."""
    return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


def tune(
    build: Callable[[], Classifier],
    data: Unlabelled,
    recipe: Recipe,
    settings: Sequence[Mapping[str, Any]],
    *,
    cache: FeatureCache | None = None,
    on_trial: Callable[[dict[str, Any]], Callable[[Step], None] | None] | None = None,
    look: Callable[[int, int, Classifier], None] | None = None,
) -> tuple[Tuning, Classifier]:
    """Adapt with each setting, and take the trial and the step that agree best with all of them together.

    Snapshots that an alarm speaks against have no vote and can't be chosen; where all have one, it is zero-shot.

    Args:
        build: makes the classifier as it is before training.
        on_trial: is told the settings of a trial before it starts, and gives what is to be told of its steps.
        look: is told of trial, step and classifier at each snapshot.
    """
    if recipe.snapshots == 0:
        raise InputError("a choice among settings needs snapshots: set snapshots = 10")
    trials = []
    for i, changes in enumerate(settings):
        classifier, changes = build(), dict(changes)
        told = on_trial(changes) if on_trial is not None else None
        watch = None if look is None else _watch(look, i, classifier)
        try:
            result = adapt(
                classifier, data, recipe.with_settings(**changes), cache=cache, on_start=lambda message: None,
                on_step=told, on_snapshot=watch,
            )  # fmt: skip
        except Diverged as error:
            trials.append(Trial(changes, None, {}, str(error)))
            continue
        trials.append(_judged(changes, result))
    tuning = choose_trial(trials)
    if tuning.best is None:
        return tuning, build()
    best = trials[tuning.best].adaptation
    assert best is not None and best.snapshots is not None
    best.snapshots.restore(tuning.step)
    if recipe.adjust != "none":
        best.classifier.adjust(recipe.adjust, best.classifier.encode(data, Reading(cache=cache)), recipe.seed)
    return tuning, best.classifier


def _watch(look: Callable[[int, int, Classifier], None], trial: int, classifier: Classifier) -> Callable[[int], None]:
    return lambda step: look(trial, step, classifier)


def _judged(changes: dict[str, Any], result: Adaptation) -> Trial:
    assert result.snapshots is not None
    believable, reasons = {}, []
    for step, seen in result.snapshots.seen.items():
        against = alarms(result.snapshots.signs(step))
        if step and not against:
            believable[step] = seen.probabilities
        reasons += [alarm.name for alarm in against]
    why = "" if believable else ", ".join(dict.fromkeys(reasons))
    return Trial(changes, result, believable, why)


def choose_trial(trials: Sequence[Trial]) -> Tuning:
    """The last snapshots of the believable trials vote; of the snapshots, the one that agrees best with the vote.

    The last ones alone, since the many early snapshots of slow settings would otherwise outvote those that got further.
    """
    last = [trial.believable[max(trial.believable)] for trial in trials if trial.believable]
    if not last:
        return Tuning(list(trials), None, 0, {})
    voted = ensemble_labels(last)
    agreement = {
        (i, step): (probabilities.argmax(1) == voted).double().mean().item()
        for i, trial in enumerate(trials)
        for step, probabilities in trial.believable.items()
    }
    best = max(agreement, key=lambda place: (agreement[place], place[1]))
    return Tuning(list(trials), best[0], best[1], agreement)


def write_tuning(tuning: Tuning, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SUMMARY, tuning.to_json())
    return folder / SUMMARY
