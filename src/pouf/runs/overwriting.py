"""A run folder that is written again: the old run waits until the new one has come to something."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pouf.data.base import Unlabelled
from pouf.errors import InputError
from pouf.files import LOCK
from pouf.reading import read_json
from pouf.runs.names import BEFORE, CHECKPOINTS, MANIFEST, WRITTEN_BY_POUF
from pouf.saving import CARD


def check_apart(folder: Path, sources: Mapping[str, Unlabelled]) -> None:
    for source in sources.values():
        place = Path(source.source.split("::")[0])
        if place.exists() and place.resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"the inputs {str(place)!r} lie in the run folder that is to be overwritten: choose another"
            )


def set_aside(folder: Path) -> None:
    """What a run wrote waits below its checkpoints until the next one has come to something; all else stays."""
    aside = folder / BEFORE
    written = [child for child in folder.iterdir() if child.name in _written(folder)]
    if aside.is_dir() and not (folder / CARD).is_file():  # of a run that was overwritten by one that came to nothing
        for child in written:
            _remove(child)
    else:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for child in sorted(written, key=lambda child: child.name == MANIFEST):  # by which it is known as a run
            child.rename(aside / child.name)
    for child in (folder / CHECKPOINTS).iterdir():
        if child.name not in (LOCK, aside.name):
            _remove(child)


def bring_back(folder: Path) -> None:
    own = _written(folder)
    for child in folder.iterdir():
        if child.name in own:
            _remove(child)
    for child in (folder / BEFORE).iterdir():
        child.rename(folder / child.name)
    (folder / BEFORE).rmdir()


def _written(folder: Path) -> set[str]:
    """Names in a run folder that are pouf's own."""
    card = read_json(folder / CARD, dict[str, Any]) if (folder / CARD).is_file() else {}
    return {*WRITTEN_BY_POUF, *(Path(name).parts[0] for name in card.get("files", ()))}


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
