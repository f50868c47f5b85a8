"""A stronger encoder as the teacher of a small one, as a second space, and as both.

    python benchmarks/teachers.py --data DIR --stronger FOLDER    # DIR/<task>/{train,test}.jsonl, as for texts.py

Seven sets of texts; half of the texts drawn are adapted to without their labels, the other half is judged on. The small
encoder is that of `texts.py`, FOLDER another sentence encoder, as all-mpnet-base-v2. Both are asked the same. Both tune
prototypes (`--preset fast`), so that each encodes its texts once. The teacher is the stronger one after its own
adaptation; its features, without its prompts, are the second space. With both the answers stay, so that here, where all
texts have one, nothing is added. Last step. "Recovered" is the share of the distance
from the small one alone to the stronger one that is made up for, at the small one's cost of prediction.

Then three bad teachers: noise, one class for all, and the good one with its two largest classes swapped; what the last
step gives, and what the verdict uses.

`--full` also tunes all weights of the small one, alone and taught, on the sets named. Labels are read for the table
alone. The weight of the teacher's term was settled on three of the sets, marked with *, in view of their labels.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from texts import TASKS, model_folder, read
from torch import Tensor
from tuners import put_table

from pouf import Classifier, InferenceConfig, Texts
from pouf.files import write_json
from pouf.inference.cache import InMemoryFeatureCache
from pouf.runs.folder import versions
from pouf.validation.diagnostics import share

DOMAINS = ("tweets", "amazon")
SETS = ("intents 150", "intents 20", "trec", "mr", "subj", *DOMAINS)
SETTLED_ON = ("intents 150", "trec", "mr")
BAD = ("noise", "one class", "swapped")
OWN = ", own texts"
STATES = ("zero-shot", "stronger, zero-shot", "alone", "stronger", "taught", "second space", "both")


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


def run_set(name: str, given: argparse.Namespace, seed: int) -> dict[str, float]:
    pairs, words, templates = drawn(name, given.data, 2 * given.texts)
    texts, labels = [text for text, _ in pairs], torch.tensor([list(words).index(label) for _, label in pairs])
    adapted_to, half = texts[: given.texts], given.texts
    cache = InMemoryFeatureCache()
    small, stronger = (
        Classifier.from_pretrained(model, list(words.values()), templates)
        for model in (model_folder(given.model), given.stronger)
    )

    def right(classifier: Classifier, own: bool = False) -> float:
        """Accuracy on texts that were not adapted to, or on those that were."""
        judged_on, truth = (adapted_to, labels[:half]) if own else (texts[half:], labels[half:])
        found = classifier.infer(Texts(judged_on), InferenceConfig(cache=cache))
        return share(found.log_probabilities.argmax(1) == truth)

    def last(classifier: Classifier, recipe: str = "fast", **options: object) -> Classifier:
        return classifier.adapt(Texts(adapted_to), recipe=recipe, seed=seed, cache=cache, **options).at("last")

    other = last(stronger)
    teacher: Tensor = other.infer(Texts(adapted_to), InferenceConfig(cache=cache)).log_probabilities.exp()
    space = stronger.encode(Texts(adapted_to), InferenceConfig(cache=cache)).features.numpy()
    ways = {
        "alone": {}, "taught": {"teacher": other}, "second space": {"second_features": space},
        "both": {"teacher": other, "second_features": space},
    }  # fmt: skip
    states = {"zero-shot": small, "stronger, zero-shot": stronger, "stronger": other}
    states |= {way: last(small, **options) for way, options in ways.items()}
    found = {f"{state}{OWN * own}": right(each, own) for state, each in states.items() for own in (False, True)}
    for kind, answers in bad_teachers(teacher).items():
        result = small.adapt(Texts(adapted_to), recipe="fast", seed=seed, cache=cache, teacher=answers)
        found[f"{kind}, last step"], found[f"{kind}, used"] = right(result.at("last")), right(result.classifier)
        found[f"{kind}, alarm"] = any("teacher" in alarm.name for alarm in result.verdict.alarms)
    if name in given.full:
        for way in ("alone", "taught"):
            start = time.process_time()
            found[f"{way}, all weights"] = right(last(small, "balanced", **ways[way]))
            found[f"{way}, all weights: CPU seconds"] = time.process_time() - start
    return {state: round(value, 4) for state, value in found.items()}


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
    lines += ["", f"| set | zero-shot | {' | '.join(f'{kind}: last step, used' for kind in BAD)} |"]
    lines += ["|---|---|" + "---|" * len(BAD)]
    for name, runs in results.items():
        cells = [
            f"{100 * runs[0][f'{kind}, last step']:.1f}, {100 * runs[0][f'{kind}, used']:.1f}"
            f"{' (alarm)' if runs[0][f'{kind}, alarm'] else ''}"
            for kind in BAD
        ]
        lines.append(f"| {name} | {100 * runs[0]['zero-shot']:.1f} | {' | '.join(cells)} |")
    full = {name: runs[0] for name, runs in results.items() if "taught, all weights" in runs[0]}
    for name, run in full.items():
        lines += ["", f"All weights of the small one, {name}: alone {100 * run['alone, all weights']:.1f}, taught "
                  f"{100 * run['taught, all weights']:.1f} (seed 0)."]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="folder of the small encoder; default: the installed package")
    parser.add_argument("--stronger", type=Path, required=True, help="folder of the stronger encoder")
    parser.add_argument("--texts", type=int, default=400, help="texts to adapt to, and as many to judge on")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--full", nargs="*", default=[], choices=SETS, help="sets on which all weights are tuned too")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    folder = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=folder / "teachers.json", help="JSON; what is in it stays")
    parser.add_argument("--page", type=Path, default=folder / "teachers.md", help="page with a place for the table")
    given = parser.parse_args()
    facts = json.loads(given.out.read_text()) if given.out.is_file() else {}
    facts |= {"texts": given.texts, "seeds": given.seeds, "versions": versions()}
    results: dict[str, list[dict[str, float]]] = facts.setdefault("sets", {})
    for name in given.sets:
        if name not in results:
            results[name] = [run_set(name, given, seed) for seed in given.seeds]
            print(name, results[name], flush=True)
            write_json(given.out, facts)
    shown = table({name: results[name] for name in SETS if name in results})
    print(shown)
    put_table(given.page, "teachers", shown)


if __name__ == "__main__":
    main()
