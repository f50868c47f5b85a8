"""Writes a run folder: as things happen, and whatever ends the run."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.texts import Texts
from pouf.errors import Diverged, InputError
from pouf.files import LOCK, clear_partial, discard, lock_folder, write_json, write_text
from pouf.interruption import AtOnce
from pouf.runs.folder import read_manifest, versions
from pouf.runs.names import (
    BEFORE,
    CHECKPOINTS,
    CLASSES,
    DESCRIPTIONS,
    MANIFEST,
    METRICS,
    PLAN,
    RECIPE,
    SKIPPED,
    TRIALS,
)
from pouf.runs.overwriting import bring_back, check_apart, clear_moved, remove, set_aside
from pouf.runs.states import all_can_save, save_failed_run, save_states
from pouf.saving import CARD
from pouf.training.adaptation import Adaptation
from pouf.training.callbacks import Callback, Step
from pouf.training.plan import Plan
from pouf.validation.checkpoints import STATE, Checkpoints
from pouf.validation.verdict import failed_verdict

logger = logging.getLogger(__name__)


class RunWriter(Callback):
    """Writes a run folder as things happen: settings at once, steps as they come, the classifier at the end.

    Until then the folder belongs to this process alone.

    Args:
        plan: what is done.
        command: the command line that repeats the run, where there is one.
        resume, overwrite: what to do with a run that is there.
        trains: the classifier itself is trained; a search trains copies of it, has nothing new before its end, and
            logs the steps of the chosen copy alone.
        facts: more for the manifest.
    """

    def __init__(
        self,
        folder: str | Path,
        classifier: Classifier,
        plan: Plan,
        command: Sequence[str] = (),
        resume: bool = False,
        overwrite: bool = False,
        trains: bool = True,
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        sources = plan.sources()
        self.trains, self.overwrites = trains, overwrite
        self.folder = check_new(folder, resume, overwrite)
        if overwrite:
            check_apart(self.folder, sources)
        self.fresh = not self.folder.exists() or not any(self.folder.iterdir())
        self.lock = lock_folder(self.folder / CHECKPOINTS)
        self.classifier, self.sources, self.logged, self.done = classifier, sources, 0, False
        self.checkpoints: Checkpoints | None = None  # of a run that has come to its end
        self.start = time.perf_counter()
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        clear_moved(self.folder)
        # Of the run that goes on: what it says of itself stays, if it can't.
        names = [
            name
            for name in (MANIFEST, RECIPE, PLAN, CLASSES, DESCRIPTIONS)
            if resume and (self.folder / name).is_file()
        ]
        self.before = {name: (self.folder / name).read_text(encoding="utf-8") for name in names}
        earlier = read_manifest(self.folder) if resume else {}
        self.manifest: dict[str, Any] = {
            "status": "running",
            "created": earlier.get("created", now),
            **({"resumed": [*earlier.get("resumed", []), now]} if earlier else {}),
            "command": list(command),
            "method": plan.method,
            "model": classifier.model,
            "revision": classifier.revision,
            **{name: _facts(source) for name, source in sources.items()},
            **facts,
            "versions": versions(),
        }
        try:
            clear_partial(self.folder)
            if overwrite:
                set_aside(self.folder)
            write_json(self.folder / MANIFEST, self.manifest)
            write_text(self.folder / RECIPE, plan.recipe.to_toml())
            write_json(self.folder / PLAN, plan.to_json())
            if classifier.descriptions is None:
                write_text(self.folder / CLASSES, "".join(f"{name}\n" for name in classifier.classes))
            else:
                named = zip(classifier.classes, classifier.descriptions, strict=True)
                write_json(self.folder / DESCRIPTIONS, dict(named))
            (self.folder / METRICS).touch()
        except OSError as error:
            with suppress(OSError):
                self.roll_back()
            self.lock.release()
            raise InputError(f"can't write into the run folder {str(folder)!r}: {error}. Choose another") from None

    def on_resume(self, history: list[Step]) -> None:
        """Steps that were logged after the state was saved are taken again, and logged again."""
        if self.trains:
            self._log(history)
        self.logged = len(history)

    def on_step(self, step: Step) -> None:
        file = self.folder / METRICS
        if not file.exists():
            raise FileNotFoundError(f"the run folder {str(self.folder)!r} was removed while the run was under way")
        if self.trains:
            with file.open("a" if self.logged else "w", encoding="utf-8") as metrics:
                metrics.write(json.dumps(step._asdict()) + "\n")
        self.logged += 1

    def _log(self, history: list[Step]) -> None:
        write_text(self.folder / METRICS, "".join(json.dumps(step._asdict()) + "\n" for step in history))

    def finish(self, result: Adaptation, status: str = "finished") -> None:
        """All states of the run that differ, each in its folder."""
        inner, self.checkpoints = save_states(result, self.folder), result.checkpoints
        for stale in {"chosen", "last"} - inner if result.checkpoints is not None else ():
            shutil.rmtree(self.folder / stale, ignore_errors=True)  # of the run before it was interrupted
        write_text(self.folder / RECIPE, result.recipe.to_toml())  # as it was made to fit the data
        drift = {} if result.drift is None else {"drift": result.drift._asdict()}
        self._close(status, trainable=result.trainable, total=result.total, **drift)
        self.done = True

    def finish_search(self, result: Adaptation, trials: dict[str, Any], ended_by: BaseException | None) -> None:
        """The chosen trial as if it were a run of its own, and what came of all of them."""
        self._log(result.history)
        write_json(self.folder / TRIALS, trials)
        self.finish(result, "finished" if ended_by is None else _status(ended_by))

    def close(self) -> None:
        """The run has come to its end: there is nothing to go on from. Weights that wait go with their checkpoints."""
        (self.folder / CHECKPOINTS / STATE).unlink(missing_ok=True)
        if self.checkpoints is not None:
            self.checkpoints.release()
        for child in [] if self.trains else (self.folder / CHECKPOINTS).iterdir():  # the trials of a search
            if child.name != LOCK and (self.checkpoints is None or child != self.checkpoints.folder):
                remove(child)
        self.checkpoints = None
        self._free()

    def _free(self) -> None:
        (self.folder / CHECKPOINTS / LOCK).unlink(missing_ok=True)
        self.lock.release()
        with suppress(OSError):
            (self.folder / CHECKPOINTS).rmdir()

    def abort(self, error: BaseException) -> None:
        """What was learned before the run broke off; a run that had not begun leaves nothing behind."""
        with ExitStack() as stack:
            stack.callback(self.lock.release)
            if self.done:
                return
            undoes = not self.logged and (self.overwrites or bool(self.before) or isinstance(error, InputError))
            wanted = self.trains and not undoes and not isinstance(error, AtOnce)
            saves = all_can_save(self.classifier, error, wanted)
            if undoes:
                self.roll_back()
            elif saves:
                self._save_failed_run(error)
            elif wanted or not self.trains:
                with suppress(OSError):
                    write_json(self.folder / MANIFEST, self.manifest | {"status": _status(error), "error": str(error)})

    def roll_back(self) -> None:
        """The folder before this run."""
        if self.overwrites and (self.folder / BEFORE).is_dir():
            bring_back(self.folder)
            self._free()
        elif self.fresh:
            shutil.rmtree(self.folder)  # the next try may use the same name
        else:
            for name, text in self.before.items():
                write_text(self.folder / name, text)

    def _save_failed_run(self, error: BaseException) -> None:
        verdict = failed_verdict(error)
        try:
            save_failed_run(self.classifier, verdict, self.folder)
            self._close(_status(error), error=str(error))
        except Exception as other:  # what broke the run off is what is to be told
            logger.error("the run could not be saved in %s: %s", self.folder, other)

    def _close(self, status: str, **more: Any) -> None:
        lines = [
            json.dumps({"of": name, "id": source.ids[i], "reason": why})
            for name, source in self.sources.items()
            for i, why in sorted(source.skipped.items())
        ]
        write_text(self.folder / SKIPPED, "".join(line + "\n" for line in lines))
        self.manifest.update({name: _facts(source) for name, source in self.sources.items()})
        seconds = round(time.perf_counter() - self.start, 2)
        write_json(self.folder / MANIFEST, self.manifest | {"status": status, "seconds": seconds} | more)
        if status == "finished":
            discard(self.folder / BEFORE)  # the run that this one takes the place of


def _facts(data: Unlabelled) -> dict[str, Any]:
    file, *inner = data.source.split("::")  # as features.npz::x
    source = "::".join([os.path.abspath(file), *inner]) if os.path.exists(file) else data.source
    facts = {"source": source, "n": len(data), "skipped": len(data.skipped)}
    columns = data.columns if isinstance(data, Texts) else ()
    named = {"columns": columns, "id_columns": data.id_columns}
    return facts | {name: ",".join(value) for name, value in named.items() if value}


def check_new(folder: str | Path, resume: bool = False, overwrite: bool = False) -> Path:
    """The folder of a run to come, which must not hold anything yet, unless it is to be resumed or overwritten."""
    folder = Path(folder)
    above = next((parent for parent in folder.parents if parent.exists()), None)
    if above is not None and not above.is_dir():
        raise InputError(f"can't make the run folder {str(folder)!r}: {str(above)!r} is a file. Choose another place")
    if resume and overwrite:
        raise InputError("a run is either resumed or overwritten: choose one")
    if not folder.exists():
        return folder
    if not folder.is_dir():
        raise InputError(f"run folder {str(folder)!r} is a file: choose another")
    if not any(child.name != CHECKPOINTS for child in folder.iterdir()):
        return folder
    if not (resume or overwrite):
        raise InputError(
            f"run folder {str(folder)!r} already exists: give resume=True to continue the run "
            "there, overwrite=True to replace it, or another folder"
        )
    if not any((folder / name).exists() for name in (MANIFEST, CARD, BEFORE)):
        raise InputError(f"{str(folder)!r} holds files, but no run: choose another folder")
    # Until all is written, predictions and report too, the lock is there, even if its owner was killed.
    finished = read_manifest(folder).get("status", "finished") == "finished"
    if resume and finished and not (folder / CHECKPOINTS / LOCK).exists():
        raise InputError(
            f"the run in {str(folder)!r} is finished: there is nothing to resume; give overwrite=True to run again"
        )
    return folder


def _status(error: BaseException) -> str:
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return "interrupted"
    return "diverged" if isinstance(error, Diverged) else "failed"
