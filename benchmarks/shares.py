"""Can the shares of two classes be told without labels? Thresholds on zero-shot's margins, found in several ways.

    python benchmarks/shares.py --data DIR --masked-model DIR --out benchmarks/results/shares.json

With two classes a share is a threshold on the margin m = log p(second) - log p(first). A biased model wants another
threshold than 0, and so do skewed data. DIR holds `text/`, as for `robustness.py`. Of each set 600 texts are read;
draws of at most 300 have the second class in 15, 30, 50, 70 and 85 % of the texts, or as often as in the set. Nothing
is trained. Labels make the draws and judge the thresholds; only the last three are told some of them.

- **equal shares**: the median of m.
- **EM**: shares π that explain themselves, π ← mean σ(m + log π/(1-π)) (Saerens et al., 2002).
- **shape**: m is two Gaussians of one width; where they are as likely.
- **words**: how m changes when a text is followed by the prompt of either class; EM on m without the bias this tells.
- **both**: where shape and words want the same side, as far as either but at most twice as far as the other, as the
  default of masked language models has it: see `pouf.training.bias` for the three.
- **20 answers**, **50 answers**: what `pouf review` says of the shares after as many labels of texts drawn at random;
  zero-shot's where it says nothing of them.
- **true shares**.

The first sets were in view when the ways were made; then come the same texts asked with other words and templates, and
other tasks, among them all pairs of TREC's classes, most of which the model can hardly tell apart. `mr` and `subj` are
asked with a sentence encoder.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pouf import Classifier, Texts
from pouf.bench.tasks import TASKS
from pouf.data.base import Subset
from pouf.files import write_json
from pouf.inference.encode import InferenceConfig
from pouf.runs.folder import versions
from pouf.training.bias import EMPTY, FEWEST, Margins, agreed, by_em, by_shape, by_words, read_margins
from pouf.validation.review import AGREE, DISAGREE, Review, ReviewQuestion, score_answers

sys.path.insert(0, str(Path(__file__).parent))
from robustness import development, drawn
from texts import TASKS as ENCODED
from tuners import put_table

SETS = ("tweets", "amazon", "movies", "nyt", "SST-2", "MR", "mr", "subj")  # in capitals, and the domains: a masked LM
SHARES = (0.15, 0.3, 0.5, 0.7, 0.85)  # of the second class
SEEDS = range(6)
SIZE, DRAWN = 600, 300
PAIRS = "TREC, "
RESULTS = Path(__file__).parent / "results" / "shares.json"


class ClozeTask(NamedTuple):
    """A set of two classes and how a masked language model is asked about it."""

    source: str  # a set of `robustness.py`, or a task
    template: str = ""  # "": its own
    words: tuple[str, str] = ("", "")
    classes: tuple[int, int] = (0, 1)  # of the set


OTHERWISE = {
    "tweets, good": ClozeTask("tweets", "{text} It was [MASK].", ("bad", "good")),
    "tweets, happy": ClozeTask("tweets", "{text} I feel [MASK].", ("sad", "happy")),
    "amazon, excellent": ClozeTask("amazon", "{text} This is [MASK].", ("awful", "excellent")),
    "amazon, love": ClozeTask("amazon", "{text} I [MASK] it.", ("hate", "love")),
    "movies, fun": ClozeTask("movies", "{text} All in all [MASK].", ("boring", "fun")),
    "nyt, positive": ClozeTask("nyt", "{text} It is [MASK].", ("negative", "positive")),
    "nyt, right": ClozeTask("nyt", "{text} It was [MASK].", ("wrong", "right")),
    "Subj": ClozeTask("Subj"),
    "CoLA": ClozeTask("CoLA"),
    **{
        f"{PAIRS}{first} or {second}": ClozeTask("TREC", classes=(i, j))
        for (i, first), (j, second) in itertools.combinations(enumerate(TASKS["TREC"].labels), 2)
    },
}


def read_set(name: str, data: Path, encoder: Path | None, masked: Path) -> tuple[Margins, list[int]]:
    """Margins of `SIZE` texts at most, and their labels."""
    cloze = OTHERWISE.get(name, ClozeTask(name))
    with tempfile.TemporaryDirectory() as scratch:
        data_set = development(cloze.source, data, encoder, masked, Path(scratch))
    rows = [row for row, label in enumerate(data_set.labels) if label in cloze.classes]
    rows = sorted(random.Random(0).sample(rows, min(SIZE, len(rows))))
    labels = [cloze.classes.index(data_set.labels[row]) for row in rows]
    task = TASKS.get(cloze.source, TASKS["SST-2"])
    if cloze.source in ENCODED:
        return encoder_margins(data_set.classifier(), Subset(data_set.data, rows)), labels
    own = [list(task.words.values())[k] for k in cloze.classes]
    classifier = Classifier.from_pretrained(
        masked, ["first", "second"], [cloze.template or task.template],
        words=list(cloze.words) if cloze.template else own, max_length=task.max_length,
    )  # fmt: skip
    return read_margins(classifier, Subset(data_set.data, rows), InferenceConfig()), labels


def encoder_margins(classifier: Classifier, texts: Subset) -> Margins:
    """As `read_margins` for a sentence encoder, which is not asked by default."""

    def margin(texts: Sequence[str]) -> Tensor:
        logs = classifier.log_probabilities(classifier.encode(Texts(list(texts)))).double()
        return logs[:, 1] - logs[:, 0]

    plain = [texts.read(i) for i in range(len(texts))]
    prompts = [prompts[0] for prompts in classifier.prompts()]
    first, second = (margin([f"{text} {prompt}" for text in plain]) for prompt in prompts)
    empty = [margin([f"{text} {prompt}" for text in EMPTY]).mean() for prompt in prompts]
    return Margins(margin(plain), first, second, float(sum(empty) / 2))


def at_share(margins: Tensor, share: float) -> float:
    """The threshold above which this share of the margins lies."""
    return float(margins.quantile(1 - share))


def after_review(answers: int, margins: Tensor, truth: Sequence[int]) -> float:
    """The threshold after a review in which so many texts were labelled."""
    predicted = ["second" if margin > 0 else "first" for margin in margins]
    rows = random.Random(0).sample(range(len(predicted)), answers)
    questions = [ReviewQuestion(str(row), AGREE, predicted[row], predicted[row]) for row in rows]
    review = Review({DISAGREE: {}, AGREE: dict(Counter(predicted))}, questions)
    result = score_answers(review, {str(row): ("first", "second")[truth[row]] for row in rows}, ["first", "second"])
    return 0.0 if result.prior is None else at_share(margins, result.prior[1])


# The labels (n,) are for the last three.
WAYS: dict[str, Callable[[Margins, Sequence[int]], float]] = {
    "zero-shot": lambda margins, truth: 0.0,
    "equal shares": lambda margins, truth: at_share(margins.plain, 0.5),
    "EM": lambda margins, truth: by_em(margins.plain),
    "shape": lambda margins, truth: by_shape(margins.plain),
    "words": lambda margins, truth: by_words(margins),
    "both": lambda margins, truth: agreed(by_words(margins), by_shape(margins.plain)),
    "20 answers": lambda margins, truth: after_review(20, margins.plain, truth),
    "50 answers": lambda margins, truth: after_review(50, margins.plain, truth),
    "true shares": lambda margins, truth: at_share(margins.plain, statistics.mean(truth)),
}


def judge(margins: Margins, labels: Sequence[int]) -> dict[str, dict[str, float]]:
    """Accuracies in % by draw and way, means over the seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    for share in (None, *SHARES):
        for seed in SEEDS if share is not None else (0,):
            rows = list(range(len(labels))) if share is None else drawn(labels, [1 - share, share], DRAWN, seed)
            if len(rows) < FEWEST:
                continue
            own = Margins(*(each[rows] for each in margins[:3]), margins.undecided)
            truth = [labels[row] for row in rows]
            name = "as it is" if share is None else f"{share:.0%}"
            for way, threshold in WAYS.items():
                right = (own.plain > threshold(own, truth)) == torch.tensor(truth)
                found.setdefault(name, {}).setdefault(way, []).append(100 * float(right.double().mean()))
    return {draw: {way: round(statistics.mean(each), 2) for way, each in ways.items()} for draw, ways in found.items()}


