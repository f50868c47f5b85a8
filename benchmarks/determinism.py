"""How far do two runs of the same command differ: again, on other numbers of threads, on two processes?

    python benchmarks/determinism.py --out benchmarks/results/determinism.json

The digits of `pouf demo`, full tuning, 20 steps of 96, fp32 on a CPU, each run in processes of its own; the last step.
Differences are the largest against the first run: of a weight, of a probability; and how many images change class.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from pouf import EMBEDDED, Classifier
from pouf.demo import DIGITS, write_digits
from pouf.runs.folder import versions

TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "1 thread": (1, ()),
    "1 thread, again": (1, ()),
    "2 threads": (2, ()),
    "2 threads, again": (2, ()),
    "2 processes of 1 thread": (1, TWO_PROCESSES),
    "2 processes of 1 thread, again": (1, TWO_PROCESSES),
}


def adapted(folder: Path, threads: int, launch: tuple[str, ...]) -> Classifier:
    options = ["--recipe", "demo", "--steps", "20", "--no-report", "--no-cache", "--quiet", "--device", "cpu"]
    subprocess.run(
        [sys.executable, *launch, "-m", "pouf", "adapt", "digits", "--model", EMBEDDED, "--classes", ",".join(DIGITS),
         "--out", "run", "--overwrite", *options],
        cwd=folder, check=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip
    return Classifier.from_pretrained(folder / "run", use="last")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    runs: dict[str, tuple[list[torch.Tensor], torch.Tensor]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        digits = write_digits(Path(scratch) / "digits")
        for name, (threads, launch) in RUNS.items():
            classifier = adapted(Path(scratch), threads, launch)
            weights = [parameter.detach() for parameter in classifier.parameters()]
            runs[name] = weights, classifier.predict_proba(digits)
    (first_weights, first_p), *_ = runs.values()
    results: dict[str, dict[str, Any]] = {}
    for name, (weights, p) in runs.items():
        apart = max(float((a - b).abs().max()) for a, b in zip(first_weights, weights, strict=True))
        results[name] = {
            "weight": apart,
            "probability": float((first_p - p).abs().max()),
            "classes changed": int((first_p.argmax(1) != p.argmax(1)).sum()),
        }
        print(f"{name}: {results[name]}", flush=True)
    if given.out:
        given.out.write_text(json.dumps({"runs": results, "versions": versions()}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
