"""Vectors of some of the named classes only: what the default does as fewer and fewer of them are there.

    python benchmarks/few_classes.py --features FILE --out benchmarks/results/few_classes.json

FILE is an npz with `features` (n, d), `labels` (n,), `prototypes` (k, d) and `names` (k,), as CLIP ViT-B/32's of four
images for each of ImageNet's 1,000 classes. Which classes are there is drawn at random by each seed; all k are named.
The default is compared with itself when it always trains (`min_class_usage = 0`); labels are read after the last step,
to judge. The limit of 0.75 was set on other features (`alternatives.py`, 287 classes); the limits in refinement were
set on those and on these.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch

from pouf import Classifier, Vectors
from pouf.losses.objective import share_of_classes
from pouf.runs.folder import versions
from pouf.validation.diagnostics import share

COUNTS = (1000, 700, 600, 500, 400, 200, 100, 30, 10)
GATES = {"always trained": 0.0, "default": 0.75}


def run(file: Path, count: int, seed: int) -> dict[str, float | str]:
    with np.load(file, allow_pickle=False) as arrays:
        labels, names = arrays["labels"], arrays["names"].tolist()
        prototypes = torch.from_numpy(arrays["prototypes"].astype(np.float32))
        there = np.random.default_rng(seed).permutation(len(names))[:count]
        rows = np.flatnonzero(np.isin(labels, there))
        data, truth = Vectors(arrays["features"][rows].astype(np.float32)), torch.from_numpy(labels[rows])
    classifier = Classifier.from_vectors(prototypes, names)
    before = classifier.predict_proba(data)
    found: dict[str, float | str] = {
        "used": share_of_classes(before.mean(0)), "zero-shot": share(before.argmax(1) == truth),
    }  # fmt: skip
    for name, gate in GATES.items():
        classifier = Classifier.from_vectors(prototypes, names)
        result = classifier.adapt(data, settings={"few_classes": gate})
        classifier = result.classifier
        found[f"{name}, advised"] = share(classifier.predict_proba(data).argmax(1) == truth)
        found[f"{name}, alarms"] = ", ".join(alarm.name for alarm in result.verdict.alarms)
        classifier = result.at("last")
        found[name] = share(classifier.predict_proba(data).argmax(1) == truth)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--counts", nargs="+", type=int, default=list(COUNTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    facts: dict[str, object] = {"versions": versions()}
    columns = ("used", "zero-shot", *GATES, *(f"{name}, advised" for name in GATES))
    print(f"| classes there | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|", sep="\n")
    for count in given.counts:
        runs = [run(given.features, count, seed) for seed in given.seeds]
        means = [statistics.mean(float(each[column]) for each in runs) for column in columns]
        print(f"| {count} | {means[0]:.2f} | {' | '.join(f'{100 * mean:.1f}' for mean in means[1:])} |", flush=True)
        facts[str(count)] = runs
        if given.out is not None:
            given.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
