"""A small grid of settings, and a choice among all their steps without labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.errors import Diverged, InputError
from pouf.inference.encode import InferenceConfig
from pouf.interruption import ImmediateExit
from pouf.parallel.process_group import processes
from pouf.recipe import Recipe
from pouf.training.adaptation import Adaptation, finish_step
from pouf.training.state import check_same, read_state, write_state
from pouf.validation.checkpoints import Checkpoint, Checkpoints
from pouf.validation.rules import alarms
from pouf.validation.selectors import Choice, ensemble_labels
from pouf.validation.verdict import assess

RATES = (1 / 3, 1.0, 3.0)  # times the recipe's learning rate: what is tried when nothing else is said


class Trial(NamedTuple):
    """One setting, and its checkpoints that no alarm speaks against. One with a `why_not` is not chosen.

    Of many trials at once: only what the choice needs is stored of each.
    """

    settings: dict[str, Any]
    believable: dict[int, Tensor]  # step -> (n,) predicted classes; without zero-shot
    vote: Tensor | None = None  # (n, k), probabilities of the last of these steps
    why_not: str = ""
    steps: frozenset[int] | None = None  # that have weights and can be chosen; None is all

    @classmethod
    def from_predictions(cls, settings: dict[str, Any], predictions: Mapping[int, Tensor], *rest: Any) -> Trial:
        """From the probabilities (n, k) of the believable steps."""
        labels = {step: probabilities.argmax(1) for step, probabilities in predictions.items()}
        return cls(settings, labels, predictions[max(predictions)] if predictions else None, *rest)


class Ranking(NamedTuple):
    """The choice among trials."""

    best: int | None  # position of the chosen trial; None is zero-shot
    step: int
    agreement: dict[tuple[int, int], float]  # of each trial and step with all that are believable


@dataclass
class Search:
    """The result of a search: all trials, and the adaptation of the one that was chosen."""

    trials: list[Trial] = field(repr=False)
    ranking: Ranking
    result: Adaptation  # of the chosen trial; of the first, at zero-shot, where none is believable
    ended_by: BaseException | None = None  # what ended it before all trials were run

    @property
    def classifier(self) -> Classifier:
        """What the verdict advises."""
        return self.result.classifier

    @property
    def settings(self) -> dict[str, Any] | None:
        """What was chosen; None where no trial is believable."""
        return self.trials[self.ranking.best].settings if self.ranking.best is not None else None

    def to_json(self) -> dict[str, Any]:
        rows = []
        for i, trial in enumerate(self.trials):
            steps = {str(step): value for (which, step), value in self.ranking.agreement.items() if which == i}
            rows.append({"settings": trial.settings, "agreement": steps, "why_not": trial.why_not})
        return {"best": self.ranking.best, "step": self.ranking.step, "trials": rows}


def all_combinations(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations, by dotted name of a setting."""
    return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


def usual_grid(recipe: Recipe) -> dict[str, list[float]]:
    """⅓×, 1× and 3× the recipe's learning rate."""
    return {"optimisation.lr": [times * recipe.optimisation.lr for times in RATES]}


class TrialLog:
    """Finished trials on disk, so that an interrupted search resumes with the next.

    Args:
        file: for the trials; None stores them in memory.
        about: settings and data of the search; a search with others is not resumed.
    """

    def __init__(self, file: Path | None = None, about: dict[str, Any] | None = None) -> None:
        self.file, self.about = file, about or {}
        self.trials: list[Trial] = []

    def read(self) -> None:
        exists = self.file is not None and processes().is_main and self.file.is_file()
        stored = processes().broadcast(read_state(self.file) if exists and self.file is not None else None)
        if stored is not None:
            check_same(stored["about"], self.about, "search")
        for settings, labels, vote, why_not, steps in stored["trials"] if stored is not None else ():
            self.trials.append(Trial(settings, labels, vote, why_not, frozenset(steps) if steps is not None else None))

    def add(self, trial: Trial) -> None:
        self.trials.append(trial)
        if self.file is not None and processes().is_main:
            rows = [[*each[:-1], sorted(each.steps) if each.steps is not None else None] for each in self.trials]
            write_state(self.file, {"about": self.about, "trials": rows})


# The recipe of a trial and its number -> the result of adapting a copy of the classifier.
Adapt = Callable[[Recipe, int], Adaptation]


