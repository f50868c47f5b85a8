"""Features that need not be computed twice: memory-mapped files, found again by what they were computed from."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pouf.files import atomic_write

DIGEST = np.dtype("V16")
FEATURES, DIGESTS = ".features.npy", ".digests.npy"
logger = logging.getLogger(__name__)


class Location(NamedTuple):
    shard: int
    row: int


class FeatureCache:
    """Features by model and by content of the sample.

    `folder/<model>/<shard>.features.npy` is (n, d) float32, `<shard>.digests.npy` names the n samples. A shard bears
    the checksum of both as its name: it is looked at before it is used, and what has been damaged is computed again.
    Files are written once and under their final names only when they are whole, so that processes can share a folder
    and an interruption leaves nothing half.

    Args:
        folder: default `$POUF_CACHE`, or `~/.cache/pouf`.
        every: seconds after which what has been computed is written, so that little is lost with a long run.
    """

    def __init__(self, folder: str | Path | None = None, every: float = 60.0) -> None:
        self.every = every
        usual = os.environ.get("POUF_CACHE") or Path.home() / ".cache" / "pouf"
        self.folder = Path(folder if folder is not None else usual).expanduser() / "features"

    def open(self, model: str) -> CachedFeatures:
        """The features of one model, under its fingerprint."""
        return CachedFeatures(self.folder / model)


class InMemoryFeatureCache(FeatureCache):
    """Features in memory for one run, so that inputs are encoded once without a cache on disk."""

    def __init__(self) -> None:
        self.every = math.inf  # seconds: nothing is lost by waiting
        self.models: dict[str, _InMemory] = {}

    def open(self, model: str) -> CachedFeatures:
        return self.models.setdefault(model, _InMemory())


class CachedFeatures:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stems: list[str] = []  # names of the shards, by their numbers
        self.locations: dict[bytes, Location] = {}
        self.checked: set[int] = set()  # numbers of the shards that are as they were written
        for file in sorted(folder.glob(f"*{DIGESTS}")):
            stem = file.name.removesuffix(DIGESTS)
            try:
                self._add(stem, np.load(file, allow_pickle=False))
            except Exception as error:  # any bytes may stand there
                self._drop(stem, error)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.locations

    def check(self, digests: Iterable[bytes]) -> None:
        """Look at the shards that hold these; afterwards those that are damaged hold nothing."""
        for number in {self.locations[digest].shard for digest in digests if digest in self.locations} - self.checked:
            stem = self.stems[number]
            try:
                features, names = self.shard(number), np.load(self.folder / f"{stem}{DIGESTS}", allow_pickle=False)
                if features.ndim != 2 or features.dtype != np.float32 or len(features) != len(names):
                    raise ValueError("its files do not belong together")
                if _checksum(features, names) != stem:
                    raise ValueError("its checksum is another")
                self.checked.add(number)
            except Exception as error:
                self._drop(stem, error)

    def get(self, digests: Sequence[bytes]) -> Tensor:
        """(n, d) of checked ones. Where they are one whole shard in its order, the file itself, memory-mapped; else a
        copy."""
        locations = [self.locations[digest] for digest in digests]
        shard = self.shard(locations[0].shard)
        if len(locations) == len(shard) and all(
            location == Location(locations[0].shard, i) for i, location in enumerate(locations)
        ):
            return torch.from_numpy(shard)
        rows = np.empty((len(locations), shard.shape[1]), np.float32)
        by_shard: dict[int, list[int]] = {}
        for i, location in enumerate(locations):
            by_shard.setdefault(location.shard, []).append(i)
        for number, wanted in by_shard.items():
            rows[wanted] = self.shard(number)[[locations[i].row for i in wanted]]
        return torch.from_numpy(rows)

    def shard(self, number: int) -> NDArray[np.float32]:
        """(n, d), memory-mapped. Copy on write: torch wants memory that it may change, and the file must not change."""
        file = self.folder / f"{self.stems[number]}{FEATURES}"
        features: NDArray[np.float32] = np.load(file, mmap_mode="c", allow_pickle=False)
        return features

    def put(self, digests: Sequence[bytes], features: Tensor) -> None:
        """Add (n, d) features of samples that are not there yet; `OSError` where they can't be written."""
        rows, names = features.float().cpu().contiguous().numpy(), np.array(list(digests), dtype=DIGEST)
        stem = _checksum(rows, names)
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / f"{stem}{FEATURES}", rows)
        # The digests come last: a shard counts from when they are there.
        _write(self.folder / f"{stem}{DIGESTS}", names)
        self.checked.add(self._add(stem, names))

    def _add(self, stem: str, digests: NDArray[Any]) -> int:
        if digests.ndim != 1 or digests.dtype != DIGEST:
            raise ValueError("its digests are none")
        self.stems.append(stem)
        number = len(self.stems) - 1
        for row, digest in enumerate(digests):
            self.locations.setdefault(digest.tobytes(), Location(number, row))
        return number

    def _drop(self, stem: str, why: Exception) -> None:
        """Forget a damaged shard: its features are computed again."""
        logger.warning("part of the cache in %s was damaged (%s) and is computed again", self.folder, why)
        if stem in self.stems:
            number = self.stems.index(stem)
            self.locations = {
                digest: location for digest, location in self.locations.items() if location.shard != number
            }
        for ending in (DIGESTS, FEATURES):
            try:
                (self.folder / f"{stem}{ending}").unlink(missing_ok=True)
            except OSError as error:
                logger.warning("it can't be deleted: %s", error)


class _InMemory(CachedFeatures):
    def __init__(self) -> None:
        self.shards: list[NDArray[np.float32]] = []
        self.locations = {}

    def check(self, digests: Iterable[bytes]) -> None:
        """Nothing could have damaged them."""

    def shard(self, number: int) -> NDArray[np.float32]:
        return self.shards[number]

    def put(self, digests: Sequence[bytes], features: Tensor) -> None:
        self.shards.append(features.float().cpu().numpy())
        for row, digest in enumerate(digests):
            self.locations.setdefault(digest, Location(len(self.shards) - 1, row))


def _checksum(features: NDArray[np.float32], digests: NDArray[Any]) -> str:
    digest = blake2b(digests.tobytes(), digest_size=16)
    digest.update(repr(features.shape).encode())
    digest.update(np.ascontiguousarray(features).data)
    return digest.hexdigest()


def _write(file: Path, array: NDArray[np.generic]) -> None:
    with atomic_write(file) as partial, partial.open("wb") as stream:
        np.save(stream, array, allow_pickle=False)
