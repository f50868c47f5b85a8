"""Class names and their descriptions: reading, checking, comparing and displaying them."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.data.tables import BadRow, header, object_without_duplicates, read_table
from pouf.errors import InputError, did_you_mean
from pouf.files import read_text

# Unicode's categories of control characters, invisible marks, surrogates and line breaks; and single letters and
# symbols that render as nothing.
NOT_IN_NAMES, BLANK = ("Cc", "Cf", "Cs", "Zl", "Zp"), "\u034f\u115f\u1160\u2800\u3164\uffa0"
# Zero-width joiners: part of the spelling of many languages and of emoji, but never next to ASCII letters.
JOINERS = re.compile(r"(?<=[^\x00-\x7f])[\u200c\u200d](?=[^\x00-\x7f])")

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# A list of names, a file, or a mapping from each name to one or several descriptions.
Classes = Sequence[str] | Mapping[str, str | Sequence[str]] | Path


class ClassSet(NamedTuple):
    """Class names, and the descriptions that the text side reads instead of the names, if any."""

    names: tuple[str, ...]
    descriptions: tuple[tuple[str, ...], ...] | None = None

    def as_given(self) -> Classes:
        """The inverse of `class_set`."""
        return self.names if self.descriptions is None else dict(zip(self.names, self.descriptions, strict=True))


def display_name(name: str) -> str:
    """A class name with spaces for underscores: `back_pack` → `back pack`, as in the paper."""
    return " ".join(name.replace("_", " ").split())


def normalise_name(name: str) -> str:
    """The normal form by which names are compared: ignores case, underscores, spaces and Unicode forms."""
    return unicodedata.normalize("NFKC", display_name(name)).casefold()


def find_class(name: str, classes: Sequence[str]) -> int:
    """The index of a class by its name, or by an unambiguous prefix: `Puncher` finds `punchers`."""
    known, prefix = list(map(normalise_name, classes)), normalise_name(name)
    matches = [k for k, each in enumerate(known) if prefix and each.startswith(prefix)]
    if prefix in known:
        return known.index(prefix)
    if len(matches) != 1:
        hint = f": it may be {', '.join(classes[k] for k in matches)}" if matches else did_you_mean(prefix, known)
        raise InputError(f"no class {name!r} among {', '.join(classes[:5])}{', …' * (len(classes) > 5)}{hint}")
    return matches[0]


def class_set(classes: Classes) -> ClassSet:
    """Names and descriptions from any accepted form of `classes`."""
    if isinstance(classes, Path):
        return read_class_file(classes)
    if not isinstance(classes, Mapping):
        return ClassSet(check_classes(classes))
    names = check_classes(list(classes))
    texts = [[given] if isinstance(given, str) else given for given in classes.values()]
    descriptions = tuple(tuple(dict.fromkeys(_checked(*each))) for each in zip(names, texts, strict=True))
    return ClassSet(names, descriptions)


def _checked(name: str, texts: Any) -> Iterable[str]:
    """The descriptions of one class, with single spaces, or an error."""
    if not isinstance(texts, Iterable) or isinstance(texts, Mapping) or not all(isinstance(t, str) for t in texts):
        raise InputError(f"class {name!r} has {texts!r} where a description, or a list of them, is expected")
    descriptions = [" ".join(text.split()) for text in texts]
    if not descriptions or not all(descriptions):
        raise InputError(f"class {name!r} has an empty description: describe each class, or give names alone")
    return descriptions


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """The class names, stripped, or an error if they are too few, empty or not distinct."""
    if isinstance(classes, str):
        raise InputError(f"classes must be a list of names, not the text {classes!r}: give {_split_names(classes)!r}")
    if isinstance(classes, (set, frozenset)):
        raise InputError("classes must be a list of names, not a set: its order changes from run to run")
    names = tuple(_check_name(name) for name in classes)
    doubles = [name for name, count in Counter(map(normalise_name, names)).items() if count > 1]
    if doubles:
        raise InputError(f"duplicate class names: {', '.join(doubles)}. Give each class once, under its own name.")
    if len(names) < 2:
        raise InputError(f"{len(names)} class given, at least 2 are needed")
    return names


def _split_names(text: str) -> list[str]:
    return [name.strip() for name in re.split(r"[,;|\n]", text) if name.strip()]


def _check_name(name: str) -> str:
    """The name, stripped, or an error if it is none."""
    if not isinstance(name, str):
        raise InputError(f"a class name must be a text, not {name!r}: give a word that says what the class is")
    if not display_name(name):
        raise InputError("a class name is empty: give each class a name, which is what the text side reads")
    plain = JOINERS.sub("", name.strip())
    if any(character in BLANK or unicodedata.category(character) in NOT_IN_NAMES for character in plain):
        raise InputError(
            f"class name {name!r} contains a line break, a control character or another invisible one: give one line "
            "of visible text"
        )
    if all(unicodedata.category(character)[0] in "MZ" for character in plain):
        raise InputError(f"class name {name!r} contains no visible character: give one line of visible text")
    return name.strip()


def number_duplicates(names: Sequence[str]) -> list[str]:
    """The second `missile` becomes `missile (2)`."""
    counts: Counter[str] = Counter()
    numbered = []
    for name in map(_check_name, names):
        counts[key := normalise_name(name)] += 1
        numbered.append(name if counts[key] == 1 else f"{name} ({counts[key]})")
    return numbered


def read_classes(given: str) -> ClassSet:
    """Classes from the command line: a file, or names as `a,b,c`."""
    if os.path.isfile(given):
        return read_class_file(Path(given))
    if "," not in given:
        if Path(given).suffix or os.sep in given:
            raise InputError(f"no such file: {given!r}; expected one with a class name per line, or names like a,b,c")
        suggestion = ",".join(_split_names(given))
        hint = f"separate names by commas: {suggestion}" if "," in suggestion else "name at least two, as a,b,c"
        raise InputError(f"one class given, {given!r}; {hint}, or give a file of them")
    return class_set(given.strip().removesuffix(",").split(","))


def read_class_file(file: Path) -> ClassSet:
    """Names and descriptions from a file.

    One name per line; or, as TOML or JSON, `name = "description"` or a list of them; or a CSV file with a column
    `class` and one or several columns of descriptions; a class may have several rows.
    """
    if not file.is_file():
        raise InputError(f"no such file: {str(file)!r}; expected one name per line, or a .csv, .json or .toml file")
    kind = file.suffix.lower()
    if kind in (".csv", ".tsv"):
        return _class_table(file)
    if kind not in (".json", ".toml"):
        return class_set(read_lines(file))
    try:
        parse = tomllib.loads if kind == ".toml" else partial(json.loads, object_pairs_hook=object_without_duplicates)
        table = parse(read_text(file))
    except (ValueError, RecursionError) as error:  # of both libraries
        raise InputError(f"{str(file)!r} is not valid {kind[1:].upper()}: {error}") from None
    if isinstance(table, dict) and table.keys() == {"classes"}:
        table = table["classes"]
    if not isinstance(table, (dict, list)):
        raise InputError(f"{str(file)!r}: expected a list of names, or a description for each name, not {table!r}")
    try:
        return class_set(table)
    except InputError as error:
        raise InputError(f"{str(file)!r}: {error}") from None


CLASS_COLUMNS = ("class", "name", "label")
DESCRIPTION_COLUMNS = ("description", "descriptions", "prompt", "prompts", "word", "words")


def _class_table(file: Path) -> ClassSet:
    names = header(file, CLASS_COLUMNS)
    plain = {name: name.strip().casefold().rstrip("0123456789 _") for name in names}
    class_columns = [name for name in names if plain[name] in CLASS_COLUMNS]
    description_columns = [name for name in names if plain[name] in DESCRIPTION_COLUMNS]
    if len(names) == 1 and not class_columns:
        return class_set(read_lines(file))  # one name per line, and no header
    if len(class_columns) != 1 or len(class_columns) + len(description_columns) < len(names):
        raise InputError(
            f"{str(file)!r} has the columns {', '.join(names[:20])}: expected class and description, or class alone"
        )
    columns = read_table(file, *class_columns, *description_columns)
    classes: dict[str, list[str]] = {}
    for name, *texts in zip(*columns.values(), strict=True):
        given = [text for text in texts if not isinstance(text, BadRow) and text.strip()]
        if isinstance(name, BadRow) or not name.strip():
            if given or "blank" not in name:
                raise InputError(f"{str(file)!r} has a row without a class ({name or 'blank'}): name it")
            continue
        if name in classes and not given:
            raise InputError(f"{str(file)!r} has class {name!r} twice: give it once, or another description")
        classes.setdefault(name, []).extend(given)
    return class_set(classes if description_columns else list(classes))


def read_lines(file: str | Path) -> list[str]:
    """The non-blank lines of a text file."""
    # Only line feeds and carriage returns end a line: `splitlines` also splits at U+2028 and other separators.
    return [line for line in io.StringIO(read_text(file), newline=None).read().split("\n") if line.strip()]


class Taxonomy(NamedTuple):
    """The common ancestors of k classes with paths as names."""

    classes: tuple[str, ...]
    members: dict[str, list[int]]  # classes below each ancestor, by its path; highest ancestors first

    @classmethod
    def from_names(cls, classes: Sequence[str]) -> Taxonomy | None:
        """None for flat names: without a /, or where no two share an ancestor."""
        members: dict[str, list[int]] = {}
        for k, name in enumerate(classes):
            for ancestor in ancestors_of(name):
                members.setdefault(ancestor, []).append(k)
        if all(len(below) < 2 for below in members.values()):
            return None
        for k, name in enumerate(classes):
            if name in members:  # the class itself is an ancestor
                members[name].append(k)
        return cls(tuple(classes), dict(sorted(members.items(), key=lambda entry: entry[0].count("/"))))

    def texts(self, k: int) -> tuple[str, ...]:
        """The names of a class in prompts: its own, then those of its ancestors, nearest first."""
        name = self.classes[k]
        return tuple(part.strip() for part in reversed(name.split("/"))) if ancestors_of(name) else (name,)

    def parent(self, name: str) -> str | None:
        above = ancestors_of(name)
        return above[-1] if above and above[-1] in self.members else None

    def sums(self, probabilities: Tensor) -> Tensor:
        """Probabilities of the ancestors, in the order of `members`: (n, k) -> (n, m)."""
        belongs = torch.zeros(len(self.members), len(self.classes), dtype=probabilities.dtype)
        for row, below in enumerate(self.members.values()):
            belongs[row, below] = 1.0
        return probabilities @ belongs.T.to(probabilities.device)


def ancestors_of(name: str) -> list[str]:
    """Paths of the ancestors, the highest first; none if a part of the name is empty."""
    parts = name.split("/")
    if not all(part.strip() for part in parts):
        return []
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]
