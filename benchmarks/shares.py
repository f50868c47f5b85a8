"""Can the shares of two classes be told without labels? Thresholds on zero-shot's margins, found in several ways.

    python benchmarks/shares.py --data DIR --masked-model DIR --out benchmarks/results/shares.json

With two classes a share is a threshold on the margin m = log p(second) - log p(first). A biased model wants another
threshold than 0, and so do skewed data. DIR holds `text/`, as for `robustness.py`. Of each set 300 texts are read;
draws of them have the second class in 15, 30, 50, 70 and 85 % of the texts, or as often as in the set. Nothing is
trained. Labels make the draws and judge the thresholds; only the last three are told some of them.

- **equal shares**: the median of m.
- **EM**: shares π that explain themselves, π ← mean σ(m + log π/(1-π)) (Saerens et al., 2002).
- **mixture**: m is two Gaussians of one width; the share of the upper one.
- **added words**: how m changes when a text is followed by the prompt of either class tells where the model is
  undecided. With m₋ and m₊ after these, the line through (m, (m₋ + m₊)/2) meets the diagonal at a margin that hardly
  depends on the shares; the same midpoint of texts without content is taken off it.
- **added words, EM**: EM on margins from which that bias is taken.
- **20 answers**, **50 answers**: what `pouf review` says of the shares after as many labels of texts drawn at random;
  zero-shot's where it says nothing of them.
- **true shares**.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.mixture import GaussianMixture

from pouf import Classifier, Texts
from pouf.data.base import Subset
from pouf.files import write_json
from pouf.runs.folder import versions
from pouf.validation.review import AGREE, DISAGREE, Question, Review, conclude

sys.path.insert(0, str(Path(__file__).parent))
from robustness import development, drawn

SETS = ("tweets", "amazon", "movies", "nyt", "SST-2", "MR", "mr", "subj")  # in capitals, and the domains: a masked LM
SHARES = (0.15, 0.3, 0.5, 0.7, 0.85)  # of the second class
SEEDS = range(6)
SIZE = 300
EMPTY = ("N/A", "[text]", "the text", "this is a text", "text", ".", "...", "it", "this", "a text about something")
RESULTS = Path(__file__).parent / "results" / "shares.json"
Array = NDArray[np.float64]


class Margins(NamedTuple):
    """Of some texts: (n,) as they are, and after the prompt of the first and of the second class."""

    plain: Array
    first: Array
    second: Array
    undecided: float  # the midpoint of what either prompt makes of texts without content

    def at(self, rows: Sequence[int]) -> Margins:
        return Margins(self.plain[rows], self.first[rows], self.second[rows], self.undecided)


def read_margins(classifier: Classifier, texts: Sequence[str]) -> Margins:
    def margin(shown: Sequence[str]) -> Array:
        logs = classifier.log_probabilities(classifier.encode(Texts(list(shown)))).double().numpy()
        return np.asarray(logs[:, 1] - logs[:, 0])

    cloze = classifier.backbone.cloze
    if cloze is not None:
        question = cloze.template.replace("{text}", "")
        prompts = [question.replace("[MASK]", words[0].strip()) for words in cloze.words]
    else:
        prompts = [f" {prompts[0]}" for prompts in classifier.prompts()]
    after = [margin([text + prompt for text in texts]) for prompt in prompts]
    empty = [margin([text + prompt for text in EMPTY]).mean() for prompt in prompts]
    return Margins(margin(texts), after[0], after[1], float(sum(empty) / 2))


def em(margins: Array) -> float:
    """The threshold of π ← mean σ(m + log π/(1-π))."""
    odds = 0.0
    for _ in range(200):
        share = float(np.clip((1 / (1 + np.exp(-(margins + odds)))).mean(), 1e-3, 1 - 1e-3))
        odds = float(np.log(share / (1 - share)))
    return -odds


def mixture(margins: Array) -> float:
    starts = np.quantile(margins, [[0.1, 0.6], [0.25, 0.75], [0.4, 0.9]])[:, :, None]
    fits = [GaussianMixture(2, covariance_type="tied", means_init=start).fit(margins[:, None]) for start in starts]
    best = max(fits, key=lambda fit: fit.score(margins[:, None]))
    upper = best.predict(margins[:, None]) == best.means_.argmax()
    return at_share(margins, float(upper.mean()))


def bias(margins: Margins) -> float:
    slope, at_zero = np.polyfit(margins.plain, (margins.first + margins.second) / 2, 1)
    return float(at_zero / (1 - slope)) - margins.undecided


def at_share(margins: Array, share: float) -> float:
    """The threshold above which this share of the margins lies."""
    return float(np.quantile(margins, 1 - share))


def after_review(answers: int, margins: Array, truth: Sequence[int]) -> float:
    """The threshold after a review in which so many texts were labelled."""
    said = ["second" if margin > 0 else "first" for margin in margins]
    rows = random.Random(0).sample(range(len(said)), answers)
    questions = [Question(str(row), AGREE, said[row], said[row]) for row in rows]
    review = Review({DISAGREE: {}, AGREE: dict(Counter(said))}, questions)
    told = conclude(review, {str(row): ("first", "second")[truth[row]] for row in rows}, ["first", "second"])
    return 0.0 if told.prior is None else at_share(margins, told.prior[1])


# The labels (n,) are for the last three.
WAYS: dict[str, Callable[[Margins, Sequence[int]], float]] = {
    "zero-shot": lambda margins, truth: 0.0,
    "equal shares": lambda margins, truth: at_share(margins.plain, 0.5),
    "EM": lambda margins, truth: em(margins.plain),
    "mixture": lambda margins, truth: mixture(margins.plain),
    "added words": lambda margins, truth: bias(margins),
    "added words, EM": lambda margins, truth: bias(margins) + em(margins.plain - bias(margins)),
    "20 answers": lambda margins, truth: after_review(20, margins.plain, truth),
    "50 answers": lambda margins, truth: after_review(50, margins.plain, truth),
    "true shares": lambda margins, truth: at_share(margins.plain, statistics.mean(truth)),
}


def judge(margins: Margins, labels: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """Accuracies in % by draw and way, one per seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for share in (None, *SHARES):
        for seed in SEEDS if share is not None else (0,):
            rows = list(range(len(labels))) if share is None else drawn(labels, [1 - share, share], len(labels), seed)
            own, truth = margins.at(rows), [labels[row] for row in rows]
            name = "as it is" if share is None else f"{share:.0%}"
            for way, threshold in WAYS.items():
                right = (own.plain > threshold(own, truth)) == np.array(truth)
                found.setdefault(name, {}).setdefault(way, []).append(100 * float(right.mean()))
    return found


