"""Predictions as rows of a file."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pouf.classifier import Classifier, Predictions
from pouf.data.base import Unlabelled
from pouf.data.class_names import Taxonomy
from pouf.errors import InputError, optional
from pouf.files import atomic_write, check_writable
from pouf.inference.encode import FITTED_ON, FeatureSet, InferenceConfig, in_order, share_skipped
from pouf.parallel.process_group import launched_as_main, processes, started_processes

Row = dict[str, Any]
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # beginnings of what spreadsheets compute


class Extras(NamedTuple):
    """Further columns of a table of predictions."""

    replaced: Mapping[int, str] = {}  # written instead of the class, by position of the sample
    flags: Mapping[str, Collection[int]] = {}  # columns of true and false: the positions where it is true
    figures: Mapping[str, Mapping[int, float]] = {}  # further columns, by name and position
    probabilities: bool = False  # one column per class
    safe_csv: bool = False  # of CSV files: `'` before values that a spreadsheet would take for a formula


NOTHING = Extras()


def prediction_rows(
    classes: Sequence[str], data: Unlabelled, blocks: Iterable[Predictions], extras: Extras = NOTHING
) -> Iterator[Row]:
    """One row per sample: its name or its text, the class, its probability, the runner-up and its probability."""
    names, taxonomy = data.display_columns(), Taxonomy.from_names(classes)
    ancestors = list(taxonomy.members) if taxonomy is not None else []
    every = [f"p_{name}" for name in (*classes, *ancestors)]
    for block in blocks:
        probabilities = block.log_probabilities.exp()
        sums = probabilities[:, :0] if taxonomy is None else taxonomy.sums(probabilities)
        best = probabilities.topk(2, dim=1)
        rows = zip(block.indices, best.values.tolist(), best.indices.tolist(), probabilities, sums, strict=True)
        for index, p, k, all_of, above in rows:
            yield {
                **{name: values[index] for name, values in names.items()},
                "class": extras.replaced.get(index, classes[k[0]]), "probability": round(p[0], 6),
                "runner_up": classes[k[1]], "runner_up_probability": round(p[1], 6),
                **_parent(taxonomy, classes[k[0]], ancestors, above),
                **{name: index in where for name, where in extras.flags.items()},
                **{name: round(values[index], 6) for name, values in extras.figures.items()},
                **({name: round(v, 6) for name, v in zip(every, all_of.tolist() + above.tolist(), strict=True)}
                   if extras.probabilities else {}),
            }  # fmt: skip


def _parent(taxonomy: Taxonomy | None, name: str, ancestors: Sequence[str], sums: torch.Tensor) -> Row:
    """The parent of the predicted class, where names are paths, with the sum of the probabilities below it."""
    if taxonomy is None:
        return {}
    parent = taxonomy.parent(name)
    total = None if parent is None else round(float(sums[ancestors.index(parent)]), 6)
    return {"parent": parent or "", "parent_probability": total}


def _without_formulas(row: Row) -> Row:
    return {
        name: f"'{value}" if isinstance(value, str) and value.startswith(FORMULAS) else value
        for name, value in row.items()
    }


def _write_csv(file: Path, rows: Iterator[Row]) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer: csv.DictWriter[str] | None = None
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(stream, fieldnames=list(row))
                writer.writeheader()
            writer.writerow(row)


def _write_json_lines(file: Path, rows: Iterator[Row]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_parquet(file: Path, rows: Iterator[Row]) -> None:
    pyarrow = optional("pyarrow", "parquet", "a Parquet file")
    parquet = optional("pyarrow.parquet", "parquet", "a Parquet file")
    writer = None
    while group := list(islice(rows, ROWS)):
        table = pyarrow.Table.from_pylist(group, schema=writer.schema if writer is not None else None)
        writer = writer or parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


ROWS = 8192  # of Parquet, written together
WRITERS: dict[str, Callable[[Path, Iterator[Row]], None]] = {
    ".csv": _write_csv,
    ".jsonl": _write_json_lines,
    ".parquet": _write_parquet,
}


def check_place(file: Path, overwrite: bool = False) -> None:
    """An error where predictions can't be written to: before anything is computed."""
    if file.suffix.lower() not in WRITERS:
        raise InputError(f"can't write predictions to {str(file)!r}: the name must end in {' or '.join(WRITERS)}")
    if file.suffix.lower() == ".parquet":
        optional("pyarrow", "parquet", "a Parquet file")
    # The first process alone: another may look when that one has begun to write.
    if launched_as_main() and file.exists() and not overwrite:
        raise InputError(f"{str(file)!r} already exists: give overwrite=True to replace it, or choose another file")
    check_writable(file if started_processes() == 1 else file.parent / "parts")  # several may find the folder of before


