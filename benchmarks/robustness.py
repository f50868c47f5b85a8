"""Is the default ever below zero-shot? Many sets, as they are and with their classes skewed, one default for each kind.

    python benchmarks/robustness.py --development DIR --masked-model DIR --out benchmarks/results/robustness.json
    python benchmarks/robustness.py FILE_OR_FOLDER ... --out results.json            # your own sets

The development sets are those of `DEVELOPMENT` below, from a folder with `clip_features/` and `text/`, and the digits
of `pouf demo`. Own sets are
- `.npz` with `features` (n, d), `labels` (n,), `prototypes` (k, d) and, optionally, `names` (k,) and `temperature`,
  0.01 unless given;
- `.jsonl` with `text` (or `text_a` and `text_b`) and `label`. A file `NAME.toml` beside `NAME.jsonl` says how the model
  is asked: `template` (with [MASK] for a masked language model, with {} otherwise) and, in `[classes]`, what each label
  is called. Without it, labels are their own names and a sentence encoder is asked.

Each set is taken as it is and in draws: of two classes 70:30, 85:15 and 10:1 (which is the larger alternates with the
seed), of more classes with shares that fall off to a tenth in an order drawn at random, and with `--missing` some where
a third or two thirds of the named classes do not occur. Labels make the draws and judge the results; no method sees
them. "default" is what `adapt` without any setting leaves the classifier at, "last" the last step whatever the verdict.
Texts are also judged on others of the same set, half as many and with the same shares, which no run was adapted to
("held out"). With `--answers 20` a review of the default with 20 labels may give shares: "answers" is what adapting
again with these reaches. What is in the file already is not run again.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from pouf import EMBEDDED, Classifier, InputError, Texts, Vectors
from pouf.bench.archives import read_task
from pouf.bench.tasks import TASKS
from pouf.data.base import Subset, Unlabelled
from pouf.data.labels import read_labelled
from pouf.data.tables import read_table
from pouf.demo import DIGITS, write_digits
from pouf.postprocess import fit_correction
from pouf.runs.folder import versions
from pouf.validation.diagnostics import share
from pouf.validation.review import sample_questions, score_answers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

sys.path.insert(0, str(Path(__file__).parent))
from masked_lm import domain
from texts import TASKS as ENCODED
from texts import model_folder
from tuners import put_table

SEEDS = (0, 1, 2)
UNTRAINED = ("prior-correction", "sinkhorn", "em", "stata")
SIZE = 600  # texts of a cell at most
TRIED = ("imagenet287", "digits", "mr", "trec", "tweets", "nyt", "SST-2", "amazon", "movies")
DEVELOPMENT = (*TRIED, "imagenet1k", "subj", "RTE", "MRPC")
PHOTOS = ("webcam", "dslr", "art-painting", "cartoon", "photo", "sketch")  # what `photos.py --features` writes
CHOSEN_ON = (*TRIED, *PHOTOS)  # what was tried on while the defaults were made; the others were only reported


class Labelled(NamedTuple):
    """A set, what made its classifier, and the labels that training never sees."""

    classifier: Callable[[], Classifier]
    data: Unlabelled
    labels: list[int]

    @property
    def classes(self) -> int:
        return max(self.labels) + 1


def from_arrays(file: Path) -> Labelled:
    with np.load(file, allow_pickle=False) as arrays:
        if "features" in arrays:
            vectors, labels, prototypes = arrays["features"], arrays["labels"], arrays["prototypes"]
        else:  # by shots, as the file of 287 classes has them
            parts = sorted(name.removeprefix("image_") for name in arrays if name.startswith("image_"))
            vectors = np.concatenate([arrays[f"image_{part}"] for part in parts])
            labels, prototypes = np.concatenate([arrays[f"label_{part}"] for part in parts]), arrays["text"]
        names = arrays["names"].tolist() if "names" in arrays else [str(i) for i in range(len(prototypes))]
        temperature = float(arrays["temperature"]) if "temperature" in arrays else 0.01
    prototypes = torch.from_numpy(prototypes.astype(np.float32))
    unique = names if len(set(names)) == len(names) else [f"{name} ({i})" for i, name in enumerate(names)]
    return Labelled(
        functools.partial(Classifier.from_vectors, prototypes, unique, temperature=temperature),
        Vectors(vectors.astype(np.float32)), labels.astype(int).tolist(),
    )  # fmt: skip


def from_rows(file: Path, encoder: Path | None, masked: Path | None) -> Labelled:
    try:
        texts, marked = read_table(file, "text", "label").values()
    except InputError:  # pairs
        first, second, marked = read_table(file, "text_a", "text_b", "label").values()
        texts = list(zip(first, second, strict=True))
    description = file.with_suffix(".toml")
    settings: dict[str, Any] = tomllib.loads(description.read_text()) if description.is_file() else {}
    called = settings.get("classes") or {name: name for name in sorted({str(label) for label in marked})}
    labels = [list(called).index(str(label)) for label in marked]
    template = settings.get("template")
    if template and "[MASK]" in template:
        if masked is None:
            raise SystemExit(f"{description} asks a masked language model: give --masked-model")
        make = functools.partial(
            Classifier.from_pretrained, masked, list(called), [template], words=list(called.values())
        )
        return Labelled(make, Texts(texts), labels)
    templates = [template] if template else None
    make = functools.partial(Classifier.from_pretrained, model_folder(encoder), list(called.values()), templates)
    return Labelled(make, Texts(texts), labels)


def development(name: str, data: Path, encoder: Path | None, masked: Path | None, scratch: Path) -> Labelled:
    """One of the sets that the defaults were made with."""
    if name.startswith("imagenet"):
        return from_arrays(next((data / "clip_features").glob(f"{name}_*.npz")))
    if name == "digits":
        digits = read_labelled(write_digits(scratch / "digits"), DIGITS, "image")
        return Labelled(functools.partial(Classifier.from_pretrained, EMBEDDED, DIGITS), digits.inputs, digits.labels)
    if name in ENCODED:
        called, templates = ENCODED[name]
        table = read_table(data / "text" / name / "train.jsonl", "text", "label")
        make = functools.partial(Classifier.from_pretrained, model_folder(encoder), list(called.values()), templates)
        labels = [list(called).index(label) for label in table["label"]]
        return Labelled(make, Texts(table["text"]), labels)
    if masked is None:
        raise SystemExit(f"{name} asks a masked language model: give --masked-model")
    task = TASKS.get(name, TASKS["SST-2"])
    rated = (
        read_task(task, data / "text", "train")
        if name in TASKS
        else domain(data / "text" / "sentiment_domains" / f"{name}.jsonl")
    )
    make = functools.partial(
        Classifier.from_pretrained, masked, task.labels, [task.template], words=list(task.words.values()),
        max_length=task.max_length,
    )  # fmt: skip
    return Labelled(make, rated.inputs, rated.targets.argmax(1).tolist())


def draws(
    labels: Sequence[int], classes: int, size: int, seeds: Sequence[int], missing: bool = False
) -> Iterator[tuple[str, int, list[int]]]:
    """The name of a draw, its seed and its rows."""
    for seed in seeds:
        yield "as it is", seed, sorted(random.Random(seed).sample(range(len(labels)), min(size, len(labels))))
    skews = {"70:30": 0.7 / 0.3, "85:15": 0.85 / 0.15, "10:1": 10.0} if classes == 2 else {"10:1": 10.0}
    for name, ratio in skews.items():
        for seed in seeds:
            order = [seed % 2, 1 - seed % 2] if classes == 2 else random.Random(seed).sample(range(classes), classes)
            weights = [ratio ** (-order[k] / (classes - 1)) for k in range(classes)]
            yield name, seed, drawn(labels, weights, size, seed)
    for thirds, seed in product((2, 1) if missing and classes > 2 else (), seeds):
        there = set(random.Random(seed).sample(range(classes), classes * thirds // 3))
        weights = [float(k in there) for k in range(classes)]
        yield f"{thirds} of 3 classes", seed, drawn(labels, weights, size, seed)


def drawn(labels: Sequence[int], weights: Sequence[float], size: int, seed: int) -> list[int]:
    """As many rows as there are, up to the size, whose classes have shares in these proportions."""
    own = [[i for i, label in enumerate(labels) if label == k] for k in range(len(weights))]
    wanted = [(rows, weight) for rows, weight in zip(own, weights, strict=True) if rows and weight]
    total = min([size, *(len(rows) * sum(weights) / weight for rows, weight in wanted)])
    draw = random.Random(seed)
    counts = [max(1, round(total * weight / sum(weights))) if weight else 0 for weight in weights]
    return sorted(i for rows, count in zip(own, counts, strict=True) for i in draw.sample(rows, min(count, len(rows))))


def held_out(labels: Sequence[int], rows: Sequence[int], seed: int) -> list[int]:
    """Half as many of the other rows, with the same shares of the classes where there are enough of each."""
    taken, draw = set(rows), random.Random(seed)
    others: list[int] = []
    for k in sorted(set(labels)):
        left = [i for i, label in enumerate(labels) if label == k and i not in taken]
        others += draw.sample(left, min(len(left), sum(labels[i] == k for i in rows) // 2))
    return sorted(others)


def run(case: Labelled, rows: list[int], seed: int, known: bool, answers: int, cell: dict[str, Any]) -> dict[str, Any]:
    """What the cell does not have yet."""
    data = Subset(case.data, rows)
    truth = torch.tensor([case.labels[i] for i in rows])
    if "default" not in cell:
        cell |= compared(case, data, truth, rows, seed)
    if known and "known, uniform" not in cell:
        cell |= with_prior(case, data, truth, seed)
    if answers and "answers" not in cell:
        cell["answers"] = answered(case, data, truth, answers, seed)
    return cell


def compared(case: Labelled, data: Subset, truth: torch.Tensor, rows: list[int], seed: int) -> dict[str, Any]:
    """Zero-shot, what needs no training, and the default."""
    other_rows = held_out(case.labels, rows, seed) if isinstance(case.data, Texts) else []
    others, others_truth = Subset(case.data, other_rows), torch.tensor([case.labels[i] for i in other_rows])
    classifier = case.classifier()
    encoded = classifier.encode(data)

    def judged() -> float:
        return share(classifier.log_probabilities(encoded).argmax(1) == truth)

    def judged_on_others() -> float:
        return share(classifier.log_probabilities(classifier.encode(others)).argmax(1) == others_truth)

    cell: dict[str, Any] = {"n": len(rows), "zero-shot": judged()}
    if other_rows:
        cell |= {"held out, n": len(other_rows), "held out, zero-shot": judged_on_others()}
    for method in UNTRAINED:
        classifier.postprocessor = fit_correction(method, classifier, encoded)
        cell[method] = judged()
    start = time.perf_counter()
    classifier = case.classifier()
    result = classifier.adapt(data, seed=seed)
    classifier = result.classifier
    cell["seconds"] = round(time.perf_counter() - start, 1)
    encoded = classifier.encode(data)
    cell["default"] = judged()
    if other_rows:
        cell["held out, default"] = judged_on_others()
    classifier = result.at("last")
    encoded = classifier.encode(data)
    cell["last"] = judged()
    cell["noticed"] = [notice.name for notice in (*result.verdict.alarms, *result.verdict.cautions)]
    return cell


def with_prior(case: Labelled, data: Subset, truth: torch.Tensor, seed: int) -> dict[str, float]:
    """With the true shares given, and with a uniform prior. Without a verdict, so that nothing is looked at."""
    shares = (torch.bincount(truth, minlength=case.classes) + 1e-3) / (len(truth) + 1e-3 * case.classes)

    def predicted_with(prior: list[float] | str) -> torch.Tensor:
        classifier = case.classifier()
        classifier = classifier.adapt(data, prior=prior, seed=seed, settings={"snapshots": 0}).classifier
        return classifier.log_probabilities(classifier.encode(data)).argmax(1)

    true = predicted_with(shares.tolist())
    found = torch.bincount(true, minlength=case.classes) / len(true)
    return {
        "known": share(true == truth),
        "known, share error": float((found - shares).abs().max()),
        "known, uniform": share(predicted_with("uniform") == truth),
    }


def answered(case: Labelled, data: Subset, truth: torch.Tensor, answers: int, seed: int) -> float | None:
    """Accuracy after a review: adapted again with the shares that it gives. None where it gives none."""
    adapted = case.classifier()
    adapted = adapted.adapt(data, seed=seed).classifier
    review, _ = sample_questions(case.classifier(), adapted, data, answers, seed=seed)
    names = dict(zip(data.ids, (adapted.classes[k] for k in truth), strict=True))
    prior = score_answers(review, names, adapted.classes).prior
    if prior is None:
        return None
    again = case.classifier()
    again = again.adapt(data, prior=prior, seed=seed, settings={"snapshots": 0}).classifier
    return share(again.log_probabilities(again.encode(data)).argmax(1) == truth)


def table(cells: dict[str, dict[str, Any]]) -> str:
    """Means over the seeds, accuracies in %. † marks sets that no default was chosen on."""
    columns = ("zero-shot", *UNTRAINED, "default", "known, uniform", "known", "answers")
    names = ("zero-shot", "prior-corrected", "Sinkhorn", "EM", "StatA", "default",
             "uniform prior", "true shares given", "50 answers")  # fmt: skip
    head = ("set", "kind", "draw", "runs", *names, "other texts: zero-shot → default", "noticed")
    rows = [head]
    order = [f"{name}/" for name in DEVELOPMENT]
    keys = dict.fromkeys(cell.rsplit("/", 1)[0] for cell in cells)
    for key in sorted(keys, key=lambda key: next((i for i, name in enumerate(order) if key.startswith(name)), 99)):
        seeds = [cell for name, cell in cells.items() if name.rsplit("/", 1)[0] == key]

        def mean(column: str, seeds: list[dict[str, Any]] = seeds) -> str:
            there = [cell[column] for cell in seeds if cell.get(column) is not None]
            return f"{100 * statistics.mean(there):.1f}" if there else "–"

        found = [mean(column) for column in columns]
        found[columns.index("default")] = f"**{mean('default')}**"
        others = f"{mean('held out, zero-shot')} → {mean('held out, default')}"
        names = sorted({name for cell in seeds for name in cell["noticed"]})
        noticed = f"{sum(bool(cell['noticed']) for cell in seeds)}: {', '.join(names)}" if names else "–"
        name, draw = key.split("/")
        named = name if name in CHOSEN_ON else f"{name} †"
        rows.append(
            (named, kind_of(name), draw, str(len(seeds)), *found, others if "–" not in others else "–", noticed)
        )
    filled = [column for column in zip(*rows, strict=True) if any(cell != "–" for cell in column[1:])]
    lines = [f"| {' | '.join(row)} |" for row in zip(*filled, strict=True)]
    return "\n".join([lines[0], "|---" * len(filled) + "|", *lines[1:]])


def kind_of(name: str) -> str:
    if name not in DEVELOPMENT:
        return "vectors" if name in PHOTOS else "–"
    if name.startswith("imagenet"):
        return "vectors"
    return "images, prototypes tuned" if name == "digits" else "sentence encoder" if name in ENCODED else "masked LM"


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, float | int]:
    """In points. A run is bad that ends more than one below zero-shot, and good that ends above it."""
    gains = [round(100 * (cell["default"] - cell["zero-shot"]), 3) for cell in cells]
    ends = [round(100 * (cell["last"] - cell["zero-shot"]), 3) for cell in cells]
    noticed = [bool(cell["noticed"]) for cell in cells]
    bad = [alarmed for end, alarmed in zip(ends, noticed, strict=True) if end < -1]
    good = [alarmed for end, alarmed in zip(ends, noticed, strict=True) if end > 0]
    return {
        "runs": len(cells),
        "mean gain": round(statistics.mean(gains), 2),
        "worst loss": round(min(0.0, *gains, 0.0), 2),
        "worst loss, nothing noticed": round(
            min([gain for gain, alarmed in zip(gains, noticed, strict=True) if not alarmed] + [0.0]), 2
        ),
        "bad runs": len(bad),
        "bad runs noticed": sum(bad),
        "good runs": len(good),
        "good runs noticed": sum(good),
    }


def own_sets(paths: Sequence[Path]) -> dict[str, Path]:
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return {file.stem: file for file in files if file.suffix in (".npz", ".jsonl")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", type=Path, help="npz and JSONL files, or folders of them")
    parser.add_argument("--development", type=Path, help="folder of the development sets")
    parser.add_argument("--only", nargs="+", help="some of the sets, by name")
    parser.add_argument("--encoder", type=Path, help="folder of a sentence encoder; default: the installed package")
    parser.add_argument("--masked-model", type=Path, help="folder of a masked language model")
    parser.add_argument(
        "--size", type=int, default=SIZE, help="texts and images per cell at most; vectors are all used"
    )
    parser.add_argument(
        "--known", action="store_true", help="also with the true shares given and with a uniform prior, last step"
    )
    parser.add_argument("--answers", type=int, default=0, help="also after a review with so many labels, last step")
    parser.add_argument("--draws", nargs="+", help="some of the draws, as 'as it is' 85:15")
    parser.add_argument("--missing", action="store_true", help="also draws that lack some of the named classes")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--out", type=Path, help="file for the results, JSON; what is in it is not run again")
    parser.add_argument("--table", type=Path, help="a page to put the table into")
    given = parser.parse_args()
    cells: dict[str, dict[str, Any]] = {}
    if given.out is not None and given.out.is_file():
        cells = json.loads(given.out.read_text())["cells"]
    own = own_sets(given.sets)
    names = [*(DEVELOPMENT if given.development else ()), *own]
    with tempfile.TemporaryDirectory() as scratch:
        for name in (name for name in names if given.only is None or name in given.only):
            if name in own and own[name].suffix == ".npz":
                case = from_arrays(own[name])
            elif name in own:
                case = from_rows(own[name], given.encoder, given.masked_model)
            else:
                case = development(name, given.development, given.encoder, given.masked_model, Path(scratch))
            size = len(case.labels) if isinstance(case.data, Vectors) else given.size
            for draw, seed, rows in draws(case.labels, case.classes, size, given.seeds, given.missing):
                if given.draws and draw not in given.draws:
                    continue
                before = dict(cell := cells.setdefault(f"{name}/{draw}/{seed}", {}))
                if run(case, rows, seed, given.known, given.answers, cell) == before:
                    continue
                shares = {key: value for key, value in cell.items() if isinstance(value, float) and key != "seconds"}
                text = " ".join(f"{key} {100 * value:.1f}" for key, value in shares.items())
                print(f"{name}, {draw}, seed {seed}: {text} {', '.join(cell['noticed'])}", flush=True)
                if given.out is not None:
                    facts = {"chosen on": CHOSEN_ON, "versions": versions(), "cells": cells}
                    given.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(table(cells))
    if given.table is not None:
        put_table(given.table, "robustness", table(cells))
    there = {key.split("/")[0] for key in cells}
    groups = {"all sets": there, "chosen on": there & {*CHOSEN_ON}, "reported": there - {*CHOSEN_ON}}
    for group, members in groups.items():
        found = [cell for key, cell in cells.items() if key.split("/")[0] in members]
        if found:
            print(f"{group}:", ", ".join(f"{name} {value}" for name, value in summary(found).items()))


if __name__ == "__main__":
    main()
