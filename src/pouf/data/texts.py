"""Files of texts: CSV, TSV, JSONL, Parquet, or plain text with one a line."""

from __future__ import annotations

import csv
import json
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from pouf.data.base import Unlabelled, Unreadable
from pouf.errors import InputError, optional

Row = dict[str, Any]
IN_MEMORY = 64 * 2**20  # JSONL files above this size are read line by line


class Texts(Unlabelled):
    """Texts in memory, or pairs of texts as tuples. An empty one counts as unreadable."""

    modality = "text"
    columns: tuple[str, ...] = ()  # of the file they are from

    def __init__(self, items: Sequence[Any], ids: Sequence[str] | None = None, source: str = "the list") -> None:
        super().__init__([str(i) for i in range(len(items))] if ids is None else ids, source)
        self.items = items

    @classmethod
    def from_file(cls, file: str | Path, columns: str | Sequence[str] = "text") -> Texts:
        """The texts of a file, or its pairs where two columns are named; ids are row numbers from 0, header not
        counted. All other columns stay unread."""
        columns = (columns,) if isinstance(columns, str) else tuple(columns)
        file = Path(file)
        if file.suffix.lower() == ".jsonl" and file.is_file() and file.stat().st_size > IN_MEMORY:
            return LargeTexts(file, columns)
        rows = read_rows(file, *columns)
        if not rows:
            raise InputError(f"no texts in {str(file)!r}: the file has no rows")
        return cls.from_rows(rows, columns, str(file))

    @classmethod
    def from_rows(cls, rows: Sequence[Row], columns: Sequence[str], source: str) -> Texts:
        samples = [tuple(row.get(name, BadRow(f"no {name!r} in this row")) for name in columns) for row in rows]
        texts = cls([sample[0] if len(columns) == 1 else sample for sample in samples], source=source)
        texts.columns = tuple(columns)
        return texts

    def read(self, index: int) -> str | tuple[str, ...]:
        return _checked(self.items[index])

    def reading_order(self) -> list[int]:
        return sorted(range(len(self)), key=lambda index: len(str(self.items[index])))

    def content_order(self) -> Sequence[int]:
        return sorted(range(len(self)), key=lambda index: str(self.items[index]))

    def digest(self, index: int) -> bytes:
        return _digest(self.items[index])


def _checked(item: Any) -> str | tuple[str, ...]:
    """A sample that can be read, or `Unreadable`."""
    for text in item if isinstance(item, tuple) else (item,):
        if isinstance(text, BadRow):
            raise Unreadable(text)
        if not isinstance(text, str):
            raise Unreadable(f"expected a text, not {type(text).__name__}")
        if not text.strip():
            raise Unreadable("the text is empty")
    return item  # type: ignore[no-any-return]


def _digest(item: Any) -> bytes:
    return blake2b(repr(item).encode(), digest_size=16).digest()


