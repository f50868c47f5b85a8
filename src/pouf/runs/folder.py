"""The run folder: everything needed to use, judge and repeat one adaptation.

run/                pouf.json and weights: the classifier that the run advises
run/last, chosen    the other states of the run, where they differ
verdict.json, recipe.toml, classes.txt, metrics.jsonl, skipped.jsonl, run.json, predictions.csv, report.html
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pouf.base import BaseClassifier, State
from pouf.data.base import Unlabelled
from pouf.data.texts import Texts
from pouf.errors import Diverged, InputError
from pouf.recipe import Recipe
from pouf.saving import CARD, Use, read_card, save, write_json
from pouf.training.adaptation import Adaptation
from pouf.training.callbacks import Callback, Step
from pouf.validation.checkpoints import Checkpoint
from pouf.validation.verdict import Verdict, broken_off, not_judged

VERDICT, PREDICTIONS, CHECKPOINTS = "verdict.json", "predictions.csv", "checkpoints"
RECIPE, CLASSES, METRICS, MANIFEST, SKIPPED = "recipe.toml", "classes.txt", "metrics.jsonl", "run.json", "skipped.jsonl"
logger = logging.getLogger(__name__)
PACKAGES = (
    "pouf",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pillow",
    "scikit-learn",
    "accelerate",
)


class RunWriter(Callback):
    """Writes a run folder as things happen: settings at once, steps as they come, the classifier at the end.

    Args:
        sources: what is learned from, by what to call it in the manifest.
        command: the command line that repeats the run, where there is one.
    """

    def __init__(
        self,
        folder: str | Path,
        classifier: BaseClassifier,
        recipe: Recipe,
        sources: Mapping[str, Unlabelled],
        method: str = "pouf",
        command: Sequence[str] = (),
    ) -> None:
        self.folder, self.classifier, self.sources = check_new(folder), classifier, sources
        self.start, self.logged = time.perf_counter(), 0
        self.manifest: dict[str, Any] = {
            "status": "running",
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": list(command),
            "method": method,
            "model": classifier.model,
            "revision": classifier.revision,
            **{name: _facts(source) for name, source in sources.items()},
            "versions": versions(),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"can't make the run folder {str(folder)!r}: {error}. Choose another") from None
        (self.folder / RECIPE).write_text(recipe.to_toml(), encoding="utf-8")
        (self.folder / CLASSES).write_text("".join(f"{name}\n" for name in classifier.classes), encoding="utf-8")
        (self.folder / METRICS).touch()
        write_json(self.folder / MANIFEST, self.manifest)

    def on_step(self, step: Step) -> None:
        with (self.folder / METRICS).open("a", encoding="utf-8") as metrics:
            metrics.write(json.dumps(step._asdict()) + "\n")
        self.logged += 1

    def finish(self, result: Adaptation, status: str = "finished") -> None:
        """All states of the run that differ, each in its folder; the classifier stands as advised afterwards."""
        verdict, checkpoints = result.verdict, result.checkpoints
        if checkpoints is None:
            save(self.classifier, self.folder)
        else:
            names: dict[Checkpoint, tuple[Use, ...]] = {}
            for use in ("chosen", "last"):
                place = result.place(use)
                names[place] = (*names.get(place, ()), use)
            advised = result.place(verdict.advised)
            for place, uses in names.items():
                if place != advised:
                    checkpoints.restore(place)
                    save(self.classifier, self.folder / uses[0], uses)
            checkpoints.restore(advised)
            save(self.classifier, self.folder, names.get(advised, ()))
        self._close(status, verdict, trainable=result.trainable, total=result.total)

    def give_up(self, error: BaseException) -> None:
        """What was learned before the run broke off; a run that had not begun leaves nothing behind."""
        if isinstance(error, InputError) and not self.logged:
            shutil.rmtree(self.folder)  # the next try may use the same name
            return
        verdict, here = broken_off(error), self.classifier.state()
        interrupted = isinstance(error, KeyboardInterrupt)
        status = "diverged" if isinstance(error, Diverged) else "interrupted" if interrupted else "failed"
        try:
            if verdict.advised == "zero-shot":
                save(self.classifier, self.folder / "last", ("chosen", "last"))
                self.classifier.set_state(State(None, None, None, None, dict.fromkeys(here.added)))
                save(self.classifier, self.folder, ())
                self.classifier.set_state(here)
            else:
                save(self.classifier, self.folder)
            self._close(status, verdict, error=str(error))
        except OSError as other:  # what broke the run off is what is to be told
            logger.error("the run could not be saved in %s: %s", self.folder, other)

    def _close(self, status: str, verdict: Verdict, **more: Any) -> None:
        write_json(self.folder / VERDICT, verdict.to_json())
        lines = [
            json.dumps({"of": name, "id": source.ids[i], "reason": why})
            for name, source in self.sources.items()
            for i, why in sorted(source.skipped.items())
        ]
        (self.folder / SKIPPED).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        self.manifest.update({name: _facts(source) for name, source in self.sources.items()})
        seconds = round(time.perf_counter() - self.start, 2)
        write_json(self.folder / MANIFEST, self.manifest | {"status": status, "seconds": seconds} | more)


class Run:
    """A run folder that is there. `Classifier.from_pretrained(folder, use=…)` gives its classifiers."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.card = read_card(self.folder)
        self.manifest: dict[str, Any] = _read_json(self.folder / MANIFEST) or {}
        facts = _read_json(self.folder / VERDICT)
        self.verdict = Verdict.from_json(facts) if facts is not None else not_judged(False)

    @property
    def adapted(self) -> Use:
        """What stands for the adapted model, trusted or not: the chosen step, or the last where that is zero-shot."""
        return "last" if self.verdict.chosen in (0, None, self.verdict.last) else "chosen"

    def lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []

    def steps(self) -> list[dict[str, Any]]:
        """What was logged of each step."""
        return [json.loads(line) for line in self.lines(METRICS)]

    def source(self) -> tuple[str, str | None]:
        """Where the data of the run lie, and the columns of their texts; an error where they are gone."""
        facts = self.manifest.get("data") or self.manifest.get("shots") or {}
        source = facts.get("source", "")
        if not source or not os.path.exists(source.split("::")[0]):
            raise InputError(f"the data of the run, {source!r}, are not there any more: name the inputs")
        return source, facts.get("columns")


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except ValueError as error:
        raise InputError(f"{str(file)!r} is damaged ({error}): restore it, or adapt again") from None


def _facts(data: Unlabelled) -> dict[str, Any]:
    file, *inner = data.source.split("::")  # as features.npz::x
    source = "::".join([os.path.abspath(file), *inner]) if os.path.exists(file) else data.source
    facts = {"source": source, "n": len(data), "skipped": len(data.skipped)}
    return facts | {"columns": ",".join(data.columns)} if isinstance(data, Texts) and data.columns else facts


def check_new(folder: str | Path) -> Path:
    """The folder of a run to come, which must not hold anything yet."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"run folder {str(folder)!r} already exists: choose another, or remove it")
    return folder


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": sys.platform}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


__all__ = ["CARD", "Run", "RunWriter", "check_new", "versions", "write_json"]
