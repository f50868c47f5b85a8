"""What is lost by choosing without labels, over a grid of learning rates: zero-shot, last step, choice, oracle.

    python benchmarks/selection.py --data DIR/text --out benchmarks/results/selection.json

The digits of the demo with the embedded model, and MR, Subj and TREC with all-MiniLM-L6-v2 (see `texts.py`), each with
five learning rates of which the largest is far too large. The choice of `pouf search` among all trials and steps has no
labels; the oracle takes the best of them by the labels; "last step" is the mean over the rates of where a run ends, and
"choice within a run" the mean over the rates of what each run alone would advise. Runs for hours on two cores; with
`--keep DIR` it goes on where it was interrupted, and another way to choose can be tried in seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from texts import TASKS, UNLABELLED, model_folder, read

from pouf import EMBEDDED, Callback, Classifier, Diverged, Images, InferenceConfig, Recipe, Texts
from pouf.data.base import Unlabelled
from pouf.data.labels import read_labelled
from pouf.demo import DIGITS, write_digits
from pouf.runs.folder import versions
from pouf.training.search import Trial as JudgedTrial
from pouf.training.search import choose_trial, judge_trial
from pouf.validation.checkpoints import Checkpoint, Checkpoints
from pouf.validation.diagnostics import SnapshotPredictions, share
from pouf.validation.verdict import assess

DIGIT_RATES = (2e-3, 6e-3, 2e-2, 6e-2, 2e-1)
TEXT_RATES = (3e-6, 1e-5, 3e-5, 1e-4, 1e-3)


class Task(NamedTuple):
    build: Callable[[], Classifier]
    data: Unlabelled
    test: Unlabelled
    labels: torch.Tensor
    recipe: Recipe
    rates: Sequence[float]


class Trial(NamedTuple):
    """What one rate gave: without labels, and how right it was."""

    checkpoints: Checkpoints | None  # None where training diverged
    accuracy: dict[int, float]  # by step


def run_trial(task: Task, rate: float, zero_shot: float | None) -> Trial:
    """`zero_shot`: its accuracy, where an earlier trial has found it."""
    accuracies = dict[int, float]()

    class Look(Callback):
        def on_checkpoint(self, step: int, classifier: Classifier) -> None:
            if step == 0 and zero_shot is not None:
                accuracies[step] = zero_shot
                return
            guess = classifier.infer(task.test, InferenceConfig(256)).log_probabilities.argmax(1)
            accuracies[step] = share(guess == task.labels)
            print(f"    {rate:g} step {step}: {100 * accuracies[step]:.1f}", flush=True)

    try:
        settings = {"optimisation.lr": rate}
        result = task.build().adapt(task.data, recipe=task.recipe, settings=settings, callbacks=[Look()])
    except Diverged:
        return Trial(None, accuracies)
    return Trial(result.checkpoints, accuracies)


def kept_trial(task: Task, rate: float, zero_shot: float | None, file: Path | None) -> Trial:
    """A trial, or what a file holds of it, so that other ways to choose can be tried without training again."""
    if file is not None and file.is_file():
        return _read(file)
    trial = run_trial(task, rate, zero_shot)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        stored = {"accuracy": trial.accuracy, "features": None, "seen": {}, "kept": []}
        if trial.checkpoints is not None:
            stored["features"] = trial.checkpoints.sample.features
            stored["seen"] = {
                checkpoint.step: list(predictions) for checkpoint, predictions in trial.checkpoints.predictions.items()
            }
            stored["kept"] = [checkpoint.step for checkpoint in trial.checkpoints.postprocessors]
            stored["target_offsets"] = trial.checkpoints.target_offsets
        torch.save(stored, file)
    return trial


def _read(file: Path) -> Trial:
    stored = torch.load(file)
    if not stored["seen"]:
        return Trial(None, stored["accuracy"])
    # All that a choice looks at: predictions, features, and which steps have their weights. There is no classifier.
    backbone = SimpleNamespace(added_by_tuners=(), sharded=False)
    nobody = SimpleNamespace(postprocessor=None, adapted=False, backbone=backbone)
    there = Checkpoints(
        nobody, nobody, SimpleNamespace(features=stored["features"]), max(stored["seen"]),
        target_offsets=stored.get("target_offsets"),
    )  # type: ignore[arg-type]  # fmt: skip
    there.tuner = object()  # type: ignore[assignment]  # something was trained
    there.predictions = {Checkpoint(step): SnapshotPredictions(*parts) for step, parts in stored["seen"].items()}
    there.postprocessors = dict.fromkeys(map(Checkpoint, stored.get("kept", stored["seen"])))  # type: ignore[arg-type]
    return Trial(there, stored["accuracy"])


def measure(task: Task, keep: Path | None) -> dict[str, Any]:
    """`keep`: how the files of the trials begin."""
    tried: list[Trial] = []
    for rate in task.rates:
        zero_shot = tried[0].accuracy[0] if tried else None
        tried.append(kept_trial(task, rate, zero_shot, keep and keep.with_name(f"{keep.name}-{rate:g}.pt")))
    zero_shot = tried[0].accuracy[0]
    judged, within, ends = [], [], []
    for rate, trial in zip(task.rates, tried, strict=True):
        if trial.checkpoints is None:
            judged.append(JudgedTrial({"lr": rate}, {}, why_not="diverged"))
            within.append(zero_shot)
            ends.append(trial.accuracy[max(trial.accuracy)])
            continue
        choice = trial.checkpoints.choose()
        judged.append(judge_trial({"lr": rate}, trial.checkpoints, choice))
        verdict = assess(trial.checkpoints, choice)
        within.append(zero_shot if verdict.advised == "zero-shot" else trial.accuracy[verdict.chosen])
        ends.append(trial.accuracy[verdict.last])
    ranking = choose_trial(judged)
    return {
        "zero_shot": zero_shot,
        "last": ends,
        "within": within,
        "chosen": zero_shot if ranking.best is None else tried[ranking.best].accuracy[ranking.step],
        "chosen_setting": None if ranking.best is None else [task.rates[ranking.best], ranking.step],
        "oracle": max(value for trial in tried for value in trial.accuracy.values()),
        "not_believed": {f"{trial.settings['lr']:g}": trial.why_not for trial in judged if trial.why_not},
        "steps": {
            f"{rate:g}": {str(step): round(value, 4) for step, value in trial.accuracy.items()}
            for rate, trial in zip(task.rates, tried, strict=True)
        },
    }


def on_digits(seed: int, snapshots: int, keep: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        labelled = read_labelled(write_digits(folder), DIGITS, "image")
        recipe = Recipe.load("demo").with_settings(seed=seed, snapshots=snapshots)
        task = Task(
            lambda: Classifier.from_pretrained(EMBEDDED, DIGITS), Images.from_folder(folder), labelled.inputs,
            torch.tensor(labelled.labels), recipe, DIGIT_RATES,
        )  # fmt: skip
        return measure(task, keep)


def on_texts(
    name: str, data: Path, model: Path, seed: int, snapshots: int, most: int, keep: Path | None
) -> dict[str, Any]:
    words, templates = TASKS[name]
    unlabelled = random.Random(0).sample(read(data / name / "train.jsonl")[0], UNLABELLED)
    rows = list(zip(*read(data / name / "test.jsonl"), strict=True))
    texts, names = zip(*random.Random(0).sample(rows, min(most, len(rows))), strict=True)
    labels = torch.tensor([list(words).index(label) for label in names])
    recipe = Recipe.load("texts").with_settings(seed=seed, snapshots=snapshots)
    task = Task(
        lambda: Classifier.from_pretrained(model, list(words.values()), templates), Texts(unlabelled), Texts(texts),
        labels, recipe, TEXT_RATES,
    )  # fmt: skip
    return measure(task, keep)


def table(results: dict[str, dict[str, Any]]) -> str:
    columns = "zero-shot | last step | choice within a run | choice over the grid | oracle (peeks at labels)"
    lines = [f"| | {columns} |", "|---" * 6 + "|"]
    for name, seeds in results.items():
        runs = list(seeds.values())
        cells = [statistics.mean(run["zero_shot"] for run in runs)]
        cells += [statistics.mean(v for run in runs for v in run[key]) for key in ("last", "within")]
        cells += [statistics.mean(run[key] for run in runs) for key in ("chosen", "oracle")]
        lines.append(f"| {name} ({len(runs)} seeds) | {' | '.join(f'{100 * cell:.1f}' for cell in cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the language tasks, for mr, subj and trec")
    parser.add_argument("--model", type=Path, help="folder of a sentence encoder; default: the installed package")
    parser.add_argument("--names", nargs="+", default=["digits", *TASKS], choices=["digits", *TASKS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--snapshots", type=int, default=5)
    parser.add_argument("--test", type=int, default=1000, help="most test texts of a task, drawn at random")
    parser.add_argument("--out", type=Path, help="file for the results, JSON; what is in it stays and is added to")
    parser.add_argument("--keep", type=Path, help="folder for what each trial showed; what is in it is not run again")
    given = parser.parse_args()
    facts = json.loads(given.out.read_text()) if given.out and given.out.is_file() else {"results": {}}
    for seed in given.seeds:
        for name in given.names:
            print(f"{name}, seed {seed}", flush=True)
            keep = given.keep and given.keep / f"{name}-{seed}"
            if name == "digits":
                found = on_digits(seed, given.snapshots, keep)
            else:
                found = on_texts(name, given.data, model_folder(given.model), seed, given.snapshots, given.test, keep)
            facts["results"].setdefault(name, {})[str(seed)] = found
            facts["versions"] = versions()
            if given.out is not None:
                given.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(table(facts["results"]))


if __name__ == "__main__":
    main()