class LargeTexts(Texts):
    """The texts of a JSONL file that need not fit into memory: read by their places in the file when needed.

    One pass over the file notes where its lines begin, how long they are and a fingerprint of their texts: 24 bytes a
    line. The order of training follows the fingerprints, so that no other column can steer it.
    """

    def __init__(self, file: str | Path, columns: Sequence[str]) -> None:
        self.file, self.columns = Path(file), tuple(columns)
        places = array("q")
        marks = array("Q")
        at, known = 0, False
        with self.file.open("rb") as lines:
            for line in lines:
                if line.strip():
                    sample = self._parse(line)
                    known = known or not isinstance(sample, BadRow)
                    places.append(at)
                    marks.append(int.from_bytes(blake2b(repr(sample).encode(), digest_size=8).digest(), "big"))
                at += len(line)
        if not known:
            raise InputError(
                f"{str(file)!r} has no row with {' and '.join(map(repr, columns))}. Name the right column."
            )
        self.places, self.marks = np.frombuffer(places, np.int64), np.frombuffer(marks, np.uint64)
        self.lengths = np.diff(self.places, append=at)
        super().__init__(range(len(self.places)), RowNumbers(len(self.places)), str(file))

    def read(self, index: int) -> str | tuple[str, ...]:
        with self.file.open("rb") as stream:
            stream.seek(int(self.places[index]))
            return _checked(self._parse(stream.readline()))

    def reading_order(self) -> list[int]:
        return np.argsort(self.lengths, kind="stable").tolist()  # type: ignore[no-any-return]

    def content_order(self) -> Sequence[int]:
        # Python's own numbers are made one by one, as they are asked for.
        return np.argsort(self.marks, kind="stable")  # type: ignore[return-value]

    def digest(self, index: int) -> bytes:
        with self.file.open("rb") as stream:
            stream.seek(int(self.places[index]))
            return _digest(self._parse(stream.readline()))

    def _parse(self, line: bytes) -> Any:
        try:
            row = json.loads(line)
        except ValueError as error:
            return BadRow(f"not valid JSON: {error}")
        row = row if isinstance(row, dict) else {self.columns[0]: row}
        missing = [name for name in self.columns if name not in row]
        if missing:
            return BadRow(f"no {missing[0]!r} in this row")
        values = tuple(row[name] for name in self.columns)
        return values[0] if len(values) == 1 else values


class RowNumbers(Sequence[str]):
    """The ids of rows, without a list of them."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return str(index)


class BadRow(str):
    """Stands in the place of a row that can't be read, and says why."""


def read_rows(file: str | Path, *needed: str) -> list[Row]:
    """All rows of a file as dictionaries; those that can't be parsed hold a `BadRow` under every needed column."""
    file = Path(file)
    if not file.is_file():
        raise InputError(f"no text file {str(file)!r}: expected a {', '.join(READERS)} file")
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        raise InputError(f"can't read {file.name!r} as texts: expected a file that ends in {', '.join(READERS)}")
    try:
        rows = list(reader(file, needed))
    except UnicodeDecodeError as error:
        raise InputError(f"{str(file)!r} is not UTF-8 text ({error.reason}): save it as UTF-8") from None
    columns = {name for row in rows for name in row}
    for name in needed:
        if rows and name not in columns:
            there = ", ".join(sorted(columns)) or "none"
            raise InputError(f"{str(file)!r} has no column {name!r}, only: {there}. Name the right one.")
    return rows


def _plain(file: Path, needed: Sequence[str]) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig") as lines:
        for line in lines:
            yield {needed[0]: line.rstrip("\r\n")}


def _table(delimiter: str) -> Callable[[Path, Sequence[str]], Iterator[Row]]:
    def read(file: Path, needed: Sequence[str]) -> Iterator[Row]:
        csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default refuses texts above 128 kB
        with file.open(encoding="utf-8-sig", newline="") as lines:
            for row in csv.DictReader(lines, delimiter=delimiter):
                yield {name: value for name, value in row.items() if name is not None and value is not None}

    return read


def _json_lines(file: Path, needed: Sequence[str]) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                yield dict.fromkeys(needed, BadRow(f"not valid JSON: {error}"))
                continue
            yield row if isinstance(row, dict) else {needed[0]: row}


def _parquet(file: Path, needed: Sequence[str]) -> Iterator[Row]:
    pyarrow = optional("pyarrow", "parquet", "a Parquet file")
    try:
        parquet = optional("pyarrow.parquet", "parquet", "a Parquet file").ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{str(file)!r} is not a Parquet file: {error}") from None
    columns = [name for name in needed if name in parquet.schema_arrow.names]
    for batch in parquet.iter_batches(columns=columns or None):
        yield from batch.to_pylist()


READERS: dict[str, Callable[[Path, Sequence[str]], Iterator[Row]]] = {
    ".csv": _table(","),
    ".tsv": _table("\t"),
    ".jsonl": _json_lines,
    ".parquet": _parquet,
    ".txt": _plain,
}
