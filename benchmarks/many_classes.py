"""Vectors with 1,000 classes from the command line, on one thread: how long the default takes, and StatA beside it.

    python benchmarks/many_classes.py --features FILE --out benchmarks/results/many_classes.json

FILE is an npz with `features` (n, d), `labels` (n,), `prototypes` (k, d) and `names` (k,), as CLIP ViT-B/32's of four
images for each of ImageNet's 1,000 classes. Each command is a process of its own, imports and report included; both
the time that passed and the time that the processor worked are told, since they differ on a machine that is shared.
Labels are read for the accuracies, after the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from pouf import Classifier, Vectors
from pouf.runs.folder import versions
from pouf.validation.diagnostics import share

COMMANDS = {"default": (), "default, without a report": ("--no-report",), "stata": ("--method", "stata")}


def run(file: Path, options: tuple[str, ...]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pouf", "adapt", "--features", f"{file}::features", "--prototypes",
                   f"{file}::prototypes", "--out", f"{folder}/run", "--quiet", *options]  # fmt: skip
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = time.perf_counter() - start
        with np.load(file, allow_pickle=False) as arrays:
            data, labels = Vectors(arrays["features"].astype(np.float32)), torch.from_numpy(arrays["labels"])
        guess = Classifier.from_pretrained(f"{folder}/run").infer(data).log_probabilities.argmax(1)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "processor seconds": used, "accuracy": share(guess == labels)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    facts: dict[str, object] = {"versions": versions(), "load": os.getloadavg()[0], "processors": os.cpu_count()}
    for name, options in COMMANDS.items():
        facts[name] = found = run(given.features, options)
        print(f"| {name} | {found['seconds']:.0f} s | {found['processor seconds']:.0f} s | "
              f"{100 * found['accuracy']:.1f} % |", flush=True)  # fmt: skip
    if given.out is not None:
        given.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