def search(
    recipe: Recipe,
    settings: Sequence[Mapping[str, Any]],
    adapt: Adapt,
    on_trial: Callable[[dict[str, Any]], None],
    log: TrialLog,
) -> Search:
    """Adapt with each setting, and choose among all their steps.

    Only the best trial so far has its weights on disk. Where the vote of all ends elsewhere, that trial is run again:
    it repeats itself to the bit. An interruption ends the search with the trials that are finished; those in the log
    are not run again.
    """
    if recipe.snapshots == 0:
        raise InputError("a choice among settings needs checkpoints: set snapshots = 4")
    recipes = [recipe.with_settings(changes) for changes in settings]  # a wrong one is said before the first runs
    if not recipes:
        raise InputError("nothing to choose from: give the grid at least one value per setting")

    def run(number: int) -> Adaptation:
        on_trial(dict(settings[number]))
        return adapt(recipes[number], number)

    trials: list[Trial] = []
    best: int | None = None  # the best trial so far
    result: Adaptation | None = None  # its result, unless it was run before an interruption
    ended_by: BaseException | None = None
    for number, changes in enumerate(map(dict, settings)):
        outcome: Adaptation | None = None
        if number == len(log.trials):
            try:
                outcome = run(number)
                log.add(_judged(changes, outcome))
            except Diverged as error:
                log.add(Trial(changes, {}, why_not=str(error)))
            except BaseException as error:
                if result is None or isinstance(error, ImmediateExit):
                    raise
                ended_by = error
                break
        trials.append(log.trials[number])
        if trials[-1].steps is not None and (
            best is None or processes().broadcast(choose_trial(trials)).best == number
        ):
            best, result, outcome = number, outcome, result
        _forget(outcome)
    if best is None:
        raise InputError(f"every trial diverged; the last one: {trials[-1].why_not}")
    ranking = processes().broadcast(choose_trial(trials))
    wanted = ranking.best if ranking.best is not None else best
    if result is None or (best != wanted and ended_by is None):
        _forget(result)
        best, result = wanted, None  # its weights are deleted before others are written
        result = run(wanted)
    if best != wanted:  # there is no time to run it again
        ranking = ranking._replace(best=best, step=result.verdict.chosen or 0)
    return Search(trials, ranking, result, ended_by)


def _forget(result: Adaptation | None) -> None:
    """A trial that is not chosen: its weights can go, and with them the way to go on with it."""
    if result is not None and result.checkpoints is not None:
        result.checkpoints.release()


def _judged(changes: dict[str, Any], result: Adaptation) -> Trial:
    if result.checkpoints is None or not result.history:
        raise InputError("nothing to choose between: a search needs a method that trains, and data that are no stream")
    return judge_trial(changes, result.checkpoints, result.checkpoints.choose())


def select_step(result: Adaptation, step: int, data: Unlabelled, inference: InferenceConfig) -> Adaptation:
    """A trial as if it had chosen this step itself."""
    checkpoints = result.checkpoints
    assert checkpoints is not None
    if step and not len(checkpoints.predictions[checkpoints.at_step(step)].perturbed):
        classifier = checkpoints.classifier(Checkpoint(step))
        finish_step(data, result.recipe, inference, checkpoints, result.target_shares, step, classifier)
    verdict = processes().broadcast(assess(checkpoints, checkpoints.choose()._replace(step=step)))
    changed = replace(result, verdict=verdict)
    return replace(changed, classifier=checkpoints.classifier(changed.checkpoint("advised")))


def judge_trial(settings: dict[str, Any], checkpoints: Checkpoints, choice: Choice) -> Trial:
    """The steps of a trial that no alarm speaks against; none where it ended badly, as the verdict sees it.

    A trial that has not converged may still vote: where there are others, they outvote it.
    """
    at_the_end = [alarm.name for alarm in alarms(checkpoints.diagnose(checkpoints.last, choice.convergence))]
    if at_the_end not in ([], ["not converged"]):
        return Trial(settings, {}, why_not=", ".join(at_the_end))
    believable = {
        key.step: checkpoints.comparable(checkpoints.at_step(key.step)).probabilities
        for key in checkpoints.predictions
        if key.step and not alarms(checkpoints.diagnose(checkpoints.at_step(key.step)))
    }
    steps = frozenset(key.step for key in checkpoints.postprocessors)
    return Trial.from_predictions(settings, believable, ", ".join(at_the_end), steps)


def choose_trial(trials: Sequence[Trial]) -> Ranking:
    """The last checkpoints of the believable trials vote; of all, the one that agrees best with the vote.

    The last ones alone, since the many early ones of slow settings would otherwise outvote those that got further.
    """
    votes = [trial.vote for trial in trials if trial.vote is not None]
    voted = ensemble_labels(votes) if votes else torch.zeros(0)
    agreement = {
        (i, step): (labels == voted).double().mean().item()
        for i, trial in enumerate(trials)
        for step, labels in trial.believable.items()
    }
    chosen = [
        (number, step)
        for number, step in agreement
        if not trials[number].why_not and step in (trials[number].steps or trials[number].believable)
    ]
    if not chosen:
        return Ranking(None, 0, agreement)
    best = max(chosen, key=lambda key: (agreement[key], key[1]))
    return Ranking(best[0], best[1], agreement)
