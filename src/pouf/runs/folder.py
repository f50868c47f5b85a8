"""The run folder: everything needed to use, judge and repeat one adaptation."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.cache import FeatureCache
from pouf.data.shots import Shots
from pouf.data.texts import Texts
from pouf.distributed import join
from pouf.errors import Diverged, InputError
from pouf.recipe import Recipe
from pouf.saving import CARD
from pouf.training.trainer import Adaptation, Step, adapt
from pouf.validation.diagnostics import Alarm, Diagnostics, alarms
from pouf.validation.selectors import Choice, Snapshots

CHOICE, CHOSEN, PREDICTIONS = "choice.json", "chosen", "predictions.csv"
Use = Literal["last", "chosen", "zero-shot"]
RECIPE, CLASSES, METRICS, MANIFEST, SKIPPED = "recipe.toml", "classes.txt", "metrics.jsonl", "run.json", "skipped.jsonl"
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


def adapt_run(
    classifier: Classifier,
    data: Unlabelled | None,
    recipe: Recipe,
    folder: str | Path,
    *,
    shots: Shots | None = None,
    cache: FeatureCache | None = None,
    command: Sequence[str] = (),
    on_start: Callable[[str], None] = print,
    on_step: Callable[[Step], None] | None = None,
) -> Adaptation:
    """`adapt`, with everything about it written to a new folder as it happens.

    When training diverges or is interrupted, the weights of the last good step are saved before the error goes on.
    Of several processes the first one writes, and the others only take part.
    """
    if not join(classifier.backbone.device).is_first:
        return adapt(classifier, data, recipe, shots=shots, cache=cache, on_start=lambda message: None)
    inputs = {"data": data, "shots": shots.inputs if shots is not None else None}
    sources = {name: source for name, source in inputs.items() if source is not None}
    writer = RunWriter(check_new(folder), classifier, recipe, sources, command)

    def log(step: Step) -> None:
        writer.log(step)
        if on_step is not None:
            on_step(step)

    try:
        adaptation = adapt(classifier, data, recipe, shots=shots, cache=cache, on_start=on_start, on_step=log)
    except Diverged as error:
        writer.finish("diverged", error=str(error))
        raise
    except KeyboardInterrupt:
        writer.finish("interrupted")
        raise
    except InputError as error:
        if writer.logged:
            writer.finish("failed", error=str(error))
        else:
            shutil.rmtree(writer.folder)  # nothing was learned, and the next try may use the same name
        raise
    if adaptation.snapshots is not None:
        keep_choice(adaptation, assess(adaptation.snapshots, adaptation.choice), writer.folder)
    writer.finish("finished", trainable=adaptation.trainable, total=adaptation.total)
    return adaptation


class RunWriter:
    """Writes a run folder as things happen: settings at once, steps as they come, the classifier at the end."""

    def __init__(
        self,
        folder: Path,
        classifier: Classifier,
        recipe: Recipe,
        sources: Mapping[str, Unlabelled],
        command: Sequence[str],
        start: float | None = None,  # of time.perf_counter
    ) -> None:
        self.folder, self.classifier, self.sources = folder, classifier, sources
        self.start, self.logged = time.perf_counter() if start is None else start, 0
        self.manifest: dict[str, Any] = {
            "status": "running",
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": list(command),
            "model": classifier.model,
            **{name: _facts(source) for name, source in sources.items()},
            "versions": versions(),
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECIPE).write_text(recipe.to_toml(), encoding="utf-8")
        (folder / CLASSES).write_text("".join(f"{name}\n" for name in classifier.classes), encoding="utf-8")
        (folder / METRICS).touch()
        write_json(folder / MANIFEST, self.manifest)

    def log(self, step: Step) -> None:
        with (self.folder / METRICS).open("a", encoding="utf-8") as metrics:
            metrics.write(json.dumps(step._asdict()) + "\n")
        self.logged += 1

    def finish(self, status: str, **more: Any) -> None:
        self.classifier.save(self.folder)
        lines = [
            json.dumps({"of": name, "id": source.ids[i], "reason": why})
            for name, source in self.sources.items()
            for i, why in sorted(source.skipped.items())
        ]
        (self.folder / SKIPPED).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        self.manifest.update({name: _facts(source) for name, source in self.sources.items()})
        seconds = round(time.perf_counter() - self.start, 2)
        write_json(self.folder / MANIFEST, self.manifest | {"status": status, "seconds": seconds} | more)


class Verdict(NamedTuple):
    """Which classifier of a run to use, and why; found without labels."""

    use: Use
    chosen: int  # the step
    last: int
    alarms: list[Alarm]  # of the chosen step, or of the last where the run ended badly or zero-shot was chosen
    diagnostics: Diagnostics  # of the same step
    choice: Choice
    trained: bool
    near: dict[Use, float]  # cosine with the nearest prototype that 99 of 100 inputs reach

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.words(),
            "use": self.use,
            "chosen": self.chosen,
            "last": self.last,
            "near": self.near,
            "alarms": [alarm._asdict() for alarm in self.alarms],
            "signs": self.diagnostics._asdict(),
            "settled": self.choice.settled,
            "snapshots": [snapshot._asdict() for snapshot in self.choice.snapshots],
        }

    def words(self) -> str:
        """The verdict for people."""
        if self.use == "zero-shot":
            why, advice = "no later step agrees as well with the rest of the run as zero-shot itself", ""
            if self.alarms:
                first, *others = self.alarms
                also = f" (also: {', '.join(alarm.name for alarm in others)})" if others else ""
                why, advice = first.words + also, f" {first.advice}" if first.advice else ""
            override = f"--use {'chosen' if self.chosen else 'last'} overrides"
            return f"Do not trust the adapted model: {why}. Zero-shot is used instead ({override}).{advice}"
        if not self.trained:
            return "No alarm. Nothing was trained; predictions are adjusted as a whole."
        return f"No alarm. Step {self.chosen} of {self.last} was chosen without labels and is used."


def assess(snapshots: Snapshots, choice: Choice | None = None) -> Verdict:
    """The step to use, unless an alarm speaks against it or against how the run ended.

    Args:
        choice: what was chosen before, alone or among several runs; by default it is made now.
    """
    choice, last = choice or snapshots.choose(), max(snapshots.seen)
    # A run that ended badly was on its way there before. A choice of zero-shot, too, is told by how the run ended.
    at_the_end = alarms(snapshots.diagnostics(last), choice.settled)
    diagnostics = snapshots.diagnostics(last if at_the_end or choice.step == 0 else choice.step)
    found = at_the_end or alarms(diagnostics)
    use: Use = "zero-shot" if found or choice.step == 0 else "last" if choice.step == last else "chosen"
    steps: dict[Use, int] = {"zero-shot": 0, "chosen": choice.step, "last": last}
    near = {which: snapshots.seen[step].nearness.quantile(0.01).item() for which, step in steps.items()}
    return Verdict(use, choice.step, last, found, diagnostics, choice, bool(snapshots.parameters), near)


def keep_choice(adaptation: Adaptation, trust: Verdict, folder: Path) -> None:
    """Beside the last step in the run folder, the chosen one in a folder of its own."""
    if trust.chosen not in (0, trust.last) and adaptation.snapshots is not None:
        classifier, of_last = adaptation.classifier, adaptation.classifier.postprocessor
        adaptation.snapshots.restore(trust.chosen)
        classifier.postprocessor = adaptation.chosen_adjustment
        classifier.save(folder / CHOSEN)
        adaptation.snapshots.restore(trust.last)
        classifier.postprocessor = of_last
    write_json(folder / CHOICE, trust.to_json())


def load_run(folder: str | Path, use: Use | Literal["auto"] = "auto") -> Classifier:
    """A classifier of a run: what it advises, or another: the last step, the chosen one, or zero-shot."""
    folder = check_run(folder)
    use, advised = advised_use(folder, use), read_choice(folder)
    if use == "zero-shot" or (use == "chosen" and advised is not None and advised["chosen"] == 0):
        return Classifier.load_zero_shot(folder)
    return Classifier.load(folder / CHOSEN if use == "chosen" and (folder / CHOSEN).is_dir() else folder)


def advised_use(folder: str | Path, use: Use | Literal["auto"] = "auto") -> Use:
    """What `auto` stands for in a run; anything else is what it says."""
    if use != "auto":
        return use
    advised = read_choice(folder)
    if advised is None:
        return "zero-shot" if read_manifest(folder).get("status") == "diverged" else "last"
    found: Use = advised["use"]
    return found


def read_verdict(folder: str | Path) -> tuple[str, bool]:
    """What a run says of itself, and whether that is good."""
    choice, manifest = read_choice(folder), read_manifest(folder)
    if choice is not None:
        return choice["verdict"], choice["use"] != "zero-shot"
    status = manifest.get("status", "finished")
    if status == "diverged":
        return f"{manifest['error']}. Zero-shot is used instead (--use last takes the last good weights).", False
    if status != "finished":
        return f"The run has not come to its end ({status}), so nothing speaks for it or against it.", False
    if manifest.get("trainable"):
        return "Not judged: this run took no snapshots, so no step was chosen and no alarm could be raised.", False
    return "Nothing was trained.", True


def adapted_use(folder: str | Path) -> Use:
    """What stands for the adapted model, trusted or not: the chosen step, or the last where that is zero-shot."""
    advised = read_choice(check_run(folder))
    return "last" if advised is None or advised["chosen"] in (0, advised["last"]) else "chosen"


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """How a run came about; nothing for a classifier that was saved without one."""
    file = Path(folder) / MANIFEST
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def read_choice(folder: str | Path) -> dict[str, Any] | None:
    """What `Trust.to_json` wrote; None for a run without a choice."""
    file = Path(folder) / CHOICE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _facts(data: Unlabelled) -> dict[str, Any]:
    file, *inner = data.source.split("::")  # as features.npz::x
    source = "::".join([os.path.abspath(file), *inner]) if os.path.exists(file) else data.source
    facts = {"source": source, "n": len(data), "skipped": len(data.skipped)}
    return facts | {"columns": ",".join(data.columns)} if isinstance(data, Texts) and data.columns else facts


def check_new(folder: str | Path) -> Path:
    """The folder of a run to come, which must not hold anything yet."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"run folder {str(folder)!r} already exists: choose another with --out, or remove it")
    return folder


def check_run(folder: str | Path) -> Path:
    """The folder of a finished run, or an error that says what it is instead."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"no run folder {str(folder)!r}: expected what pouf adapt or pouf demo wrote")
    if not (folder / CARD).is_file():
        raise InputError(f"{str(folder)!r} is not a finished run: expected {CARD} in it; run pouf adapt again")
    return folder


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": sys.platform}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def write_json(file: Path, value: Any) -> None:
    """Whole or not at all: a reader never meets half a file."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, file)
