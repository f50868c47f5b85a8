"""The interface of all unlabelled data. There is no field for a label."""

from __future__ import annotations

import copy
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch

from pouf.data.batches import Draw, Permutations, RandomBatches
from pouf.errors import InputError

Modality = Literal["image", "text", "vector"]
logger = logging.getLogger(__name__)


class Transform(NamedTuple):
    """A change of samples before they are encoded; its name is part of the key of cached features."""

    name: str
    apply: Callable[[Any, int], Any]  # a sample and its seed


class Unlabelled(ABC):
    """Samples that are read one by one when needed; those that can't be read are skipped and remembered.

    Attributes:
        ids: name of each sample in lists, reviews and reports: a path, a row number, or the user's own id.
        source: where the samples come from, for messages and the run's manifest.
        skipped: index → reason, for the samples found unreadable so far.
        own_ids: columns of the user's choice that name the samples in predictions, instead of `ids`.
        id_columns: names of these columns as the user gave them, to read them again.
    """

    modality: Modality
    streamed = False  # of unknown length, and readable once in order only
    own_ids: Mapping[str, Sequence[Any]] | None = None
    id_columns: tuple[str, ...] = ()

    def __init__(self, ids: Sequence[str], source: str) -> None:
        self.ids = ids
        self.source = source
        self.skipped: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def with_own_skipped(self) -> Unlabelled:
        """The same samples with a separate `skipped`: an input that one model can't use may be fine for another."""
        own = copy.copy(self)
        own.skipped = dict(self.skipped)
        return own

    def display_columns(self) -> Mapping[str, Sequence[Any]]:
        """The columns that name the samples in a table of predictions."""
        return self.own_ids or {"path" if self.modality == "image" else "row": self.ids}

    def set_ids(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Name the samples by columns of the user's choice; the first becomes `ids` if its values are distinct."""
        self.own_ids, self.id_columns = columns, tuple(columns)
        for name, values in islice(columns.items(), 1):
            ids = [str(value).strip() for value in values]
            if len(set(ids)) == len(ids) and all(ids):
                self.ids = ids
            else:  # an answer of a review must identify its input
                logger.warning(
                    "%s: the ids in %r are incomplete or not distinct: predictions show them, but reports and "
                    "reviews name inputs by row number", self.source, name,
                )  # fmt: skip

    @abstractmethod
    def read(self, index: int, side: int | None = None) -> Any:
        """The sample, or `Unreadable`. For a model that reads side² pixels, a large image may be decoded smaller."""

    def show(self, index: int, side: int) -> Any:
        """The sample for display: a picture of about side² pixels, a text, or the raw sample."""
        return self.read(index, side)

    @abstractmethod
    def content_order(self) -> Sequence[int]:
        """All indices, in an order that depends on the contents of the samples alone.

        Folder names, file names and the order of rows can reveal the classes; none of them may influence training.
        """

    def digest(self, index: int) -> bytes:
        """A fingerprint of the sample's content (16 bytes), the key of its cached features; empty if unknown."""
        return b""

    def known_digest(self, index: int) -> bytes | None:
        """The digest if it needs no reading or was computed before; else None."""
        return self.digest(index)

    def remember(self, index: int, digest: bytes) -> None:  # noqa: B027
        """Store a digest that another process computed, for `known_digest`; does nothing if no reading is needed."""

    def peek(self) -> AbstractContextManager[None]:
        """While open, bytes are stored for the next read of the same sample: it is opened once."""
        return nullcontext()

    def reading_order(self) -> Sequence[int]:
        """The order of `batches`. Texts are sorted by length, so that batches hold little padding."""
        return range(len(self))

    def batches(self, size: int, only: Sequence[int] | None = None) -> Iterator[list[Draw]]:
        """Every sample once, samples of similar length together.

        Args:
            only: indices of some samples; by default all that are not known to be unreadable.
        """
        wanted = set(range(len(self)) if only is None else only) - self.skipped.keys()
        order = self.reading_order()
        order = sorted(wanted) if isinstance(order, range) else [index for index in order if index in wanted]
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            yield [Draw(index, 0) for index in batch]

    def seed(self, index: int) -> int:
        """Seed of random changes of a sample: a function of its content, or of its index if that is unknown."""
        digest = self.digest(index)
        return int.from_bytes(digest[:7], "big") if digest else index

    def random_batches(self, size: int, generator: torch.Generator) -> RandomBatches:
        """Endless batches, epoch after epoch."""
        return Permutations(self, size, generator)

    def fingerprint(self) -> str:
        """A hash of the names of all samples and the content of some; other data almost surely get another one."""
        digest = blake2b(json.dumps([len(self), *self.ids]).encode(), digest_size=16)
        for index in range(0, len(self), max(1, len(self) // 256)):
            digest.update(self.digest(index))
        return digest.hexdigest()

    def check_readable(self) -> None:
        """Raise an error if there are no samples, or if none could be read."""
        if not len(self):
            raise InputError(f"no inputs in {self.source}: there must be at least one")
        if len(self.skipped) == len(self):
            example = min(self.skipped)
            raise InputError(
                f"none of the {len(self)} inputs in {self.source} can be read; "
                f"the first, {self.ids[example]}: {self.skipped[example]}"
            )


class Subset(Unlabelled):
    """Some samples of other data, in the given order."""

    def __init__(self, data: Unlabelled, indices: Sequence[int]) -> None:
        super().__init__([data.ids[index] for index in indices], data.source)
        self.data, self.indices = data, indices
        self.modality = data.modality
        self.skipped = {i: data.skipped[index] for i, index in enumerate(indices) if index in data.skipped}

    def read(self, index: int, side: int | None = None) -> Any:
        return self.data.read(self.indices[index], side)

    def show(self, index: int, side: int) -> Any:
        return self.data.show(self.indices[index], side)

    def content_order(self) -> Sequence[int]:
        rows: dict[int, list[int]] = {}  # an index may be given twice
        for i, index in enumerate(self.indices):
            rows.setdefault(index, []).append(i)
        return [i for index in self.data.content_order() for i in rows.get(index, ())]

    def reading_order(self) -> Sequence[int]:
        rank = {index: i for i, index in enumerate(self.data.reading_order())}
        return sorted(range(len(self)), key=lambda index: rank[self.indices[index]])

    def digest(self, index: int) -> bytes:
        return self.data.digest(self.indices[index])

    def known_digest(self, index: int) -> bytes | None:
        return self.data.known_digest(self.indices[index])

    def remember(self, index: int, digest: bytes) -> None:
        self.data.remember(self.indices[index], digest)

    def peek(self) -> AbstractContextManager[None]:
        return self.data.peek()
