"""Where alarms fire and where they stay silent; and how wrong what is kept after abstention is.

    python benchmarks/trust.py --data DIR/text --out benchmarks/results/trust.json

The digits of the demo with the embedded model, and TREC with all-MiniLM-L6-v2 (see `texts.py`): the recipe as it is, a
learning rate that is far too large, lambda too small, names of classes that are not in the data, and data of a single
class. On the recipe as it is, `--abstain` is asked for several rates. Labels are read for the accuracies alone.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from texts import TASKS, UNLABELLED, model_folder, read

from pouf import EMBEDDED, Classifier, Images, InferenceConfig, Recipe, Texts
from pouf.data.base import Subset, Unlabelled
from pouf.demo import DIGITS, write_digits
from pouf.runs.folder import versions
from pouf.validation.diagnostics import share
from pouf.validation.selective import unreliable, within_error_rate

RATES = (0.02, 0.05, 0.1)
ANIMALS = ("a cat", "a dog", "a horse", "a bird", "a fish", "a cow")


class Case(NamedTuple):
    name: str
    usual: bool  # the recipe as it is, on the data it is meant for: abstention is tried too
    model: str | Path
    classes: Sequence[str]
    templates: Sequence[str] | None
    data: Unlabelled
    labels: torch.Tensor | None  # positions in `classes`; None where they are others
    recipe: Recipe


def digit_cases(folder: Path) -> Iterator[Case]:
    data, recipe = Images.from_folder(write_digits(folder)), Recipe.load("demo")
    labels = torch.tensor([DIGITS.index(name.split("/")[0]) for name in data.ids])
    letters, sevens = tuple("klmnopqrst"), (labels == 7).nonzero().flatten().tolist()
    large = recipe.with_settings(**{"optimisation.lr": 10 * recipe.optimisation.lr})
    yield Case("digits, as it is", True, EMBEDDED, DIGITS, None, data, labels, recipe)
    yield Case("digits, learning rate × 10", False, EMBEDDED, DIGITS, None, data, labels, large)
    yield Case("digits, named k to t", False, EMBEDDED, letters, None, data, None, recipe)
    yield Case("digits, only sevens", False, EMBEDDED, DIGITS, None, Subset(data, sevens), labels[sevens], recipe)


def text_cases(folder: Path, model: Path) -> Iterator[Case]:
    words, templates = TASKS["trec"]
    rows = list(zip(*read(folder / "trec" / "train.jsonl"), strict=True))
    drawn = random.Random(0).sample(rows, UNLABELLED)
    names, recipe = list(words), Recipe.load("texts")
    people = [row for row in drawn if row[1] == "human"]
    data, only = Texts([text for text, _ in drawn]), Texts([text for text, _ in people])
    labels = torch.tensor([names.index(label) for _, label in drawn])
    one = torch.full((len(people),), names.index("human"))
    large = recipe.with_settings(**{"optimisation.lr": 100 * recipe.optimisation.lr})
    small = recipe.with_settings(**{"objective.information": 0.1 * recipe.objective.information})
    classes = list(words.values())
    yield Case("TREC, as it is", True, model, classes, templates, data, labels, recipe)
    yield Case("TREC, learning rate × 100", False, model, classes, templates, data, labels, large)
    yield Case("TREC, lambda / 10", False, model, classes, templates, data, labels, small)
    yield Case("TREC, named as animals", False, model, ANIMALS, templates, data, None, recipe)
    yield Case("TREC, only people", False, model, classes, templates, only, one, recipe)


def run_case(case: Case) -> dict[str, Any]:
    classifier = Classifier.from_pretrained(case.model, case.classes, case.templates)

    def right() -> float | None:
        if case.labels is None:
            return None
        return share(classifier.infer(case.data).log_probabilities.argmax(1) == case.labels)

    before = right()
    zero_shot = Classifier.from_pretrained(case.model, case.classes, case.templates)
    result = classifier.adapt(case.data, recipe=case.recipe, settings={"snapshots": 4})
    classifier = result.at("last")
    last = right()
    verdict = result.verdict
    assert verdict.diagnostics is not None
    abstained = {}
    if case.usual and case.labels is not None:
        classifier = result.at("chosen")
        encoded = classifier.encode(case.data)
        is_right = classifier.log_probabilities(encoded).argmax(1) == case.labels
        found = unreliable(classifier, zero_shot, case.data, encoded, 0.05, InferenceConfig())
        estimated = torch.tensor(list(found.reliability.values()))
        for rate in RATES:
            reliable = within_error_rate(rate, estimated)
            wrong = 1 - is_right[reliable].double().mean().item() if reliable.any() else None
            abstained[f"{rate:g}"] = {"n": len(reliable), "kept": int(reliable.sum()), "wrong": wrong}
    return {
        "zero_shot": before, "last": last, "advised": verdict.advised,
        "alarms": [alarm.name for alarm in verdict.alarms], "diagnostics": verdict.diagnostics._asdict(),
        "abstained": abstained,
    }  # fmt: skip


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = ["| run | zero-shot | last step | alarms | advised |", "|---" * 5 + "|"]
    for name, found in results.items():
        numbers = ["–" if found[key] is None else f"{100 * found[key]:.1f}" for key in ("zero_shot", "last")]
        alarms = ", ".join(found["alarms"]) or "none"
        lines.append(f"| {name} | {' | '.join(numbers)} | {alarms} | {found['advised']} |")
    lines += ["", "| abstained | asked: wrong | kept | of them wrong |", "|---" * 4 + "|"]
    for name, found in results.items():
        for rate, part in found["abstained"].items():
            wrong = "–" if part["wrong"] is None else f"{100 * part['wrong']:.1f} %"
            lines.append(f"| {name} | {100 * float(rate):g} % | {part['kept']:,} of {part['n']:,} | {wrong} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the language tasks; without it, the digits alone")
    parser.add_argument("--model", type=Path, help="folder of a sentence encoder; default: the installed package")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        cases = list(digit_cases(Path(folder)))
        if given.data is not None:
            cases += text_cases(given.data, model_folder(given.model))
        for case in cases:
            results[case.name] = run_case(case)
            print(case.name, results[case.name]["alarms"], results[case.name]["advised"], flush=True)
            if given.out is not None:
                facts = {"results": results, "versions": versions()}
                given.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
