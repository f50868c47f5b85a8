"""Language tasks from files (archives of GLUE and LM-BFF, tables, folders of `datasets`), and few-shot splits."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pouf import Classifier, Demonstrations, Shots, Texts
from pouf.bench.tasks import SHOTS, Task, find_folders
from pouf.data.base import Subset
from pouf.data.class_names import normalise_name
from pouf.data.tables import BadRow, read_table
from pouf.errors import InputError, optional

if TYPE_CHECKING:
    from pouf.models.templates import Example, TextSample


Split = Literal["train", "dev", "test"]
TaskRow = tuple[tuple[str, ...], Any]  # texts and label
FILES = (".csv", ".jsonl", ".parquet", ".tsv")
# Names count where numbers stand beside them: the hub numbers some classes in another order than LM-BFF's files.
LABELS = ("label_text", "label", "coarse_label", "label-coarse", "label_coarse")
NUMBERED_OTHERWISE = ("Subj", "TREC")  # by the hub


class Columns(NamedTuple):
    """The columns to read, where they do not have one of the usual names."""

    texts: tuple[str, ...] = ()
    label: str = ""


DEFAULT_COLUMNS = Columns()


def read_task(
    task: Task, folder: str | Path, split: Split, seed: int | None = None, columns: Columns = DEFAULT_COLUMNS
) -> Shots:
    """The examples of a task with their labels, for shots and for evaluation.

    Args:
        folder: holds `<layout.folder>/train.tsv` and so on as GLUE does, `<layout.folder>/train.csv` as LM-BFF does,
            `<task>/train.jsonl` (CSV, TSV, Parquet) with columns text, or text_a and text_b, and label, or score for
            STS-B, or `<task>/` as `datasets` saves it to disk; or, as the authors' `data/k-shot` does, splits that are
            drawn already: `<task>/16-<seed>/{train,dev,test}.tsv`. Case and hyphens in folder names do not matter.
        split: "test" is GLUE's dev, whose labels are known. "dev" is D_dev, which only splits that are drawn have.
        seed: of splits that are drawn already.
    """
    found = _task_folder(task, Path(folder))
    if any((found / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return from_dataset(task, _load_from_disk(task, found, split), columns.texts, columns.label)
    drawn = _drawn_splits(found)
    if drawn:
        found = found / f"{SHOTS}-{seed}"
        if found.name not in drawn:
            raise InputError(
                f"no {found.name!r} in {str(found.parent)!r}, only {', '.join(drawn)}: choose their seeds, or draw "
                f"{SHOTS} shots of each class, as the paper's"
            )
    stems = {"train": ("train",), "dev": ("dev_matched", "dev"), "test": (task.layout.test, "test")}[split]
    file = _test_file(task, found, columns, bool(drawn)) if split == "test" else _find(found, stems)
    if file is None:
        expected = " or ".join(dict.fromkeys(stems))
        raise InputError(f"no {expected} file in {str(found)!r}: expected one in {', '.join(FILES)}")
    return _examples(task, list(_rows(task, file, columns)), str(file))


def has_drawn_splits(task: Task, folder: str | Path) -> bool:
    """Whether the shots of each seed are there already, as in the authors' `data/k-shot`."""
    return bool(_drawn_splits(_task_folder(task, Path(folder))))


def _drawn_splits(found: Path) -> list[str]:
    """The folders of seeds, `<shots>-<seed>`."""
    return sorted(path.name for path in found.glob("[0-9]*-[0-9]*") if path.is_dir())


def _find(found: Path, stems: Sequence[str]) -> Path | None:
    for stem in stems:
        files = [file for file in sorted(found.glob(f"{stem}.*")) if file.suffix in FILES]
        if len(files) > 1:
            raise InputError(f"{str(found)!r} has {' and '.join(file.name for file in files)}: keep one of them")
        if files:
            return files[0]
    return None


