"""Data → features: each input is opened once, each process encodes its share, and what is cached is looked up."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.data.base import Transform, Unlabelled
from pouf.data.batches import read_batches
from pouf.errors import InputError
from pouf.inference.cache import CachedFeatures, FeatureCache
from pouf.inference.views import View, ViewReader, ViewsRead, in_batches
from pouf.models.base import Backbone, check_modality, evaluating
from pouf.models.demonstrations import DemonstrationEncoder
from pouf.parallel.process_group import alone, processes
from pouf.recipe import Compute

MOST_WORKERS = 1024  # more is a slip of the pen
FITTED_ON = 2**14  # inputs that a postprocessor is fitted on at most, drawn at random
BLOCK = 2**14  # samples with features in memory at once, if not all are needed
COUNTED, FEWEST_COUNTED = 1000, 16  # samples that are looked for in the cache, to tell how many are missing
COUNTING = 0.1  # seconds that this may take, but for the first few
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InferenceConfig:
    """How to go through data. Nothing here changes what comes out.

    Args:
        batch_size: samples encoded at once.
        workers: processes that read and decode ahead.
        cache: where features are stored and looked up.
        on_start: called with the number of samples, before the first that is not in the cache is encoded.
        on_batch: called with the number of samples of each batch.
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
    def from_compute(cls, compute: Compute, cache: FeatureCache | None) -> InferenceConfig:
        """As a recipe says."""
        return cls(compute.chunk or cls.batch_size, compute.workers, cache)

    def begin(self, n: int) -> None:
        if self.on_start is not None:
            self.on_start(n)

    def notify(self, n: int) -> None:
        if self.on_batch is not None:
            self.on_batch(n)


class Predictions(NamedTuple):
    indices: list[int]  # positions of the samples that could be read, ascending
    log_probabilities: Tensor  # (len(indices), k)
    skipped: Mapping[int, str] = {}  # position → reason, of those that can't be read


class FeatureSet(NamedTuple):
    indices: list[int]  # positions of the samples that could be read, ascending
    features: Tensor  # (len(indices), d), on the CPU, as the backbone gives them

    def only(self, there: Set[int]) -> FeatureSet:
        """Of these positions alone."""
        rows = [row for row, index in enumerate(self.indices) if index in there]
        return self if len(rows) == len(self.indices) else self.rows(rows)

    def rows(self, rows: Sequence[int]) -> FeatureSet:
        return FeatureSet([self.indices[row] for row in rows], self.features[list(rows)])

    def drawn(self, count: int) -> FeatureSet:
        """At most so many of them, at random."""
        if len(self.indices) <= count:
            return self
        draw = torch.randperm(len(self.indices), generator=torch.Generator().manual_seed(0))
        return self.rows(draw[:count].sort().values.tolist())

    def nearness(self, prototypes: Tensor) -> Tensor:
        """(n,): cosine of each feature with the nearest of the prototypes (k, d)."""
        if not self.indices:
            return torch.zeros(0)
        features = F.normalize(self.features.float().to(prototypes.device), dim=1)
        return (features @ F.normalize(prototypes.float(), dim=1).T).max(1).values.cpu()


