"""The default against every method that needs no training, on many sets: is it ahead of all that is free?

    python benchmarks/ahead.py --data DIR --photos DIR --out benchmarks/results/ahead.json

DIR holds `clip_features/` and `text/`; `--photos` is a folder of what `photos.py --features` writes. Texts are encoded
once, by the sentence encoder of `texts.py` or by `--encoder`; the default for them here is what more than twelve
classes get, and what `--preset fast` gives all; with `--tuned` texts of at most twelve classes have their own default
on 300 texts. Photographs, digits and CLIP features have the default of images. Fine classes are CLINC150's 150 intents,
whole, in parts of 77 and of 20, with two wordings; sets are taken as they are and with a 10:1 skew, and those of images
also with a third or two thirds of the named classes missing. Labels judge, and make the draws.

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
from pouf.data.labels import read_labelled
from pouf.data.tables import read_table
from pouf.demo import DIGITS, write_digits
from pouf.files import write_json
from pouf.postprocess import POSTPROCESSORS, fit_correction
from pouf.runs.folder import versions
from pouf.validation.diagnostics import share

sys.path.insert(0, str(Path(__file__).parent))
from alternatives import skewed
from texts import FREE, TASKS, model_folder
from tuners import put_table

SETTLED_ON = (
    "intents 150", "intents 77 (0)", "intents 20 (0)", "TREC", "digits", "webcam", "photo", "CLIP 287", "sketch",
    "cartoon", "MR", "Subj", "SST-2", "tweets", "amazon", "movies", "nyt",
)  # fmt: skip
PHOTOS = ("webcam", "dslr", "art-painting", "cartoon", "photo", "sketch")


TUNED_ON = 300  # texts
OPINIONS = ("tweets", "amazon", "movies", "nyt")
MIN_SCORE = 1.0  # of opinions from -4 to 4: nearer to 0 they are of neither class


class Set(NamedTuple):
    features: Tensor  # (n, d)
    prototypes: Tensor  # (k, d)
    labels: Tensor  # (n,)
    temperature: float
    kind: str  # of the recipe: text or image
    texts: tuple[str, ...] = ()
    classifier: Classifier | None = None  # of the texts

    def only(self, rows: list[int]) -> Set:
        texts = tuple(self.texts[row] for row in rows) if self.texts else ()
        return self._replace(features=self.features[rows], labels=self.labels[rows], texts=texts)

    def of_classes(self, chosen: list[int]) -> Set:
        """The classifier is asked for these classes alone."""
        rows = [i for i, label in enumerate(self.labels.tolist()) if label in set(chosen)]
        labels = torch.tensor([chosen.index(int(self.labels[i])) for i in rows])
        return self._replace(features=self.features[rows], prototypes=self.prototypes[chosen], labels=labels)


def all_intents(data: Path, encoder: Path | None, parts: tuple[str, ...]) -> dict[str, Set]:
    """By wording."""
    texts: list[str] = []
    names: list[str] = []
    for part in parts:
        table = read_table(data / "text" / "clinc150" / f"{part}.jsonl", "text", "label")
        texts, names = texts + table["text"], names + table["label"]
    classes = sorted(set(names))
    labels = torch.tensor([classes.index(name) for name in names])
    first = Classifier.from_pretrained(model_folder(encoder), classes, ["A question about {}."])
    features = first.encode(Texts(texts)).features
    found = {}
    for wording, templates in (("", ["A question about {}."]), (", bare names", ["{}"])):
        prototypes = Classifier(first.backbone, classes, templates).fixed_prototypes()
        found[wording] = Set(features, prototypes, labels, 0.1, "text")
    return found


def intents(data: Path, encoder: Path | None) -> Iterator[tuple[str, Set]]:
    for wording, whole in all_intents(data, encoder, ("test",)).items():
        yield f"intents 150{wording}", whole
        yield f"intents 150, 10:1{wording}", whole.only(skewed(whole.labels.numpy(), 150, 0))


def parts_of_intents(data: Path, encoder: Path | None) -> Iterator[tuple[str, Set]]:
    for wording, whole in all_intents(data, encoder, ("test", "train")).items():
        for count, size in ((77, 1000), (20, 600)):
            for seed in (0, 1):
                part = whole.of_classes(random.Random(seed).sample(range(150), count))
                rows = random.Random(seed).sample(range(len(part.labels)), min(size, len(part.labels)))
                yield f"intents {count} ({seed}){wording}", part.only(sorted(rows))
    part = whole.of_classes(random.Random(3).sample(range(150), 77))
    yield "intents 77, 300 texts", part.only(random.Random(3).sample(range(len(part.labels)), 300))


def encoded(texts: list[str], labels: list[int], classes: list[str], templates: list[str], encoder: Path | None) -> Set:
    classifier = Classifier.from_pretrained(model_folder(encoder), classes, templates)
    features, prototypes = classifier.encode(Texts(texts)).features, classifier.fixed_prototypes()
    return Set(features, prototypes, torch.tensor(labels), 0.1, "text", tuple(texts), classifier)


def questions(data: Path, encoder: Path | None) -> Iterator[tuple[str, Set]]:
    words, templates = TASKS["trec"]
    table = read_table(data / "text" / "trec" / "train.jsonl", "text", "label")
    order = random.Random(0).sample(range(len(table["text"])), 1500)
    texts, labels = [table["text"][i] for i in order], [list(words).index(table["label"][i]) for i in order]
    described = encoded(texts, labels, list(words.values()), templates, encoder)
    yield "TREC", described.only(list(range(600)))
    yield "TREC, 10:1", described.only(skewed(described.labels.numpy(), 6, 0))
    assert described.classifier is not None
    bare = Classifier(described.classifier.backbone, list(words), ["{}"])
    named = described._replace(prototypes=bare.fixed_prototypes(), classifier=bare)
    yield "TREC, bare names", named.only(list(range(600)))


def opinions(data: Path, encoder: Path | None) -> Iterator[tuple[str, Set]]:
    """Films, subjectivity and ratings; all but SST-5 have two classes."""
    two, five = ["terrible", "great"], ["terrible", "bad", "okay", "good", "great"]
    labelled = ["very negative", "negative", "neutral", "positive", "very positive"]
    for name, labels, classes, templates in (
        ("MR", list(TASKS["mr"][0]), *(list(TASKS["mr"][0].values()), TASKS["mr"][1])),
        ("Subj", list(TASKS["subj"][0]), *(list(TASKS["subj"][0].values()), TASKS["subj"][1])),
        ("SST-2", ["negative", "positive"], two, ["It was {}."]),
        ("SST-5", labelled, five, ["It was {}."]),
    ):
        table = read_table(data / "text" / name.lower().replace("-", "") / "train.jsonl", "text", "label")
        order = random.Random(0).sample(range(len(table["text"])), 600)
        marked = [labels.index(table["label"][i]) for i in order]
        yield name, encoded([table["text"][i] for i in order], marked, classes, templates, encoder)
    for name in OPINIONS:
        table = read_table(data / "text" / "sentiment_domains" / f"{name}.jsonl", "text", "score")
        scores = [float(score) for score in table["score"]]
        clear = [i for i, score in enumerate(scores) if abs(score) >= MIN_SCORE]
        order = random.Random(0).sample(clear, min(600, len(clear)))
        marked = [int(scores[i] > 0) for i in order]
        yield name, encoded([table["text"][i] for i in order], marked, two, ["It was {}."], encoder)


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
    with np.load(next((data / "clip_features").glob("imagenet1k_*.npz")), allow_pickle=False) as arrays:
        yield "CLIP 1000", Set(
            torch.from_numpy(arrays["features"].astype(np.float32)), torch.from_numpy(arrays["prototypes"]).float(),
            torch.from_numpy(arrays["labels"]).long(), 0.01, "image",
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


def compared(one: Set, tuned: bool) -> dict[str, float]:
    """Accuracies of zero-shot, of each free method and of the default, as its verdict leaves it."""
    if tuned:
        one = one.only(list(range(min(TUNED_ON, len(one.labels)))))
    names, data = [str(i) for i in range(len(one.prototypes))], Vectors(one.features.numpy())
    classifier = Classifier.from_vectors(one.prototypes, names, temperature=one.temperature)
    features = classifier.encode(data)
    found = {"zero-shot": share(classifier.log_probabilities(features).argmax(1) == one.labels)}
    for method in FREE:
        assert method in POSTPROCESSORS
        classifier.postprocessor = fit_correction(method, classifier, features)
        found[method] = share(classifier.log_probabilities(features).argmax(1) == one.labels)
    classifier.postprocessor = None
    if tuned:
        assert one.classifier is not None
        texts = Texts(list(one.texts))
        result = one.classifier.copy().adapt(texts, seed=0)
        features = result.classifier.encode(texts)
    else:
        recipe = Recipe.preset("fast", "text" if one.kind == "text" else "image")
        result = classifier.adapt(data, recipe=recipe.with_settings(temperature=one.temperature), seed=0)
    found["default"] = share(result.classifier.log_probabilities(features).argmax(1) == one.labels)
    found["classes"] = len(one.prototypes)
    return found


def table(sets: dict[str, dict[str, float]]) -> str:
    lines = ["| set | zero-shot | best free method | default | difference |", "|---|---|---|---|---|"]
    for name, found in sets.items():
        best = best_of(found)
        own = "" if name.removesuffix(", bare names").startswith(SETTLED_ON) else " †"
        lines.append(
            f"| {name}{own} | {100 * found['zero-shot']:.1f} | {100 * found[best]:.1f} ({best}) | "
            f"**{100 * found['default']:.1f}** | {100 * (found['default'] - found[best]):+.1f} |"
        )
    lines.append("")
    for group, members in (
        ("more than two classes", [each for each in sets.values() if each["classes"] > 2]),
        ("two classes, whose shares are kept", [each for each in sets.values() if each["classes"] == 2]),
    ):
        if members:
            lines.append(f"{summary(group, members)}\n")
    return "\n".join(lines).rstrip()


def best_of(found: dict[str, float]) -> str:
    return max((method for method in ("zero-shot", *FREE) if method in found), key=lambda method: found[method])


def summary(group: str, sets: list[dict[str, float]]) -> str:
    differences = [100 * (each["default"] - each[best_of(each)]) for each in sets]
    gains = [100 * (each["default"] - each["zero-shot"]) for each in sets]
    within = sum(difference >= -0.5 for difference in differences)
    single = {
        method: statistics.mean(100 * (each["default"] - each[method]) for each in sets if method in each)
        for method in FREE
    }
    return (
        f"{group.capitalize()}: against the best free method of each set mean {statistics.mean(differences):+.1f}, "
        f"worst {min(differences):+.1f}, within half a point or ahead on {within} of {len(differences)}. Against "
        f"zero-shot mean {statistics.mean(gains):+.1f}, worst {min(gains):+.1f}. Mean against each method alone: "
        + ", ".join(f"{method} {value:+.1f}" for method, value in single.items())
        + "."
    )


FAMILIES = {"intents": intents, "parts": parts_of_intents, "questions": questions, "opinions": opinions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with clip_features/ and text/")
    parser.add_argument("--photos", type=Path, help="folder of npz files from photos.py --features")
    parser.add_argument("--encoder", type=Path, help="folder of a sentence encoder; default: the installed package")
    parser.add_argument("--tuned", action="store_true", help="texts of few classes alone, with all weights tuned")
    parser.add_argument("--only", nargs="+", choices=[*FAMILIES, "images"], default=[*FAMILIES, "images"])
    parser.add_argument("--out", type=Path, help="file for the results, JSON; what is in it stays")
    page = Path(__file__).parent / "results" / "ahead.md"
    parser.add_argument("--page", type=Path, default=page, help="page with a place for the table")
    parser.add_argument("--table", default="ahead", help="the place's name")
    given = parser.parse_args()
    facts = json.loads(given.out.read_text()) if given.out and given.out.is_file() else {}
    sets: dict[str, dict[str, float]] = facts.setdefault("sets", {})
    facts["versions"] = versions()

    def every() -> Iterator[tuple[str, Set]]:
        for family in given.only:
            if family in FAMILIES:
                yield from FAMILIES[family](given.data, given.encoder)
        if "images" in given.only:
            for name, whole in images(given.data, given.photos):
                yield from drawn(name, whole)

    for name, one in every():
        if name not in sets and not (given.tuned and one.classifier is None):
            sets[name] = {method: round(value, 4) for method, value in compared(one, given.tuned).items()}
            print(name, sets[name], file=sys.stderr, flush=True)
            if given.out is not None:
                write_json(given.out, facts)
    text = table(sets)
    print(text)
    put_table(given.page, given.table, text)


if __name__ == "__main__":
    main()
