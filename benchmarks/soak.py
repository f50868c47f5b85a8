"""Does it hold out? Memory, open files and threads over many steps, images, rows and trials.

    python benchmarks/soak.py --out benchmarks/results/soak.json

Each part runs in a process of its own and is measured at ten equal distances: `growth` is the last measurement over
the first one after the warm-up, for memory (resident, MB), open files and threads. `--scale 0.1` makes a tenth of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

from pouf import EMBEDDED, Callback, Classifier, Recipe, Vectors
from pouf.data.base import Unlabelled
from pouf.data.texts import Texts
from pouf.demo import DIGITS, write_digits
from pouf.inference import InferenceConfig
from pouf.runs.folder import versions

WARM = 2  # of the measurements: until then, allocators and libraries grow to their size


class Meter:
    """Measures this process when it is told of progress."""

    def __init__(self, total: int, times: int = 10) -> None:
        self.total, self.every, self.done, self.seen = total, max(1, total // times), 0, []

    def advance(self, n: int = 1) -> None:
        before, self.done = self.done, self.done + n
        if self.done // self.every > before // self.every:
            process = psutil.Process()
            self.seen.append((process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()))

    def facts(self) -> dict[str, Any]:
        names = ("memory", "files", "threads")
        series = {name: [round(each[i], 1) for each in self.seen] for i, name in enumerate(names)}
        growth = {name: round(values[-1] / values[WARM], 3) for name, values in series.items()}
        return {"done": self.done, "growth": growth, "series": series}


class Told(Callback):
    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_step(self, step: Any) -> None:
        self.meter.advance()


def train(n: int, folder: Path, recipe: str, batch_size: int) -> Meter:
    """Steps of the demo, with a run folder and its saves."""
    meter = Meter(n)
    write_digits(folder / "digits")
    settings = Recipe.load(recipe).with_settings(
        {"steps": n, "batch_size": batch_size, "optimisation.lr": 1e-4, "compute.save_every": 5.0}
    )
    Classifier.from_pretrained(EMBEDDED, DIGITS).adapt(
        folder / "digits", recipe=settings, output_dir=folder / "run", report=False, callbacks=[Told(meter)]
    )
    return meter


class Generated(Unlabelled):
    """Images of noise that are made when they are read."""

    modality = "image"

    def __init__(self, n: int) -> None:
        super().__init__(range(n), "noise")  # type: ignore[arg-type]

    def read(self, index: int) -> Image.Image:
        return Image.fromarray(np.random.default_rng(index).integers(0, 256, (32, 32, 3), dtype=np.uint8))

    def content_order(self) -> range:
        return range(len(self))


def images(n: int, folder: Path) -> Meter:
    """Images through predict, block by block."""
    meter = Meter(n)
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    encoded = classifier.encode(Generated(n), InferenceConfig(256, on_batch=meter.advance))
    assert sum(len(block.indices) for block in classifier.score_blocks(encoded)) == n
    return meter


def rows(n: int, folder: Path) -> Meter:
    """A CSV of so many rows, read ten times over, with random batches from it."""
    with (folder / "rows.csv").open("w", encoding="utf-8") as file:
        file.write("text\n")
        file.writelines(f'"row {i}, with a comma and some more words"\n' for i in range(n))
    import torch

    meter = Meter(10)
    for seed in range(10):
        texts = Texts.from_file(folder / "rows.csv")
        batches = texts.random_batches(256, torch.Generator().manual_seed(seed))
        assert len(texts) == n and all(texts.read(draw.place) for draw in next(batches))
        meter.advance()
    meter.done = n
    return meter


def trials(n: int, folder: Path) -> Meter:
    """A search over so many settings; each trial is measured as it starts."""
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(50, 64)).astype(np.float32)
    vectors = Vectors(centres[draw.integers(0, 50, 20_000)] + draw.normal(size=(20_000, 64)).astype(np.float32))
    classifier = Classifier.from_vectors(centres, [f"class {i}" for i in range(50)])
    meter = Meter(n)
    rates = [float(rate) for rate in np.geomspace(1e-4, 1e-2, n)]
    classifier.search(
        vectors, {"optimisation.lr": rates}, settings={"steps": 100}, output_dir=folder / "run", report=False,
        on_trial=lambda settings: meter.advance(),
    )  # fmt: skip
    return meter


PARTS: dict[str, tuple[int, Callable[[int, Path], Meter]]] = {
    "steps, prompt tuning": (10_000, lambda n, folder: train(n, folder, "demo-prompt", 96)),
    "steps, full tuning": (10_000, lambda n, folder: train(n, folder, "demo", 8)),
    "images through predict": (100_000, images),
    "rows of a CSV": (1_000_000, rows),
    "trials of a search": (10, trials),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full sizes")
    parser.add_argument("--only", help="one part")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    if given.only:
        size, part = PARTS[given.only]
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            meter = part(max(10, round(size * given.scale)), Path(folder))
        print(json.dumps(meter.facts() | {"seconds": round(time.perf_counter() - start, 1)}))
        return
    results: dict[str, Any] = {}
    for name in PARTS:
        command = [sys.executable, __file__, "--only", name, "--scale", str(given.scale)]
        results[name] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        growth = ", ".join(f"{what} x {times}" for what, times in results[name]["growth"].items())
        print(f"{name}: {results[name]['done']:,} in {results[name]['seconds']} s; {growth}", flush=True)
    if given.out:
        given.out.write_text(
            json.dumps({"scale": given.scale, "parts": results, "versions": versions()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
