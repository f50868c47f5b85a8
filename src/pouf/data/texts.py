"""Texts in memory, from a table, or from a file larger than memory."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pouf.data.base import Unlabelled
from pouf.data.contents import DIGEST_SIZE, as_url, content_digest, local_copy
from pouf.data.tables import BadRow, Columns, detect_encoding, find_columns, parse_json, read_table
from pouf.errors import InputError, Unreadable

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

    def read(self, index: int) -> str | tuple[str, ...]:
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
    with file.open("rb") as stream:
        return detect_encoding(stream.read(4096)).startswith(
            "utf-8"
        )  # other encodings can't be split into lines as bytes


class LargeTexts(Texts):
    """The texts of a JSONL file larger than memory, read by their offsets in the file when needed.

    One pass over the file stores the offset and the length of each line and a digest of its text: 32 bytes per line.
    The order of training follows the digests, so that no other column can influence it.
    """

    def __init__(self, file: str | Path, columns: Sequence[str], source: str | None = None) -> None:
        self.file, self.columns = Path(file), tuple(columns)
        self.lines = _Lines(self.file)
        self.keys = self._keys()
        offsets, digests = array("q"), bytearray()
        offset = rows = 0
        for line in self.lines.read_all():
            offsets.append(offset)
            digests += _digest(self._parse(line))
            offset += len(line)
            rows = len(offsets) if line.strip() else rows  # blank lines count, except those at the end
        self.offsets = np.frombuffer(offsets[:rows], np.int64)
        self.digests = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_SIZE)[:rows]
        self.lengths = np.diff(self.offsets, append=offset)
        super().__init__(range(rows), RowNumbers(rows), source or str(file))

    def read(self, index: int) -> str | tuple[str, ...]:
        return _checked(self._parse(self.lines.read_at(int(self.offsets[index]))))

    def reading_order(self) -> list[int]:
        return np.argsort(self.lengths, kind="stable").tolist()  # type: ignore[no-any-return]

    def content_order(self) -> Sequence[int]:
        # An array, since a list of Python integers would take several times the memory.
        first = np.ascontiguousarray(self.digests[:, :8]).view(">u8").ravel()
        return np.argsort(first, kind="stable")  # type: ignore[return-value]

    def digest(self, index: int) -> bytes:
        return bytes(self.digests[index])

    def _keys(self) -> list[str]:
        """The names of the columns as spelled in the first row of the file that is a JSON object."""
        for line in self.lines.read_all():
            row = parse_json(line)
            if isinstance(row, dict):
                names = list(row)
                return [names[i] for i in find_columns(names, self.columns, str(self.file))]
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


class _Lines:
    """The lines of a file, opened once by each process."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.stream: BinaryIO | None = None
        self.process = 0

    def read_at(self, start: int) -> bytes:
        stream = self._opened()
        stream.seek(start)
        return stream.readline()

    def read_all(self) -> Iterator[bytes]:
        stream = self._opened()
        stream.seek(0)
        yield from iter(stream.readline, b"")  # closing this generator would close the stream itself

    def _opened(self) -> BinaryIO:
        if self.stream is None or self.process != os.getpid():  # a worker must not move its parent's file position
            self.stream, self.process = self.file.open("rb"), os.getpid()
        return self.stream

    def __reduce__(self) -> tuple[Any, ...]:
        return _Lines, (self.file,)

    def __del__(self) -> None:
        if self.stream is not None:
            self.stream.close()


class RowNumbers(Sequence[str]):
    """Row numbers as ids, without storing them."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        found = range(self.n)[index]
        return str(found) if isinstance(found, int) else [str(number) for number in found]
