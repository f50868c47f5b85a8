"""A million vectors of 512 numbers and 1,000 classes, as commands: CPU seconds and peak memory of each.

    python benchmarks/million_vectors.py --out benchmarks/results/million_vectors.json

The vectors are random clusters in half precision (1 GB on disk), written to a temporary folder. Accuracy means nothing
here; what counts is how the seconds compare with those of a bare loop that multiplies all vectors with all prototypes,
block by block, and the peak memory with the size of the data.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from pouf.runs.folder import versions

# Runs a command and tells the peak memory of its process in GB.
CHILD = """
import sys
from pouf.cli import main
try:
    main()
finally:
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print("peak", int(peak.split()[1]) / 2**20, file=sys.stderr)
"""

BARE = """
import numpy as np, torch
vectors = np.load("features.npy", mmap_mode="r")
prototypes = torch.from_numpy(np.load("prototypes.npz")["prototypes"])
for start in range(0, len(vectors), 8192):
    torch.from_numpy(np.array(vectors[start : start + 8192])).float() @ prototypes.T
"""


def measured(code: str, folder: Path, *arguments: str) -> tuple[float, str]:
    """CPU seconds of a Python process, and what it says."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = subprocess.run([sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True)
    if child.returncode:
        sys.exit(child.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, child.stderr


def write(folder: Path, n: int, k: int, d: int) -> None:
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(k, d)).astype(np.float32)
    np.savez(folder / "prototypes.npz", prototypes=centres, names=np.array([f"class {i}" for i in range(k)]))
    vectors = np.lib.format.open_memmap(folder / "features.npy", "w+", np.float16, (n, d))
    for start in range(0, n, 50_000):
        rows = min(50_000, n - start)
        labels = draw.integers(0, k, rows)
        vectors[start : start + rows] = centres[labels] + 2 * draw.normal(size=(rows, d)).astype(np.float32)
    vectors.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--k", type=int, default=1000)
    parser.add_argument("--d", type=int, default=512)
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    facts: dict[str, object] = {"n": given.n, "k": given.k, "d": given.d}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, given.n, given.k, given.d)
        commands = {
            "adapt": [
                "adapt",
                "--features",
                "features.npy",
                "--prototypes",
                "prototypes.npz",
                "--out",
                "run",
                "--no-report",
            ],
            "predict": ["predict", "run", "features.npy", "--out", "predictions.csv"],
        }
        bare, _ = measured(BARE, folder)
        size = (folder / "features.npy").stat().st_size / 2**30
        print(f"bare loop: {bare:.0f} s; data: {size:.2f} GB", flush=True)
        facts |= {"bare_seconds": round(bare), "data_gb": round(size, 2)}
        for command, arguments in commands.items():
            seconds, output = measured(CHILD, folder, *arguments, "--quiet")
            peak = float(output.split("peak")[-1])
            facts[command] = {
                "seconds": round(seconds), "peak_gb": round(peak, 2), "of_bare": round(seconds / bare, 1),
                "of_data": round(peak / size, 2),
            }  # fmt: skip
            print(command, facts[command], flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(facts | {"versions": versions()}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
