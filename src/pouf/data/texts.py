"""Texts in memory, from a table, or from a file larger than memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np

from pouf.data.base import Unlabelled
from pouf.data.contents import DIGEST_SIZE, as_url, content_digest, local_copy
from pouf.data.tables import BadRow, Columns, find_columns, parse_json, read_table
from pouf.errors import InputError, Unreadable
from pouf.files import encoding_of

IN_MEMORY = 64 * 2**20  # JSONL files above this size are read line by line


class Texts(Unlabelled):
    """Texts in memory, or pairs of texts as tuples. An empty one counts as unreadable."""

    modality = "text"
    columns: tuple[str, ...] = ()  # of the file that they were read from

    def __init__(self, items: Sequence[Any], ids: Sequence[str] | None = None, source: str = "the list") -> None:
        super().__init__([str(i) for i in range(len(items))] if ids is None else ids, source)
        self.items = items

    @classmethod
    def from_file(
        cls, file: str | Path, columns: str | Sequence[str] = "text", id_columns: Sequence[str] = ()
    ) -> Texts:
        """The texts of a file, or its pairs where two columns are named; ids are row numbers from 0, the header
        not counted. Other columns are not read.

        Args:
            id_columns: columns that name the samples, instead of row numbers.
        """
        columns = (columns,) if isinstance(columns, str) else tuple(columns)
        source, file = as_url(file) or str(file), local_copy(file)
        if _is_large(file) and not id_columns:
            return LargeTexts(file, columns, source)
        table = read_table(file, *dict.fromkeys((*columns, *id_columns)))
        texts = cls.from_columns(table, columns, source)
        texts.set_ids({name: _of_one_type(table[name]) for name in id_columns})
        return texts

    @classmethod
    def from_columns(cls, table: Columns, columns: Sequence[str], source: str) -> Texts:
        first, *others = (table[name] for name in columns)
        if not first:
            raise InputError(f"no texts in {source!r}: the file has no rows")
        texts = cls(list(zip(first, *others, strict=True)) if others else first, source=source)
        texts.columns = tuple(columns)
        return texts

    def read(self, index: int, side: int | None = None) -> str | tuple[str, ...]:
        return _checked(self.items[index])

    def display_columns(self) -> Mapping[str, Sequence[Any]]:
        """The ids, and the texts themselves."""
        named = super().display_columns()
        own = self.columns or ("text",)
        texts = {name: _TextColumn(self, k if len(own) > 1 else None) for k, name in enumerate(own)}
        return {**named, **{name: column for name, column in texts.items() if name not in named}}

    def reading_order(self) -> list[int]:
        return sorted(range(len(self)), key=lambda index: len(str(self.items[index])))

    def content_order(self) -> Sequence[int]:
        return sorted(range(len(self)), key=lambda index: str(self.items[index]))

    def digest(self, index: int) -> bytes:
        return _digest(self.items[index])


class _TextColumn(Sequence[str]):
    """One text of each sample, read on access, since a file may be larger than memory.

    Args:
        part: index of the text in a pair; None joins all texts of a sample.
    """

    def __init__(self, texts: Texts, part: int | None) -> None:
        self.texts, self.part = texts, part

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: Any) -> Any:
        sample = self.texts.read(index)
        if isinstance(sample, tuple):
            return sample[self.part] if self.part is not None else " | ".join(sample)
        return sample


def _of_one_type(values: Sequence[Any]) -> Sequence[Any]:
    """Ids unchanged if all are of one simple type, else as strings; empty for unreadable rows."""
    ids = ["" if value is None or isinstance(value, BadRow) else value for value in values]
    kinds = {type(value) for value in ids}
    return ids if len(kinds) == 1 and kinds <= {str, int, float, bool} else [str(value) for value in ids]


def _checked(item: Any) -> str | tuple[str, ...]:
    """The sample if it is a usable text or pair, else `Unreadable`."""
    for text in item if isinstance(item, tuple) else (item,):
        if isinstance(text, BadRow):
            raise Unreadable(text)
        if not isinstance(text, str):
            raise Unreadable(f"expected a text, not {type(text).__name__}")
        if not text.strip():
            raise Unreadable("the text is empty")
        if "\0" in text:
            raise Unreadable("the text contains a NUL character: is it text at all?")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Unreadable("the text contains half a character (a lone surrogate)") from None
    return item  # type: ignore[no-any-return]


def _digest(item: Any) -> bytes:
    return content_digest(repr(item).encode())


def _is_large(file: Path) -> bool:
    if file.suffix.lower() != ".jsonl" or not file.is_file() or file.stat().st_size <= IN_MEMORY:
        return False
    with file.open("rb") as stream:  # other encodings can't be split into lines as bytes
        return encoding_of(stream.read(4096), guess=True).startswith("utf-8")


class LargeTexts(Texts):
    """The texts of a JSONL file larger than memory, read by their offsets in the file when needed.

    One pass over the file stores the offset and the length of each line and a digest of its text: 32 bytes per line.
    The order of training follows the digests, so that no other column can influence it.
    """

    def __init__(self, file: str | Path, columns: Sequence[str], source: str | None = None) -> None:
        self.columns = tuple(columns)
        with Path(file).open("rb") as stream:  # an empty file can't be mapped
            self.content = mmap(stream.fileno(), 0, access=ACCESS_READ) if stream.seek(0, 2) else b""
        self.keys = self._keys(str(file))
        bounds, digests = array("q", [0]), bytearray()
        rows = 0
        for line in self._lines():
            bounds.append(bounds[-1] + len(line))
            digests += _digest(self._parse(line))
            rows = len(bounds) - 1 if line.strip() else rows  # blank lines count, except those at the end
        self.bounds = np.frombuffer(bounds[: rows + 1], np.int64)
        self.digests = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_SIZE)[:rows]
        super().__init__(range(rows), RowNumbers(rows), source or str(file))

    def read(self, index: int, side: int | None = None) -> str | tuple[str, ...]:
        return _checked(self._parse(self.content[self.bounds[index] : self.bounds[index + 1]]))

    def reading_order(self) -> list[int]:
        return np.argsort(np.diff(self.bounds), kind="stable").tolist()  # type: ignore[no-any-return]

    def content_order(self) -> Sequence[int]:
        # An array, since a list of Python integers would take several times the memory.
        first = np.ascontiguousarray(self.digests[:, :8]).view(">u8").ravel()
        return np.argsort(first, kind="stable")  # type: ignore[return-value]

    def digest(self, index: int) -> bytes:
        return bytes(self.digests[index])

    def _lines(self) -> Iterator[bytes]:
        start = 0
        while start < len(self.content):
            end = self.content.find(b"\n", start) + 1 or len(self.content)
            yield self.content[start:end]
            start = end

    def _keys(self, source: str) -> list[str]:
        """The names of the columns as spelled in the first row of the file that is a JSON object."""
        for line in self._lines():
            row = parse_json(line)
            if isinstance(row, dict):
                names = list(row)
                return [names[i] for i in find_columns(names, self.columns, source)]
        return list(self.columns)

    def _parse(self, line: bytes) -> Any:
        row = parse_json(line)
        if isinstance(row, BadRow):
            return row
        row = row if isinstance(row, dict) else {self.keys[0]: row}
        missing = [name for name in self.keys if name not in row]
        if missing:
            return BadRow(f"no {missing[0]!r} in this row")
        values = tuple(row[name] for name in self.keys)
        return values[0] if len(values) == 1 else values


class RowNumbers(Sequence[str]):
    """Row numbers as ids, without storing them."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        found = range(self.n)[index]
        return str(found) if isinstance(found, int) else [str(number) for number in found]
