"""What is lost by choosing without labels, over a grid of learning rates: zero-shot, last step, choice, oracle.

    python benchmarks/selection.py --data DIR/text --out benchmarks/results/selection.json

The digits of the demo with the embedded model, and MR, Subj and TREC with all-MiniLM-L6-v2 (see `texts.py`), each with
five learning rates of which the largest is far too large. `pouf.tuning.tune` chooses among all trials and steps without
labels; the oracle takes the best of them by the labels; "last step" is the mean over the rates of where a run ends, and
"choice within a run" the mean over the rates of what each run alone would advise.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from texts import TASKS, UNLABELLED, model_folder, read

from pouf import EMBEDDED, Classifier, Images, Recipe, Texts
from pouf.data.base import Unlabelled
from pouf.data.labelled import read_labelled
from pouf.demo import DIGITS, write_digits
from pouf.encoding import Reading
from pouf.evaluation import accuracy
from pouf.runs import judge, versions
from pouf.tuning import grid, tune

DIGIT_RATES = (2e-3, 6e-3, 2e-2, 6e-2, 2e-1)
TEXT_RATES = (3e-6, 1e-5, 3e-5, 1e-4, 1e-3)


def measure(
    build: Callable[[], Classifier],
    data: Unlabelled,
    test: Unlabelled,
    labels: torch.Tensor,
    recipe: Recipe,
    rates: Sequence[float],
) -> dict[str, Any]:
    at: dict[tuple[int, int], float] = {}

    def look(trial: int, step: int, classifier: Classifier) -> None:
        at[trial, step] = accuracy(classifier.score(test, Reading(256)).log_probabilities.argmax(1), labels)
        print(f"    {rates[trial]:g} step {step}: {100 * at[trial, step]:.1f}", flush=True)

    tuning, _ = tune(build, data, recipe, grid(**{"optimisation.lr": rates}), look=look)
    zero_shot = at[0, 0]
    within = []
    for i, trial in enumerate(tuning.trials):
        trust = judge(trial.adaptation) if trial.adaptation is not None else None
        advised = 0 if trust is None or trust.use == "zero-shot" else trust.chosen
        within.append(at.get((i, advised), zero_shot))
    ends = [at.get((i, recipe.steps), 0.0) for i in range(len(rates))]
    return {
        "zero_shot": zero_shot,
        "last": ends,
        "within": within,
        "chosen": zero_shot if tuning.best is None else at[tuning.best, tuning.step],
        "chosen_setting": None if tuning.best is None else [rates[tuning.best], tuning.step],
        "oracle": max(at.values()),
        "not_believed": [rates[i] for i, trial in enumerate(tuning.trials) if trial.why_not],
        "steps": {f"{rates[trial]:g} {step}": value for (trial, step), value in at.items()},
    }


def on_digits(seed: int, snapshots: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        labelled = read_labelled(write_digits(folder), DIGITS, "image")
        recipe = Recipe.load("demo").with_settings(seed=seed, snapshots=snapshots)
        return measure(
            lambda: Classifier.from_pretrained(EMBEDDED, DIGITS), Images.from_folder(folder), labelled.inputs,
            torch.tensor(labelled.labels), recipe, DIGIT_RATES,
        )  # fmt: skip


def on_task(task: str, data: Path, model: Path, seed: int, snapshots: int) -> dict[str, Any]:
    words, templates = TASKS[task]
    unlabelled = random.Random(0).sample(read(data / task / "train.jsonl")[0], UNLABELLED)
    texts, names = read(data / task / "test.jsonl")
    labels = torch.tensor([list(words).index(name) for name in names])
    recipe = Recipe.load("texts").with_settings(seed=seed, snapshots=snapshots)
    return measure(
        lambda: Classifier.from_pretrained(model, list(words.values()), templates), Texts(unlabelled), Texts(texts),
        labels, recipe, TEXT_RATES,
    )  # fmt: skip


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
    parser.add_argument("--out", type=Path, help="file for the results, JSON; what is in it stays and is added to")
    given = parser.parse_args()
    facts = json.loads(given.out.read_text()) if given.out and given.out.is_file() else {"results": {}}
    for seed in given.seeds:
        for name in given.names:
            print(f"{name}, seed {seed}", flush=True)
            if name == "digits":
                found = on_digits(seed, given.snapshots)
            else:
                found = on_task(name, given.data, model_folder(given.model), seed, given.snapshots)
            facts["results"].setdefault(name, {})[str(seed)] = found
            facts["versions"] = versions()
            if given.out is not None:
                given.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(table(facts["results"]))


if __name__ == "__main__":
    main()
