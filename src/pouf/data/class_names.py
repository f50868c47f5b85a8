"""Names of classes: how they are said, compared, checked and read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pouf.errors import InputError


def spoken(name: str) -> str:
    """A class name as a person would say it: `back_pack` → `back pack`, as the paper does."""
    return " ".join(name.replace("_", " ").split())


def same_name(name: str) -> str:
    """What two spellings of one class have in common: case, underscores and spaces do not count."""
    return spoken(name).casefold()


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """The class names, stripped, or an error where they are too few, empty or not distinct."""
    if isinstance(classes, str):
        raise InputError(f"classes must be a list of names, not the text {classes!r}: give [{classes!r}, …]")
    names = tuple(name.strip() for name in classes)
    if any(not spoken(name) for name in names):
        raise InputError("a class name is empty: give each class a name, as the text side reads nothing else")
    doubles = [name for name, count in Counter(map(same_name, names)).items() if count > 1]
    if doubles:
        raise InputError(f"duplicate class names: {', '.join(doubles)}. Give each class once, under its own name.")
    if len(names) < 2:
        raise InputError(f"{len(names)} class given, at least 2 are needed to tell things apart")
    return names


def numbered(names: Sequence[str]) -> list[str]:
    """The second `missile` becomes `missile (2)`."""
    met: Counter[str] = Counter()
    told = []
    for name in names:
        met[same_name(name)] += 1
        count = met[same_name(name)]
        told.append(name if count == 1 else f"{name} ({count})")
    return told


def read_classes(given: str) -> tuple[str, ...]:
    """Class names from the command line: a file with one name a line, or `a,b,c`."""
    if os.path.isfile(given):
        return check_classes(read_lines(given))
    if "," not in given:
        raise InputError(f"no class file {given!r}: expected a file with one name a line, or names like a,b,c")
    return check_classes([name for name in given.split(",") if name.strip()])


def read_lines(file: str | Path) -> list[str]:
    """The lines of a text file that are not blank."""
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{str(file)!r} is not UTF-8 text ({error.reason}): save it as UTF-8") from None
    return [line for line in text.splitlines() if line.strip()]
