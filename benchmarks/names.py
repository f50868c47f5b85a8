"""Do the alarms about class names fire where they should, which names are said not to occur, and who is a stranger?

    python benchmarks/names.py --text DIR/text --masked-lm MODEL --photos DIR/images --features FILE FILE
                               --out benchmarks/results/names.json

*fit*: real data (512 inputs each) with names that fit and with names of other things, as the check before training sees
them: the digits of the demo, MR, Subj and TREC with all-MiniLM-L6-v2 (see `texts.py`), sentiment and other tasks with a
masked language model (see `masked_lm.py`), photographs (see `photos.py`).

*occur*: CLIP features (npz files as in `alternatives.py` and `few_classes.py`) of some of the named classes. How many
of the names do not occur, how many are said not to, and how many of these are right.

*unknown*: one class after the other is left out of the names; how well its inputs are told from the others by the
largest cosine, which `--unknown` goes by, and by NegLabel's ratio to the ordinary words (area under the ROC curve).
Of CLIP's features, whose text side is not here, half of the unnamed classes' names stand for the words.

The rules were settled while looking at the texts and at the masked LM's sets. Labels are read to judge.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from alternatives import few_classes, skewed
from masked_lm import domain, items, sample
from sklearn.metrics import roc_auc_score
from texts import TASKS, model_folder, read
from torch import Tensor

from pouf import EMBEDDED, Classifier, Images, Texts
from pouf.bench.tasks import TASKS as CLOZE_TASKS
from pouf.data.base import Subset
from pouf.data.tables import read_table
from pouf.demo import DIGITS, write_digits
from pouf.models.templates import Cloze
from pouf.runs.folder import versions
from pouf.validation.diagnostics import Diagnostics
from pouf.validation.names import absent_names, check_names, word_prototypes
from pouf.validation.rules import METRICS

INPUTS = 512
MASKED = 300
OTHERS = {
    "animals": "cat dog horse bird fish cow pig sheep goat hen",
    "colours": "purple yellow green blue red black white pink brown grey",
    "weather": "rain snow ice fog wind thunder storm cloud frost sunshine",
    "metals": "copper iron tin zinc lead nickel silver gold steel brass",
    "fruit": "apple banana cherry grape lemon orange peach plum pear melon",
    "rooms": "kitchen bathroom cellar attic garage hall bedroom office balcony library",
}
Row = dict[str, Any]


def finding(classifier: Classifier, features: Tensor) -> Row:
    start = time.process_time()
    fit = check_names(classifier, features)
    seconds = time.process_time() - start
    if fit is None:
        return {"level": "not told", "seconds": seconds}
    blank = dict.fromkeys(Diagnostics._fields, 1.0) | {"inputs": len(features), "perturbed": 100}
    diagnostics = Diagnostics(**blank | {"names_near": fit.nearness, "names_span": fit.span})  # type: ignore[arg-type]
    level = next((row.level for row in METRICS if row.name.endswith("names") and row.fires(diagnostics)), "none")
    return {"near": fit.nearness, "span": fit.span, "level": level, "worst": fit.worst, "seconds": seconds}


def digits() -> tuple[Images, list[str]]:
    data = Images.from_folder(write_digits(tempfile.mkdtemp()))
    return data, [name.split("/")[0] for name in data.ids]


def fits(text: Path, masked: Path | None, photos: Path | None, names: Path | None) -> Iterator[tuple[str, str, Row]]:
    """Set, names, what is found."""
    data, _ = digits()
    some = Subset(data, random.Random(0).sample(range(len(data)), INPUTS))
    yield from _named("digits", Classifier.from_pretrained(EMBEDDED, DIGITS), some)
    for task, (classes, templates) in TASKS.items():
        texts, _ = read(text / task / "train.jsonl")
        own = Classifier.from_pretrained(model_folder(None), list(classes.values()), templates)
        yield from _named(f"{task}, MiniLM", own, Texts(random.Random(0).sample(texts, INPUTS)))
    if masked is not None:
        for name, texts in _cloze_sets(text):
            task = CLOZE_TASKS.get(name, CLOZE_TASKS["SST-2"])
            own = Classifier.from_pretrained(
                masked, task.labels, [task.template], words=list(task.words.values()), max_length=128
            )
            yield from _named(f"{name}, masked LM", own, own.data(texts))
    if photos is not None and names is not None:
        from photos import ConSE

        known = np.load(names, allow_pickle=False)["names"].tolist()
        data = Images.from_folder(photos / "office_caltech10" / "webcam")
        own = Classifier(ConSE(known), sorted({name.split("/")[0] for name in data.ids}))
        yield from _named("webcam, photographs", own, data)


def _named(name: str, own: Classifier, data: Any) -> Iterator[tuple[str, str, Row]]:
    """The same inputs under their own names, and under others."""
    features, k = own.encode(data).features, len(own.classes)
    yield name, "own", finding(own, features)
    for other, words in OTHERS.items():
        wrong, cloze = words.split()[:k], own.backbone.cloze
        if cloze is None:
            stranger = Classifier(own.backbone, wrong, own.templates)
        else:
            given = Cloze(cloze.template, tuple((word,) for word in wrong), cloze.max_length)
            stranger = Classifier(type(own.backbone)(own.backbone.model, own.backbone.tokenizer, given), wrong)
        yield name, other, finding(stranger, features)


def _cloze_sets(text: Path) -> Iterator[tuple[str, list[Any]]]:
    for name in ("tweets", "amazon", "nyt"):
        yield name, items(sample(domain(text / "sentiment_domains" / f"{name}.jsonl"), MASKED))
    for name in ("SST-2", "MR", "Subj", "TREC", "SST-5"):
        texts = read_table(text / name.lower().replace("-", "") / "train.jsonl", "text")["text"]
        yield name, random.Random(0).sample(list(texts), MASKED)


def clip_sets(files: Sequence[Path]) -> Iterator[tuple[Tensor, np.ndarray[Any, Any], Tensor, list[str]]]:
    """Features, labels, prototypes and names of each file."""
    for file in files:
        with np.load(file, allow_pickle=False) as arrays:
            if "text" in arrays:
                x = np.concatenate([arrays[f"image_{i}shot"] for i in (1, 2, 4)])
                y = np.concatenate([arrays[f"label_{i}shot"] for i in (1, 2, 4)])
                w = arrays["text"]
            else:
                x, y, w = arrays["features"], arrays["labels"], arrays["prototypes"]
            named = arrays["names"].tolist()
        tensors = [F.normalize(torch.from_numpy(each.astype(np.float32)), dim=1) for each in (x, w)]
        yield tensors[0], y.astype(int), tensors[1], named


def occurrences(files: Sequence[Path]) -> Iterator[tuple[str, Row]]:
    for x, y, w, named in clip_sets(files):
        k, classifier = len(w), Classifier.from_vectors(w, named)
        sets = {"all": list(range(len(y))), "10:1 skew": skewed(y, k, 0)}
        sets |= {str(count): few_classes(y, k, count) for count in (700, 400, 200, 100, 30, 10) if count < k}
        for which, rows in sets.items():
            missing = set(range(k)) - set(y[rows].tolist())
            absent = absent_names(classifier, classifier.encode(classifier.data(x[rows].numpy())))
            positions = {classifier.classes.index(name) for name in absent}
            right = len(positions & missing)
            yield f"{which} of {k}", {"missing": len(missing), "said": len(absent), "right": right}


def out_of_distribution(text: Path, files: Sequence[Path]) -> Iterator[tuple[str, Row]]:
    """How well inputs of a class that is not named are told from the others, mean over the classes left out."""
    classes, templates = TASKS["trec"]
    texts, labels = read(text / "trec" / "train.jsonl")
    chosen = random.Random(0).sample(range(len(texts)), INPUTS)
    own = Classifier.from_pretrained(model_folder(None), list(classes.values()), templates)
    yield "TREC, MiniLM", _left_out(own, Texts([texts[i] for i in chosen]), [labels[i] for i in chosen], list(classes))
    data, names = digits()
    some = random.Random(0).sample(range(len(data)), INPUTS)
    own = Classifier.from_pretrained(EMBEDDED, DIGITS)
    yield "digits", _left_out(own, Subset(data, some), [names[i] for i in some], list(DIGITS))
    x, y, w, _ = next(clip_sets(files))
    for k in (10, 50, 140):
        found = []
        for seed in range(3):
            order = np.random.default_rng(seed).permutation(len(w))
            rest = len(w) - (len(w) - k) // 2
            inside, outside = np.isin(y, order[:k]), np.isin(y, order[rest:])
            both = inside | outside
            found.append(_told_apart(x[both], w[order[:k]], w[order[k:rest]], inside[both], 0.01))
        yield f"CLIP, {k} of {len(w)} named", _mean(found)


def _left_out(own: Classifier, data: Any, labels: list[str], classes: list[str]) -> Row:
    words, prototypes = word_prototypes(own), own.prototypes().detach()
    assert words is not None
    features, temperature = own.encode(data).features, 1 / own.backbone.logit_scale.exp().item()
    found = []
    for k, name in enumerate(classes):
        inside = np.array([label != name for label in labels])
        if (~inside).sum() >= 10:
            others = [i for i in range(len(classes)) if i != k]
            found.append(_told_apart(F.normalize(features, dim=1), prototypes[others], words, inside, temperature))
    return _mean(found)


def _told_apart(x: Tensor, own: Tensor, words: Tensor, inside: Any, temperature: float) -> Row:
    sim, others = x @ F.normalize(own, dim=1).T, x @ words.T
    ratio = (sim / temperature).logsumexp(1) - (torch.cat([sim, others], 1) / temperature).logsumexp(1)
    return {
        "largest cosine": float(roc_auc_score(inside, sim.max(1).values)),
        "NegLabel": float(roc_auc_score(inside, ratio)),
    }


def _mean(found: Sequence[Row]) -> Row:
    return {name: statistics.mean(each[name] for each in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="folder of the text tasks")
    parser.add_argument("--masked-lm", type=Path, help="folder of a masked language model")
    parser.add_argument("--photos", type=Path, help="folder of images; the names are those of the last features file")
    parser.add_argument("--features", type=Path, nargs="+", required=True, help="npz files of CLIP features")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    facts: dict[str, Any] = {"versions": versions(), "fit": {}, "occur": {}, "unknown": {}}

    def keep(part: str, name: str, row: Row) -> None:
        facts[part][name] = row
        print(part, name, {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    for name, row in occurrences(given.features):
        keep("occur", name, row)
    for name, row in out_of_distribution(given.text, given.features):
        keep("unknown", name, row)
    for name, names, row in fits(given.text, given.masked_lm, given.photos, given.features[-1]):
        keep("fit", f"{name}: {names}", row)


if __name__ == "__main__":
    main()
