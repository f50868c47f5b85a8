"""Data → features: in batches, each process its share, and nothing that is kept already."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from pouf.data.base import Transform, Unlabelled
from pouf.data.loader import Reader, read_batches
from pouf.errors import InputError
from pouf.inference.cache import CachedFeatures, FeatureCache
from pouf.models.base import Backbone
from pouf.models.demonstrations import Shown
from pouf.parallel.padding import in_step
from pouf.parallel.process_group import alone, processes
from pouf.recipe import Compute

MOST_WORKERS = 1024  # more is a slip of the pen
BLOCK = 2**14  # samples whose features are in memory at once, where they need not be all
COUNTED = 1000  # samples that are looked for among the kept ones, to tell how many are missing
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InferenceConfig:
    """How to go through data. Nothing here changes what comes out.

    Args:
        batch_size: samples encoded at once.
        workers: processes that read and decode ahead.
        cache: where features are kept and found again.
        on_start: is told how many samples there are, before the first that is not kept is encoded.
        on_batch: is told how many samples each batch had.
        skip_not_finite: leave out what the model has no finite answer to. While it is trained, that is no fault of the
            input, and its features are given as they are.
    """

    batch_size: int = 64
    workers: int = 0
    cache: FeatureCache | None = None
    on_batch: Callable[[int], None] | None = None
    on_start: Callable[[int], None] | None = None
    skip_not_finite: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"the batch size must be at least 1, not {self.batch_size}")
        if not 0 <= self.workers <= MOST_WORKERS:
            raise InputError(f"the number of worker processes must be from 0 to {MOST_WORKERS}, not {self.workers}")

    @classmethod
    def of(cls, compute: Compute, cache: FeatureCache | None) -> InferenceConfig:
        """As a recipe says."""
        return cls(compute.chunk or cls.batch_size, compute.workers, cache)

    def begin(self, n: int) -> None:
        if self.on_start is not None:
            self.on_start(n)

    def notify(self, n: int) -> None:
        if self.on_batch is not None:
            self.on_batch(n)


class FeatureSet(NamedTuple):
    indices: list[int]  # positions of the samples that could be read, ascending
    features: Tensor  # (len(indices), d), on the CPU, as the backbone gives them

    def only(self, there: Set[int]) -> FeatureSet:
        """Of these positions alone."""
        rows = [row for row, index in enumerate(self.indices) if index in there]
        return self if len(rows) == len(self.indices) else _rows(self, rows)


@torch.no_grad()
def encode(
    backbone: Backbone | Shown, data: Unlabelled, inference: InferenceConfig, transform: Transform | None = None
) -> FeatureSet:
    """Features of all that can be read; what can't is listed in `data.skipped`."""
    if transform is None and backbone.ready_features(data) is not None:
        with alone():
            return encode_share(backbone, data, inference)
    own, group = encode_share(backbone, data, inference, transform), processes()
    if group.size == 1:
        return own
    indices = [index for part in group.gather_objects(own.indices) for index in part]
    return FeatureSet(indices, group.gather(own.features.to(backbone.device)).cpu())


@torch.no_grad()
def encode_share(
    backbone: Backbone | Shown, data: Unlabelled, inference: InferenceConfig, transform: Transform | None = None
) -> FeatureSet:
    """The same, of this process's share alone; what any of them could not read is known to all."""
    own = in_order(list(encode_blocks(backbone, data, inference, transform, rows=len(data))))
    readable = share_skipped(data, len(own.indices))
    if not readable:
        data.check_readable()
    return own


@torch.no_grad()
def encode_blocks(
    backbone: Backbone | Shown,
    data: Unlabelled,
    inference: InferenceConfig,
    transform: Transform | None = None,
    rows: int | None = None,
) -> Iterator[FeatureSet]:
    """The same, block by block in the order of the data, so that nobody holds more than a block of features.

    `share_skipped` has to be called at the end, by all processes.
    """
    rows = BLOCK if rows is None else max(rows, 1)
    places = [place for place in processes().share(range(len(data))) if place not in data.skipped]
    ready = backbone.ready_features(data) if transform is None else None
    if ready is not None:
        data.check_readable()
    cache = inference.cache if ready is None else None
    kept = _kept(backbone, cache, transform) if cache is not None else None
    if len(places) > rows:
        inference.begin(len(places))
        inference = replace(inference, on_start=None)
    most = max(processes().gather_objects(len(places))) if backbone.sharded and ready is None else len(places)
    for start in range(0, most, rows):
        block = places[start : start + rows]
        if ready is not None:
            if inference.on_start is None:
                inference.notify(len(block))
            yield FeatureSet(block, ready if len(block) == len(data) else ready[block])
        elif cache is None or kept is None:
            inference.begin(len(block))
            yield in_order(list(_batches(backbone, data, block, inference, transform)))
        else:
            yield _looked_up(backbone, data, block, inference, transform, kept, cache.every)


def share_skipped(data: Unlabelled, readable: int) -> int:
    """All come to know what any of them could not read. How many each could read -> how many there are in all."""
    told = processes().gather_objects((dict(data.skipped), readable))
    for skipped, _ in told:
        data.skipped.update(skipped)
    return sum(n for _, n in told)


