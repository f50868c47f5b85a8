"""What to train: all weights, LayerNorms, LoRA, a prompt or prototypes, compared in accuracy and cost.

    python benchmarks/tuners.py --sets digits
    python benchmarks/tuners.py --data DIR --sets mr subj trec tweets webcam --names NAMES --limit 300

DIR holds `text/<task>/{train,test}.jsonl`, `text/sentiment_domains/<domain>.jsonl` and `images/office_caltech10/`; the
models for texts and photographs come from pip, as in `texts.py` and `photos.py`. A sentence encoder is asked about the
sentiment domains, too, with the words that it is asked about MR with; `masked_lm.py` asks a masked language model. The
image side of the model for photographs has neither attention nor LayerNorms, so that LoRA and LayerNorm reach its text
side alone.

Every cell runs in a process of its own, on one thread. Its peak of memory is that of the whole process up to the end of
the adaptation: libraries, model, data and training. A cell that is in the results already is not computed again.
`--table FILE` puts the table between the marks in a page.

Each tuner has its own recipe, one for all sets of a kind: for texts what `--tune` takes; `upper` is for texts alone.
Labels are read after training, for the table alone.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pouf import EMBEDDED, METHODS, Classifier, InferenceConfig, Recipe, Texts
from pouf.data.base import Subset, Unlabelled
from pouf.data.labels import read_labelled
from pouf.demo import DIGITS, write_digits
from pouf.files import write_json
from pouf.runs.folder import versions
from pouf.validation.diagnostics import share

RESULTS = Path(__file__).parent / "results" / "tuners.json"
TUNERS = ("full", "upper", "layernorm", "lora", "prompt", "prototypes")
DOMAINS = ("tweets", "amazon", "movies", "nyt")
SETS = ("digits", "webcam", "dslr", "mr", "subj", "trec", *DOMAINS)

IMAGE_RECIPES = {"full": "demo", "prompt": "demo-prompt", "layernorm": "images-layernorm", "lora": "images-lora",
                 "prototypes": "features"}  # fmt: skip


class Task(NamedTuple):
    """A zero-shot classifier, what it adapts to, and what it is judged on."""

    classifier: Classifier
    data: Unlabelled
    test: Unlabelled
    labels: list[int]
    recipe: Recipe


def digits(tuner: str, options: argparse.Namespace) -> Task:
    folder = write_digits(Path(tempfile.gettempdir()) / "pouf-benchmark-digits")
    labelled = read_labelled(folder, DIGITS, "image")
    recipe = Recipe.load(IMAGE_RECIPES[tuner])
    return _transductive(Classifier.from_pretrained(EMBEDDED, DIGITS), labelled, recipe, options.limit)


def photographs(domain: str, tuner: str, options: argparse.Namespace) -> Task:
    import photos

    from pouf import FeatureCache

    bench = photos.Bench(options.data / "images", options.names, FeatureCache())
    classes, labelled = bench.read(f"office-caltech:{domain}")
    lora = photos.FULL.with_settings({"tuner.name": "lora", "optimisation.lr": 1e-3})
    recipe = {**photos.TUNED, "lora": lora}[tuner]
    return _transductive(bench.classifier(classes), labelled, recipe, options.limit)


def _transductive(classifier: Classifier, labelled: Any, recipe: Recipe, limit: int | None) -> Task:
    indices = random.Random(0).sample(range(len(labelled.labels)), min(limit or 10**9, len(labelled.labels)))
    some = Subset(labelled.inputs, indices)
    return Task(classifier, some, some, [labelled.labels[i] for i in indices], recipe)


def texts(task: str, tuner: str, options: argparse.Namespace) -> Task:
    import texts as prompts

    model = prompts.model_folder(None)
    if task in DOMAINS:
        rows = [json.loads(line) for line in (options.data / "text/sentiment_domains" / f"{task}.jsonl").open()]
        rows = [
            row for row in rows if abs(row["score"]) >= 1
        ]  # what is neither good nor bad is left out, as in masked_lm.py
        pairs = [(row["text"], "positive" if row["score"] > 0 else "negative") for row in rows]
        words, templates = prompts.TASKS["mr"]
        random.Random(0).shuffle(pairs)
        train = test = pairs
    else:
        words, templates = prompts.TASKS[task]
        train, test = (
            list(zip(*prompts.read(options.data / "text" / task / f"{part}.jsonl"), strict=True))
            for part in ("train", "test")
        )
        random.Random(0).shuffle(train)
        random.Random(1).shuffle(test)
    train, test = train[: options.limit], test[: options.limit]
    return Task(
        Classifier.from_pretrained(model, list(words.values()), templates),
        Texts([text for text, _ in train]),
        Texts([text for text, _ in test]),
        [list(words).index(label) for _, label in test],
        METHODS["pouf"].recipe("text", None, {"tuner.name": tuner}),
    )


def make_task(name: str, tuner: str, options: argparse.Namespace) -> Task:
    if name == "digits":
        return digits(tuner, options)
    if name in ("webcam", "dslr"):
        return photographs(name, tuner, options)
    return texts(name, tuner, options)


def run_cell(name: str, tuner: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    task = make_task(name, tuner, options)
    classifier, labels = task.classifier, torch.tensor(task.labels)

    def judged() -> float:
        predictions = classifier.infer(task.test, InferenceConfig(64))
        return round(100 * share(predictions.log_probabilities.argmax(1) == labels[predictions.indices]), 1)

    start = time.perf_counter()
    result = classifier.adapt(task.data, recipe=task.recipe, seed=seed)
    classifier = result.classifier
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB, before anything else is encoded
    advised = judged()
    classifier = result.at("zero-shot")
    before = judged()
    classifier = result.at("last")
    with tempfile.TemporaryDirectory() as folder:
        classifier.save_pretrained(folder)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.name != "README.md")
    return {
        "set": name, "tuner": tuner, "seed": seed, "limit": options.limit, "zero_shot": before, "last": judged(),
        "advised": advised, "use": result.verdict.advised, "trainable": result.trainable, "total": result.total,
        "megabytes": round(peak / 1024), "seconds": round(seconds, 1), "bytes": size, "inputs": len(task.data),
        "judged_on": len(task.labels), "steps": task.recipe.steps,
    }  # fmt: skip


def _size(count: int) -> str:
    return f"{count / 1e3:,.0f} kB" if count < 1e6 else f"{count / 1e6:,.1f} MB"


def table(cells: list[dict[str, Any]]) -> str:
    lines = [
        "| data | tuner | zero-shot | last step | advised | trained numbers | peak memory | seconds | on disk |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for c in cells:
        lines.append(
            f"| {c['set']} ({c['inputs']:,}) | {c['tuner']} | {c['zero_shot']:.1f} | {c['last']:.1f} | "
            f"{c['advised']:.1f} | {c['trainable']:,} | {c['megabytes']:,} MB | {c['seconds']:.0f} | "
            f"{_size(c['bytes'])} |"
        )
    return "\n".join(lines)


def put_table(page: Path, name: str, table: str) -> None:
    """Write a table between `<!-- name: begin -->` and `<!-- name: end -->` of a page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, found, rest = page.read_text(encoding="utf-8").partition(begin)
    if not found or end not in rest:
        raise SystemExit(f"{page} has no place for a table: expected the lines {begin} and {end}")
    page.write_text(f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of texts and photographs; not needed for digits")
    parser.add_argument("--names", type=Path, help="for photographs: the names of ImageNet, as in photos.py")
    parser.add_argument("--sets", nargs="+", default=["digits"],
                        choices=SETS)  # fmt: skip
    parser.add_argument("--tuners", nargs="+", default=list(TUNERS), choices=TUNERS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--limit", type=int, help="inputs to adapt to, and to be judged on, at most")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, help="a page to put the table into")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)  # of one process
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cell:
        name, tuner, seed = options.cell
        print(json.dumps(run_cell(name, tuner, int(seed), options)))
        return
    stored = json.loads(options.out.read_text()) if options.out.is_file() else {"cells": []}
    there = {(c["set"], c["tuner"], c["seed"], c["limit"]) for c in stored["cells"]}
    for name in options.sets:
        for tuner in options.tuners:
            for seed in options.seeds:
                texts_alone = tuner == "upper" and name in ("digits", "webcam", "dslr")
                if texts_alone or (name, tuner, seed, options.limit) in there:
                    continue
                # The last of two values of an option counts, so that the cell can follow what was given.
                command = [sys.executable, *sys.argv, "--cell", name, tuner, str(seed)]
                output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
                stored["cells"].append(cell := json.loads(output.splitlines()[-1]))
                stored["versions"] = versions()
                stored["cells"].sort(key=lambda c: (SETS.index(c["set"]), TUNERS.index(c["tuner"]), c["seed"]))
                options.out.parent.mkdir(parents=True, exist_ok=True)
                write_json(options.out, stored)
                print(table([cell]).splitlines()[-1], flush=True)
    print(table(stored["cells"]))
    if options.table is not None:
        put_table(options.table, "tuners", table(stored["cells"]))


if __name__ == "__main__":
    main()