@dataclass(frozen=True)
class FeatureStore:
    """The features that a model gives data: looked up in the cache, else computed and put there.

    What can't be read, or has no finite features, is listed in `data.skipped`.
    """

    model: Backbone | DemonstrationEncoder
    config: InferenceConfig

    @torch.no_grad()
    def features(self, data: Unlabelled, transform: Transform | None = None) -> FeatureSet:
        """Of all samples, on every process."""
        if transform is None and self.model.ready_features(data) is not None:
            with alone():
                return self.share(data)
        own, group = self.share(data, transform), processes()
        if group.size == 1:
            return own
        indices = [index for part in group.gather_objects(own.indices) for index in part]
        return FeatureSet(indices, group.gather(own.features.to(self.model.device)).cpu())

    @torch.no_grad()
    def share(self, data: Unlabelled, transform: Transform | None = None) -> FeatureSet:
        """Of this process's share; what any process could not read is known to all."""
        own = in_order(list(self.blocks(data, transform, rows=len(data))))
        if not share_skipped(data, len(own.indices)):
            data.check_readable()
        return own

    @torch.no_grad()
    def blocks(
        self, data: Unlabelled, transform: Transform | None = None, rows: int | None = None
    ) -> Iterator[FeatureSet]:
        """The same, block by block in the order of the data, so that no more than a block is in memory.

        `share_skipped` has to be called at the end, by all processes.
        """
        config, rows = self.config, BLOCK if rows is None else max(rows, 1)
        indices = self._own_indices(data)
        ready = self.model.ready_features(data) if transform is None else None
        if ready is not None:
            data.check_readable()
        if len(indices) > rows:
            config.begin(len(indices))
            config = replace(config, on_start=None)
        most = max(processes().gather_objects(len(indices))) if self.model.sharded and ready is None else len(indices)
        for start in range(0, most, rows):
            block = indices[start : start + rows]
            if ready is not None:
                if config.on_start is None:
                    config.notify(len(block))
                yield FeatureSet(block, ready if len(block) == len(data) else ready[block])
            else:
                yield replace(self, config=config)._block(data, block, transform)

    @torch.no_grad()
    def fill(self, data: Unlabelled, views: Sequence[View]) -> None:
        """Put several views of this process's share into the cache: each sample is opened once for all of them."""
        if self.config.cache is None or self.model.ready_features(data) is not None:
            return
        if self.model.sharded:  # processes that share the weights go through the model together
            for view in views:
                in_order(list(self.blocks(data, view.transform)))
        else:
            indices = self._own_indices(data)
            with evaluating(self._backbone):
                for start in range(0, len(indices), BLOCK):
                    self._complete(data, indices[start : start + BLOCK], [_Cached(self, view) for view in views])

    def some(self, own: FeatureSet, seed: int = 0) -> FeatureSet:
        """At most `FITTED_ON` rows of what all processes encoded, drawn at random: the same on every process.

        Args:
            own: from `share`.
        """
        group = processes()
        sizes = group.gather_objects(len(own.indices))
        chosen = torch.arange(sum(sizes))
        if len(chosen) > FITTED_ON:
            drawn = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))
            chosen = drawn[:FITTED_ON].sort().values
        if group.size == 1:
            return own if len(chosen) == len(own.indices) else own.rows(chosen.tolist())
        first = sum(sizes[: group.rank])
        part = own.rows([int(i) - first for i in chosen if first <= i < first + sizes[group.rank]])
        indices = [index for each in group.gather_objects(part.indices) for index in each]
        return FeatureSet(indices, group.gather(part.features.to(self.model.device)).cpu())

    def missing(self, data: Unlabelled) -> int:
        """How many samples have no features yet: counted among some where there are many."""
        if self.model.ready_features(data) is not None or not len(data):
            return 0
        cached = self.open_cache(None)
        if cached is None or not cached.locations:
            return len(data)
        counted, missing, start = 0, 0, time.monotonic()
        for index in random.Random(0).sample(range(len(data)), min(len(data), COUNTED)):
            missing += data.digest(index) not in cached
            counted += 1
            if counted >= FEWEST_COUNTED and time.monotonic() - start > COUNTING:
                break
        return round(len(data) * missing / counted)

    def open_cache(self, transform: Transform | None) -> CachedFeatures | None:
        """The cache of this model's features of samples, or of transformed ones."""
        if self.config.cache is None:
            return None
        name = self.model.fingerprint() + (f" {transform.name}" if transform is not None else "")
        return self.config.cache.open(blake2b(name.encode(), digest_size=16).hexdigest())

    @property
    def _backbone(self) -> Backbone:
        return self.model.backbone if isinstance(self.model, DemonstrationEncoder) else self.model

    def _own_indices(self, data: Unlabelled) -> list[int]:
        """Positions of this process's share, of data that the model can read."""
        check_modality(self._backbone, data.modality)
        if data.streamed:
            raise InputError(f"{data.source} has no known end: take some of it with take(n)")
        return [index for index in processes().share(range(len(data))) if index not in data.skipped]

    def _block(self, data: Unlabelled, indices: Sequence[int], transform: Transform | None) -> FeatureSet:
        with evaluating(self._backbone):
            if self.config.cache is None:
                self.config.begin(len(indices))
                progress = _Progress(replace(self.config, on_start=None), 0)
                computed = self._computed(data, indices, [View(transform)], [None], progress)
                return in_order([part for _, part in computed])
            cached = _Cached(self, View(transform))
            self._complete(data, indices, [cached])
            return cached.look_up(data, indices)

    def _complete(self, data: Unlabelled, indices: Sequence[int], caches: Sequence[_Cached]) -> None:
        """Compute what is missing in these caches, and put it there."""
        progress = _Progress(self.config, sum(cached.view.has(index) for cached in caches for index in indices))
        damaged, first = True, True
        while damaged:
            missing = [cached.missing(data, indices) for cached in caches]
            if first:
                progress.found(progress.total - sum(map(len, missing)))
            todo = [index for index in indices if any(index in each for each in missing) and index not in data.skipped]
            views, known = [cached.view for cached in caches], [cached.features for cached in caches]
            if todo or self.model.sharded:
                for number, part in self._computed(data, todo, views, known, progress):
                    caches[number].put(data, part)
            for cached in caches:
                cached.flush()
            # What was found while reading may lie in a shard that is damaged.
            damaged, first = any(cached.drop_damaged(data, todo) for cached in caches), False
            if self.model.sharded:
                damaged = any(processes().gather_objects(damaged))

    def _computed(
        self,
        data: Unlabelled,
        indices: Sequence[int],
        views: Sequence[View],
        known: Sequence[CachedFeatures | None],
        progress: _Progress,
    ) -> Iterator[tuple[int, FeatureSet]]:
        """What is not known, batch by batch in the order of reading: (number of the view, features)."""
        config, model = self.config, self.model
        reader = ViewReader(data, model.prepare, model.image_size, views, known)
        reads = read_batches(reader, data.batches(config.batch_size, indices), config.workers)
        for number, read, tensors in in_batches(
            _remembered(reads, data, progress), len(views), config.batch_size, model.sharded
        ):
            progress.begin()
            if tensors:
                given = {name: tensor.to(model.device) for name, tensor in tensors.items()}
                features = model.encode_inputs(given).float().cpu()
                if read.indices:
                    encoded = FeatureSet(read.indices, features)
                    yield number, _finite(encoded, data) if config.skip_not_finite else encoded
            config.notify(len(read.indices))


