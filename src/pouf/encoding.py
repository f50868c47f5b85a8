"""Data → features: in batches, each process its share, and nothing that is kept already."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.backbones import Backbone
from pouf.data.base import Unlabelled
from pouf.data.cache import CachedFeatures, FeatureCache
from pouf.data.reading import Reader, read_batches
from pouf.distributed import ALONE, World


@dataclass(frozen=True)
class Reading:
    """How to go through data. Nothing here changes what comes out.

    Args:
        batch_size: samples encoded at once.
        workers: processes that read and decode ahead.
        cache: where features are kept and found again.
        on_batch: is told how many samples each batch had.
        world: the processes that share the work; all of them get everything.
    """

    batch_size: int = 64
    workers: int = 0
    cache: FeatureCache | None = None
    on_batch: Callable[[int], None] | None = None
    world: World = ALONE

    def tell(self, n: int) -> None:
        if self.on_batch is not None:
            self.on_batch(n)


class Encoded(NamedTuple):
    indices: list[int]  # positions of the samples that could be read, ascending
    features: Tensor  # (len(indices), d), on the CPU, as the backbone gives them


class Change(NamedTuple):
    """What is done to samples before they are encoded, and what to call it: features are kept under this name too."""

    name: str
    apply: Callable[[Any, int], Any]  # a sample and its seed


@torch.no_grad()
def encode(backbone: Backbone, data: Unlabelled, reading: Reading, change: Change | None = None) -> Encoded:
    """Features of all that can be read; what can't is listed in `data.skipped`."""
    ready = backbone.ready_features(data) if change is None else None
    if ready is not None:
        kept_rows = [place for place in range(len(data)) if place not in data.skipped]
        data.check_readable()
        reading.tell(len(kept_rows))
        return Encoded(kept_rows, ready if len(kept_rows) == len(data) else ready[kept_rows])
    places = [place for place in reading.world.share(range(len(data))) if place not in data.skipped]
    if reading.cache is None:
        own = _in_order(list(_batches(backbone, data, places, reading, change)))
    else:
        name = backbone.fingerprint() + (f" {change.name}" if change is not None else "")
        kept = reading.cache.open(blake2b(name.encode(), digest_size=16).hexdigest())
        own = _looked_up(backbone, data, places, reading, change, kept, reading.cache.every)
    return _together(own, data, reading.world, backbone.device)


def _batches(
    backbone: Backbone, data: Unlabelled, places: Sequence[int], reading: Reading, change: Change | None
) -> Iterator[Encoded]:
    """What is computed, batch by batch, in the order of reading."""
    reader = Reader(data, backbone.prepare, change.apply if change is not None else None)
    draws = data.batches(reading.batch_size, places, seeded=change is not None)
    for read in read_batches(reader, draws, reading.workers):
        if read.indices:
            tensors = {name: tensor.to(backbone.device) for name, tensor in read.tensors.items()}
            yield Encoded(read.indices, backbone.encode_inputs(tensors).float().cpu())
        reading.tell(len(read.indices))


def _looked_up(
    backbone: Backbone,
    data: Unlabelled,
    places: Sequence[int],
    reading: Reading,
    change: Change | None,
    kept: CachedFeatures,
    every: float,
) -> Encoded:
    """What is kept, and what is missing computed and kept from then on, a shard at least `every` so many seconds."""
    digests = {place: data.digest(place) for place in places}
    known = [place for place in places if digests[place] in kept]
    missing = [place for place in places if digests[place] not in kept]
    reading.tell(len(known))
    waiting: list[Encoded] = []
    nameless: list[Encoded] = []  # without a digest there is nothing to find them by: held here

    def keep() -> None:
        whole = _in_order(waiting)
        waiting.clear()
        # The same content twice is kept once.
        rows = {digests[place]: row for row, place in enumerate(whole.indices) if digests[place] not in kept}
        if rows:
            kept.put(list(rows), whole.features[list(rows.values())])

    last = time.monotonic()
    for batch in _batches(backbone, data, missing, reading, change) if missing else ():
        named = [row for row, place in enumerate(batch.indices) if digests[place]]
        if len(named) < len(batch.indices):
            rest = [row for row in range(len(batch.indices)) if row not in set(named)]
            nameless.append(_rows(batch, rest))
            batch = _rows(batch, named)
        waiting.append(batch)
        if time.monotonic() - last >= every:
            keep()
            last = time.monotonic()
    keep()
    found = [place for place in places if digests[place] in kept]
    looked_up = [Encoded(found, kept.get([digests[place] for place in found]))] if found else []
    return _in_order([*looked_up, *nameless]) if nameless or not found else looked_up[0]


def _rows(encoded: Encoded, rows: Sequence[int]) -> Encoded:
    return Encoded([encoded.indices[row] for row in rows], encoded.features[list(rows)])


def _in_order(parts: Sequence[Encoded]) -> Encoded:
    """All parts as one, by position."""
    indices = [index for part in parts for index in part.indices]
    if not indices:
        return Encoded([], torch.zeros(0, 0))
    order = sorted(range(len(indices)), key=indices.__getitem__)
    return Encoded([indices[i] for i in order], torch.cat([part.features for part in parts])[order])


def _together(own: Encoded, data: Unlabelled, world: World, device: torch.device) -> Encoded:
    """The shares of all processes, and what each of them could not read."""
    for skipped in world.gather_objects(dict(data.skipped)):
        data.skipped.update(skipped)
    if world.size > 1:
        indices = [index for part in world.gather_objects(own.indices) for index in part]
        own = Encoded(indices, world.gather(own.features.to(device)).cpu())
    if not own.indices:
        data.check_readable()
    return own