def table(cells: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """Gain over zero-shot in points: in the set as it is, and the worst of the five draws (means over seeds)."""
    lines = [f"| set | zero-shot | {' | '.join(list(WAYS)[1:])} |", "|---" * (len(WAYS) + 1) + "|"]
    for name, draws in cells.items():
        means = {draw: {way: statistics.mean(each) for way, each in ways.items()} for draw, ways in draws.items()}
        row = []
        for way in list(WAYS)[1:]:
            gains = {draw: found[way] - found["zero-shot"] for draw, found in means.items()}
            worst = min(gain for draw, gain in gains.items() if draw != "as it is")
            row.append(f"{gains['as it is']:+.1f} ({worst:+.1f})")
        lines.append(f"| {name} | {means['as it is']['zero-shot']:.1f} | {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the development sets")
    parser.add_argument("--masked-model", type=Path, required=True, help="folder of a masked language model")
    parser.add_argument("--encoder", type=Path, help="folder of a sentence encoder; default: the installed package")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    cells: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name in SETS:
        with tempfile.TemporaryDirectory() as scratch:
            of = development(name, given.data, given.encoder, given.masked_model, Path(scratch))
        rows = sorted(random.Random(0).sample(range(len(of.labels)), SIZE))
        some = Subset(of.data, rows)
        margins = read_margins(of.classifier(), [some.read(i) for i in range(len(some))])
        cells[name] = judge(margins, [of.labels[row] for row in rows])
        print(table({name: cells[name]}).splitlines()[-1], flush=True)
    write_json(given.out, {"versions": versions(), "cells": cells})
    print(table(cells))


if __name__ == "__main__":
    main()
