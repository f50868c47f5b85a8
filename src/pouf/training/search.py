"""A small grid of settings, and a choice among all their steps without labels."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.cache import FeatureCache
from pouf.distributed import join
from pouf.errors import Diverged, InputError
from pouf.inference import InferenceConfig
from pouf.recipe import Recipe
from pouf.runs.folder import RunWriter, Verdict, assess, check_new, keep_choice, write_json
from pouf.training.trainer import Adaptation, Step, adapt, adjust_at
from pouf.validation.diagnostics import alarms
from pouf.validation.selectors import Choice, Snapshots, ensemble_labels

SUMMARY = "tune.json"


class Trial(NamedTuple):
    """One setting, and its snapshots that no alarm speaks against. One with a `why_not` is not chosen."""

    settings: dict[str, Any]
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
    assert best is not None
    best = _at_choice(best, tuning.step, data, recipe, cache)
    best.use_chosen()
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
) -> tuple[Tuning, Verdict]:
    """`tune`, written as the run folder of the chosen trial; `tune.json` in it tells of all trials.

    Where no trial is believable it is the folder of the first one, and advises zero-shot.
    """
    start, folder = time.perf_counter(), check_new(folder)
    tuning, results = _run_trials(build, data, recipe, settings, cache, on_trial)
    finished = [i for i, result in enumerate(results) if result is not None]
    if not finished:
        raise InputError(f"every trial diverged; the last one: {tuning.trials[-1].why_not}")
    written = finished[0] if tuning.best is None else tuning.best
    result, recipe = results[written], recipe.with_settings(**tuning.trials[written].settings)
    assert result is not None
    if tuning.best is not None:
        result = _at_choice(result, tuning.step, data, recipe, cache)
    assert result.snapshots is not None
    trust = assess(result.snapshots, result.choice)
    if join(result.classifier.backbone.device).is_first:
        writer = RunWriter(folder, result.classifier, recipe, {"data": data}, command, start)
        for step in result.history:
            writer.log(step)
        keep_choice(result, trust, writer.folder)
        write_json(writer.folder / SUMMARY, tuning.to_json())
        writer.finish("finished", trainable=result.trainable, total=result.total)
    return tuning, trust


def _at_choice(
    result: Adaptation, step: int, data: Unlabelled, recipe: Recipe, cache: FeatureCache | None
) -> Adaptation:
    """The trial that was chosen, as if it had chosen this step itself."""
    snapshots, classifier = result.snapshots, result.classifier
    assert snapshots is not None and result.choice is not None
    postprocessor = result.chosen_adjustment
    if recipe.adjust != "none" and step not in (result.choice.step, max(snapshots.seen)):
        of_last = classifier.postprocessor
        snapshots.restore(step)
        inference = InferenceConfig(cache=cache, world=join(classifier.backbone.device))
        postprocessor = adjust_at(classifier, step, data, recipe, inference, snapshots)
        snapshots.restore(max(snapshots.seen))
        classifier.postprocessor = of_last
    return result._replace(choice=result.choice._replace(step=step), chosen_adjustment=postprocessor)


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
        classifier = build()
        device = classifier.backbone.device
        try:
            result = adapt(
                classifier, data, recipe.with_settings(**changes), cache=cache, on_start=lambda message: None,
                on_step=told,
            )  # fmt: skip
        except Diverged as error:
            trials.append(Trial(changes, {}, str(error)))
            results.append(None)
            continue
        if result.snapshots is None or result.choice is None:
            raise InputError("these settings leave nothing to choose between: data must not be a stream, steps above 0")
        trials.append(judge_trial(changes, result.snapshots, result.choice))
        results.append(result)
        classifier.to("cpu")  # the device need not have room for all of them
    tuning = choose_trial(trials)
    best = results[tuning.best] if tuning.best is not None else None
    if best is not None:
        best.classifier.to(device)
    return tuning, results


def judge_trial(settings: dict[str, Any], snapshots: Snapshots, choice: Choice) -> Trial:
    """The steps of a trial that no alarm speaks against; none where it ended badly, as `judge` sees it.

    A trial that has not settled may still vote: where there are others, it is they who outvote it.
    """
    at_the_end = [alarm.name for alarm in alarms(snapshots.diagnostics(max(snapshots.seen)), choice.settled)]
    if at_the_end not in ([], ["restless"]):
        return Trial(settings, {}, ", ".join(at_the_end))
    believable = {
        step: seen.probabilities
        for step, seen in snapshots.seen.items()
        if step and not alarms(snapshots.diagnostics(step))
    }
    return Trial(settings, believable, ", ".join(at_the_end))


def choose_trial(trials: Sequence[Trial]) -> Tuning:
    """The last snapshots of the believable trials vote; of the snapshots, the one that agrees best with the vote.

    The last ones alone, since the many early snapshots of slow settings would otherwise outvote those that got further.
    """
    last = [trial.believable[max(trial.believable)] for trial in trials if trial.believable]
    voted = ensemble_labels(last) if last else torch.zeros(0)
    agreement = {
        (i, step): (probabilities.argmax(1) == voted).double().mean().item()
        for i, trial in enumerate(trials)
        for step, probabilities in trial.believable.items()
    }
    chosen = [place for place in agreement if not trials[place[0]].why_not]
    if not chosen:
        return Tuning(list(trials), None, 0, agreement)
    best = max(chosen, key=lambda place: (agreement[place], place[1]))
    return Tuning(list(trials), best[0], best[1], agreement)
