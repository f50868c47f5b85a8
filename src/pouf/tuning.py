"""A small grid of settings, and a choice among all their steps without labels."""

from __future__ import annotations

import time
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
from pouf.runs import RunWriter, Trust, check_new, judge, keep_choice, write_json
from pouf.selection import Snapshots, ensemble_labels

SUMMARY = "tune.json"


class Trial(NamedTuple):
    """One setting, and its snapshots that no alarm speaks against."""

    settings: dict[str, Any]
    believable: dict[int, Tensor]  # step -> (n, k) probabilities; without zero-shot
    why_not: str = ""  # there are none


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


OnTrial = Callable[[dict[str, Any]], Callable[[Step], None] | None]


def tune(
    build: Callable[[], Classifier],
    data: Unlabelled,
    recipe: Recipe,
    settings: Sequence[Mapping[str, Any]],
    *,
    cache: FeatureCache | None = None,
    on_trial: OnTrial | None = None,
) -> tuple[Tuning, Classifier]:
    """Adapt with each setting, and take the trial and the step that agree best with all of them together.

    Snapshots that an alarm speaks against have no vote and can't be chosen; where all have one, it is zero-shot.

    Args:
        build: makes the classifier as it is before training.
        on_trial: is told the settings of a trial before it starts, and gives what is to be told of its steps.
    """
    tuning, results = _run_trials(build, data, recipe, settings, cache, on_trial)
    if tuning.best is None:
        return tuning, build()
    best = results[tuning.best]
    assert best is not None and best.snapshots is not None
    best.snapshots.restore(tuning.step)
    if recipe.adjust != "none":
        best.classifier.adjust(recipe.adjust, best.classifier.encode(data, Reading(cache=cache)), recipe.seed)
    return tuning, best.classifier


def tune_run(
    build: Callable[[], Classifier],
    data: Unlabelled,
    recipe: Recipe,
    settings: Sequence[Mapping[str, Any]],
    folder: str | Path,
    *,
    cache: FeatureCache | None = None,
    command: Sequence[str] = (),
    on_trial: OnTrial | None = None,
) -> tuple[Tuning, Trust]:
    """`tune`, written as the run folder of the chosen trial; `tune.json` in it tells of all trials.

    Where no trial is believable it is the folder of the first one, and advises zero-shot.
    """
    start, folder = time.perf_counter(), check_new(folder)
    tuning, results = _run_trials(build, data, recipe, settings, cache, on_trial)
    finished = [i for i, result in enumerate(results) if result is not None]
    if not finished:
        raise InputError(f"every trial diverged; the last one: {tuning.trials[-1].why_not}")
    written = finished[0] if tuning.best is None else tuning.best
    result = results[written]
    assert result is not None and result.snapshots is not None
    recipe = recipe.with_settings(**tuning.trials[written].settings)
    classifier, last = result.classifier, result.classifier.adjustment
    trust = judge(result.snapshots, None if tuning.best is None else tuning.step)
    if recipe.adjust != "none" and trust.chosen not in (0, trust.last):
        result.snapshots.restore(trust.chosen)
        classifier.adjust(recipe.adjust, classifier.encode(data, Reading(cache=cache)), recipe.seed)
        result = result._replace(chosen_adjustment=classifier.adjustment)
        classifier.adjustment = last
    writer = RunWriter(folder, classifier, recipe, {"data": data}, command, start)
    for step in result.history:
        writer.log(step)
    keep_choice(result, trust, folder)
    write_json(folder / SUMMARY, tuning.to_json())
    writer.finish("finished", trainable=result.trainable, total=result.total)
    return tuning, trust


def _run_trials(
    build: Callable[[], Classifier],
    data: Unlabelled,
    recipe: Recipe,
    settings: Sequence[Mapping[str, Any]],
    cache: FeatureCache | None,
    on_trial: OnTrial | None,
) -> tuple[Tuning, list[Adaptation | None]]:
    """What came of each setting, None where it diverged; and the choice among them."""
    if recipe.snapshots == 0:
        raise InputError("a choice among settings needs snapshots: set snapshots = 10")
    trials: list[Trial] = []
    results: list[Adaptation | None] = []
    for changes in map(dict, settings):
        told = on_trial(changes) if on_trial is not None else None
        try:
            result = adapt(
                build(), data, recipe.with_settings(**changes), cache=cache, on_start=lambda message: None, on_step=told
            )
        except Diverged as error:
            trials.append(Trial(changes, {}, str(error)))
            results.append(None)
            continue
        if result.snapshots is None:
            raise InputError("these settings leave nothing to choose between: data must not be a stream, steps above 0")
        trials.append(judge_trial(changes, result.snapshots))
        results.append(result)
    return choose_trial(trials), results


def judge_trial(settings: dict[str, Any], snapshots: Snapshots) -> Trial:
    """Which steps of a trial no alarm speaks against."""
    believable, reasons = {}, []
    for step, seen in snapshots.seen.items():
        against = alarms(snapshots.signs(step))
        if step and not against:
            believable[step] = seen.probabilities
        reasons += [alarm.name for alarm in against]
    why = "" if believable else ", ".join(dict.fromkeys(reasons))
    return Trial(settings, believable, why)


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
