"""A small grid of settings, and a choice among all their steps without labels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.base import BaseClassifier
from pouf.data.base import Unlabelled
from pouf.errors import Diverged, InputError
from pouf.recipe import Recipe
from pouf.training.adaptation import Adaptation, correct
from pouf.validation.checkpoints import Checkpoint, Checkpoints
from pouf.validation.diagnostics import alarms
from pouf.validation.selectors import Choice, ensemble_labels
from pouf.validation.verdict import assess

RATES = (1 / 3, 1.0, 3.0)  # times the recipe's learning rate: what is tried when nothing else is said


class Trial(NamedTuple):
    """One setting, and its checkpoints that no alarm speaks against. One with a `why_not` is not chosen."""

    settings: dict[str, Any]
    believable: dict[int, Tensor]  # step -> (n, k) probabilities; without zero-shot
    why_not: str = ""
    kept: frozenset[int] | None = None  # the steps whose weights are there and can be chosen; None is all


class Ranking(NamedTuple):
    """The choice among trials."""

    best: int | None  # position of the chosen trial; None is zero-shot
    step: int
    agreement: dict[tuple[int, int], float]  # of each trial and step with all that are believable


@dataclass
class Search:
    """What came of a search: all trials, and the adaptation of the one that was chosen."""

    trials: list[Trial] = field(repr=False)
    ranking: Ranking
    result: Adaptation  # of the chosen trial; of the first, at zero-shot, where none is believable
    interrupted: bool = False  # before all trials were run

    @property
    def settings(self) -> dict[str, Any] | None:
        """What was chosen; None where no trial is believable."""
        return self.trials[self.ranking.best].settings if self.ranking.best is not None else None

    def to_json(self) -> dict[str, Any]:
        told = []
        for i, trial in enumerate(self.trials):
            steps = {str(step): value for (which, step), value in self.ranking.agreement.items() if which == i}
            told.append({"settings": trial.settings, "agreement": steps, "why_not": trial.why_not})
        return {"best": self.ranking.best, "step": self.ranking.step, "trials": told}


def all_combinations(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations, by dotted name of a setting."""
    return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


def usual_grid(recipe: Recipe) -> dict[str, list[float]]:
    """⅓×, 1× and 3× the recipe's learning rate."""
    return {"optimisation.lr": [times * recipe.optimisation.lr for times in RATES]}


# A copy of the classifier and its recipe -> what came of adapting it.
Adapt = Callable[[BaseClassifier, Recipe], Adaptation]


def search(
    classifier: BaseClassifier,
    recipe: Recipe,
    settings: Sequence[Mapping[str, Any]],
    adapt: Adapt,
    on_trial: Callable[[dict[str, Any]], None],
) -> Search:
    """Adapt a copy of the classifier with each setting, and choose among all their steps.

    Weights are kept of the best trial so far alone. Where the vote of all ends elsewhere, that trial is run again: it
    repeats itself to the bit. An interruption ends the search with the trials that have come to their end.
    """
    if recipe.snapshots == 0:
        raise InputError("a choice among settings needs checkpoints: set snapshots = 10")
    recipes = [recipe.with_settings(changes) for changes in settings]  # a wrong one is said before the first runs
    if not recipes:
        raise InputError("nothing to choose from: give the grid at least one value per setting")

    def run(number: int) -> Adaptation:
        # The classifier keeps its own tensors; what is not trained could be shared, but trials may tune anything.
        return adapt(copy.deepcopy(classifier), recipes[number])

    trials: list[Trial] = []
    kept: tuple[int, Adaptation] | None = None
    failed, interrupted = "", False
    for number, changes in enumerate(map(dict, settings)):
        on_trial(changes)
        try:
            result = run(number)
        except Diverged as error:
            trials.append(Trial(changes, {}, str(error)))
            failed = str(error)
            continue
        except KeyboardInterrupt:
            if kept is None:
                raise
            interrupted = True
            break
        if result.checkpoints is None or not result.history:
            raise InputError("these settings leave nothing to choose between: data must not be a stream, steps above 0")
        trials.append(judge_trial(changes, result.checkpoints, result.checkpoints.choose()))
        if kept is None or choose_trial(trials).best == number:
            kept = number, result
    if kept is None:
        raise InputError(f"every trial diverged; the last one: {failed}")
    ranking = choose_trial(trials)
    wanted = ranking.best if ranking.best is not None else kept[0]
    if kept[0] != wanted and not interrupted:
        on_trial(dict(settings[wanted]))
        kept = wanted, run(wanted)
    if kept[0] != wanted:  # there is no time to run it again
        ranking = ranking._replace(best=kept[0], step=kept[1].verdict.chosen or 0)
    return Search(trials, ranking, kept[1], interrupted)


def stand_at(result: Adaptation, step: int, data: Unlabelled, inference: Any) -> None:
    """Let a trial be as if it had chosen this step itself."""
    checkpoints = result.checkpoints
    assert checkpoints is not None
    if result.recipe.postprocess != "none" and Checkpoint(step, True) not in checkpoints.states:
        with checkpoints.at(Checkpoint(step)) as classifier:
            correct(classifier, data, result.recipe, inference, checkpoints, step)
    result.verdict = assess(checkpoints, checkpoints.choose()._replace(step=step))
    result.restore("advised")


def judge_trial(settings: dict[str, Any], checkpoints: Checkpoints, choice: Choice) -> Trial:
    """The steps of a trial that no alarm speaks against; none where it ended badly, as the verdict sees it.

    A trial that has not converged may still vote: where there are others, it is they who outvote it.
    """
    at_the_end = [alarm.name for alarm in alarms(checkpoints.diagnose(checkpoints.last, choice.convergence))]
    if at_the_end not in ([], ["not converged"]):
        return Trial(settings, {}, ", ".join(at_the_end))
    believable = {
        place.step: checkpoints.predictions[checkpoints.of(place.step)].probabilities
        for place in checkpoints.predictions
        if place.step and not alarms(checkpoints.diagnose(checkpoints.of(place.step)))
    }
    kept = frozenset(place.step for place in checkpoints.states)
    return Trial(settings, believable, ", ".join(at_the_end), kept)


def choose_trial(trials: Sequence[Trial]) -> Ranking:
    """The last checkpoints of the believable trials vote; of all, the one that agrees best with the vote.

    The last ones alone, since the many early ones of slow settings would otherwise outvote those that got further.
    """
    last = [trial.believable[max(trial.believable)] for trial in trials if trial.believable]
    voted = ensemble_labels(last) if last else torch.zeros(0)
    agreement = {
        (i, step): (probabilities.argmax(1) == voted).double().mean().item()
        for i, trial in enumerate(trials)
        for step, probabilities in trial.believable.items()
    }
    chosen = [
        (number, step)
        for number, step in agreement
        if not trials[number].why_not and step in (trials[number].kept or trials[number].believable)
    ]
    if not chosen:
        return Ranking(None, 0, agreement)
    best = max(chosen, key=lambda place: (agreement[place], place[1]))
    return Ranking(best[0], best[1], agreement)
