"""What an export to ONNX and int8 costs in accuracy and brings in speed: torch, onnxruntime and int8 in turn.

The embedded model adapted to handwritten digits with the recipe `demo`, and all-MiniLM-L6-v2 adapted to a task of
`benchmarks/texts.py` with `texts-fast`, both at the last step. One thread each. In every round the three go through the
same batches one after the other, so that a busy machine hits all of them alike: the ratios count.

    python benchmarks/export.py --data DIR  # DIR/<task>/{train,test}.jsonl with `text` and `label`; without it, digits
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from texts import TASKS, UNLABELLED, model_folder, read

from pouf import Classifier, Texts, read_labelled
from pouf.data.base import Unlabelled
from pouf.demo import DIGITS, write_digits
from pouf.integrations.onnx import CLASSIFIER, INT8, export_onnx, run

BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the text tasks")
    parser.add_argument("--task", default="trec", choices=list(TASKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tables = [digits(given)]
    if given.data is not None:
        tables.append(texts(given))
    print("| model | run by | accuracy | ms per input | times as fast as torch | MB |\n|---|---|---|---|---|---|")
    for table in tables:
        for name, row in table["rows"].items():
            print(
                f"| {table['model']} | {name} | {100 * row['accuracy']:.1f} | {row['ms']:.2f} | {row['ratio']:.2f} | "
                f"{row['mb']:.1f} |"
            )
    if given.out is not None:
        given.out.write_text(json.dumps(tables, indent=2) + "\n")


def digits(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        images = write_digits(Path(folder) / "digits")
        clf = Classifier.from_pretrained("pouf/tiny-clip", DIGITS)
        clf = clf.adapt(images, recipe="demo").at("last")
        labelled = read_labelled(images, DIGITS, "image")
        return measure("tiny CLIP, digits", clf, labelled.inputs, labelled.labels, given.rounds)


def texts(given: argparse.Namespace) -> dict[str, Any]:
    words, templates = TASKS[given.task]
    clf = Classifier.from_pretrained(model_folder(None), list(words.values()), templates)
    unlabelled = random.Random(0).sample(read(given.data / given.task / "train.jsonl")[0], UNLABELLED)
    clf = clf.adapt(Texts(unlabelled), recipe="texts-fast").at("last")
    inputs, names = read(given.data / given.task / "test.jsonl")
    labels = [list(words).index(name) for name in names]
    return measure(f"all-MiniLM-L6-v2, {given.task}", clf, Texts(inputs), labels, given.rounds)


def measure(name: str, clf: Classifier, inputs: Unlabelled, labels: Sequence[int], rounds: int) -> dict[str, Any]:
    """Accuracy on all inputs, and the time of each of the three for the same batches."""
    truth = np.asarray(labels)
    samples = [inputs.read(i, clf.backbone.image_size) for i in range(len(truth))]
    order = inputs.reading_order()  # texts of about the same length together
    batches = [clf.backbone.prepare([samples[i] for i in order[s : s + BATCH]]) for s in range(0, len(order), BATCH)]
    with tempfile.TemporaryDirectory() as folder:
        out = export_onnx(clf, folder, inputs, int8=True).folder
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = 1
        sessions = {
            each: onnxruntime.InferenceSession(str(out / file), settings)
            for each, file in (("onnxruntime", CLASSIFIER), ("int8", INT8))
        }
        prototypes = clf.prototypes().detach()

        def in_torch(batch: dict[str, torch.Tensor]) -> np.ndarray:
            with torch.inference_mode():
                features = clf.backbone.encode_inputs(batch)
                logits = clf.backbone.scores(features, prototypes).logits
                return (logits if clf.postprocessor is None else clf.postprocessor(features, logits)).numpy()

        ways: dict[str, Callable[[dict[str, torch.Tensor]], np.ndarray]] = {"torch": in_torch}
        ways |= {each: lambda batch, s=session: run(s, batch)[0] for each, session in sessions.items()}
        right = {
            way: float((np.concatenate([call(b).argmax(1) for b in batches]) == truth[list(order)]).mean())
            for way, call in ways.items()
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, call in ways.items():
                start = time.perf_counter()
                for batch in batches:
                    call(batch)
                times[way].append((time.perf_counter() - start) / len(truth))
        size = {"onnxruntime": CLASSIFIER, "int8": INT8}
        weights = sum(p.numel() * 4 for p in clf.backbone.parameters())
        rows = {
            way: {
                "accuracy": right[way],
                "ms": 1e3 * statistics.median(times[way]),
                "ratio": statistics.median(t / o for t, o in zip(times["torch"], times[way], strict=True)),
                "mb": ((out / size[way]).stat().st_size if way in size else weights) / 2**20,
            }
            for way in ways
        }
    return {"model": name, "inputs": len(truth), "rows": rows}


if __name__ == "__main__":
    main()