def _test_file(task: Task, found: Path, columns: Columns, drawn: bool) -> Path | None:
    """The file to judge on: test where it has labels, else dev, whose labels GLUE gives away."""
    own = task.layout.test
    test = _find(found, (own.replace("dev", "test"), "test"))
    dev = _find(found, (own,)) if own.startswith("dev") and not drawn else None
    if test is None or dev is None:
        return test or dev
    try:
        _examples(task, list(islice(_rows(task, test, columns), 20)), str(test))
    except InputError:  # without labels, or with -1 for each
        return dev
    if task.layout.labelled_test:
        return dev
    raise InputError(
        f"{str(found)!r} has {dev.name} and {test.name}, both with labels: keep the one to be judged on "
        f"({dev.name} in the paper's protocol)"
    )


def from_dataset(task: Task, dataset: Any, columns: Sequence[str] | None = None, label: str | None = None) -> Shots:
    """A `datasets.Dataset`, with the hub's usual column names unless others are given."""
    source, chosen = f"dataset {task.name}", Columns(tuple(columns or ()), label or "")
    texts, label = _columns(task, list(dataset.column_names), chosen, source)
    # The hub numbers some labels in another order than GLUE's files do: where they have names, these count.
    classes = getattr(dataset.features.get(label), "names", None)
    labelled = [row for row in dataset if row[label] is not None and (isinstance(row[label], str) or row[label] >= 0)]
    rows = [(tuple(row[name] for name in texts), classes[row[label]] if classes else row[label]) for row in labelled]
    return _examples(task, _check_numbering(task, rows, label, source), source)


def _check_numbering(task: Task, rows: Sequence[TaskRow], label: str, source: str) -> Sequence[TaskRow]:
    """Rows of a table with a header, where numbers of classes are in the one order that everybody uses."""
    if task.name in NUMBERED_OTHERWISE and rows and str(rows[0][1]).isdigit():
        raise InputError(
            f"{source}: column {label!r} has numbers, and {task.name} is numbered in several ways: read or write a "
            f"column of names ({', '.join(task.labels)}), as label_text"
        )
    return rows


def _columns(task: Task, names: Sequence[str], columns: Columns, source: str) -> tuple[tuple[str, ...], str]:
    """The columns of texts and of the label: those of the user, or the first usual ones."""
    texts = [columns.texts] if columns.texts else _text_columns(task)
    labels = [columns.label] if columns.label else ["score", "label"] if task.scale is not None else LABELS
    found = next((each for each in texts if set(each) <= set(names)), None)
    label = next((name for name in labels if name in names), None)
    if found is None or label is None or len(found) != 1 + task.pair:
        raise InputError(
            f"{source}: task {task.name} needs columns for its text{'s' if task.pair else ''} and its label, but there "
            f"are {', '.join(names)}: name them by text_column= and label_column="
        )
    return found, label


def _text_columns(task: Task) -> list[tuple[str, ...]]:
    """What the texts of such a task are called, here and on the hub."""
    if not task.pair:
        return [("text",), ("sentence",)]
    named = tuple(name for name in task.layout.columns if isinstance(name, str))
    return [("text_a", "text_b"), named, ("sentence1", "sentence2"), ("premise", "hypothesis"), ("text1", "text2")]


def _task_folder(task: Task, folder: Path) -> Path:
    for parent in (folder, folder / "k-shot"):
        if found := find_folders(parent, task.name, task.layout.folder):
            return found[0]
    raise InputError(
        f"no folder of task {task.name} in {str(folder)!r}: expected {task.layout.folder} or {task.name.lower()}"
    )


def _rows(task: Task, file: Path, columns: Columns) -> Iterator[TaskRow]:
    names = _header(file)
    if file.suffix in (".csv", ".tsv") and not _is_table(task, names, columns):
        yield from _archive_table(task, file)
        return
    texts, label = _columns(task, names, columns, str(file))
    table = read_table(file, *texts, label)
    rows = [
        (tuple("" if isinstance(text, BadRow) else text for text in own), value)
        for *own, value in zip(*table.values(), strict=True)
    ]
    yield from _check_numbering(task, rows, label, str(file))


