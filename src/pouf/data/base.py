"""What every kind of unlabelled data offers. There is no field that could hold a label."""

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

from pouf.data.random_batches import Draw, Permutations, RandomBatches
from pouf.errors import InputError

Modality = Literal["image", "text", "vector"]
logger = logging.getLogger(__name__)


class Unreadable(Exception):
    """One sample can't be read; its message says why. Never fatal: the sample is skipped and listed."""


class Transform(NamedTuple):
    """What is done to samples before they are encoded, and what to call it: features are kept under this name too."""

    name: str
    apply: Callable[[Any, int], Any]  # a sample and its seed


class Unlabelled(ABC):
    """Samples that are read one by one when needed; those that can't be read are skipped and remembered.

    Attributes:
        ids: what to call each sample in lists, reviews and reports: a path, a row's number, or the user's own id.
        source: where the samples come from, for messages and the run's manifest.
        skipped: index → reason, for the samples found unreadable so far.
        own_ids: columns of the user's choice that name the samples in predictions, instead of `ids`.
        id_columns: what these columns were asked for by, so that they are found again.
    """

    modality: Modality
    streamed = False  # without a known number of samples, and without a way back to one
    own_ids: Mapping[str, Sequence[Any]] | None = None
    id_columns: tuple[str, ...] = ()

    def __init__(self, ids: Sequence[str], source: str) -> None:
        self.ids = ids
        self.source = source
        self.skipped: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def with_own_skips(self) -> Unlabelled:
        """The same samples, with a list of its own of those that can't be read: one model may answer where another
        can't."""
        own = copy.copy(self)
        own.skipped = dict(self.skipped)
        return own

    def display_columns(self) -> Mapping[str, Sequence[Any]]:
        """What names the samples in a table of predictions, by column."""
        return self.own_ids or {"path" if self.modality == "image" else "row": self.ids}

    def set_ids(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Let columns of the user's choice name the samples; the first of them becomes `ids`, if no two are alike."""
        self.own_ids, self.id_columns = columns, tuple(columns)
        for name, values in islice(columns.items(), 1):
            ids = [str(value).strip() for value in values]
            if len(set(ids)) == len(ids) and all(ids):
                self.ids = ids
            else:  # an answer of a review must tell which input it is about
                logger.warning(
                    "%s: the ids in %r are not all there and distinct: they stand in predictions, but reports and "
                    "reviews name inputs by their row numbers", self.source, name,
                )  # fmt: skip

    @abstractmethod
    def read(self, index: int) -> Any:
        """The sample, or `Unreadable`."""

    def read_for(self, index: int, side: int | None) -> Any:
        """The sample as a model that reads side² pixels needs it: a large image may come smaller."""
        return self.read(index)

    def show(self, index: int, side: int) -> Any:
        """The sample as a person is to see it: a picture of about side² pixels, a text, or all there is."""
        return self.read_for(index, side)

    @abstractmethod
    def content_order(self) -> Sequence[int]:
        """All positions in an order that only the samples' contents decide.

        Folder names, file names and the order of rows can tell the classes; none of them may steer the training.
        """

    def digest(self, index: int) -> bytes:
        """A fingerprint of the sample's content (16 bytes), by which its features are found again; empty if unknown."""
        return b""

    def known_digest(self, index: int) -> bytes | None:
        """The digest where it takes no reading, or has been computed before; else None."""
        return self.digest(index)

    def remember(self, index: int, digest: bytes) -> None:  # noqa: B027
        """A digest that another process computed, for `known_digest`; nothing to do where it takes no reading."""

    def peek(self) -> AbstractContextManager[None]:
        """While open, what is read is opened once together with the next time that it is read."""
        return nullcontext()

    def reading_order(self) -> Sequence[int]:
        """The order of `batches`. Texts come by length, so that little of a batch is padding."""
        return range(len(self))

    def batches(self, size: int, only: Sequence[int] | None = None) -> Iterator[list[Draw]]:
        """Every sample once, those that cost alike together.

        Args:
            only: positions of some samples; by default all that are not known to be unreadable.
        """
        wanted = set(range(len(self)) if only is None else only) - self.skipped.keys()
        order = self.reading_order()
        order = sorted(wanted) if isinstance(order, range) else [place for place in order if place in wanted]
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            yield [Draw(place, 0) for place in batch]

    def seed(self, place: int) -> int:
        """Of what is done to a sample at random: it follows from the content, or from the position."""
        digest = self.digest(place)
        return int.from_bytes(digest[:7], "big") if digest else place

    def random_batches(self, size: int, generator: torch.Generator) -> RandomBatches:
        """Batches without end, an epoch after the other."""
        return Permutations(self, size, generator)

    def fingerprint(self) -> str:
        """Of the names of all samples and the content of some: other data are most likely to have another."""
        digest = blake2b(json.dumps([len(self), *self.ids]).encode(), digest_size=16)
        for place in range(0, len(self), max(1, len(self) // 256)):
            digest.update(self.digest(place))
        return digest.hexdigest()

    def check_readable(self) -> None:
        """An error if there is nothing, or if every sample has turned out to be unreadable."""
        if not len(self):
            raise InputError(f"no inputs in {self.source}: there must be at least one")
        if len(self.skipped) == len(self):
            example = min(self.skipped)
            raise InputError(
                f"none of the {len(self)} inputs in {self.source} can be read; "
                f"the first, {self.ids[example]}: {self.skipped[example]}"
            )


class Subset(Unlabelled):
    """Some samples of other data, in the order given."""

    def __init__(self, data: Unlabelled, places: Sequence[int]) -> None:
        super().__init__([data.ids[place] for place in places], data.source)
        self.data, self.places = data, places
        self.modality = data.modality
        self.skipped = {i: data.skipped[place] for i, place in enumerate(places) if place in data.skipped}

    def read(self, index: int) -> Any:
        return self.data.read(self.places[index])

    def show(self, index: int, side: int) -> Any:
        return self.data.show(self.places[index], side)

    def read_for(self, index: int, side: int | None) -> Any:
        return self.data.read_for(self.places[index], side)

    def content_order(self) -> Sequence[int]:
        own: dict[int, list[int]] = {}  # a place may be given twice
        for i, place in enumerate(self.places):
            own.setdefault(place, []).append(i)
        return [i for place in self.data.content_order() for i in own.get(place, ())]

    def reading_order(self) -> Sequence[int]:
        rank = {place: i for i, place in enumerate(self.data.reading_order())}
        return sorted(range(len(self)), key=lambda index: rank[self.places[index]])

    def digest(self, index: int) -> bytes:
        return self.data.digest(self.places[index])

    def known_digest(self, index: int) -> bytes | None:
        return self.data.known_digest(self.places[index])

    def remember(self, index: int, digest: bytes) -> None:
        self.data.remember(self.places[index], digest)

    def peek(self) -> AbstractContextManager[None]:
        return self.data.peek()
