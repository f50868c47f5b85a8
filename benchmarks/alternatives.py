"""Every label-free method on the same real features, balanced and skewed, and on the digits.

    python benchmarks/alternatives.py --features FILE --out benchmarks/results/alternatives.json
    python benchmarks/alternatives.py --digits --out benchmarks/results/alternatives.json

The features are CLIP ViT-B/32's of 2,009 images in 287 classes (npz: `text` (k, d), `names`, `image_<i>shot` (n, d) and
`label_<i>shot`), as they are, in three subsamples with a 10:1 skew (which classes are frequent is drawn anew), and, to
see whether a method is safe, with 100, 30 and 10 of the classes only while all 287 are named. Labels are read after
the last step, to judge. No method is told how the classes are distributed.

The digits are those of `pouf demo`: methods that train a prompt use its recipe `demo-prompt`, the others `demo`; CoOp
learns from 16 labelled digits per class, which no method's accuracy here counts. The skewed digits keep from all down
to a tenth of a class's images. All accuracies are those of the last step, whatever the verdict.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pouf import EMBEDDED, METHODS, Classifier, Images, Recipe, Shots, Vectors
from pouf.data.base import Subset
from pouf.data.labels import read_labelled
from pouf.demo import DIGITS, write_digits
from pouf.runs.folder import versions
from pouf.validation.diagnostics import share

Keep = Callable[[str, str, object], None]
SEEDS = (0, 1, 2)
SKEW = 10
# Beside the methods by name: parts of our default, each changed alone. These train however few classes are there.
TRAINED = Recipe.load("features").with_settings(min_class_usage=0.0)
FEATURE_METHODS: dict[str, Recipe] = {
    name: METHODS[name].recipe("vector")
    for name in (
        "zero-shot",
        "prior-correction",
        "sinkhorn",
        "em",
        "stata",
        "few-classes",
        "transclip",
        "zlap",
        "inmap",
        "propagation",
        "tent",
        "upl",
        "pouf",
    )
} | {
    "pouf, always trained": TRAINED,
    "refinement alone": METHODS["zero-shot"].recipe("vector").with_settings(postprocess="refinement"),
    "pouf, no refinement": TRAINED.with_settings(postprocess="none"),
    "pouf, uniform prior": TRAINED.with_settings(**{"objective.prior": "uniform"}),
    "pouf as in the paper": TRAINED.with_settings(postprocess="none", **{"objective.prior": "uniform"}),
    "transport alone": TRAINED.with_settings(
        postprocess="none", **{"objective.prior": "uniform", "objective.information": 0.0}
    ),
    "information alone": TRAINED.with_settings(
        postprocess="none", **{"objective.prior": "uniform", "objective.transport": 0.0}
    ),
    "pouf with a map": TRAINED.with_settings(
        **{"tuner.name": "map", "optimisation.name": "adamw", "optimisation.lr": 3e-4}
    ),
    "exact transport": TRAINED.with_settings(
        postprocess="none", **{"objective.prior": "uniform", "objective.plan": "exact"}
    ),
}


def skewed(labels: NDArray[np.int64], classes: int, seed: int) -> list[int]:
    """Positions of a subsample whose classes fall off to a tenth, in an order drawn at random."""
    draw = np.random.default_rng(seed)
    rank = draw.permutation(classes)
    rows: list[int] = []
    for k in range(classes):
        own = np.flatnonzero(labels == k)
        share = SKEW ** (-rank[k] / (classes - 1))
        rows += draw.choice(own, max(1, round(len(own) * share)), replace=False).tolist()
    return sorted(rows)


def few_classes(labels: NDArray[np.int64], classes: int, count: int) -> list[int]:
    chosen = np.random.default_rng(0).permutation(classes)[:count]
    return np.flatnonzero(np.isin(labels, chosen)).tolist()  # type: ignore[no-any-return]


def on_features(file: Path, only: Sequence[str], keep: Keep) -> None:
    with np.load(file, allow_pickle=False) as arrays:
        vectors = np.concatenate([arrays[f"image_{i}shot"] for i in (1, 2, 4)])
        labels = np.concatenate([arrays[f"label_{i}shot"] for i in (1, 2, 4)])
        prototypes, names = torch.from_numpy(arrays["text"].astype(np.float32)), arrays["names"].tolist()
    k = len(names)
    sets = {"balanced": list(range(len(labels)))}
    sets |= {f"skewed {seed}": skewed(labels, k, seed) for seed in SEEDS}
    sets |= {f"{count} classes": few_classes(labels, k, count) for count in (100, 30, 10)}
    for method in only or FEATURE_METHODS:
        found: dict[str, float] = {}
        for which, rows in sets.items():
            classifier, data = Classifier.from_vectors(prototypes, names), Vectors(vectors[rows])
            classifier = classifier.adapt(data, recipe=FEATURE_METHODS[method]).at("last")
            guess = classifier.infer(data).log_probabilities.argmax(1)
            found[which] = share(guess == torch.from_numpy(labels[rows]))
        found["skewed"] = statistics.mean(found[f"skewed {seed}"] for seed in SEEDS)
        columns = ("balanced", "skewed", "100 classes", "30 classes", "10 classes")
        print(f"| {method} | {' | '.join(f'{100 * found[c]:.1f}' for c in columns)} |", flush=True)
        keep("features", method, found)


def digit_methods() -> dict[str, Recipe]:
    prompt = {name: METHODS[name].recipe("image", "demo-prompt") for name in ("tent", "upl", "coop")}
    untrained = ("zero-shot", "prior-correction", "sinkhorn", "propagation")
    full, soft = Recipe.load("demo"), Recipe.load("demo-prompt")
    variants = {
        "without transport": {"objective.transport": 0.0},
        "without information": {"objective.information": 0.0},
        "exact transport": {"objective.plan": "exact"},
        "sinkhorn transport": {"objective.plan": "sinkhorn"},
        "exponential cost": {"objective.cost": "exponential"},
        "estimated prior": {"objective.prior": "estimated"},
        "refined": {"postprocess": "refinement"},
    }
    return (
        {name: METHODS[name].recipe("image", "demo") for name in untrained}
        | prompt
        | {"pouf, prompt": soft, "pouf, full": full}
        | {f"pouf, full, {name}": full.with_settings(**settings) for name, settings in variants.items()}
    )


def on_digits(only: Sequence[str], keep: Keep) -> None:
    with tempfile.TemporaryDirectory() as folder:
        labelled = read_labelled(write_digits(folder), DIGITS, "image")
        labels = np.array(labelled.labels)
        draw = np.random.default_rng(0)
        shots = [i for k in range(10) for i in draw.choice(np.flatnonzero(labels == k), 16, replace=False).tolist()]
        rest = sorted(set(range(len(labels))) - set(shots))
        for name, recipe in digit_methods().items():
            if only and name not in only:
                continue
            given = labelled_shots(labelled.inputs, shots, labels) if name == "coop" else None
            trained = [one_digit_run(recipe, labelled.inputs, rest, labels, seed, given) for seed in SEEDS]
            keep("digits", name, trained)
            print(f"| {name} | {spread(trained)} |", flush=True)
        for name in ("pouf, full", "pouf, full, estimated prior"):
            if only and f"skewed: {name}" not in only:
                continue
            runs = []
            for seed in SEEDS:
                rows = skewed(labels, 10, seed)
                runs.append(one_digit_run(digit_methods()[name], labelled.inputs, rows, labels, seed, None))
            keep("digits", f"skewed: {name}", runs)
            print(f"| skewed: {name} | {spread(runs)} |", flush=True)


def labelled_shots(data: Any, indices: list[int], labels: NDArray[np.int64]) -> Shots:
    targets = torch.nn.functional.one_hot(torch.from_numpy(labels[indices]), 10).float()
    return Shots(Subset(data, indices), targets)


def one_digit_run(
    recipe: Recipe, images: Images, rows: list[int], labels: NDArray[np.int64], seed: int, shots: Shots | None
) -> float:
    classifier, data = Classifier.from_pretrained(EMBEDDED, DIGITS), Subset(images, rows)
    result = classifier.adapt(None if shots is not None else data, recipe=recipe, shots=shots, seed=seed)
    classifier = result.at("last")
    return share(classifier.infer(data).log_probabilities.argmax(1) == torch.from_numpy(labels[rows]))


def spread(values: list[float]) -> str:
    each = [100 * value for value in values]
    return f"{statistics.mean(each):.1f} ({statistics.pstdev(each):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=Path, help="npz of image features, labels and prototypes")
    parser.add_argument("--digits", action="store_true", help="the digits of the demo")
    parser.add_argument("--only", nargs="+", default=[], help="some methods, by name")
    parser.add_argument("--out", type=Path, help="file for the results, JSON; what is in it stays and is added to")
    given = parser.parse_args()
    facts = json.loads(given.out.read_text()) if given.out and given.out.is_file() else {}
    facts |= {"recipe": Recipe.load("features").to_toml().splitlines(), "versions": versions()}

    def keep(part: str, method: str, found: object) -> None:
        facts.setdefault(part, {})[method] = found
        if given.out is not None:
            given.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    if given.features is not None:
        on_features(given.features, given.only, keep)
    if given.digits:
        on_digits(given.only, keep)


if __name__ == "__main__":
    main()