def _is_table(task: Task, names: Sequence[str], columns: Columns) -> bool:
    """Whether these are the columns of a table of one's own, and not those of GLUE's files, which have no quoting."""
    if any(columns):
        return True
    if {*task.layout.columns, task.layout.label} <= set(names):
        return "label_text" in names
    texts = any(set(each) <= set(names) for each in _text_columns(task))
    return texts and any(name in names for name in (*LABELS, "score"))


def _header(file: Path) -> list[str]:
    """The names of a file's columns; the first row where it has none."""
    if file.suffix == ".parquet":
        parquet = optional("pyarrow.parquet", "parquet", "a Parquet file")
        return list(parquet.read_schema(file).names)
    with file.open(encoding="utf-8-sig") as lines:
        first = next((line for line in lines if line.strip()), "").rstrip("\r\n")
    if file.suffix == ".jsonl":
        row = json.loads(first) if first.startswith("{") else {}
        return list(row)
    return first.split("\t") if file.suffix == ".tsv" else next(csv.reader([first]), [])


def _archive_table(task: Task, file: Path) -> Iterator[TaskRow]:
    """GLUE's files have no quoting: a quotation mark is a character like any other. LM-BFF's CSV files have."""
    layout = task.layout
    with file.open(encoding="utf-8-sig", newline="") as lines:
        tabs = file.suffix == ".tsv" and "\t" in lines.readline()  # some end in .tsv and have commas
        lines.seek(0)
        rows: Iterator[list[str]] = iter(
            csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(lines)
        )
        indices = [column for column in (*layout.columns, layout.label) if isinstance(column, int)]
        if not indices:
            header = next(rows, [])
            missing = [name for name in (*layout.columns, layout.label) if name not in header]
            if missing:
                raise InputError(f"{str(file)!r} has no column {missing[0]!r}, only: {', '.join(header)}")
            indices = [header.index(str(name)) for name in (*layout.columns, layout.label)]
        for row in rows:
            if len(row) > max(indices):  # a cut line has no label
                *texts, label = (row[index] for index in indices)
                yield tuple(texts), label


def _examples(task: Task, rows: Sequence[TaskRow], source: str) -> Shots:
    spellings = (task.labels, task.raw, task.also)
    known = {normalise_name(name): k for names in spellings for k, name in enumerate(names)}
    samples, targets = [], []
    for texts, label in rows:
        if str(label) == "-" or not all(isinstance(text, str) and text.strip() for text in texts):
            continue  # SNLI's annotators did not agree, or there is nothing to read
        if task.scale is not None:
            targets.append(_soft_target(label, task.scale, source))
        elif (k := known.get(normalise_name(str(label)))) is not None:
            targets.append([float(k == j) for j in range(len(task.labels))])
        else:
            raise InputError(f"{source}: label {label!r} is none of {', '.join((*task.labels, *task.raw))}")
        samples.append(texts if task.pair else texts[0])
    if not samples:
        raise InputError(f"{source} has no example of task {task.name}")
    return Shots(Texts(samples, source=source), torch.tensor(targets))


def _soft_target(score: Any, scale: float, source: str) -> list[float]:
    """A score from 0 to `scale` as a soft target between two words."""
    try:
        share = float(score) / scale
    except (TypeError, ValueError):
        share = -1.0
    if not 0 <= share <= 1:
        raise InputError(f"{source}: score {score!r} is no number from 0 to {scale:g}")
    return [1 - share, share]


def _load_from_disk(task: Task, folder: Path, split: Split) -> Any:
    try:
        import datasets
    except ImportError:
        raise InputError(f"{str(folder)!r} was saved by datasets: pip install datasets to read it") from None
    loaded = datasets.load_from_disk(str(folder))
    if not isinstance(loaded, datasets.DatasetDict):
        raise InputError(f"{str(folder)!r} is one dataset without splits: save a DatasetDict with train and validation")
    own = task.layout.test.replace("dev", "validation")  # MNLI has two
    names = ("train",) if split == "train" else tuple(dict.fromkeys((own, "validation", "dev", "test")))
    name = next((name for name in names if name in loaded), None)
    if name is None:
        raise InputError(f"{str(folder)!r} has no split {' or '.join(names)}, only: {', '.join(loaded)}")
    return loaded[name]


