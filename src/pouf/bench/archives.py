"""Language tasks from files: GLUE's and LM-BFF's archives, tables with a header, and folders of `datasets`."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from pouf.bench.language import Task
from pouf.data.class_names import same_name
from pouf.data.labelled import Shots
from pouf.data.tables import READERS, BadRow, read_table
from pouf.data.texts import Texts
from pouf.errors import InputError

Split = Literal["train", "test"]
OwnRow = tuple[tuple[str, ...], Any]  # texts and label


def read_task(task: Task, folder: str | Path, split: Split) -> Shots:
    """The examples of a task with their labels, for shots and for evaluation.

    Args:
        folder: holds `<layout.folder>/train.tsv` and so on as GLUE does, `<layout.folder>/train.csv` as LM-BFF does,
            `<task>/train.jsonl` (CSV, TSV, Parquet) with columns text, or text_a and text_b, and label, or score for
            STS-B, or `<task>/` as `datasets` saves it to disk. Case does not matter in folder names, nor do hyphens.
        split: "test" is GLUE's dev, whose labels are known.
    """
    folder = Path(folder)
    found = _task_folder(task, folder)
    if any((found / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return from_dataset(task, _load_from_disk(task, found, split))
    stems = ("train",) if split == "train" else tuple(dict.fromkeys((task.layout.test, "test")))
    file = next((f for stem in stems for f in sorted(found.glob(f"{stem}.*")) if f.suffix in READERS), None)
    if file is None:
        raise InputError(f"no {' or '.join(stems)} file in {str(found)!r}: expected one in {', '.join(READERS)}")
    rows = _own_table(task, file) if _has_own_header(task, file) else _archive_table(task, file)
    return _examples(task, list(rows), str(file))


def from_dataset(task: Task, dataset: Any, columns: Sequence[str] | None = None, label: str = "label") -> Shots:
    """A `datasets.Dataset`, with the hub's usual column names unless others are given."""
    there = list(dataset.column_names)
    names = columns or next((names for names in _usual_columns(task) if set(names) <= set(there)), None)
    if names is None or label not in there:
        raise InputError(
            f"task {task.name} needs columns for its text{'s' if task.pair else ''} and its label, but the dataset has "
            f"{', '.join(there)}: name them with columns=… and label=…"
        )
    # The hub numbers some labels in another order than GLUE's files do: where they have names, these count.
    classes = getattr(dataset.features.get(label), "names", None)
    rows = []
    for row in dataset:
        value = row[label]
        if value is None or (isinstance(value, (int, float)) and value < 0):
            continue  # no gold label
        rows.append((tuple(row[name] for name in names), classes[value] if classes is not None else value))
    return _examples(task, rows, f"dataset {task.name}")


def _task_folder(task: Task, folder: Path) -> Path:
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    for wanted in (task.name, task.layout.folder):
        for candidate in inside:
            if candidate.is_dir() and _plain(candidate.name) == _plain(wanted):
                return candidate
    raise InputError(
        f"no folder of task {task.name} in {str(folder)!r}: expected {task.layout.folder} or {task.name.lower()}"
    )


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _has_own_header(task: Task, file: Path) -> bool:
    if file.suffix in (".jsonl", ".parquet"):
        return True
    with file.open(encoding="utf-8-sig") as lines:
        header = lines.readline().strip().split("\t" if file.suffix == ".tsv" else ",")
    return {*_own_columns(task), _own_label(task)} <= set(header)


def _own_columns(task: Task) -> tuple[str, ...]:
    return ("text_a", "text_b") if task.pair else ("text",)


def _own_label(task: Task) -> str:
    return "label" if task.scale is None else "score"


def _usual_columns(task: Task) -> list[tuple[str, ...]]:
    """What the hub calls the texts of such a task."""
    if not task.pair:
        return [("text",), ("sentence",)]
    named = tuple(name for name in task.layout.columns if isinstance(name, str))
    return [("text_a", "text_b"), named, ("sentence1", "sentence2"), ("premise", "hypothesis")]


def _own_table(task: Task, file: Path) -> Iterator[OwnRow]:
    columns = _own_columns(task)
    table = read_table(file, *columns, _own_label(task))
    for *texts, label in zip(*table.values(), strict=True):
        yield tuple("" if isinstance(text, BadRow) else text for text in texts), label


def _archive_table(task: Task, file: Path) -> Iterator[OwnRow]:
    """GLUE's files have no quoting: a quotation mark is a character like any other. LM-BFF's CSV files have."""
    layout = task.layout
    with file.open(encoding="utf-8-sig", newline="") as lines:
        if file.suffix == ".tsv":
            rows: Iterator[list[str]] = iter(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
        else:
            rows = iter(csv.reader(lines))
        places = [column for column in (*layout.columns, layout.label) if isinstance(column, int)]
        if not places:
            header = next(rows, [])
            missing = [name for name in (*layout.columns, layout.label) if name not in header]
            if missing:
                raise InputError(f"{str(file)!r} has no column {missing[0]!r}, only: {', '.join(header)}")
            places = [header.index(str(name)) for name in (*layout.columns, layout.label)]
        for row in rows:
            if len(row) > max(places):  # a cut line has no label
                *texts, label = (row[place] for place in places)
                yield tuple(texts), label


def _examples(task: Task, rows: Sequence[OwnRow], source: str) -> Shots:
    spellings = (task.labels, task.raw, task.also)
    known = {same_name(name): k for names in spellings for k, name in enumerate(names)}
    samples, targets = [], []
    for texts, label in rows:
        if str(label) == "-" or not all(isinstance(text, str) and text.strip() for text in texts):
            continue  # SNLI's annotators did not agree, or there is nothing to read
        if task.scale is not None:
            targets.append(_between(label, task.scale, source))
        elif (k := known.get(same_name(str(label)))) is not None:
            targets.append([float(k == j) for j in range(len(task.labels))])
        else:
            raise InputError(f"{source}: label {label!r} is none of {', '.join((*task.labels, *task.raw))}")
        samples.append(texts if task.pair else texts[0])
    if not samples:
        raise InputError(f"{source} has no example of task {task.name}")
    return Shots(Texts(samples, source=source), torch.tensor(targets))


def _between(score: Any, scale: float, source: str) -> list[float]:
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
