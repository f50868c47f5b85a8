"""Samples from requests, and predictions of a run, zero-shot and adapted, for many requests in one batch."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Subset
from pouf.data.images import draft_jpeg
from pouf.data.inputs import normalise
from pouf.data.tables import read_table
from pouf.data.texts import Texts
from pouf.errors import InputError, Unreadable
from pouf.inference.cache import FeatureCache
from pouf.inference.encode import FeatureSet, InferenceConfig
from pouf.integrations.serve.guard import Limits
from pouf.models.demonstrations import DemonstrationEncoder
from pouf.reporting.pages import as_text, shorten, thumbnail
from pouf.runs.folder import Run

NEIGHBOUR_SIDE = 72  # pixels
SHOWN_NEIGHBOURS = 4  # training inputs displayed with each answer


class Busy(Exception):
    """Too many samples are waiting."""


class FixedClassifier:
    """A classifier with prototypes that are computed once."""

    @torch.no_grad()
    def __init__(self, classifier: Classifier) -> None:
        self.classifier, self.prototypes = classifier.eval(), classifier.fixed_prototypes()
        demonstrations = classifier.demonstrations
        self.encoder = (
            classifier.backbone if demonstrations is None else DemonstrationEncoder(classifier.backbone, demonstrations)
        )

    @torch.inference_mode()
    def features(self, samples: Sequence[Any]) -> Tensor:
        """(n, d), on the model's device."""
        tensors = self.encoder.prepare(samples)
        return self.encoder.encode_inputs({k: v.to(self.encoder.device) for k, v in tensors.items()}).float()

    @torch.inference_mode()
    def probabilities(self, features: Tensor) -> Tensor:
        """(n, d) -> (n, k), on the CPU."""
        return self.classifier.log_probabilities(
            FeatureSet(list(range(len(features))), features), self.prototypes
        ).exp()


class Neighbour(NamedTuple):
    """A training input, displayed with an answer."""

    name: str
    image: str  # a small picture as a data URL, or empty
    text: str
    predicted: str  # by the adapted model


class Answer(NamedTuple):
    zero_shot: Tensor  # (k,), probabilities
    adapted: Tensor  # (k,)
    near: list[tuple[float, Neighbour]]  # cosines of features and the inputs, nearest first


