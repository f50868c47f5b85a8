"""How large a batch the loss needs: real features of many classes, from a third of a sample per class to all of them.

    python benchmarks/batch_size.py --features FILE --out benchmarks/results/batch_size.json

FILE is an npz as `alternatives.py` takes it (287 classes, 2,009 images). Prototypes are tuned as in the paper (uniform
prior, no refinement), 100 steps, three seeds, last step; labels are read afterwards, to judge.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from robustness import from_arrays

from pouf import Recipe
from pouf.runs.folder import versions

SAMPLES_PER_CLASS = (0.33, 1, 2, 4, 7)
SEEDS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    case = from_arrays(given.features)
    plain = {"objective.prior": "uniform", "postprocess": "none", "min_class_usage": 0.0, "snapshots": 0}
    found: dict[str, list[float]] = {}
    print("| samples per class | batch | accuracy, mean (std) |", "|---|---|---|", sep="\n")
    for each in SAMPLES_PER_CLASS:
        size = round(each * case.classes)
        recipe = Recipe.default("vector").with_settings(plain, batch_size=size)
        rates = []
        for seed in SEEDS:
            classifier = case.classifier()
            classifier = classifier.adapt(case.data, recipe=recipe, seed=seed).classifier
            predicted = classifier.infer(case.data).log_probabilities.argmax(1).tolist()
            rates.append(sum(a == b for a, b in zip(predicted, case.labels, strict=True)) / len(predicted))
        found[str(each)] = rates
        mean, spread = 100 * statistics.mean(rates), 100 * statistics.pstdev(rates)
        print(f"| {each} | {size} | {mean:.1f} ({spread:.1f}) |", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps({"accuracy": found, "versions": versions()}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
