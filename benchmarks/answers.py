"""Three rounds of 20 answers, against as many labels of random inputs.

    python benchmarks/answers.py --data DIR    # DIR/<task>/{train,test}.jsonl, as for texts.py

400 inputs are adapted to, the others of 800 (600 for 20 intents) are judged on. In each round 20 answers are added, and
all of them train beside the unlabelled inputs, as by `pouf adapt --answers`. "Reviewed": asked by `pouf review --n 10
--unsure 10`, 10 at random, which judge the run before they teach the next one, and the 10 that it is least sure of.
"Random": as many inputs at random, as by `--shots`. Prototypes are tuned (`--preset fast`) on features that are encoded
once; three seeds, which divide the inputs and draw the questions; last step. Labels answer the questions and give the
accuracies.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from teachers import drawn
from texts import model_folder
from torch import Tensor
from tuners import put_table

from pouf import Classifier, Images, Recipe, Shots, Texts, Vectors
from pouf.data.base import Subset
from pouf.demo import DIGITS, write_digits
from pouf.files import write_json
from pouf.models.load import EMBEDDED
from pouf.runs.folder import versions
from pouf.validation.diagnostics import share
from pouf.validation.review import sample_questions

SETS = ("trec", "subj", "intents 20", "digits")
ROUNDS, ANSWERS, ADAPTED_TO, COUNT = 3, 20, 400, 800


def task(name: str, given: argparse.Namespace, folder: Path) -> tuple[Classifier, Tensor, Tensor, Recipe]:
    """A classifier of vectors in the place of its model, the features of all inputs, their labels, and the recipe."""
    if name == "digits":
        images = Images.from_folder(write_digits(folder / "digits"))
        rows = random.Random(0).sample(range(len(images)), COUNT)
        labels = [DIGITS.index(str(images.ids[row]).split("/")[0]) for row in rows]
        classifier, data = Classifier.from_pretrained(EMBEDDED, DIGITS), Subset(images, rows)
    else:
        pairs, words, templates = drawn(name, given.data, COUNT)
        classifier = Classifier.from_pretrained(model_folder(given.model), list(words.values()), templates)
        data, labels = Texts([text for text, _ in pairs]), [list(words).index(label) for _, label in pairs]
    encoded = classifier.encode(data)
    temperature = float(classifier.scores(encoded).temperature)
    vectors = Classifier.from_vectors(classifier.fixed_prototypes(), classifier.classes, temperature)
    return vectors, encoded.features, torch.tensor(labels), Recipe.preset("fast", classifier.kind)


def run_seed(classifier: Classifier, features: Tensor, truth: Tensor, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Accuracy before the first answer and after each round, by who chooses what is asked."""
    order = random.Random(seed).sample(range(len(truth)), len(truth))
    own, others = order[:ADAPTED_TO], order[ADAPTED_TO:]
    data, rest = Vectors(features[own].numpy()), features[others]

    def last(answered: list[int]) -> Classifier:
        options: dict[str, Any] = {}
        if answered:
            targets = F.one_hot(truth[own][answered], len(classifier.classes)).float()
            options["shots"] = Shots(Subset(data, answered), targets)
        return classifier.adapt(data, recipe=recipe, seed=seed, **options).at("last")

    def right(adapted: Classifier) -> float:
        return round(share(adapted.predict_proba(rest.numpy()).argmax(1) == truth[others]), 4)

    def reviewed(adapted: Classifier, answered: list[int]) -> list[int]:
        review, _ = sample_questions(
            classifier, adapted, data, ANSWERS // 2, unsure=ANSWERS // 2, seed=seed, answered=list(map(str, answered))
        )
        return [int(question.id) for question in review.questions]

    def at_random(_: Classifier, answered: list[int]) -> list[int]:
        return random.Random(f"{seed} {len(answered)}").sample(sorted(set(range(len(own))) - set(answered)), ANSWERS)

    first = last([])
    found: dict[str, Any] = {"zero-shot": right(classifier)}
    ways: dict[str, Callable[[Classifier, list[int]], list[int]]] = {"random": at_random, "reviewed": reviewed}
    for way, choose in ways.items():
        adapted, answered, found[way] = first, list[int](), [right(first)]
        for _ in range(ROUNDS):
            answered += choose(adapted, answered)
            adapted = last(answered)
            found[way].append(right(adapted))
    return found


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    counts = [ANSWERS * n for n in range(1, ROUNDS + 1)]
    lines = ["| set | zero-shot | adapted | " + " | ".join(f"{n} random · reviewed" for n in counts) + " |"]
    lines.append("|---|---|---|" + "---|" * ROUNDS)
    ways = [(n, way) for n in range(ROUNDS + 1) for way in ("random", "reviewed")]
    means = {
        name: [100 * statistics.mean(run["zero-shot"] for run in runs)]
        + [100 * statistics.mean(run[way][n] for run in runs) for n, way in ways]
        for name, runs in results.items()
    }
    means["mean"] = [statistics.mean(column) for column in zip(*means.values(), strict=True)]
    for name, (zero_shot, adapted, _, *rounds) in means.items():
        cells = [f"{a:.1f} · {b:.1f}" for a, b in zip(rounds[::2], rounds[1::2], strict=True)]
        lines.append(f"| {name} | {zero_shot:.1f} | {adapted:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="folder of the sentence encoder; default: the installed package")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    results = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=results / "answers.json", help="JSON; what is in it stays")
    parser.add_argument("--page", type=Path, default=results / "teachers.md", help="page with a place for the table")
    given = parser.parse_args()
    facts = json.loads(given.out.read_text()) if given.out.is_file() else {}
    facts |= {"seeds": given.seeds, "versions": versions()}
    found = facts.setdefault("sets", {})
    with tempfile.TemporaryDirectory() as folder:
        for name in given.sets:
            if name not in found:
                prepared = task(name, given, Path(folder))
                found[name] = [run_seed(*prepared, seed) for seed in given.seeds]
                print(name, found[name], flush=True)
                write_json(given.out, facts)
    rows = table({name: found[name] for name in SETS if name in found})
    print(rows)
    put_table(given.page, "answers", rows)


if __name__ == "__main__":
    main()