class RunPredictor:
    """Classifies inputs with both classifiers of a run.

    Args:
        neighbours: number of random training inputs to search for the nearest ones; 0 for none.
        cache: for features of the training inputs.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        device: str = "cpu",
        trust_model: bool = False,
        neighbours: int = 500,
        cache: FeatureCache | None = None,
    ) -> None:
        self.run = Run(folder)
        before, after = (
            Classifier.from_pretrained(folder, use=use, device=device, trust_model=trust_model)
            for use in ("zero-shot", self.run.adapted)
        )
        self.zero_shot, self.adapted = FixedClassifier(before), FixedClassifier(after)
        # If training did not change the input encoder, both share the features.
        same = before.backbone.fingerprint() == after.backbone.fingerprint()
        self.encodes_once = after.demonstrations is None and same
        self.neighbours: list[Neighbour] = []
        self.unit = torch.zeros(0, 0)
        if neighbours:
            self._find_neighbours(neighbours, cache)

    @property
    def classifier(self) -> Classifier:
        return self.adapted.classifier

    def _find_neighbours(self, count: int, cache: FeatureCache | None) -> None:
        classifier = self.classifier
        try:
            columns = self.run.columns() or classifier.columns
            data = normalise(Path(self.run.source()), classifier.backbone.modality, columns).data
        except InputError:
            return  # the data are gone, or were no files
        drawn = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:count]
        sample = Subset(data, sorted(drawn.tolist()))
        encoded = classifier.encode(sample, InferenceConfig(cache=cache))
        self.unit = F.normalize(encoded.features.float(), dim=1)
        best = classifier.log_probabilities(encoded).argmax(1).tolist()
        self.neighbours = [
            _neighbour(sample, index, classifier.classes[k]) for index, k in zip(encoded.indices, best, strict=True)
        ]

    def answers(self, samples: Sequence[Any]) -> list[Answer]:
        """One answer for each sample, computed in one batch."""
        features = self.adapted.features(samples)
        first = features if self.encodes_once else self.zero_shot.features(samples)
        if not bool(features.isfinite().all() and first.isfinite().all()):
            raise InputError("the model's features of it are not finite")
        before, after = self.zero_shot.probabilities(first), self.adapted.probabilities(features)
        near: list[list[tuple[float, Neighbour]]] = [[] for _ in samples]
        if self.neighbours:
            cosines = F.normalize(features.cpu(), dim=1) @ self.unit.T
            top = cosines.topk(min(SHOWN_NEIGHBOURS, len(self.neighbours)), dim=1)
            near = [
                [(value, self.neighbours[i]) for value, i in zip(values, indices, strict=True)]
                for values, indices in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
        return [Answer(*each) for each in zip(before, after, near, strict=True)]


def _neighbour(data: Subset, index: int, predicted: str) -> Neighbour:
    try:
        sample = data.show(index, NEIGHBOUR_SIDE)
    except Unreadable:  # deleted after it was encoded
        sample = ""
    picture = thumbnail(sample, NEIGHBOUR_SIDE) if isinstance(sample, Image.Image) else ""
    text = "" if picture or data.modality == "vector" else shorten(as_text(sample), 160)
    return Neighbour(str(data.ids[index]), picture, text, predicted)


class Batcher:
    """Batches the samples of concurrent requests: while one batch is computed, the next one fills.

    A single request does not wait for others. If a batch fails, its samples are computed one by one, so that one bad
    input fails alone.

    Args:
        compute: samples -> as many answers; called in a separate thread, one batch at a time.
        size: maximum samples of a batch.
        max_waiting: samples that may wait; beyond that, `Busy`.
        on_batch: called with the number of samples of each batch.
    """

    def __init__(
        self, compute: Callable[[list[Any]], list[Any]], size: int, max_waiting: int, on_batch: Callable[[int], object]
    ) -> None:
        self.compute, self.size, self.max_waiting, self.on_batch = compute, size, max_waiting, on_batch
        self.waiting: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] = asyncio.Queue()
        self.thread = ThreadPoolExecutor(1)
        self.worker: asyncio.Task[None] | None = None

    async def __call__(self, samples: Sequence[Any]) -> list[Any]:
        if self.waiting.qsize() + len(samples) > self.max_waiting:
            raise Busy
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in samples]
        for pair in zip(samples, futures, strict=True):
            self.waiting.put_nowait(pair)
        return await asyncio.gather(*futures)

    @property
    def is_full(self) -> bool:
        return self.waiting.qsize() >= self.max_waiting

    def start(self) -> None:
        self.worker = asyncio.create_task(self._work())

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.cancel()
        self.thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        while True:
            batch = [await self.waiting.get()]
            while len(batch) < self.size and not self.waiting.empty():
                batch.append(self.waiting.get_nowait())
            batch = [pair for pair in batch if not pair[1].done()]  # the client may be gone
            if batch:
                await self._answer(batch)

    async def _answer(self, batch: list[tuple[Any, asyncio.Future[Any]]]) -> None:
        loop = asyncio.get_running_loop()
        self.on_batch(len(batch))
        try:
            answers = await loop.run_in_executor(self.thread, self.compute, [sample for sample, _ in batch])
        except Exception as error:
            if len(batch) > 1:
                for pair in batch:
                    await self._answer([pair])
            elif not batch[0][1].done():
                batch[0][1].set_exception(error)
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)


class RequestReader:
    """Reads samples from requests; raises `InputError` if it can't."""

    def __init__(self, predictor: RunPredictor, limits: Limits) -> None:
        self.classifier, self.limits = predictor.classifier, limits
        self.modality, self.columns = predictor.classifier.backbone.modality, predictor.classifier.columns
        self.width = predictor.adapted.prototypes.shape[1]

    def samples(self, fields: Mapping[str, Any]) -> list[Any]:
        """Of one field, named after the modality."""
        if list(fields) != [f"{self.modality}s"]:
            raise InputError(f"this model reads {self.modality}s: give {self.modality}s and nothing else")
        (items,) = fields.values()
        self._check_count(items, "inputs", self.limits.inputs)
        if self.modality == "image":
            return [_from_base64(i, item) for i, item in enumerate(items)]
        return [self._sample(i, item) for i, item in enumerate(items)]

    def check_files(self, files: Sequence[Any]) -> None:
        if self.modality != "image":
            raise InputError(f"this model reads {self.modality}s, not images")
        self._check_count(files, "images", self.limits.inputs)

    def pixels(self, contents: Sequence[bytes]) -> int:
        """Pixels of the images once they are decoded and scaled for the model, from their headers alone."""
        return sum(self._pixels(i, content) for i, content in enumerate(contents))

    def decode(self, contents: Sequence[bytes]) -> list[Image.Image]:
        return [self._sample(i, content) for i, content in enumerate(contents)]

    def texts(self, name: str, content: bytes, column: str) -> Texts:
        if self.modality != "text":
            raise InputError(f"this model reads {self.modality}s: a table is for texts")
        columns = tuple(column.split(",")) if column else self.columns
        if len(columns) != len(self.columns):
            raise InputError(f"expected {len(self.columns)} names of columns, not {len(columns)}: {column}")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"table{Path(name).suffix.lower()}"
            file.write_bytes(content)
            try:
                texts = Texts.from_columns(read_table(file, *columns), columns, name)
            except InputError as error:
                raise InputError(str(error).replace(str(file), Path(name).name)) from None
            self._check_count(texts, "rows", self.limits.rows)
            for i in range(len(texts)):
                try:
                    texts.read(i)
                except Unreadable as why:
                    texts.skipped[i] = str(why)
        return texts

    def _check_count(self, items: Any, what: str, limit: int) -> None:
        if not len(items):
            raise InputError(f"no {what}: give at least one")
        if len(items) > limit:
            raise InputError(f"{len(items):,} {what}, but at most {limit:,} at once: send them in parts")

    def _pixels(self, i: int, content: bytes) -> int:
        side = self.classifier.backbone.image_size or 0
        with _opened(i, content) as image:
            draft_jpeg(image, side)
            short, long = sorted(image.size)
            return short * long + side * side * long // max(short, 1)  # its shorter side becomes the model's

    def _sample(self, i: int, item: Any) -> Any:
        """One sample in the form that the model reads."""
        if self.modality == "text" and (len(item) if isinstance(item, list) else 1) != len(self.columns):
            raise InputError(f"text {i}: expected {'a pair of texts' if len(self.columns) == 2 else 'one text'}")
        if self.modality == "vector" and len(item) != self.width:
            raise InputError(f"vector {i} has {len(item)} numbers, expected {self.width}")
        try:
            return normalise([item], self.modality, self.columns).data.read(0, self.classifier.backbone.image_size)
        except (InputError, Unreadable) as error:
            raise InputError(f"{self.modality} {i} can't be read: {error}") from None


@contextmanager
def _opened(i: int, content: bytes) -> Iterator[Image.Image]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged metadata, and of the size, which is checked here
            with Image.open(io.BytesIO(content)) as image:
                yield image
    except UnidentifiedImageError:
        raise InputError(f"image {i}: not an image, or not in a format that Pillow knows") from None
    except (Unreadable, Image.DecompressionBombError, OSError, ValueError) as error:
        raise InputError(f"image {i} can't be read: {error}") from None


def _from_base64(i: int, text: str) -> bytes:
    try:
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"image {i} is not base64: encode the bytes of the file") from None
