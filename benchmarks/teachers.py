"""A stronger encoder as the teacher of a small one, as a second space, and as both.

    python benchmarks/teachers.py --data DIR --stronger FOLDER    # DIR/<task>/{train,test}.jsonl, as for texts.py

Seven sets of texts; some of the texts drawn are adapted to without their labels, the others are judged on; each seed
divides them anew. The small encoder is that of `texts.py`, FOLDER another sentence encoder, as all-mpnet-base-v2. Both
are asked the same. Each encodes its texts once, and prototypes are tuned on the features, as by `--preset fast`. The
teacher is the stronger one after its own adaptation; its features, without its prompts, are the second space. Last
step. "Recovered" is the share of the distance from the small one alone to the stronger one that is made up for, at the
small one's cost of prediction.

"A quarter": answers to a quarter of the texts, alone and with the second space, where answers stay and teach their
neighbours; with answers to all texts it adds nothing. "All labels": taught by the labels themselves, the most that
prototypes of the small one can learn from these texts.

Then three bad teachers: noise, one class for all, and the good one with its two largest classes swapped; what the last
step gives, and what the verdict uses.

Labels are read for the table and "all labels". The weight of the teacher's term was settled on three of the sets, which
are marked with *, in view of their labels.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from texts import TASKS, model_folder, read
from torch import Tensor
from tuners import put_table

from pouf import Adaptation, Classifier, FeatureCache, InferenceConfig, Recipe, Texts
from pouf.data.labels import Teacher
from pouf.files import write_json
from pouf.inference.cache import InMemoryFeatureCache
from pouf.runs.folder import versions
from pouf.validation.diagnostics import share

DOMAINS = ("tweets", "amazon")
SETS = ("intents 150", "intents 20", "trec", "mr", "subj", *DOMAINS)
SETTLED_ON = ("intents 150", "trec", "mr")
BAD = ("noise", "one class", "swapped")
OWN = ", own texts"
STATES = ("zero-shot", "stronger, zero-shot", "alone", "stronger", "taught", "second space", "a quarter",
          "a quarter, second space", "all labels")  # fmt: skip


def drawn(name: str, data: Path, count: int) -> tuple[list[tuple[str, str]], dict[str, str], list[str]]:
    """Texts with labels, what each class is called, and templates."""
    if name.startswith("intents"):
        parts = [read(data / "clinc150" / f"{part}.jsonl") for part in ("test", "train")]
        pairs = [pair for part in parts for pair in zip(*part, strict=True)]
        classes = sorted({label for _, label in pairs})
        classes = sorted(random.Random(0).sample(classes, int(name.split()[1])))
        pairs = [pair for pair in pairs if pair[1] in set(classes)]
        words, templates = {each: each for each in classes}, ["A question about {}."]
    elif name in DOMAINS:
        rows = [json.loads(line) for line in (data / "sentiment_domains" / f"{name}.jsonl").open(encoding="utf-8")]
        pairs = [
            (row["text"], "positive" if row["score"] > 0 else "negative") for row in rows if abs(row["score"]) >= 1
        ]
        words, templates = TASKS["mr"]
    else:
        words, templates = TASKS[name]
        pairs = [pair for part in ("train", "test") for pair in zip(*read(data / name / f"{part}.jsonl"), strict=True)]
    random.Random(0).shuffle(pairs)
    return pairs[:count], words, templates


def bad_teachers(good: Tensor) -> dict[str, Tensor]:
    """Answers (n, k) that are noise, one class for all, and those of a good teacher with two classes swapped."""
    n, k = good.shape
    noise = torch.randint(0, k, (n,), generator=torch.Generator().manual_seed(0))
    a, b = torch.bincount(good.argmax(1), minlength=k).topk(2).indices.tolist()
    swapped = good.clone()
    swapped[:, [a, b]] = good[:, [b, a]]
    return {"noise": sure_of(noise, k), "one class": sure_of(torch.full((n,), a), k), "swapped": swapped}


def sure_of(labels: Tensor, k: int) -> Tensor:
    return 0.9 * F.one_hot(labels, k) + 0.1 / k


class Encoded(NamedTuple):
    """What an encoder makes of a set of texts: a classifier of its vectors, and these."""

    classifier: Classifier
    features: Tensor


def encode(
    model: Path, pairs: list[tuple[str, str]], words: dict[str, str], templates: list[str], cache: FeatureCache
) -> Encoded:
    classifier = Classifier.from_pretrained(model, list(words.values()), templates)
    encoded = classifier.encode(Texts([text for text, _ in pairs]), InferenceConfig(cache=cache))
    temperature = float(classifier.scores(encoded).temperature)
    vectors = Classifier.from_vectors(classifier.fixed_prototypes(), classifier.classes, temperature)
    return Encoded(vectors, encoded.features.clone())


def run_seed(small: Encoded, stronger: Encoded, labels: Tensor, count: int, seed: int) -> dict[str, float]:
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    own, others = order[:count], order[count:]
    recipe, k = Recipe.preset("fast", "text"), len(small.classifier.classes)

    def right(state: Encoded, rows: Tensor = others) -> float:
        return share(state.classifier.predict_proba(state.features[rows].numpy()).argmax(1) == labels[rows])

    def adapted(encoder: Encoded, **options: object) -> Adaptation:
        return encoder.classifier.adapt(encoder.features[own].numpy(), recipe=recipe, seed=seed, **options)

    def last(encoder: Encoded, **options: object) -> Encoded:
        return encoder._replace(classifier=adapted(encoder, **options).at("last"))

    other = last(stronger)
    teacher = other.classifier.predict_proba(other.features[own].numpy())
    quarter = teacher.clone()
    quarter[count // 4 :] = 0
    space = {"second_features": stronger.features[own].numpy()}
    ways: dict[str, dict[str, object]] = {
        "alone": {}, "taught": {"teacher": Teacher(teacher)}, "second space": space,
        "a quarter": {"teacher": Teacher(quarter)}, "a quarter, second space": {"teacher": Teacher(quarter), **space},
        "all labels": {"teacher": sure_of(labels[own], k)},
    }  # fmt: skip
    states = {"zero-shot": small, "stronger, zero-shot": stronger, "stronger": other}
    states |= {way: last(small, **options) for way, options in ways.items()}
    found = {state: right(each) for state, each in states.items()}
    found |= {state + OWN: right(each, own) for state, each in states.items()}
    for kind, answers in bad_teachers(teacher).items():
        result = adapted(small, teacher=answers)
        found[f"{kind}, last step"] = right(small._replace(classifier=result.at("last")))
        found[f"{kind}, used"] = right(small._replace(classifier=result.classifier))
        found[f"{kind}, alarm"] = any("teacher" in alarm.name for alarm in result.verdict.alarms)
    return {state: round(float(value), 4) for state, value in found.items()}


def recovered(found: dict[str, float], way: str) -> str:
    """The share of the distance to the stronger model; nothing where there is hardly any."""
    distance = found["stronger"] - found["alone"]
    return f"{(found[way] - found['alone']) / distance:.0%}" if distance >= 0.02 else "–"


def rows(results: dict[str, list[dict[str, float]]], suffix: str) -> list[str]:
    """A row for each set, and their mean."""
    sets = {
        name: {state: statistics.mean(run[state + suffix] for run in runs) for state in STATES}
        for name, runs in results.items()
    }
    sets["mean"] = {state: statistics.mean(found[state] for found in sets.values()) for state in STATES}
    lines = []
    for name, found in sets.items():
        cells = [f"{100 * found[state]:.1f}" for state in STATES]
        star = " *" if name in SETTLED_ON else ""
        lines.append(f"| {name}{star} | {' | '.join(cells)} | {recovered(found, 'taught')} |")
    return lines


def table(results: dict[str, list[dict[str, float]]]) -> str:
    head = [f"| set | {' | '.join(STATES)} | recovered by the taught one |", "|---|" + "---|" * (len(STATES) + 1)]
    lines = ["On texts that were not adapted to:", "", *head, *rows(results, ""), ""]
    lines += ["On the texts that were adapted to:", "", *head, *rows(results, OWN)]
    lines += ["", f"| set | zero-shot | {' | '.join(f'{kind}: last step, used (alarms)' for kind in BAD)} |"]
    lines += ["|---|---|" + "---|" * len(BAD)]
    for name, runs in results.items():
        mean = {state: statistics.mean(run[state] for run in runs) for state in runs[0]}
        cells = [
            f"{100 * mean[f'{kind}, last step']:.1f}, {100 * mean[f'{kind}, used']:.1f}"
            f" ({round(mean[f'{kind}, alarm'] * len(runs))} of {len(runs)})"
            for kind in BAD
        ]
        lines.append(f"| {name} | {100 * mean['zero-shot']:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="folder of the small encoder; default: the installed package")
    parser.add_argument("--stronger", type=Path, required=True, help="folder of the stronger encoder")
    parser.add_argument("--texts", type=int, default=400, help="texts to adapt to, and at most as many to judge on")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--cache", type=Path, help="folder of features, for another time")
    folder = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=folder / "teachers.json", help="JSON; what is in it stays")
    parser.add_argument("--page", type=Path, default=folder / "teachers.md", help="page with a place for the table")
    given = parser.parse_args()
    facts = json.loads(given.out.read_text()) if given.out.is_file() else {}
    facts |= {"texts": given.texts, "seeds": given.seeds, "versions": versions()}
    results: dict[str, list[dict[str, float]]] = facts.setdefault("sets", {})
    cache = FeatureCache(given.cache) if given.cache else InMemoryFeatureCache()
    for name in given.sets:
        if name not in results:
            pairs, words, templates = drawn(name, given.data, 2 * given.texts)
            labels = torch.tensor([list(words).index(label) for _, label in pairs])
            models = (model_folder(given.model), given.stronger)
            small, stronger = (encode(model, pairs, words, templates, cache) for model in models)
            results[name] = [run_seed(small, stronger, labels, given.texts, seed) for seed in given.seeds]
            print(name, results[name], flush=True)
            write_json(given.out, facts)
    shown = table({name: results[name] for name in SETS if name in results})
    print(shown)
    put_table(given.page, "teachers", shown)


if __name__ == "__main__":
    main()