FILTER_RATE = 0.5  # of the shots of a class


class FewShot(NamedTuple):
    train: Shots
    dev: Shots


def few_shot(data: Shots, seed: int, shots: int = SHOTS, excluded: Collection[TextSample] = ()) -> FewShot:
    """`shots` examples of each class for training and as many others for development, drawn as LM-BFF draws them.

    No text is in both, nor in `excluded`, the test texts; duplicates are taken once. A soft label
    counts as its most likely class.
    """
    items = [data.inputs.read(i) for i in range(len(data.inputs))]
    labels = data.targets.argmax(1).tolist()
    order = list(range(len(items)))
    np.random.RandomState(seed).shuffle(order)
    used = set(excluded)
    by_class: dict[int, list[int]] = {k: [] for k in range(data.targets.shape[1])}
    for index in order:
        if items[index] not in used:
            used.add(items[index])
            by_class[labels[index]].append(index)
    poorest = min(by_class, key=lambda k: len(by_class[k]))
    if len(by_class[poorest]) < 2 * shots:
        raise InputError(
            f"class number {poorest} has {len(by_class[poorest])} different examples in {data.inputs.source}, "
            f"{2 * shots} are needed for {shots} shots to train on and {shots} to develop with. Splits that are drawn "
            f"already belong in <task>/{shots}-<seed>/"
        )
    train = [index for indices in by_class.values() for index in indices[:shots]]
    dev = [index for indices in by_class.values() for index in indices[shots : 2 * shots]]
    return FewShot(subset(data, train), subset(data, dev))


def subset(data: Shots, indices: list[int]) -> Shots:
    """Some examples, in this order."""
    return Shots(Subset(data.inputs, indices), data.targets[indices])


class SimilarityFilter:
    """LM-BFF's `demo_filter`: of each class the half of the shots whose embeddings are most like the sample's.

    Args:
        model: any sentence encoder, by name or folder. Both texts of a pair are joined.
    """

    def __init__(self, model: str) -> None:
        encoder = Classifier.from_pretrained(model, ["a", "b"])  # only for features; any vocabulary has letters
        if encoder.kind != "text":
            raise InputError(f"{model!r} is no sentence encoder: filter demonstrations with one, as all-MiniLM-L6-v2")
        self.encoder = encoder
        self._known: dict[TextSample, Tensor] = {}

    def __call__(
        self, sample: TextSample, shots: tuple[tuple[TextSample, int], ...]
    ) -> tuple[tuple[TextSample, int], ...]:
        """The most similar shots of each class, the sample itself left out."""
        others = [shot for shot in shots if shot[0] != sample]
        classes = sorted({label for _, label in others})
        most = max(1, int(len(others) // len(classes) * FILTER_RATE))
        similarity = torch.stack([self._embedding(text) for text, _ in others]) @ self._embedding(sample)
        order = similarity.argsort(descending=True, stable=True).tolist()
        return tuple(shot for k in classes for shot in [others[i] for i in order if others[i][1] == k][:most])

    def _embedding(self, sample: TextSample) -> Tensor:
        if sample not in self._known:
            text = sample if isinstance(sample, str) else " ".join(sample)
            self._known[sample] = self.encoder.features([text])[0]
        return self._known[sample]


@dataclass(frozen=True)
class PublishedDemonstrations(Demonstrations):
    """What is too long loses the far end of its shots: the tail, or the head where they stand before the sample.

    Args:
        similar: which shots are drawn from, for a sample; None draws from all.
    """

    similar: SimilarityFilter | None = None

    def show(self, sample: TextSample, draw: random.Random) -> Example:
        drawn_from = self if self.similar is None else replace(self, shots=self.similar(sample, self.shots))
        return super(PublishedDemonstrations, drawn_from).show(sample, draw)._replace(cut_solved=True)