class _Cached:
    """The cache of one view, while it is completed: a shard is written at least every so many seconds."""

    def __init__(self, store: FeatureStore, view: View) -> None:
        features = store.open_cache(view.transform)
        assert features is not None and store.config.cache is not None
        self.view, self.features, self.every = view, features, store.config.cache.every
        self.waiting: list[FeatureSet] = []
        self.digests: dict[int, bytes] = {}  # of what waits
        self.uncached: list[FeatureSet] = []  # what can't be put
        self.last = time.monotonic()

    def missing(self, data: Unlabelled, indices: Sequence[int]) -> set[int]:
        """Indices that are not in the cache, or without a known digest."""
        digests = {index: data.known_digest(index) for index in indices if self.view.has(index)}
        self.features.check(digest for digest in digests.values() if digest)
        return {index for index, digest in digests.items() if not digest or digest not in self.features}

    def drop_damaged(self, data: Unlabelled, indices: Sequence[int]) -> bool:
        """Whether the cache turns out not to have what it seemed to have."""
        digests = [digest for index in indices if self.view.has(index) and (digest := data.known_digest(index))]
        there = [digest for digest in digests if digest in self.features]
        self.features.check(there)
        return any(digest not in self.features for digest in there)

    def put(self, data: Unlabelled, part: FeatureSet) -> None:
        # Without a digest there is nothing to find them by.
        digests = {index: data.known_digest(index) for index in part.indices}
        named = [row for row, index in enumerate(part.indices) if digests[index]]
        if len(named) < len(part.indices):
            self.uncached.append(part.rows([row for row in range(len(part.indices)) if row not in set(named)]))
            part = part.rows(named)
        self.waiting.append(part)
        self.digests |= {index: digest for index in part.indices if (digest := digests[index])}
        if time.monotonic() - self.last >= self.every:
            self.flush()

    def flush(self) -> None:
        whole, digests = in_order(self.waiting), self.digests
        self.waiting, self.digests, self.last = [], {}, time.monotonic()
        # Equal contents are stored once.
        rows = {digests[index]: row for row, index in enumerate(whole.indices) if digests[index] not in self.features}
        try:
            if rows:
                self.features.put(list(rows), whole.features[list(rows.values())])
        except OSError as error:
            logger.warning("features can't be stored in the cache %s: %s", self.features.folder, error)
            self.uncached.append(whole)

    def look_up(self, data: Unlabelled, indices: Sequence[int]) -> FeatureSet:
        at_hand = {index for part in self.uncached for index in part.indices}
        digests = {index: data.known_digest(index) for index in indices if index not in at_hand}
        found = {p: digest for p, digest in digests.items() if digest and digest in self.features}
        looked_up = [FeatureSet(list(found), self.features.get(list(found.values())))] if found else []
        return in_order([*looked_up, *self.uncached]) if self.uncached or not found else looked_up[0]


class _Progress:
    """Reports the start of encoding only if something is computed, and all progress from then on."""

    def __init__(self, config: InferenceConfig, total: int) -> None:
        self.config, self.total, self.waiting = config, total, 0
        self.begun = config.on_start is None  # without on_start, all samples are counted

    def begin(self) -> None:
        if not self.begun:
            self.begun = True
            self.config.begin(self.total)
            self.found(self.waiting)

    def found(self, n: int) -> None:
        """So many are in the cache."""
        if self.begun:
            self.config.notify(n)
        else:
            self.waiting += n


def _remembered(reads: Iterator[ViewsRead], data: Unlabelled, progress: _Progress) -> Iterator[ViewsRead]:
    """The same, and `data` remembers what workers found out."""
    for read in reads:
        data.skipped.update(read.failed)
        for index, digest in read.digests.items():
            if digest:
                data.remember(index, digest)
        progress.found(read.found)
        yield read


def share_skipped(data: Unlabelled, readable: int) -> int:
    """All come to know what any of them could not read. How many each could read -> how many there are in all."""
    every = processes().gather_objects((dict(data.skipped), readable))
    for skipped, _ in every:
        data.skipped.update(skipped)
    return sum(n for _, n in every)


def _finite(encoded: FeatureSet, data: Unlabelled) -> FeatureSet:
    """Without what the model has no finite answer to: any class would be a guess."""
    fine = encoded.features.isfinite().all(1)
    if bool(fine.all()):
        return encoded
    for row in (~fine).nonzero().flatten().tolist():
        data.skipped[encoded.indices[row]] = "the model gives numbers for it that are not finite"
    return encoded.rows(fine.nonzero().flatten().tolist())


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
