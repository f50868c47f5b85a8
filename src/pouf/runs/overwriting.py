"""A run folder that is written again: the old run waits until the new one has come to its end."""

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
    """What a run wrote waits below its checkpoints until the next one has come to its end; all else stays."""
    aside = folder / BEFORE
    written = [child for child in folder.iterdir() if child.name in _written(folder)]
    if aside.is_dir() and not _finished(folder):  # what waits there is the last that came to its end
        for child in written:
            remove(child)
    else:
        shutil.rmtree(aside, ignore_errors=True)
        try:
            (aside / CHECKPOINTS).mkdir(parents=True)
            for child in _checkpoints(folder):
                child.rename(aside / CHECKPOINTS / child.name)
            for child in sorted(written, key=lambda child: child.name == MANIFEST):  # by which it is known as a run
                child.rename(aside / child.name)
        except OSError:
            _back(folder)
            raise
    for child in _checkpoints(folder):
        remove(child)


def bring_back(folder: Path) -> None:
    """The run that waited, with what it could be gone on from, as if nothing had happened."""
    own = _written(folder)
    for child in [child for child in folder.iterdir() if child.name in own] + _checkpoints(folder):
        remove(child)
    _back(folder)


def _back(folder: Path) -> None:
    aside = folder / BEFORE
    for child in [*aside.glob(f"{CHECKPOINTS}/*"), *aside.glob("*")]:
        if child != aside / CHECKPOINTS:
            child.rename(folder / child.relative_to(aside))
    shutil.rmtree(aside, ignore_errors=True)


def _checkpoints(folder: Path) -> list[Path]:
    """What a run can be gone on from."""
    return [child for child in (folder / CHECKPOINTS).iterdir() if child.name not in (LOCK, Path(BEFORE).name)]


def _finished(folder: Path) -> bool:
    manifest = read_json(folder / MANIFEST, dict[str, Any]) if (folder / MANIFEST).is_file() else {}
    return manifest.get("status") == "finished"


def _written(folder: Path) -> set[str]:
    """Names in a run folder that are pouf's own."""
    card = read_json(folder / CARD, dict[str, Any]) if (folder / CARD).is_file() else {}
    return {*WRITTEN_BY_POUF, *(Path(name).parts[0] for name in card.get("files", ()))}


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
