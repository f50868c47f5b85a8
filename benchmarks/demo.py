"""The demo for several seeds: the embedded model on scikit-learn's handwritten digits.

    python benchmarks/demo.py --out benchmarks/results/demo.json

Same recipe for all seeds, accuracy at the last step. Labels are read after training, for the table alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from pouf import Recipe
from pouf.demo import demo
from pouf.runs.folder import versions

# What the demo shows, and what is taken for one's own images: by default, with `--preset balanced`, `--tune layernorm`.
RECIPES = {
    "full": "demo", "prompt": "demo-prompt", "prototypes": "features", "prompts for each class": "images-prompt",
    "layernorm": "images-layernorm",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--only", nargs="+", choices=list(RECIPES), default=list(RECIPES), help="the others stay as kept"
    )
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    results = []
    if given.out is not None and given.out.is_file():
        earlier = json.loads(given.out.read_text(encoding="utf-8"))["runs"]
        results = [row for row in earlier if row["tune"] not in given.only]
    for tune in given.only:
        name = RECIPES[tune]
        for seed in given.seeds:
            with tempfile.TemporaryDirectory() as folder:
                result = demo(Path(folder) / "run", Recipe.load(name).with_settings(seed=seed))
            e = result.evaluation
            facts = {"tune": tune, "seed": seed, "zero_shot": e.zero_shot, "prior_corrected": e.prior_corrected}
            results.append(facts | {"last": e.last, "seconds": round(result.seconds, 1)})
            print(results[-1], flush=True)
    print("| tuning | zero-shot | prior-corrected | POUF, last step: mean (std) | each seed | seconds |")
    print("|---|---|---|---|---|---|")
    for tune in RECIPES:
        rows = [row for row in results if row["tune"] == tune]
        if not rows:
            continue
        each = [100 * row["last"] for row in rows]
        print(
            f"| {tune} | {100 * rows[0]['zero_shot']:.1f} | {100 * rows[0]['prior_corrected']:.1f} | "
            f"{statistics.mean(each):.1f} ({statistics.pstdev(each):.1f}) | {', '.join(f'{x:.1f}' for x in each)} | "
            f"{max(row['seconds'] for row in rows):.0f} at most |"
        )
    if given.out is not None:
        given.out.write_text(json.dumps({"versions": versions(), "runs": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
