"""A small masked language model meets new domains: zero-shot, prior correction, POUF, a few labels with and without it.

    python benchmarks/masked_lm.py --model DIR --data DIR/text --out results.json

The model (a BERT with a masked-LM head, 22.7 M parameters) learned what "It was [MASK]." asks from film reviews. The
targets are `sentiment_domains/{tweets,amazon,nyt}.jsonl` (text, score from -4 to 4): all texts with |score| >= 1, their
first 40 words, but for 300 that are kept apart for shots. POUF adapts on the target's texts without labels and is
judged on them, as the paper does with images; `pouf_equal` is told that the classes are about equally frequent (as the
paper assumes), which they are not quite. LM-BFF learns from 16 of the others per class with labels, and LM-BFF +
POUF adds the unsupervised loss on those shots. LM-BFF's demonstrations make everything several times longer: they are
left out unless `--methods lm_bff_demo lm_bff_demo_pouf` asks for them. Last step, three seeds, one recipe for all
domains: the paper's lambda and T, with the steps, batch and rate that were tried first on tweets and amazon.

The GLUE-like tasks (`<task>/{train,test}.jsonl`) run through the same functions: adapted on 600 training texts, judged
on up to 600 test texts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pouf import Classifier, Recipe, Shots, Texts
from pouf.bench.archives import few_shot, read_task, subset
from pouf.bench.tasks import TASK_METRICS, TASKS, Task
from pouf.data.tables import read_table
from pouf.models.demonstrations import Demonstrations
from pouf.models.templates import TextSample
from pouf.postprocess.shares import prior_correction
from pouf.runs.folder import versions

DOMAINS = ("tweets", "amazon", "nyt")
GLUE_LIKE = ("SST-2", "SST-5", "MR", "Subj", "TREC", "CoLA", "RTE", "MRPC")
NEAR_SOURCE = ("SST-2", "MR", "SST-5")  # film reviews, as the model's own training texts: no targets
METHODS = (
    "pouf",
    "pouf_equal",
    "lm_bff",
    "lm_bff_pouf",
    "lm_bff_demo",
    "lm_bff_demo_pouf",
)  # tasks have the first alone
SEEDS = (0, 1, 2)
SIZE = 600
KEPT_APART = 300
FEW_SHOT_STEPS = 60
SENTIMENT = TASKS["SST-2"]

Result = dict[str, object]


def domain(file: Path) -> Shots:
    """All texts of a domain with a clear sentiment."""
    rows = zip(*read_table(file, "text", "score").values(), strict=True)
    clear = [(text, score) for text, score in rows if abs(score) >= 1]
    texts = [" ".join(text.split()[:40]) for text, _ in clear]
    return Shots(Texts(texts, source=file.stem), torch.tensor([[score < 0, score > 0] for _, score in clear]).float())


def sample(data: Shots, size: int) -> Shots:
    return subset(data, random.Random(0).sample(range(len(data.inputs)), min(size, len(data.inputs))))


def items(data: Shots) -> list[TextSample]:
    return [data.inputs.read(i) for i in range(len(data.inputs))]


class Bench:
    """One task: its classifier, its unlabelled texts and its labelled ones, which training never meets."""

    def __init__(self, model: Path, task: Task, unlabelled: list[TextSample], labelled: Shots) -> None:
        self.model, self.task, self.unlabelled, self.labelled = model, task, unlabelled, labelled
        self.measure = TASK_METRICS[task.metrics[0]]

    def classifier(self) -> Classifier:
        words = list(self.task.words.values())
        return Classifier.from_pretrained(self.model, self.task.labels, [self.task.template], words=words,
                                          max_length=self.task.max_length)  # fmt: skip

    def assess(self, logits: torch.Tensor) -> float:
        return self.measure(logits.softmax(1), self.labelled.targets)

    def untrained(self) -> Result:
        classifier = self.classifier()
        encoded = classifier.encode(self.labelled.inputs)
        scores = classifier.scores(encoded)
        corrected = prior_correction(encoded.features, classifier.prototypes(), scores)(encoded.features, scores.logits)
        n = len(scores.logits)
        majority = torch.zeros_like(scores.logits).scatter(1, self.labelled.targets.sum(0).argmax().expand(n, 1), 1.0)
        return {
            "metric": self.task.metrics[0],
            "n": n,
            "majority": self.measure(majority, self.labelled.targets),
            "zero_shot": self.assess(scores.logits),
            "prior_corrected": self.assess(corrected),
        }

    def train(
        self,
        recipe: Recipe,
        seed: int,
        unlabelled: bool,
        shots: Shots | None,
        demonstrate: bool = False,
        prior: str | None = None,
    ) -> float:
        classifier = self.classifier()
        if shots is not None and demonstrate:
            classifier.demonstrations = Demonstrations.from_shots(shots, samples=self.task.draws, seed=seed)
        data = Texts(self.unlabelled) if unlabelled else None
        classifier = classifier.adapt(data, recipe=recipe, shots=shots, seed=seed, prior=prior).at("last")
        return self.assess(classifier.infer(self.labelled.inputs).log_probabilities)


def repeated(name: str, seeds: list[int], run: Callable[[int], float]) -> list[float]:
    values = []
    for seed in seeds:
        start = time.perf_counter()
        values.append(run(seed))
        print(f"  {name}, seed {seed}: {100 * values[-1]:.1f} ({time.perf_counter() - start:.0f} s)", flush=True)
    return values


def run_domain(name: str, model: Path, data: Path, seeds: list[int], methods: Sequence[str]) -> Result:
    everything = domain(data / "sentiment_domains" / f"{name}.jsonl")
    apart = set(random.Random(0).sample(range(len(everything.inputs)), KEPT_APART))
    target = subset(everything, [i for i in range(len(everything.inputs)) if i not in apart])
    bench = Bench(model, SENTIMENT, items(target), target)
    pouf, lm_bff, both = Recipe.load("masked"), Recipe.load("lm-bff"), Recipe.load("lm-bff-pouf")
    lm_bff, both = (recipe.with_settings(steps=FEW_SHOT_STEPS) for recipe in (lm_bff, both))
    pool = subset(everything, sorted(apart))
    shots = {seed: few_shot(pool, seed, excluded=set(items(target))).train for seed in seeds}
    runs: dict[str, Callable[[int], float]] = {
        "pouf": lambda seed: bench.train(pouf, seed, True, None),
        "pouf_equal": lambda seed: bench.train(pouf, seed, True, None, prior="uniform"),
        "lm_bff": lambda seed: bench.train(lm_bff, seed, False, shots[seed]),
        "lm_bff_pouf": lambda seed: bench.train(both, seed, False, shots[seed]),
        "lm_bff_demo": lambda seed: bench.train(lm_bff, seed, False, shots[seed], True),
        "lm_bff_demo_pouf": lambda seed: bench.train(both, seed, False, shots[seed], True),
    }
    return bench.untrained() | {method: repeated(method, seeds, runs[method]) for method in methods}


def run_task(name: str, model: Path, data: Path, seeds: list[int], methods: Sequence[str]) -> Result:
    task = TASKS[name]
    train, test = (sample(read_task(task, data, split), SIZE) for split in ("train", "test"))
    bench = Bench(model, task, items(train), test)
    recipe = Recipe.load("masked").with_settings(
        **{"objective.transport": task.transport, "objective.information": task.information}
    )
    runs = {"pouf": lambda seed: bench.train(recipe, seed, True, None)}
    found = {method: repeated(method, seeds, run) for method, run in runs.items() if method in methods}
    return bench.untrained() | found | {"near_source": name in NEAR_SOURCE}


def table(results: dict[str, Result]) -> str:
    columns = ("majority", "zero_shot", "prior_corrected", *METHODS)
    lines = [f"| | metric | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for name, result in results.items():
        cells = [_cell(result.get(column)) for column in columns]
        lines.append(f"| {name} | {result['metric']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, list):
        each = [100 * float(v) for v in value]
        return f"{statistics.mean(each):.1f} ({statistics.pstdev(each):.1f})"
    return f"{100 * float(value):.1f}" if isinstance(value, float) else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a masked language model")
    parser.add_argument("--data", type=Path, required=True, help="folder of the language tasks")
    parser.add_argument("--names", nargs="+", default=[*DOMAINS, *GLUE_LIKE], choices=[*DOMAINS, *GLUE_LIKE])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--methods", nargs="+", default=METHODS[:4], choices=METHODS)
    parser.add_argument("--out", type=Path, help="file for the results, JSON; what is in it stays and is added to")
    given = parser.parse_args()
    facts = json.loads(given.out.read_text()) if given.out and given.out.is_file() else {"results": {}}
    for name in given.names:
        print(name, flush=True)
        run = run_domain if name in DOMAINS else run_task
        found = run(name, given.model, given.data, given.seeds, given.methods)
        facts["results"][name] = facts["results"].get(name, {}) | found | {"seeds": given.seeds}
        facts |= {"recipe": Recipe.load("masked").to_toml().splitlines(), "versions": versions()}
        if given.out is not None:
            given.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(table(facts["results"]))


if __name__ == "__main__":
    main()
