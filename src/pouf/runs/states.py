"""The states of a run as folders: by the first process, to which the others hand over their shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pouf.base import BaseClassifier
from pouf.distributed import join
from pouf.interruption import is_by_all
from pouf.saving import Use, save
from pouf.training.adaptation import Adaptation
from pouf.validation.checkpoints import Checkpoint
from pouf.validation.verdict import Verdict, broken_off
from pouf.zero_shot import State


def save_states(classifier: BaseClassifier, result: Adaptation, folder: Path) -> set[str]:
    """All states of a run that differ, each in its folder -> the names of those within the run's own.

    The classifier stands as advised afterwards.
    """
    checkpoints = result.checkpoints
    if checkpoints is None:
        save(classifier, folder)
        return set()
    names: dict[Checkpoint, tuple[Use, ...]] = {}
    for use in ("chosen", "last"):
        place = result.place(use)
        names[place] = (*names.get(place, ()), use)
    advised = result.place(result.verdict.advised)
    others = {place: uses for place, uses in names.items() if place != advised}
    for place, uses in others.items():
        checkpoints.restore(place)
        save(classifier, folder / uses[0], uses)
    checkpoints.restore(advised)
    save(classifier, folder, names.get(advised, ()))
    return {uses[0] for uses in others.values()}


def save_broken_off(classifier: BaseClassifier, verdict: Verdict, folder: Path) -> None:
    """What was learned so far, as the last step of a run that advises zero-shot or this."""
    if verdict.advised != "zero-shot":
        save(classifier, folder)
        return
    here = classifier.state()
    save(classifier, folder / "last", ("chosen", "last"))
    classifier.set_state(State(None, None, None, None, dict.fromkeys(here.added)))
    save(classifier, folder, ())
    classifier.set_state(here)


def all_can_save(classifier: BaseClassifier, error: BaseException, wanted: bool) -> bool:
    """Whether a run that broke off is to be saved: as the first process wants, where all know of the error.

    Shards lie on processes that know nothing of an error that came to one of them alone.
    """
    if not classifier.backbone.sharded:
        return wanted
    return is_by_all(error) and join(classifier.device).broadcast(wanted)


class ShardHolder:
    """A process that writes nothing while the first writes the run folder: where weights are sharded, it hands over its
    part of them whenever the first saves."""

    def __init__(self, folder: Path, classifier: BaseClassifier) -> None:
        self.folder, self.classifier, self.done = folder, classifier, False

    def finish(self, result: Adaptation) -> None:
        if self.classifier.backbone.sharded:
            save_states(self.classifier, result, self.folder)
        self.done = True

    def finish_search(self, result: Adaptation, trials: dict[str, Any], ended_by: BaseException | None) -> None:
        self.finish(result)

    def give_up(self, error: BaseException) -> None:
        if not self.done and self.classifier.backbone.sharded and all_can_save(self.classifier, error, False):
            save_broken_off(self.classifier, broken_off(error), self.folder)

    def close(self) -> None:
        """There is nothing to close."""
