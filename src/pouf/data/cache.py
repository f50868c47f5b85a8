"""Features that need not be computed twice: memory-mapped files, found again by what they were computed from."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pouf.errors import InputError

DIGEST = np.dtype("V16")
FEATURES, DIGESTS = ".features.npy", ".digests.npy"


class Place(NamedTuple):
    shard: int
    row: int


class FeatureCache:
    """Features by model and by content of the sample.

    `folder/<model>/<shard>.features.npy` is (n, d) float32, `<shard>.digests.npy` names the n samples. A shard is
    written once and under its final name only when it is whole, so that processes can share a folder and an
    interruption leaves nothing half.

    Args:
        folder: default `$POUF_CACHE`, or `~/.cache/pouf`.
        every: seconds after which what has been computed is written, so that little is lost with a long run.
    """

    def __init__(self, folder: str | Path | None = None, every: float = 60.0) -> None:
        self.every = every
        usual = os.environ.get("POUF_CACHE") or Path.home() / ".cache" / "pouf"
        self.folder = Path(folder if folder is not None else usual).expanduser() / "features"

    def open(self, model: str) -> CachedFeatures:
        """The features of one model, under its fingerprint. An error now if they could not be kept later."""
        folder = self.folder / model
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"can't write to the cache {str(folder)!r}: {error}. Choose another, or none") from error
        return CachedFeatures(folder)


class CachedFeatures:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[Path] = []  # of features, in the order of their shards' numbers
        self.places: dict[bytes, Place] = {}
        for file in sorted(folder.glob(f"*{DIGESTS}")):
            self._add(file)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.places

    def get(self, digests: Sequence[bytes]) -> Tensor:
        """(n, d). Where they are one whole shard in its order, the file itself, memory-mapped; else a copy."""
        places = [self.places[digest] for digest in digests]
        shard = self.shard(places[0].shard)
        if len(places) == len(shard) and all(place == Place(places[0].shard, i) for i, place in enumerate(places)):
            return torch.from_numpy(shard)
        rows = np.empty((len(places), shard.shape[1]), np.float32)
        by_shard: dict[int, list[int]] = {}
        for i, place in enumerate(places):
            by_shard.setdefault(place.shard, []).append(i)
        for number, wanted in by_shard.items():
            rows[wanted] = self.shard(number)[[places[i].row for i in wanted]]
        return torch.from_numpy(rows)

    def shard(self, number: int) -> NDArray[np.float32]:
        """(n, d), memory-mapped. Copy on write: torch wants memory that it may change, and the file must not change."""
        features: NDArray[np.float32] = np.load(self.files[number], mmap_mode="c", allow_pickle=False)
        return features

    def put(self, digests: Sequence[bytes], features: Tensor) -> None:
        """Add (n, d) features of samples that are not there yet."""
        try:
            stem = uuid.uuid4().hex
            _write(self.folder / f"{stem}{FEATURES}", features.float().cpu().numpy())
            # The digests come last: a shard counts from when they are there.
            _write(self.folder / f"{stem}{DIGESTS}", np.array(list(digests), dtype=DIGEST))
        except OSError as error:
            raise InputError(
                f"can't write to the cache {str(self.folder)!r}: {error}. Choose another, or none"
            ) from error
        self._add(self.folder / f"{stem}{DIGESTS}")

    def _add(self, file: Path) -> None:
        stem = file.name.removesuffix(DIGESTS)
        digests = np.load(file, allow_pickle=False)
        self.files.append(self.folder / f"{stem}{FEATURES}")
        number = len(self.files) - 1
        for row, digest in enumerate(digests):
            self.places.setdefault(digest.tobytes(), Place(number, row))


def _write(file: Path, array: NDArray[np.generic]) -> None:
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as stream:
        np.save(stream, array, allow_pickle=False)
    os.replace(partial, file)
