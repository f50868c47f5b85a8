"""A run folder that is written: locked, written beside, committed in one rename, rolled back where a run is refused.

run/unfinished    where the run is written: a run folder of its own, with the checkpoints that it can be resumed from
run/.replaced     the unfinished run that it overwrites, until it has taken a step
run/.saved        the run from its commit on, until each part of it is in its place
run/.weights-…    of a finished run, while its result can still be asked for them

The run that stands in the folder stays there until the commit: a process that is killed at any moment leaves either.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.texts import Texts
from pouf.errors import Diverged, InputError
from pouf.files import (
    LOCK,
    PARTIAL,
    clear_partial,
    copy,
    discard,
    lock_folder,
    write_json,
    write_text,
)
from pouf.interruption import ImmediateExit, defer_signals, ends_all_processes
from pouf.options import Output
from pouf.parallel.fsdp import is_main
from pouf.parallel.process_group import init_processes
from pouf.runs.folder import (
    CHECKPOINTS,
    CLASSES,
    DESCRIPTIONS,
    MANIFEST,
    METRICS,
    PLAN,
    RECIPE,
    SKIPPED,
    TRIALS,
    UNFINISHED,
    VERDICT,
    read_manifest,
    versions,
)
from pouf.saving import CARD, DETAILS, MODEL_FOLDER, SAVED, Use, is_saved, put_in_place, replacing, stored, write
from pouf.training.adaptation import Adaptation
from pouf.training.callbacks import Callback, Step
from pouf.training.plan import Plan
from pouf.validation.checkpoints import Checkpoint, Checkpoints
from pouf.validation.verdict import failed_verdict

REPLACED, WEIGHTS = ".replaced", ".weights"
AT_START = (MANIFEST, RECIPE, PLAN, CLASSES, DESCRIPTIONS)  # written before anything is computed
logger = logging.getLogger(__name__)


class RunFolder:
    """Use it by `RunFolder.open`. Processes but the first write nothing; where weights are sharded, they take part.

    Args:
        classifier: what is adapted.
        plan: what is done.
        command: the command line that repeats the run, where there is one.
        trains: the classifier itself is trained; a search trains others, and has nothing to save before its end.
        facts: more for the manifest.
    """

    def __init__(
        self,
        output: Output,
        classifier: Classifier,
        plan: Plan,
        command: Sequence[str],
        trains: bool,
        facts: Mapping[str, Any],
    ) -> None:
        self.folder = Path(output.folder)
        self.unfinished = self.folder / UNFINISHED
        self.classifier, self.sources, self.trains = classifier, plan.sources(), trains
        self.overwrites, self.created = output.overwrite, False  # created: nothing unfinished is continued
        self.stepped, self.written, self.status = False, False, "running"
        self.checkpoints: Checkpoints | None = None  # of the result
        self.start = time.perf_counter()
        if not is_main():
            return
        check_new(self.folder, output.resume, output.overwrite)
        if output.overwrite:
            _check_apart(self.folder, self.sources)
        self.fresh = not self.folder.exists() or not any(self.folder.iterdir())
        self.lock = lock_folder(self.folder)
        self.before: dict[Path, str] = {}  # what an unfinished run says of itself: it stays, if it can't be resumed
        try:
            clear_partial(self.folder)
            for left in self.folder.glob(f"{WEIGHTS}-*"):
                discard(left)
            put_in_place(self.folder)  # of a process that was killed in its commit
            self._bring_back_replaced()  # of one that was killed before its first step
            if self.overwrites and self.unfinished.is_dir():
                self.unfinished.rename(self.folder / REPLACED)
            self.created = not self.unfinished.is_dir()
            files = [file for name in AT_START if (file := self.unfinished / name).is_file()]
            self.before = {file: file.read_text(encoding="utf-8") for file in files}
            self.manifest = {**self._new_manifest(plan, command, output.resume), **facts}
            self._write_start(plan)
        except BaseException as error:
            with suppress(OSError):
                self._roll_back()
            self._unlock()
            if not isinstance(error, OSError):
                raise
            raise InputError(f"can't write into the run folder {str(self.folder)!r}: {error}. Choose another") from None

    @classmethod
    @contextmanager
    def open(
        cls,
        output: Output,
        classifier: Classifier,
        plan: Plan,
        command: Sequence[str] = (),
        trains: bool = True,
        facts: Mapping[str, Any] | None = None,
    ) -> Iterator[RunFolder]:
        """A folder to write a run into. Whatever error ends it, what was learned is saved and can be resumed."""
        run: RunFolder | None = None
        try:
            with defer_signals():
                run = cls(output, classifier, plan, command, trains, facts or {})
            yield run
        except BaseException as error:
            if run is not None:
                with defer_signals():
                    run._abort(error)
            raise
        with defer_signals():
            run._close()

    @property
    def checkpoint_dir(self) -> Path:
        return self.unfinished / CHECKPOINTS

    def callbacks(self) -> list[Callback]:
        """For the run that is written here."""
        log = [MetricsLog(self.unfinished / METRICS)] if self.trains else []
        return [_AfterStep(self), *log] if is_main() else []

    def write(
        self, result: Adaptation, trials: Mapping[str, Any] | None = None, ended_by: BaseException | None = None
    ) -> None:
        """The result, beside the run that is there until `commit`. All processes call it, for their shards.

        Args:
            trials: of a search, whose chosen trial is written as if it were a run of its own.
            ended_by: what ended the search before all trials were run.
        """
        if not (is_main() or self.classifier.backbone.sharded):
            return
        with defer_signals():
            _write_states(result, self.unfinished)
            if is_main():
                if trials is not None:
                    write_json(self.unfinished / TRIALS, trials)
                _log(self.unfinished / METRICS, result.history)
                write_text(self.unfinished / RECIPE, result.recipe.to_toml())  # as it was made to fit the data
                drift = {} if result.drift is None else {"drift": result.drift._asdict()}
                status = "finished" if ended_by is None else _status(ended_by)
                self._write_manifest(status, trainable=result.trainable, total=result.total, **drift)
            self.written, self.checkpoints = True, result.checkpoints

    def commit(self) -> None:
        """The run takes the place of the one that is there. An unfinished one takes none of a finished run."""
        if is_main() and (self.status == "finished" or not _finished(self.folder)):
            with defer_signals(), replacing(self.folder) as partial:
                for child in self.unfinished.iterdir():
                    if child.name != CHECKPOINTS:
                        copy(child, partial / child.name)

    def check_step(self) -> None:
        """After a step: an unfinished run that this one overwrites is not needed any more."""
        if not (self.unfinished / MANIFEST).is_file():
            raise FileNotFoundError(f"the run folder {str(self.folder)!r} was removed while the run was under way")
        if not self.stepped:
            discard(self.folder / REPLACED)
        self.stepped = True

    def _new_manifest(self, plan: Plan, command: Sequence[str], resume: bool) -> dict[str, Any]:
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        earlier = (read_manifest(self.unfinished) or read_manifest(self.folder)) if resume else {}
        return {
            "status": "running",
            "created": earlier.get("created", now),
            **({"resumed": [*earlier.get("resumed", []), now]} if earlier else {}),
            "command": list(command),
            "method": plan.method,
            "model": self.classifier.model,
            "revision": self.classifier.revision,
            **{name: _facts(source) for name, source in self.sources.items()},
            "versions": versions(),
        }

    def _write_start(self, plan: Plan) -> None:
        (self.unfinished / DETAILS).mkdir(parents=True, exist_ok=True)
        write_json(self.unfinished / MANIFEST, self.manifest)
        write_text(self.unfinished / RECIPE, plan.recipe.to_toml())
        write_json(self.unfinished / PLAN, plan.to_json())
        classes, descriptions = self.classifier.classes, self.classifier.descriptions
        if descriptions is None:
            write_text(self.unfinished / CLASSES, "".join(f"{name}\n" for name in classes))
        else:
            write_json(self.unfinished / DESCRIPTIONS, dict(zip(classes, descriptions, strict=True)))

    def _write_manifest(self, status: str, **more: Any) -> None:
        lines = [
            json.dumps({"of": name, "id": source.ids[i], "reason": why})
            for name, source in self.sources.items()
            for i, why in sorted(source.skipped.items())
        ]
        write_text(self.unfinished / SKIPPED, "".join(line + "\n" for line in lines))
        self.manifest.update({name: _facts(source) for name, source in self.sources.items()})
        seconds = round(time.perf_counter() - self.start, 2)
        write_json(self.unfinished / MANIFEST, self.manifest | {"status": status, "seconds": seconds} | more)
        self.status = status

    def _close(self) -> None:
        """Nothing is left to resume; weights that the result can still be asked for are deleted with it."""
        if is_main():
            if self.checkpoints is not None:
                self.checkpoints.release(self.folder / f"{WEIGHTS}-{uuid.uuid4().hex[:12]}")
            self.checkpoints = None  # they know the callbacks, and these the run: a cycle would delay their end
            discard(self.folder / REPLACED)
            discard(self.unfinished)
            self._unlock()

    def _abort(self, error: BaseException) -> None:
        """What was learned is saved, beside what the run can be resumed from; a refused run changes nothing."""
        if not (is_main() or self.classifier.backbone.sharded):
            return
        unused = not self.stepped and not self.written
        refused = unused and (self.overwrites or not self.created or isinstance(error, InputError))
        wanted = self.trains and not self.written and not refused and not isinstance(error, ImmediateExit)
        try:
            saves = not self.written and _all_can_save(self.classifier, error, wanted)
            if saves:
                self._save_failed(error)
            if not is_main():
                return
            if refused:
                self._roll_back()
            elif not saves and not self.written and (wanted or not self.trains):
                write_json(self.unfinished / MANIFEST, self.manifest | {"status": _status(error), "error": str(error)})
            if saves or (self.written and not isinstance(error, ImmediateExit)):
                self.commit()
        except Exception as other:  # what ended the run is the error that counts
            logger.error("the run could not be saved in %s: %s", self.folder, other)
        finally:
            if is_main():
                self._unlock()

    def _save_failed(self, error: BaseException) -> None:
        """What was learned so far, as the last step of a run that advises zero-shot or this."""
        verdict, classifier = failed_verdict(error), self.classifier
        _clear_states(self.unfinished)
        if verdict.advised != "zero-shot":
            write(classifier, self.unfinished / MODEL_FOLDER)
        else:
            write(classifier, self.unfinished / DETAILS / "last", ("chosen", "last"))
            zero_shot = classifier.copy()
            zero_shot.tuner_settings = zero_shot.prompt = zero_shot.postprocessor = zero_shot.demonstrations = None
            write(zero_shot, self.unfinished / MODEL_FOLDER, ())  # its weights are those of the last step
        if is_main():
            write_json(self.unfinished / VERDICT, verdict.to_json())
            self._write_manifest(_status(error), error=str(error))

    def _roll_back(self) -> None:
        """The folder as it was before this run."""
        if self.fresh:
            shutil.rmtree(self.folder)  # the next try may use the same name
        elif not self.created:
            for file, text in self.before.items():
                write_text(file, text)
        else:
            discard(self.unfinished)
            self._bring_back_replaced()

    def _bring_back_replaced(self) -> None:
        if (self.folder / REPLACED).is_dir():
            discard(self.unfinished)
            (self.folder / REPLACED).rename(self.unfinished)

    def _unlock(self) -> None:
        (self.folder / LOCK).unlink(missing_ok=True)
        self.lock.release()


class MetricsLog(Callback):
    """A line of JSON per step."""

    def __init__(self, file: Path) -> None:
        self.file, self.begun = file, False

    def on_resume(self, history: list[Step]) -> None:
        """Steps that were logged after the state was saved are taken again, and logged again."""
        _log(self.file, history)
        self.begun = True

    def on_step(self, step: Step) -> None:
        if not self.begun:
            _log(self.file, [])  # a new file: that of an earlier run may be linked elsewhere
        self.begun = True
        with self.file.open("a", encoding="utf-8") as metrics:
            metrics.write(json.dumps(step._asdict()) + "\n")


class _AfterStep(Callback):
    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def on_resume(self, history: list[Step]) -> None:
        self.run.check_step()

    def on_step(self, step: Step) -> None:
        self.run.check_step()


def _log(file: Path, history: Sequence[Step]) -> None:
    write_text(file, "".join(json.dumps(step._asdict()) + "\n" for step in history))


def _write_states(result: Adaptation, folder: Path) -> None:
    """All states of a run that differ, each in its folder, and the verdict."""
    _clear_states(folder)
    if is_main():
        write_json(folder / VERDICT, result.verdict.to_json())
    if result.checkpoints is None:
        write(result.classifier, folder / MODEL_FOLDER)
        return
    states: dict[Checkpoint, tuple[Use, ...]] = {}
    uses: tuple[Use, ...] = ("chosen", "last")
    for use in uses:
        checkpoint = result.checkpoint(use)
        states[checkpoint] = (*states.get(checkpoint, ()), use)
    advised = states.pop(result.checkpoint("advised"), ())
    for own in states.values():
        write(result.at(own[0]), folder / DETAILS / own[0], own)
    write(result.at("advised"), folder / MODEL_FOLDER, advised)


def _clear_states(folder: Path) -> None:
    """Of the run before it was resumed."""
    if is_main():
        for name in (MODEL_FOLDER, f"{DETAILS}/chosen", f"{DETAILS}/last"):
            discard(folder / name)
        (folder / DETAILS).mkdir(parents=True, exist_ok=True)  # somebody may have removed it


def _all_can_save(classifier: Classifier, error: BaseException, wanted: bool) -> bool:
    """Whether a run that broke off is to be saved: as the first process wants, where all know of the error.

    Shards lie on processes that know nothing of an error that came to one of them alone.
    """
    if not classifier.backbone.sharded:
        return wanted
    return ends_all_processes(error) and init_processes(classifier.device).broadcast(wanted)


def _facts(data: Unlabelled) -> dict[str, Any]:
    file, *inner = data.source.split("::")  # as features.npz::x
    source = "::".join([os.path.abspath(file), *inner]) if os.path.exists(file) else data.source
    facts = {"source": source, "n": len(data), "skipped": len(data.skipped)}
    columns = data.columns if isinstance(data, Texts) else ()
    named = {"columns": columns, "id_columns": data.id_columns}
    return facts | {name: ",".join(value) for name, value in named.items() if value}


def check_new(folder: str | Path, resume: bool = False, overwrite: bool = False) -> None:
    """An error where a run can't be written: in a folder that holds anything, it must be resumed or overwritten."""
    folder = Path(folder)
    above = next((parent for parent in folder.parents if parent.exists()), None)
    if above is not None and not above.is_dir():
        raise InputError(f"can't make the run folder {str(folder)!r}: {str(above)!r} is a file. Choose another place")
    if resume and overwrite:
        raise InputError("a run is either resumed or overwritten: choose one")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"run folder {str(folder)!r} is a file: choose another")
    there = [child.name for child in folder.iterdir()] if folder.exists() else []
    if not any(name != LOCK and not name.endswith(PARTIAL) for name in there):
        return
    if not (resume or overwrite):
        raise InputError(
            f"run folder {str(folder)!r} already exists: give resume=True to continue the run "
            "there, overwrite=True to replace it, or another folder"
        )
    unfinished = not {UNFINISHED, REPLACED}.isdisjoint(there)
    if not unfinished and not any((folder / name).exists() for name in (SAVED, MANIFEST, MODEL_FOLDER, CARD)):
        raise InputError(f"{str(folder)!r} holds files, but no run: choose another folder")
    if resume and not unfinished and _finished(folder):
        raise InputError(
            f"the run in {str(folder)!r} is finished: there is nothing to resume; give overwrite=True to run again"
        )


def _check_apart(folder: Path, sources: Mapping[str, Unlabelled]) -> None:
    for source in sources.values():
        file = Path(source.source.split("::")[0])
        if file.exists() and file.resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"the inputs {str(file)!r} lie in the run folder that is to be overwritten: choose another"
            )


def _finished(folder: Path) -> bool:
    return is_saved(folder) and read_manifest(stored(folder)).get("status", "finished") == "finished"


def _status(error: BaseException) -> str:
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return "interrupted"
    return "diverged" if isinstance(error, Diverged) else "failed"
