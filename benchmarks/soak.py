"""Does it hold out? Memory, open files and threads over many steps, images, rows and trials.

    python benchmarks/soak.py --out benchmarks/results/soak.json
    python benchmarks/soak.py --out benchmarks/results/soak.json --only "trials of a search, full tuning"  # one part

Each part runs in a process of its own and is measured at ten equal distances: `growth` is the last measurement over
the first one after the warm-up, for memory (resident, MB), open files and threads. Of a search also the bytes of all
tensors that are alive (MB), before Python's collector of cycles is asked, and resident memory once the allocator has
given back what it holds in reserve: what grows there is held by somebody. `--scale 0.1` makes a tenth of it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
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
import torch
from PIL import Image

from pouf import EMBEDDED, Callback, Classifier, Output, Recipe, Vectors
from pouf.data.base import Unlabelled
from pouf.data.texts import Texts
from pouf.demo import DIGITS, write_digits
from pouf.inference.encode import InferenceConfig
from pouf.runs.folder import versions

WARM = 2  # of the measurements: until then, allocators and libraries grow to their size


def live_tensors() -> int:
    """Bytes of all tensors that Python knows of, each memory once."""
    storages = (each.untyped_storage() for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def give_back() -> None:
    """What the C library holds in reserve goes back to the system, where it knows how."""
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


class Meter:
    """Measures this process when it is told of progress.

    Args:
        closely: also what tensors are alive, and the memory without reserves.
    """

    def __init__(self, total: int, times: int = 10, closely: bool = False) -> None:
        self.total, self.every, self.done, self.closely = total, max(1, total // times), 0, closely
        self.seen: list[dict[str, float]] = []

    def advance(self, n: int = 1) -> None:
        before, self.done = self.done, self.done + n
        if self.done // self.every > before // self.every:
            process = psutil.Process()
            figures = {"memory": process.memory_info().rss / 2**20}
            if self.closely:
                figures["tensors"] = live_tensors() / 2**20
                give_back()
                figures["memory without reserves"] = process.memory_info().rss / 2**20
            self.seen.append(figures | {"files": process.num_fds(), "threads": process.num_threads()})

    def facts(self) -> dict[str, Any]:
        series = {name: [round(each[name], 2) for each in self.seen] for name in self.seen[0]}
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
        folder / "digits", recipe=settings, output=Output(folder / "run", report=False), callbacks=[Told(meter)]
    )
    return meter


class Generated(Unlabelled):
    """Images of noise that are made when they are read."""

    modality = "image"

    def __init__(self, n: int) -> None:
        super().__init__(range(n), "noise")  # type: ignore[arg-type]

    def read(self, index: int, side: int | None = None) -> Image.Image:
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
    meter = Meter(10)
    for seed in range(10):
        texts = Texts.from_file(folder / "rows.csv")
        batches = texts.random_batches(256, torch.Generator().manual_seed(seed))
        assert len(texts) == n and all(texts.read(draw.position) for draw in next(batches))
        meter.advance()
    meter.done = n
    return meter


def trials(n: int, folder: Path) -> Meter:
    """A search over so many settings on vectors; each trial is measured as it starts."""
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(50, 64)).astype(np.float32)
    vectors = Vectors(centres[draw.integers(0, 50, 20_000)] + draw.normal(size=(20_000, 64)).astype(np.float32))
    classifier = Classifier.from_vectors(centres, [f"class {i}" for i in range(50)])
    return searched(n, folder, classifier, vectors, settings={"steps": 100})


def model_trials(n: int, folder: Path) -> Meter:
    """The same with a model of which all weights are tuned, and predictions that are corrected together."""
    write_digits(folder / "digits")
    settings = {"steps": 10, "batch_size": 16, "snapshots": 4, "postprocess": "refinement"}
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    return searched(n, folder, classifier, folder / "digits", recipe="demo", settings=settings)


def searched(n: int, folder: Path, classifier: Classifier, data: Any, **options: Any) -> Meter:
    meter = Meter(n, closely=True)
    classifier.search(
        data, {"optimisation.lr": [float(rate) for rate in np.geomspace(1e-4, 1e-2, n)]}, **options,
        output=Output(folder / "run", report=False), on_trial=lambda settings: meter.advance(),
    )  # fmt: skip
    return meter


PARTS: dict[str, tuple[int, Callable[[int, Path], Meter]]] = {
    "steps, prompt tuning": (10_000, lambda n, folder: train(n, folder, "demo-prompt", 96)),
    "steps, full tuning": (10_000, lambda n, folder: train(n, folder, "demo", 8)),
    "images through predict": (100_000, images),
    "rows of a CSV": (1_000_000, rows),
    "trials of a search, vectors": (10, trials),
    "trials of a search, full tuning": (10, model_trials),
}


def measured(name: str, scale: float) -> dict[str, Any]:
    """A part, in this process."""
    size, part = PARTS[name]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        meter = part(max(10, round(size * scale)), Path(folder))
    return meter.facts() | {"seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full sizes")
    parser.add_argument("--only", choices=PARTS, help="one part; the others in the file of results stay")
    parser.add_argument("--here", action="store_true", help="in this process, as JSON on standard output")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    if given.here:
        print(json.dumps(measured(given.only, given.scale)))
        return
    results: dict[str, Any] = {}
    if given.only and given.out and given.out.is_file():
        results = json.loads(given.out.read_text())["parts"]
    for name in [given.only] if given.only else PARTS:
        command = [sys.executable, __file__, "--here", "--only", name, "--scale", str(given.scale)]
        results[name] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        growth = ", ".join(f"{what} x {times}" for what, times in results[name]["growth"].items())
        print(f"{name}: {results[name]['done']:,} in {results[name]['seconds']} s; {growth}", flush=True)
    if given.out:
        facts = {"scale": given.scale, "parts": results, "versions": versions()}
        given.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
