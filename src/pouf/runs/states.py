"""The states of a run as folders: by the first process, to which the others hand over their shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pouf.classifier import Classifier
from pouf.files import write_json
from pouf.interruption import is_by_all
from pouf.parallel.process_group import init_processes
from pouf.parallel.shards import is_main
from pouf.runs.names import VERDICT
from pouf.saving import Use, replacing, write
from pouf.training.adaptation import Adaptation
from pouf.validation.checkpoints import Checkpoint
from pouf.validation.verdict import Verdict, failed_verdict


def save_states(result: Adaptation, folder: Path) -> set[str]:
    """All states of a run that differ, each in its folder, and the verdict -> names of the folders within the run's."""
    with replacing(folder) as partial:
        inner = _write_states(result, partial)
        _write_verdict(result.verdict, partial)
    return inner


def _write_states(result: Adaptation, folder: Path) -> set[str]:
    if result.checkpoints is None:
        write(result.classifier, folder)
        return set()
    names: dict[Checkpoint, tuple[Use, ...]] = {}
    for use in ("chosen", "last"):
        place = result.place(use)
        names[place] = (*names.get(place, ()), use)
    advised = names.pop(result.place("advised"), ())
    for uses in names.values():
        write(result.at(uses[0]), folder / uses[0], uses)
    write(result.at("advised"), folder, advised)
    return {uses[0] for uses in names.values()}


def save_failed_run(classifier: Classifier, verdict: Verdict, folder: Path) -> None:
    """What was learned so far, as the last step of a run that advises zero-shot or this."""
    with replacing(folder) as partial:
        _write_verdict(verdict, partial)
        if verdict.advised != "zero-shot":
            write(classifier, partial)
            return
        write(classifier, partial / "last", ("chosen", "last"))
        zero_shot = classifier.copy()
        zero_shot.tuner_settings = zero_shot.prompt = zero_shot.postprocessor = zero_shot.demonstrations = None
        write(zero_shot, partial, ())  # nothing of its weights, which are those of the last step


def _write_verdict(verdict: Verdict, folder: Path) -> None:
    if is_main():
        write_json(folder / VERDICT, verdict.to_json())


def all_can_save(classifier: Classifier, error: BaseException, wanted: bool) -> bool:
    """Whether a run that broke off is to be saved: as the first process wants, where all know of the error.

    Shards lie on processes that know nothing of an error that came to one of them alone.
    """
    if not classifier.backbone.sharded:
        return wanted
    return is_by_all(error) and init_processes(classifier.device).broadcast(wanted)


class ShardHolder:
    """A process that writes nothing while the first writes the run folder: where weights are sharded, it hands over its
    part of them whenever the first saves."""

    def __init__(self, folder: Path, classifier: Classifier) -> None:
        self.folder, self.classifier, self.done = folder, classifier, False

    def finish(self, result: Adaptation) -> None:
        if self.classifier.backbone.sharded:
            save_states(result, self.folder)
        self.done = True

    def finish_search(self, result: Adaptation, trials: dict[str, Any], ended_by: BaseException | None) -> None:
        self.finish(result)

    def abort(self, error: BaseException) -> None:
        if not self.done and self.classifier.backbone.sharded and all_can_save(self.classifier, error, False):
            save_failed_run(self.classifier, failed_verdict(error), self.folder)

    def close(self) -> None:
        """There is nothing to close: its weights wait in a temporary folder."""