def to_encode(backbone: Backbone, data: Unlabelled, inference: InferenceConfig) -> int:
    """How many samples have no features yet: counted among some where there are many."""
    if backbone.ready_features(data) is not None:
        return 0
    if inference.cache is None:
        return len(data)
    kept = _kept(backbone, inference.cache, None)
    places = range(0, len(data), max(1, len(data) // COUNTED))
    return round(len(data) * sum(data.digest(place) not in kept for place in places) / len(places))


def _kept(backbone: Backbone | Shown, cache: FeatureCache, transform: Transform | None) -> CachedFeatures:
    name = backbone.fingerprint() + (f" {transform.name}" if transform is not None else "")
    return cache.open(blake2b(name.encode(), digest_size=16).hexdigest())


def _batches(
    backbone: Backbone | Shown,
    data: Unlabelled,
    places: Sequence[int],
    inference: InferenceConfig,
    transform: Transform | None,
) -> Iterator[FeatureSet]:
    """What is computed, batch by batch, in the order of reading."""
    reader = Reader(data, backbone.prepare, transform.apply if transform is not None else None, backbone.image_size)
    draws = data.batches(inference.batch_size, places, seeded=transform is not None)
    reads = read_batches(reader, draws, inference.workers)
    for read, given in in_step(reads) if backbone.sharded else ((read, read.tensors) for read in reads):
        data.skipped.update(read.failed)
        if given:
            tensors = {name: tensor.to(backbone.device) for name, tensor in given.items()}
            features = backbone.encode_inputs(tensors).float().cpu()
            if read.indices:
                encoded = FeatureSet(read.indices, features)
                yield _finite(encoded, data) if inference.skip_not_finite else encoded
        inference.notify(len(read.indices))


def _finite(encoded: FeatureSet, data: Unlabelled) -> FeatureSet:
    """Without what the model has no finite answer to: any class would be a guess."""
    fine = encoded.features.isfinite().all(1)
    if bool(fine.all()):
        return encoded
    for row in (~fine).nonzero().flatten().tolist():
        data.skipped[encoded.indices[row]] = "the model gives numbers for it that are not finite"
    return _rows(encoded, fine.nonzero().flatten().tolist())


def _looked_up(
    backbone: Backbone | Shown,
    data: Unlabelled,
    places: Sequence[int],
    inference: InferenceConfig,
    transform: Transform | None,
    kept: CachedFeatures,
    every: float,
) -> FeatureSet:
    """What is kept, and what is missing computed and kept from then on, a shard at least `every` so many seconds."""
    digests = {place: data.digest(place) for place in places}
    kept.check(digests.values())
    known = [place for place in places if digests[place] in kept]
    missing = [place for place in places if digests[place] not in kept]
    if missing:
        inference.begin(len(places))
    if missing or inference.on_start is None:  # who is told of no start has counted them all
        inference.notify(len(known))
    waiting: list[FeatureSet] = []
    held: list[FeatureSet] = []  # what can't be kept

    def keep() -> None:
        whole = in_order(waiting)
        waiting.clear()
        # The same content twice is kept once.
        rows = {digests[place]: row for row, place in enumerate(whole.indices) if digests[place] not in kept}
        try:
            if rows:
                kept.put(list(rows), whole.features[list(rows.values())])
        except OSError as error:
            logger.warning("features can't be kept in the cache %s: %s", kept.folder, error)
            held.append(whole)

    last = time.monotonic()
    for batch in _batches(backbone, data, missing, inference, transform) if missing or backbone.sharded else ():
        # Without a digest there is nothing to find them by, and with another than before they are of other content.
        named = [
            row for row, place in enumerate(batch.indices) if digests[place] and data.digest(place) == digests[place]
        ]
        if len(named) < len(batch.indices):
            rest = [row for row in range(len(batch.indices)) if row not in set(named)]
            held.append(_rows(batch, rest))
            batch = _rows(batch, named)
        waiting.append(batch)
        if time.monotonic() - last >= every:
            keep()
            last = time.monotonic()
    keep()
    at_hand = {place for part in held for place in part.indices}
    found = [place for place in places if digests[place] in kept and place not in at_hand]
    looked_up = [FeatureSet(found, kept.get([digests[place] for place in found]))] if found else []
    return in_order([*looked_up, *held]) if held or not found else looked_up[0]


def _rows(encoded: FeatureSet, rows: Sequence[int]) -> FeatureSet:
    return FeatureSet([encoded.indices[row] for row in rows], encoded.features[list(rows)])


def in_order(parts: Sequence[FeatureSet]) -> FeatureSet:
    """All parts as one, by position."""
    parts = [part for part in parts if part.indices]
    indices = [index for part in parts for index in part.indices]
    if not indices:
        return FeatureSet([], torch.zeros(0, 0))
    if len(parts) == 1 and indices == sorted(indices):
        return parts[0]  # as it lies in memory, or in a file
    order = sorted(range(len(indices)), key=indices.__getitem__)
    return FeatureSet([indices[i] for i in order], torch.cat([part.features for part in parts])[order])
