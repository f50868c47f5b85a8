"""A run folder that is written again: the old run waits until the new one has come to its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pouf.data.base import Unlabelled
from pouf.errors import InputError
from pouf.files import LOCK, atomic_folder, copy, discard
from pouf.reading import read_json
from pouf.runs.names import BEFORE, CHECKPOINTS, MANIFEST, WRITTEN_BY_POUF
from pouf.saving import CARD, SAVED


def check_apart(folder: Path, sources: Mapping[str, Unlabelled]) -> None:
    for source in sources.values():
        place = Path(source.source.split("::")[0])
        if place.exists() and place.resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"the inputs {str(place)!r} lie in the run folder that is to be overwritten: choose another"
            )


def set_aside(folder: Path) -> None:
    """What a run wrote waits below its checkpoints until the next one has come to its end; all else stays.

    It is whole in one of both places, whenever the process is killed.
    """
    aside = folder / BEFORE
    if not aside.is_dir() or _finished(folder):  # else what waits there is the last that came to its end
        discard(aside)
        own = _own(folder)
        with atomic_folder(aside) as partial:
            for child in own:
                copy(child, partial / child.relative_to(folder))
    _clear(folder)


def bring_back(folder: Path) -> None:
    """The run that waited, with what it could be gone on from, as if nothing had happened."""
    aside = folder / BEFORE
    _clear(folder)
    for child in sorted(aside.iterdir(), key=lambda child: child.name == MANIFEST):
        copy(child, folder / child.name)
    discard(aside)


def clear_moved(folder: Path) -> None:
    """What is left of a run that waits elsewhere, where a process was killed while it moved it there or back."""
    if (folder / BEFORE).is_dir() and not (folder / MANIFEST).is_file():
        _clear(folder)


def _clear(folder: Path) -> None:
    """The manifest goes first, then the card: a folder without them is no run, but what is left of one."""
    for child in _own(folder):
        remove(child)


def _own(folder: Path) -> list[Path]:
    """What a run wrote, in the order in which it can be removed, then what it can be gone on from."""
    names, first = _written(folder), {MANIFEST: 0, CARD: 1, SAVED: 2}
    written = [child for child in folder.iterdir() if child.name in names]
    return sorted(written, key=lambda child: first.get(child.name, 3)) + _checkpoints(folder)


def _checkpoints(folder: Path) -> list[Path]:
    """What a run can be gone on from."""
    return [child for child in (folder / CHECKPOINTS).iterdir() if child.name not in (LOCK, Path(BEFORE).name)]


def _finished(folder: Path) -> bool:
    manifest = read_json(folder / MANIFEST, dict[str, Any]) if (folder / MANIFEST).is_file() else {}
    return manifest.get("status") == "finished"


def _written(folder: Path) -> set[str]:
    """Names in a run folder that are pouf's own."""
    files = (place / CARD for place in (folder, folder / SAVED, folder / BEFORE))
    cards = [read_json(file, dict[str, Any]) for file in files if file.is_file()]
    return {*WRITTEN_BY_POUF, *(Path(name).parts[0] for card in cards for name in card.get("files", ()))}


def remove(path: Path) -> None:
    discard(path) if path.is_dir() and not path.is_symlink() else path.unlink()