def table(cells: dict[str, dict[str, dict[str, float]]]) -> str:
    """Gain over zero-shot in points: in the set as it is, and the worst of the draws.

    Pairs of TREC's classes are one row: their mean as they are, and the worst draw of any.
    """
    lines = [f"| set | zero-shot | {' | '.join(list(WAYS)[1:])} |", "|---" * (len(WAYS) + 1) + "|"]
    pairs = [name for name in cells if name.startswith(PAIRS)]
    rows = {name: [name] for name in cells if name not in pairs} | (
        {f"TREC, {len(pairs)} pairs": pairs} if pairs else {}
    )
    for row, names in rows.items():
        zero_shot = statistics.mean(cells[name]["as it is"]["zero-shot"] for name in names)
        figures = []
        for way in list(WAYS)[1:]:
            gains = [gains_of(cells[name], way) for name in names]
            skewed = [gain for each in gains for draw, gain in each.items() if draw != "as it is"]
            figures.append(f"{statistics.mean(each['as it is'] for each in gains):+.1f} ({min(skewed):+.1f})")
        lines.append(f"| {row} | {zero_shot:.1f} | {' | '.join(figures)} |")
    return "\n".join(lines)


def gains_of(draws: dict[str, dict[str, float]], way: str) -> dict[str, float]:
    return {draw: ways[way] - ways["zero-shot"] for draw, ways in draws.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the development sets")
    parser.add_argument("--masked-model", type=Path, required=True, help="folder of a masked language model")
    parser.add_argument("--encoder", type=Path, help="folder of a sentence encoder; default: the installed package")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path, help="a page to put the table into")
    given = parser.parse_args()
    cells: dict[str, dict[str, dict[str, float]]] = {}
    for name in (*SETS, *OTHERWISE):
        cells[name] = judge(*read_set(name, given.data, given.encoder, given.masked_model))
        print(table({name: cells[name]}).splitlines()[-1], flush=True)
    write_json(given.out, {"versions": versions(), "cells": cells})
    print(table(cells))
    if given.table is not None:
        put_table(given.table, "shares", table(cells))


if __name__ == "__main__":
    main()
