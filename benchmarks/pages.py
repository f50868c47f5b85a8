"""Tables in pages of the documentation."""

from __future__ import annotations

from pathlib import Path


def put_table(page: Path, name: str, table: str) -> None:
    """Write a table between `<!-- name: begin -->` and `<!-- name: end -->`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, found, rest = page.read_text(encoding="utf-8").partition(begin)
    if not found or end not in rest:
        raise SystemExit(f"{page} has no place for a table: expected the lines {begin} and {end}")
    page.write_text(f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}", encoding="utf-8")
