"""All weights or the upper layers alone: accuracy and CPU seconds, in one process and by turns.

    python benchmarks/upper_layers.py --data DIR/text --sets mr subj trec sst5 clinc-0
    python benchmarks/upper_layers.py --data DIR/text --masked-lm MODEL --sets tweets amazon movies nyt sst2

DIR/text holds `<task>/{train,test}.jsonl` and `sentiment_domains/<domain>.jsonl`. A sentence encoder from pip (see
`texts.py`) or, with `--masked-lm`, a masked language model adapts to at most 300 texts without labels, and is judged on
as many test texts; of the domains, and of a dozen of the classes of CLINC150 (`clinc-0`, `clinc-1`, …), on the texts
themselves. One recipe for all sets; labels are read after training, for the table alone. Cells that are in the results
are not computed again. A variant may have settings, as `upper:tuner.layers=3,optimisation.lr=2e-4`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import texts as encoders
import torch

from pouf import Classifier, Texts
from pouf.files import write_json
from pouf.runs.folder import versions
from pouf.validation.diagnostics import share

RESULTS = Path(__file__).parent / "results" / "upper_layers.json"
DOMAINS = ("tweets", "amazon", "movies", "nyt")
SENTIMENT = {"negative": "terrible", "positive": "great"}
STARS = {
    "very negative": "terrible",
    "negative": "bad",
    "neutral": "okay",
    "positive": "good",
    "very positive": "great",
}
TREC_NAMES = {name: name for name in encoders.TASKS["trec"][0]}
ASKED: dict[str, tuple[dict[str, str], list[str]]] = {
    **encoders.TASKS,
    "trec-names": (TREC_NAMES, ["The question asks about {}."]),
    "sst2": (SENTIMENT, ["It was {}."]),
    "sst5": (STARS, ["It was {}."]),
    **dict.fromkeys(DOMAINS, (SENTIMENT, ["It was {}."])),
}
CLINC_CLASSES = 12


def read(name: str, data: Path, limit: int) -> tuple[list[str], list[str], list[str], dict[str, str], list[str]]:
    """Texts to adapt to, texts to be judged on with their labels, and what the model is asked."""
    if name in DOMAINS:
        rows = [json.loads(line) for line in (data / "sentiment_domains" / f"{name}.jsonl").open(encoding="utf-8")]
        pairs = [
            (" ".join(row["text"].split()[:40]), "positive" if row["score"] > 0 else "negative")
            for row in rows
            if abs(row["score"]) >= 1
        ]
        some = random.Random(0).sample(pairs, min(limit, len(pairs)))
        return [text for text, _ in some], *map(list, zip(*some, strict=True)), *ASKED[name]  # type: ignore[return-value]
    if name.startswith("clinc-"):
        parts = [zip(*encoders.read(data / "clinc150" / f"{part}.jsonl"), strict=True) for part in ("train", "test")]
        pairs = [pair for part in parts for pair in part]
        classes = sorted({label for _, label in pairs})
        random.Random(0).shuffle(classes)
        first = CLINC_CLASSES * int(name.removeprefix("clinc-"))
        names = {label: label for label in sorted(classes[first : first + CLINC_CLASSES])}
        some = [pair for pair in pairs if pair[1] in names][:limit]
        return [text for text, _ in some], *map(list, zip(*some, strict=True)), names, ["A question about {}."]  # type: ignore[return-value]
    folder = data / name.removesuffix("-names")
    train, _ = encoders.read(folder / "train.jsonl")
    test = list(zip(*encoders.read(folder / "test.jsonl"), strict=True))
    test = random.Random(1).sample(test, min(limit, len(test)))
    return random.Random(0).sample(train, limit), [t for t, _ in test], [label for _, label in test], *ASKED[name]


def run(name: str, variant: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    unlabelled, test, answers, words, templates = read(name, options.data, options.limit)
    labels = torch.tensor([list(words).index(answer) for answer in answers])
    if options.masked_lm is None:
        classifier = Classifier.from_pretrained(encoders.model_folder(None), list(words.values()), templates)
    else:
        template = [templates[0].replace("{}", "[MASK]").join(("{text} ", ""))]
        classifier = Classifier.from_pretrained(options.masked_lm, list(words), template, words=list(words.values()))

    def judged(found: Classifier) -> float:
        predictions = found.infer(Texts(test)).log_probabilities.argmax(1)
        return round(100 * share(predictions == labels), 1)

    tuner, _, changes = variant.partition(":")
    settings = {"tuner.name": tuner}
    for change in filter(None, changes.split(",")):
        setting, _, value = change.partition("=")
        settings[setting] = json.loads(value)
    start = time.process_time()
    result = classifier.adapt(Texts(unlabelled), settings=settings, seed=seed)
    seconds = time.process_time() - start
    zero_shot, last = judged(classifier), judged(result.at("last"))
    known = {"zero-shot": zero_shot, "last": last}
    advised = known[result.verdict.advised] if result.verdict.advised in known else judged(result.classifier)
    return {
        "set": name, "variant": variant, "seed": seed, "limit": options.limit, "inputs": len(unlabelled),
        "zero_shot": zero_shot, "last": last, "advised": advised,
        "use": result.verdict.advised, "trainable": result.trainable, "seconds": round(seconds, 1),
    }  # fmt: skip


def table(cells: list[dict[str, Any]]) -> str:
    variants = list(dict.fromkeys(cell["variant"] for cell in cells))
    means: dict[str, dict[str, dict[str, float]]] = {}
    for cell in cells:
        means.setdefault(cell["set"], {}).setdefault(cell["variant"], {})
    for name, own in means.items():
        for variant in own:
            same = [cell for cell in cells if (cell["set"], cell["variant"]) == (name, variant)]
            own[variant] = {k: statistics.mean(c[k] for c in same) for k in ("zero_shot", "last", "advised", "seconds")}
    head = [f"{variant}: {what}" for variant in variants for what in ("last", "advised", "seconds")]
    lines = ["| texts | zero-shot | " + " | ".join(head) + " |", "|---|---|" + "---|" * len(head)]
    complete = {name: own for name, own in means.items() if len(own) == len(variants)}
    for name, own in complete.items():
        row = [
            f"{own[v][k]:.1f}" if k != "seconds" else f"{own[v][k]:.0f}"
            for v in variants
            for k in ("last", "advised", "seconds")
        ]
        lines.append(f"| {name} | {own[variants[0]]['zero_shot']:.1f} | " + " | ".join(row) + " |")
    if complete:
        row = [
            f"{statistics.mean(own[v][k] for own in complete.values()):.1f}"
            for v in variants
            for k in ("last", "advised", "seconds")
        ]
        zero = statistics.mean(own[variants[0]]["zero_shot"] for own in complete.values())
        lines.append(f"| mean | {zero:.1f} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of texts")
    parser.add_argument("--masked-lm", type=Path, help="folder of a masked language model; default: a sentence encoder")
    parser.add_argument("--sets", nargs="+", required=True)
    parser.add_argument("--variants", nargs="+", default=["full", "upper"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--limit", type=int, default=300, help="texts to adapt to, and to be judged on, at most")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kind = "masked language model" if options.masked_lm is not None else "sentence encoder"
    stored = json.loads(options.out.read_text()) if options.out.is_file() else {}
    cells = stored.setdefault(kind, [])
    there = {(c["set"], c["variant"], c["seed"], c["limit"]) for c in cells}
    for name in options.sets:
        for seed in options.seeds:
            for variant in options.variants:
                if (name, variant, seed, options.limit) not in there:
                    cells.append(cell := run(name, variant, seed, options))
                    stored["versions"] = versions()
                    write_json(options.out, stored)
                    print(cell, flush=True)
    print(table(cells))


if __name__ == "__main__":
    main()
