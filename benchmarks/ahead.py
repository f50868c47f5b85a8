"""The default against every method that needs no training, on many sets: is it ahead of all that is free?

    python benchmarks/ahead.py --data DIR --photos DIR --out benchmarks/results/ahead.json

DIR holds `clip_features/` and `text/`; `--photos` is a folder of what `photos.py --features` writes. Texts are encoded
once by the sentence encoder of `texts.py`; the default for them here is what more than twelve classes get, and what
`--preset fast` gives all. Photographs, digits and CLIP features have the default of images. Fine classes are CLINC150's
150 intents, whole, in parts of 77 and of 20, with two wordings; sets are taken as they are and with a 10:1 skew, and
those of images also with a third or two thirds of the named classes missing. Labels judge, and make the draws.

The rules and limits of the last pass were set in view of the sets in `SETTLED_ON`; the others were only reported.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pouf import EMBEDDED, Classifier, Recipe, Texts, Vectors
from pouf.data.labelled import read_labelled
from pouf.data.tables import read_table
from pouf.demo import DIGITS, write_digits
from pouf.files import write_json
from pouf.postprocess import POSTPROCESSORS
from pouf.runs.folder import versions
from pouf.validation.diagnostics import share

sys.path.insert(0, str(Path(__file__).parent))
from alternatives import skewed
from texts import TASKS, model_folder
from tuners import put_table

FREE = ("prior-correction", "sinkhorn", "em", "stata", "few-classes", "transclip", "zlap", "inmap", "propagation")
SETTLED_ON = ("intents 150", "intents 77 (0)", "intents 20 (0)", "TREC", "digits", "webcam", "photo", "CLIP 287")
PHOTOS = ("webcam", "dslr", "art-painting", "cartoon", "photo", "sketch")


class Set(NamedTuple):
    features: Tensor  # (n, d)
    prototypes: Tensor  # (k, d)
    labels: Tensor  # (n,)
    temperature: float
    kind: str  # of the recipe: text or image

    def only(self, rows: list[int]) -> Set:
        return self._replace(features=self.features[rows], labels=self.labels[rows])

    def of_classes(self, chosen: list[int]) -> Set:
        """The classifier is asked for these classes alone."""
        rows = [i for i, label in enumerate(self.labels.tolist()) if label in set(chosen)]
        labels = torch.tensor([chosen.index(int(self.labels[i])) for i in rows])
        return self._replace(features=self.features[rows], prototypes=self.prototypes[chosen], labels=labels)


def intents(data: Path) -> Iterator[tuple[str, Set]]:
    texts: list[str] = []
    names: list[str] = []
    for part in ("test", "train"):
        table = read_table(data / "text" / "clinc150" / f"{part}.jsonl", "text", "label")
        texts, names = texts + table["text"], names + table["label"]
    classes = sorted(set(names))
    labels = torch.tensor([classes.index(name) for name in names])
    first = Classifier.from_pretrained(model_folder(None), classes, ["A question about {}."])
    features = first.encode(Texts(texts)).features
    for wording, templates in (("", ["A question about {}."]), (", bare names", ["{}"])):
        prototypes = Classifier(first.backbone, classes, templates).fixed_prototypes()
        whole = Set(features, prototypes, labels, 0.1, "text")
        yield f"intents 150{wording}", whole.only(list(range(1500)))
        for count, size in ((77, 1000), (20, 600)):
            for seed in (0, 1):
                part = whole.of_classes(random.Random(seed).sample(range(150), count))
                rows = random.Random(seed).sample(range(len(part.labels)), min(size, len(part.labels)))
                yield f"intents {count} ({seed}){wording}", part.only(sorted(rows))
    part = whole.of_classes(random.Random(3).sample(range(150), 77))
    yield "intents 77, 300 texts", part.only(random.Random(3).sample(range(len(part.labels)), 300))
    yield "intents 150, 10:1", whole.only(skewed(labels.numpy(), 150, 0))


def questions(data: Path) -> Iterator[tuple[str, Set]]:
    words, templates = TASKS["trec"]
    table = read_table(data / "text" / "trec" / "train.jsonl", "text", "label")
    order = random.Random(0).sample(range(len(table["text"])), 1500)
    labels = torch.tensor([list(words).index(table["label"][i]) for i in order])
    first = Classifier.from_pretrained(model_folder(None), list(words.values()), templates)
    features = first.encode(Texts([table["text"][i] for i in order])).features
    described = Set(features, first.fixed_prototypes(), labels, 0.1, "text")
    yield "TREC", described.only(list(range(600)))
    yield "TREC, 10:1", described.only(skewed(labels.numpy(), 6, 0))
    bare = Classifier(first.backbone, list(words), ["{}"]).fixed_prototypes()
    yield "TREC, bare names", described._replace(prototypes=bare).only(list(range(600)))


def images(data: Path, photos: Path | None) -> Iterator[tuple[str, Set]]:
    with tempfile.TemporaryDirectory() as folder:
        digits = read_labelled(write_digits(folder), DIGITS, "image")
        classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
        encoded = classifier.encode(digits.inputs)
        temperature = float(classifier.scores(encoded).temperature)
        yield (
            "digits",
            Set(encoded.features, classifier.fixed_prototypes(), torch.tensor(digits.labels), temperature, "image"),
        )
    for name in PHOTOS if photos is not None else ():
        with np.load(photos / f"{name}.npz", allow_pickle=False) as arrays:  # type: ignore[operator]
            yield name, Set(
                torch.from_numpy(arrays["features"]).float(), torch.from_numpy(arrays["prototypes"]).float(),
                torch.from_numpy(arrays["labels"]).long(), float(arrays["temperature"]), "image",
            )  # fmt: skip
    with np.load(next((data / "clip_features").glob("imagenet287_*.npz")), allow_pickle=False) as arrays:
        vectors = np.concatenate([arrays[f"image_{i}shot"] for i in (1, 2, 4)]).astype(np.float32)
        labels = np.concatenate([arrays[f"label_{i}shot"] for i in (1, 2, 4)])
        yield "CLIP 287", Set(
            torch.from_numpy(vectors), torch.from_numpy(arrays["text"].astype(np.float32)),
            torch.from_numpy(labels).long(), 0.01, "image",
        )  # fmt: skip


def drawn(name: str, whole: Set) -> Iterator[tuple[str, Set]]:
    """A set of images as it is, with a skew, and with named classes missing."""
    k = len(whole.prototypes)
    yield name, whole
    yield f"{name}, 10:1", whole.only(skewed(whole.labels.numpy(), k, 0))
    for part, count in (("two thirds there", k * 2 // 3), ("a third there", max(2, k // 3))):
        there = set(random.Random(count).sample(range(k), count))
        yield f"{name}, {part}", whole.only([i for i, label in enumerate(whole.labels.tolist()) if label in there])


def compared(one: Set) -> dict[str, float]:
    """Accuracies of zero-shot, of each free method and of the default, as its verdict leaves it."""
    names, data = [str(i) for i in range(len(one.prototypes))], Vectors(one.features.numpy())
    classifier = Classifier.from_vectors(one.prototypes, names, temperature=one.temperature)
    encoded = classifier.encode(data)
    found = {"zero-shot": share(classifier.log_probabilities(encoded).argmax(1) == one.labels)}
    for method in FREE:
        assert method in POSTPROCESSORS
        classifier.fit_postprocessor(method, encoded)
        found[method] = share(classifier.log_probabilities(encoded).argmax(1) == one.labels)
    classifier.postprocessor = None
    recipe = Recipe.preset("fast", "text" if one.kind == "text" else "image")
    result = classifier.adapt(data, recipe=recipe.with_settings(temperature=one.temperature), seed=0)
    found["default"] = share(result.classifier.log_probabilities(encoded).argmax(1) == one.labels)
    return found


def table(sets: dict[str, dict[str, float]]) -> str:
    lines = ["| set | zero-shot | best free method | default | difference |", "|---|---|---|---|---|"]
    differences, gains = [], []
    for name, found in sets.items():
        best = max(("zero-shot", *FREE), key=lambda method: found[method])
        difference = 100 * (found["default"] - found[best])
        differences.append(difference)
        gains.append(100 * (found["default"] - found["zero-shot"]))
        own = "" if name.removesuffix(", bare names").startswith(SETTLED_ON) else " †"
        lines.append(
            f"| {name}{own} | {100 * found['zero-shot']:.1f} | {100 * found[best]:.1f} ({best}) | "
            f"**{100 * found['default']:.1f}** | {difference:+.1f} |"
        )
    within = sum(difference >= -0.5 for difference in differences)
    lines.append("")
    lines.append(
        f"Against the best free method of each set: mean {statistics.mean(differences):+.1f}, worst "
        f"{min(differences):+.1f}, within half a point or ahead on {within} of {len(differences)}. Against zero-shot: "
        f"mean {statistics.mean(gains):+.1f}, worst {min(gains):+.1f}."
    )
    single = {method: [100 * (each["default"] - each[method]) for each in sets.values()] for method in FREE}
    by_method = ", ".join(f"{method} {statistics.mean(each):+.1f}" for method, each in single.items())
    lines.append(f"Mean over the sets against each method alone: {by_method}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with clip_features/ and text/")
    parser.add_argument("--photos", type=Path, help="folder of npz files from photos.py --features")
    parser.add_argument("--out", type=Path, help="file for the results, JSON; what is in it stays")
    page = Path(__file__).parent / "results" / "ahead.md"
    parser.add_argument("--page", type=Path, default=page, help="page with a place for the table")
    given = parser.parse_args()
    facts = json.loads(given.out.read_text()) if given.out and given.out.is_file() else {}
    sets: dict[str, dict[str, float]] = facts.setdefault("sets", {})
    facts["versions"] = versions()

    def every() -> Iterator[tuple[str, Set]]:
        yield from intents(given.data)
        yield from questions(given.data)
        for name, whole in images(given.data, given.photos):
            yield from drawn(name, whole)

    for name, one in every():
        if name not in sets:
            sets[name] = {method: round(value, 4) for method, value in compared(one).items()}
            print(name, sets[name], file=sys.stderr, flush=True)
            if given.out is not None:
                write_json(given.out, facts)
    shown = table(sets)
    print(shown)
    put_table(given.page, "ahead", shown)


if __name__ == "__main__":
    main()
