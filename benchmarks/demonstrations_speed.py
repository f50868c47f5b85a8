"""Predictions over 16 draws of demonstrations, ours against one draw after another, in one run.

    python benchmarks/demonstrations_speed.py --data ../shared/data/text --model ../shared/models/minilm-mlm \
        --out benchmarks/results/demonstrations_speed.json

The plain loop takes one draw after the other: it tokenizes every text and every shot anew and pads the draw to its
longest input. Ours takes all draws of a batch together: each text and each shot is tokenized once, the same input is
encoded once, and inputs of about the same length are encoded together. Both give the same features. Seconds are of the
processor, of one process, so that other work on the machine counts less; the two take turns, and medians are told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pouf import Classifier
from pouf.bench.archives import few_shot, read_task
from pouf.bench.tasks import TASKS
from pouf.data.base import Subset
from pouf.inference.encode import InferenceConfig
from pouf.models.masked_text import MaskedText
from pouf.runs.folder import versions
from pouf.training.methods import METHODS


def measured(task_name: str, data: Path, model: Path, n: int, repetitions: int) -> dict[str, object]:
    task = TASKS[task_name]
    test = read_task(task, data, "test")
    length = task.length("after")
    classifier = Classifier.from_pretrained(
        model, task.labels, [task.template], words=list(task.words.values()), max_length=length
    )
    split = few_shot(read_task(task, data, "train"), seed=42)
    limits = {"own_limit": task.own_limit, "shot_limit": task.shot_limit}
    classifier = METHODS["lm-bff"].preparation(split.train, 42, task.draws, **limits).applied_to(classifier)
    demonstrations, backbone = classifier.demonstrations, classifier.backbone
    assert demonstrations is not None and backbone.cloze is not None
    inputs = Subset(test.inputs, range(n))
    tokens = dict.fromkeys(("plain", "ours"), 0)
    encode = backbone.encode_inputs

    def counted(way: str) -> Callable[[dict[str, Tensor]], Tensor]:
        def count(batch: dict[str, Tensor]) -> Tensor:
            tokens[way] += batch["input_ids"].numel()
            return encode(batch)

        return count

    @torch.no_grad()
    def plain() -> Tensor:
        views = [demonstrations.views(inputs.read(i)) for i in range(n)]
        each = []
        for draw in range(task.draws):
            fresh = MaskedText(backbone.tokenizer, backbone.cloze, length)
            each.append(counted("plain")(fresh([of_text[draw] for of_text in views])))
        return torch.stack(each).mean(0)

    def ours() -> Tensor:
        backbone.texts = MaskedText(backbone.tokenizer, backbone.cloze, length)
        backbone.encode_inputs = counted("ours")  # type: ignore[method-assign]
        return classifier.encode(inputs, InferenceConfig(n)).features

    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    features: dict[str, Tensor] = {}
    for _ in range(repetitions):
        for name, way in (("plain", plain), ("ours", ours)):
            start = time.process_time()
            features[name] = way()
            seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "ratio": round(medians["plain"] / medians["ours"], 2),
        "seconds": {name: round(value, 2) for name, value in medians.items()},
        "tokens": {name: count // repetitions for name, count in tokens.items()},
        "largest_difference": float((features["plain"] - features["ours"]).abs().max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of language tasks")
    parser.add_argument("--model", type=Path, required=True, help="folder of a masked language model")
    parser.add_argument("--tasks", nargs="+", default=["SST-2", "TREC"])
    parser.add_argument("--texts", type=int, default=32, help="test texts of each task")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    facts: dict[str, object] = {
        task: measured(task, given.data, given.model, given.texts, given.repetitions) for task in given.tasks
    }
    setup = {"texts": given.texts, "model": given.model.name, "threads": torch.get_num_threads()}
    facts |= setup | {"versions": versions()}
    print(json.dumps(facts, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
