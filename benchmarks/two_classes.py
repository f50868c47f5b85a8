"""Prototypes tuned for two classes: how fast, if zero-shot's shares are kept?

    python benchmarks/two_classes.py --data DIR

Texts of MR, Subj and the sentiment domains (DIR/text), each encoded once by the sentence encoder of `texts.py`, 600 as
they are and draws of 500 with 15 and 85 % of the second class, of three samples of the texts. Two recipes tune
prototypes on such features: `fast` for texts, and what vectors and images take by default. `keep_shares_lr_factor`
slows both down where shares are kept. Figures are points gained over zero-shot by what the run advises, means over the
nine runs of a set; labels judge alone. One thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from itertools import product
from pathlib import Path

import torch

from pouf import METHODS, Classifier, Recipe, Texts, Vectors
from pouf.files import write_json
from pouf.runs.folder import versions
from pouf.validation.diagnostics import share

sys.path.insert(0, str(Path(__file__).parent))
from masked_lm import domain
from robustness import drawn
from texts import TASKS, model_folder, read

RESULTS = Path(__file__).parent / "results" / "two_classes.json"
SETS = ("tweets", "mr", "subj", "amazon", "movies", "nyt")  # the rate was chosen in view of the first three
DRAWS = (None, 0.15, 0.85)  # shares of the second class
RATES = (1.0, 0.333, 0.1)
SAMPLES = (0, 1, 2)


def encoded(name: str, data: Path, sample: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Features (n, d) of up to 1,200 texts, prototypes (2, d), and the labels."""
    words, templates = TASKS[name if name in TASKS else "mr"]
    if name in TASKS:
        texts, names = read(data / name / "train.jsonl")
        labels = [list(words).index(label) for label in names]
    else:
        rated = domain(data / "sentiment_domains" / f"{name}.jsonl")
        texts, labels = [rated.inputs.read(i) for i in range(len(rated.inputs))], rated.targets.argmax(1).tolist()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(sample))[:1200].tolist()
    classifier = Classifier.from_pretrained(model_folder(None), list(words.values()), templates)
    features = classifier.encode(Texts([texts[i] for i in order])).features
    return features, classifier.fixed_prototypes(), [labels[i] for i in order]


def gain(features: torch.Tensor, prototypes: torch.Tensor, labels: torch.Tensor, recipe: Recipe) -> float:
    classifier = Classifier.from_vectors(prototypes, ["first", "second"], temperature=recipe.temperature or 0.01)
    vectors = Vectors(features.numpy())
    before = share(classifier.log_probabilities(classifier.encode(vectors)).argmax(1) == labels)
    classifier = classifier.adapt(vectors, recipe=recipe, seed=0).classifier
    after = share(classifier.log_probabilities(classifier.encode(vectors)).argmax(1) == labels)
    return round(100 * (after - before), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with text/")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results, JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipes = {"texts, fast": METHODS["pouf"].recipe("text", "fast"), "vectors": METHODS["pouf"].recipe("vector")}
    gains: dict[str, dict[str, dict[str, list[float]]]] = {
        kind: {f"{rate:g}": {name: [] for name in SETS} for rate in RATES} for kind in recipes
    }
    for name, sample in product(SETS, SAMPLES):
        features, prototypes, labels = encoded(name, options.data / "text", sample)
        for drawn_share in DRAWS:
            whole = list(range(len(labels)))[:600]
            rows = whole if drawn_share is None else drawn(labels, [1 - drawn_share, drawn_share], 500, seed=0)
            truth = torch.tensor([labels[row] for row in rows])
            for (kind, recipe), rate in product(recipes.items(), RATES):
                slowed = recipe.with_settings(keep_shares_lr_factor=rate)
                gains[kind][f"{rate:g}"][name].append(gain(features[rows], prototypes, truth, slowed))
    write_json(options.out, {"versions": versions(), "draws": DRAWS, "gains": gains})
    print("| recipe | rate | " + " | ".join(SETS) + " | mean | worst run |\n" + "|---" * (len(SETS) + 4) + "|")
    for kind, rates in gains.items():
        for rate, sets in rates.items():
            means, worst = (
                [statistics.mean(values) for values in sets.values()],
                min(min(values) for values in sets.values()),
            )
            text = " | ".join(f"{mean:+.1f}" for mean in (*means, statistics.mean(means), worst))
            print(f"| {kind} | {rate} | {text} |")


if __name__ == "__main__":
    main()
