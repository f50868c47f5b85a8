"""Columns of a file: CSV, TSV, JSONL, JSON, Parquet, Excel, or plain text with one entry per line.

Delimiter and encoding are detected. An unreadable row is not dropped: a `BadRow` with the reason takes its place.
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pouf.data.contents import local_copy
from pouf.errors import InputError, did_you_mean, optional
from pouf.files import read_text

Columns = dict[str, list[Any]]  # by the requested names, all of one length
DELIMITERS = (",", ";", "\t", "|")
NO_DELIMITER = "\x1f"  # for files of one column: its entries may contain all the others
logger = logging.getLogger(__name__)


class MissingColumn(InputError):
    """A file has no column of this name."""


class BadRow(str):
    """Takes the place of an unreadable row; its text is the reason."""


def read_table(file: str | Path, *needed: str) -> Columns:
    """The needed columns of a file. Case does not matter in their names; other columns are not read."""
    file = local_copy(file)
    if file.is_dir():
        raise InputError(f"{str(file)!r} is a folder: expected one file of texts: {', '.join(TABLE_READERS)}")
    if not file.is_file():
        raise InputError(f"no such file or folder: {str(file)!r}; expected texts in {', '.join(TABLE_READERS)} files")
    reader = TABLE_READERS.get(file.suffix.lower())
    if reader is None:
        raise InputError(f"can't read {file.name!r} as texts: expected a file that ends in {', '.join(TABLE_READERS)}")
    return reader(file, needed)


def header(file: Path, expected: Sequence[str]) -> list[str]:
    """The column names of a CSV file; the expected ones help to detect the delimiter."""
    text = read_text(file, guess=True).lstrip("\r\n")
    delimiter = _delimiter(text, expected, "\t" if file.suffix.lower() == ".tsv" else ",")
    return next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])


def find_columns(names: Sequence[str], needed: Sequence[str], source: str) -> list[int]:
    """Indices of the needed columns in `names`; a name that differs in case only is accepted with a warning."""
    indices = []
    for name in needed:
        found = [i for i, other in enumerate(names) if other == name]
        if not found:
            found = [i for i, other in enumerate(names) if other.strip().casefold() == name.strip().casefold()]
            if len(found) == 1:
                logger.warning("%s has no column %r: %r is read.", source, name, names[found[0]])
        if not found:
            listed = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
            near = did_you_mean(name, names[:1000])  # a million columns have no names to compare with
            hint = {"text": "give text_column= to read another", "label": "give label_column= to read another"}
            advice = hint.get(name, "give one of these")
            if len(names) == 1 and len(names[0].split()) > 2:
                advice += "; if that is a text and not a header, rename the file to .txt"
            raise MissingColumn(f"{source!r} has no column {name!r}, only: {listed or 'none'}: {advice}{near}")
        if len(found) > 1:
            raise InputError(f"{source!r} has {len(found)} columns {name!r}: rename all but one of them")
        indices += found
    return indices


def _plain_text(file: Path, needed: Sequence[str]) -> Columns:
    # Only line feeds and carriage returns end a line here: a text may hold Unicode's other separators.
    lines = io.StringIO(read_text(file, guess=True), newline=None).read().split("\n")
    return _columns(lines[:-1] if not lines[-1] else lines, needed, str(file))


def _delimited(file: Path, needed: Sequence[str]) -> Columns:
    csv.field_size_limit(2**31 - 1)  # the default refuses texts above 128 kB
    text = read_text(file, guess=True).lstrip("\r\n")
    delimiter = _delimiter(text, needed, "\t" if file.suffix.lower() == ".tsv" else ",")
    # Strict about quotes: otherwise an open one swallows the following rows, as in pandas and pyarrow.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows, line = [], 1
    try:
        for row in reader:
            rows.append(row)
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"{str(file)!r}: the row at line {line} can't be read ({error}). Is a quotation mark left open, or not "
            "doubled inside a quoted text?"
        ) from None
    width = len(rows[0]) if rows else 0
    for number, row in enumerate(rows):
        if any(value.strip() for value in row[width:]):
            why = f"{len(row)} values for {width} columns: a text that holds {delimiter!r} needs quotes"
            rows[number] = [BadRow(why)] * width
    return _from_grid(rows, needed, str(file))


def _delimiter(text: str, needed: Sequence[str], usual: str) -> str:
    """The delimiter that splits the header into the needed columns, or else into most columns."""
    first = next(iter(text.splitlines()), "")
    ranks = {}
    for delimiter in dict.fromkeys((usual, *DELIMITERS)):
        names = next(csv.reader([first], delimiter=delimiter), [])
        known = {name.strip().casefold() for name in names} & {name.strip().casefold() for name in needed}
        ranks[delimiter] = (len(known), len(names))
    best = max(ranks, key=ranks.__getitem__)
    return best if ranks[best][1] > 1 else NO_DELIMITER


def _from_grid(rows: Sequence[Sequence[Any]], needed: Sequence[str], source: str) -> Columns:
    """Columns of a table with its header as the first row. Blank rows count, except those at the end."""
    filled = [number for number, row in enumerate(rows) if any(value not in ("", None) for value in row)]
    if not filled:
        return {name: [] for name in needed}
    names = ["" if name is None else str(name) for name in rows[filled[0]]]
    indices, non_blank = find_columns(names, needed, source), set(filled)

    def cell(number: int, name: str, index: int) -> Any:
        if number not in non_blank:
            return BadRow("the row is blank")
        value = rows[number][index] if index < len(rows[number]) else None
        return BadRow(f"no {name!r} in this row") if value is None else value

    body = range(filled[0] + 1, filled[-1] + 1)
    return {name: [cell(row, name, index) for row in body] for name, index in zip(needed, indices, strict=True)}


def _excel(file: Path, needed: Sequence[str]) -> Columns:
    openpyxl = optional("openpyxl", "excel", "an Excel file")
    try:
        book = openpyxl.load_workbook(file, read_only=True, data_only=True)
        first, *others = book.worksheets
        rows = [[_cell(cell) for cell in row] for row in first.iter_rows()]
        book.close()
    except Exception as error:  # a damaged archive can raise nearly anything
        raise InputError(f"{str(file)!r} can't be read as an Excel file: {error}. Save it as CSV") from None
    if others:
        logger.warning("%s has %d sheets: the first, %r, is read.", file, 1 + len(others), first.title)
    return _from_grid(rows, needed, str(file))


def _cell(cell: Any) -> Any:
    """The value without conversion, so that a number or a date among texts is skipped, as in other files."""
    return BadRow(f"the cell holds the error {cell.value}") if cell.data_type == "e" else cell.value


def parse_json(line: str | bytes) -> Any:
    """A JSON value, or a `BadRow`. A duplicate key is an error, since one of its values would be lost."""
    if not line.strip():
        return BadRow("the line is blank")
    try:
        return json.loads(line, object_pairs_hook=object_without_duplicates)
    except (ValueError, RecursionError) as error:
        return BadRow(f"not valid JSON: {error}")


def object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; `ValueError` if a key occurs twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return row


def _json_lines(file: Path, needed: Sequence[str]) -> Columns:
    # As in plain text, only \n ends a line: a JSON string may contain U+2028.
    lines = read_text(file, guess=True).rstrip().split("\n")
    return _columns([parse_json(line) for line in lines] if lines != [""] else [], needed, str(file))


def _json(file: Path, needed: Sequence[str]) -> Columns:
    """A list of rows, or an object of columns: lists, or objects by row name as pandas writes them."""
    table = parse_json(read_text(file, guess=True))
    if isinstance(table, BadRow):
        raise InputError(f"{str(file)!r}: {table}")
    if isinstance(table, dict):
        by_column = [list(c.items()) if isinstance(c, dict) else list(enumerate(c)) if isinstance(c, list) else None
                     for c in table.values()]  # fmt: skip
        rows: dict[Any, dict[str, Any]] = {}
        for name, cells in zip(table, by_column, strict=True):
            if cells is None or len(cells) != len(by_column[0] or ()):
                raise InputError(f"{str(file)!r}: expected a list of rows, or columns of one length; {name!r} is not")
            for row, value in cells:
                rows.setdefault(row, {})[name] = value
        table = list(rows.values())
    if not isinstance(table, list):
        raise InputError(f"{str(file)!r}: expected a list of rows, not {type(table).__name__}")
    return _columns(table, needed, str(file))


def _columns(rows: Iterable[Any], needed: Sequence[str], source: str) -> Columns:
    """Columns from rows: dictionaries, or plain values of the first column."""
    rows = [row if isinstance(row, (dict, BadRow)) else {needed[0]: row} for row in rows]
    names = list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))
    if not names:
        return {name: list(rows) for name in needed}
    found = [names[index] for index in find_columns(names, needed, source)]
    return {
        name: [row if isinstance(row, BadRow) else row.get(own, BadRow(f"no {name!r} in this row")) for row in rows]
        for name, own in zip(needed, found, strict=True)
    }


def _parquet(file: Path, needed: Sequence[str]) -> Columns:
    parquet = optional("pyarrow.parquet", "parquet", "a Parquet file")
    try:
        with parquet.ParquetFile(file, page_checksum_verification=True) as opened:
            names = opened.schema_arrow.names
            found = [names[index] for index in find_columns(names, needed, str(file))]
            table = opened.read(columns=found)
        return {
            name: [BadRow(f"no {name!r} in this row") if v is None else v for v in table[own].to_pylist()]
            for name, own in zip(needed, found, strict=True)
        }
    except InputError:
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        raise InputError(f"{str(file)!r} is not a readable Parquet file: {error}") from None


TABLE_READERS: dict[str, Callable[[Path, Sequence[str]], Columns]] = {
    ".csv": _delimited,
    ".tsv": _delimited,
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".xlsx": _excel,
    ".txt": _plain_text,
}
