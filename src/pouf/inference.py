"""Data → features: in batches, each process its share, and nothing that is kept already."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from pouf.data.base import Transform, Unlabelled
from pouf.data.cache import CachedFeatures, FeatureCache
from pouf.data.loader import Reader, read_batches
from pouf.distributed import ALONE, World
from pouf.models.base import Backbone


@dataclass(frozen=True)
class InferenceConfig:
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

    def alone(self) -> InferenceConfig:
        """The same for one process that works by itself, and tells nobody."""
        return replace(self, world=ALONE, on_batch=None)

    def tell(self, n: int) -> None:
        if self.on_batch is not None:
            self.on_batch(n)


class FeatureSet(NamedTuple):
    indices: list[int]  # positions of the samples that could be read, ascending
    features: Tensor  # (len(indices), d), on the CPU, as the backbone gives them


@torch.no_grad()
def encode(
    backbone: Backbone, data: Unlabelled, inference: InferenceConfig, transform: Transform | None = None
) -> FeatureSet:
    """Features of all that can be read; what can't is listed in `data.skipped`."""
    ready = backbone.ready_features(data) if transform is None else None
    if ready is not None:
        kept_rows = [place for place in range(len(data)) if place not in data.skipped]
        data.check_readable()
        inference.tell(len(kept_rows))
        return FeatureSet(kept_rows, ready if len(kept_rows) == len(data) else ready[kept_rows])
    places = [place for place in inference.world.share(range(len(data))) if place not in data.skipped]
    if inference.cache is None:
        own = _in_order(list(_batches(backbone, data, places, inference, transform)))
    else:
        name = backbone.fingerprint() + (f" {transform.name}" if transform is not None else "")
        kept = inference.cache.open(blake2b(name.encode(), digest_size=16).hexdigest())
        own = _looked_up(backbone, data, places, inference, transform, kept, inference.cache.every)
    return _together(own, data, inference.world, backbone.device)


def _batches(
    backbone: Backbone, data: Unlabelled, places: Sequence[int], inference: InferenceConfig, transform: Transform | None
) -> Iterator[FeatureSet]:
    """What is computed, batch by batch, in the order of reading."""
    reader = Reader(data, backbone.prepare, transform.apply if transform is not None else None)
    draws = data.batches(inference.batch_size, places, seeded=transform is not None)
    for read in read_batches(reader, draws, inference.workers):
        if read.indices:
            tensors = {name: tensor.to(backbone.device) for name, tensor in read.tensors.items()}
            yield FeatureSet(read.indices, backbone.encode_inputs(tensors).float().cpu())
        inference.tell(len(read.indices))


def _looked_up(
    backbone: Backbone,
    data: Unlabelled,
    places: Sequence[int],
    inference: InferenceConfig,
    transform: Transform | None,
    kept: CachedFeatures,
    every: float,
) -> FeatureSet:
    """What is kept, and what is missing computed and kept from then on, a shard at least `every` so many seconds."""
    digests = {place: data.digest(place) for place in places}
    known = [place for place in places if digests[place] in kept]
    missing = [place for place in places if digests[place] not in kept]
    inference.tell(len(known))
    waiting: list[FeatureSet] = []
    nameless: list[FeatureSet] = []  # without a digest there is nothing to find them by: held here

    def keep() -> None:
        whole = _in_order(waiting)
        waiting.clear()
        # The same content twice is kept once.
        rows = {digests[place]: row for row, place in enumerate(whole.indices) if digests[place] not in kept}
        if rows:
            kept.put(list(rows), whole.features[list(rows.values())])

    last = time.monotonic()
    for batch in _batches(backbone, data, missing, inference, transform) if missing else ():
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
    looked_up = [FeatureSet(found, kept.get([digests[place] for place in found]))] if found else []
    return _in_order([*looked_up, *nameless]) if nameless or not found else looked_up[0]


def _rows(encoded: FeatureSet, rows: Sequence[int]) -> FeatureSet:
    return FeatureSet([encoded.indices[row] for row in rows], encoded.features[list(rows)])


def _in_order(parts: Sequence[FeatureSet]) -> FeatureSet:
    """All parts as one, by position."""
    indices = [index for part in parts for index in part.indices]
    if not indices:
        return FeatureSet([], torch.zeros(0, 0))
    order = sorted(range(len(indices)), key=indices.__getitem__)
    return FeatureSet([indices[i] for i in order], torch.cat([part.features for part in parts])[order])


def _together(own: FeatureSet, data: Unlabelled, world: World, device: torch.device) -> FeatureSet:
    """The shares of all processes, and what each of them could not read."""
    for skipped in world.gather_objects(dict(data.skipped)):
        data.skipped.update(skipped)
    if world.size > 1:
        indices = [index for part in world.gather_objects(own.indices) for index in part]
        own = FeatureSet(indices, world.gather(own.features.to(device)).cpu())
    if not own.indices:
        data.check_readable()
    return own