def own_part(file: Path) -> Path:
    """The file that this process writes: `file` itself, or its part of a folder of that name.

    A folder of Parquet files is one table to pandas, DuckDB and Spark; so are CSV and JSON lines to the latter two.
    """
    group = processes()
    own = file / f"part-{group.rank:05}-of-{group.size:05}{file.suffix}" if group.size > 1 else file
    if group.size > 1 and group.is_main:
        # What an earlier run left, alone or with more processes.
        for old in [file] if file.is_file() else file.glob("part-*"):
            old.unlink()
    group.gather_objects(0)  # no process writes before that is done
    check_writable(own)
    return own


def rows_by_rank(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows of all processes in the order of their ranks, on each of them, some thousands in memory at a time."""
    group = processes()
    if group.size == 1:
        yield from rows
        return
    for rank in range(group.size):
        while block := group.broadcast(list(islice(rows, ROWS)) if rank == group.rank else [], rank):
            yield from block


def write_rows(file: Path, rows: Iterator[Row], safe_csv: bool = False) -> Path:
    """Write the rows to a file, in the format that its ending names."""
    write = WRITERS[file.suffix.lower()]
    with atomic_write(file) as partial:
        write(partial, map(_without_formulas, rows) if safe_csv and file.suffix.lower() == ".csv" else rows)
    return file


class Share(NamedTuple):
    """Results of the predictions of all processes."""

    n: int
    sample: FeatureSet  # some features of all processes
    rows: list[Row]  # of all processes, where no file was written


def predict_share(
    file: Path | None,
    classifier: Classifier,
    data: Unlabelled,
    inference: InferenceConfig,
    extras: Extras = NOTHING,
    on_features: Callable[[FeatureSet], None] = lambda encoded: None,
) -> Share:
    """Each process predicts its share of the data, and writes it to its own file: no process has all in memory.

    Args:
        file: one process writes it, several write a folder of that name. None collects the rows instead.
        on_features: called with the features of each block before its rows are written; may add to the extras.
    """
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    chosen, some, count = set(order[:FITTED_ON].tolist()), [], 0

    def blocks() -> Iterator[Predictions]:
        nonlocal count
        prototypes = classifier.fixed_prototypes()
        for encoded in classifier.store(inference).blocks(data):
            count += len(encoded.indices)
            some.append(encoded.only(chosen))
            on_features(encoded)
            yield from classifier.score_blocks(encoded, prototypes)
        if not count and processes().size == 1:
            data.check_readable()

    own = own_part(file) if file is not None else None
    rows = prediction_rows(classifier.classes, data, blocks(), extras)
    begun = list(islice(rows, 1))  # by all processes at once: they share the prompts
    rows, collected = chain(begun, rows), list[Row]()
    if own is None:
        collected = list(rows_by_rank(rows))
    elif begun:
        write_rows(own, rows, extras.safe_csv)
    n = share_skipped(data, count)
    if not n:
        data.check_readable()
    return Share(n, classifier.store(inference).some(in_order(some)), collected)
