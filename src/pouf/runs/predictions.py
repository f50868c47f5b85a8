"""Predictions as rows of a file."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pouf.errors import InputError

if TYPE_CHECKING:
    from pouf.base import Predictions
    from pouf.data.base import Unlabelled

Row = dict[str, Any]


def prediction_rows(
    classes: Sequence[str],
    data: Unlabelled,
    blocks: Iterable[Predictions],
    replaced: Mapping[int, str] | None = None,
    more: Mapping[str, Mapping[int, float]] | None = None,
) -> Iterator[Row]:
    """One row per sample: its path or row number, the class, its probability, the runner-up and its probability.

    Args:
        replaced: what is said instead of the class, by position of the sample.
        more: further columns, by name and position.
    """
    key = "path" if data.modality == "image" else "row"
    replaced, more = replaced or {}, more or {}
    for block in blocks:
        best = block.log_probabilities.exp().topk(2, dim=1)
        for index, p, k in zip(block.indices, best.values.tolist(), best.indices.tolist(), strict=True):
            yield {
                key: data.ids[index], "class": replaced.get(index, classes[k[0]]), "probability": round(p[0], 6),
                "runner_up": classes[k[1]], "runner_up_probability": round(p[1], 6),
                **{name: round(values[index], 6) for name, values in more.items()},
            }  # fmt: skip


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


WRITERS: dict[str, Callable[[Path, Iterator[Row]], None]] = {".csv": _write_csv, ".jsonl": _write_json_lines}


def writer_for(file: Path) -> Callable[[Path, Iterator[Row]], None]:
    """What writes a file of this ending."""
    if file.suffix.lower() not in WRITERS:
        raise InputError(f"can't write predictions to {str(file)!r}: expected a name in {' or '.join(WRITERS)}")
    return WRITERS[file.suffix.lower()]


def write_predictions(
    file: Path,
    classes: Sequence[str],
    data: Unlabelled,
    blocks: Iterable[Predictions],
    replaced: Mapping[int, str] | None = None,
    more: Mapping[str, Mapping[int, float]] | None = None,
) -> Path:
    """Write the rows to a file of the kind that its name tells."""
    write = writer_for(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, prediction_rows(classes, data, blocks, replaced, more))
    return file
