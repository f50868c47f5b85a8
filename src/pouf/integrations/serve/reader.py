"""Samples from requests."""

from __future__ import annotations

import base64
import binascii
import io
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from pouf.data.images import draft_jpeg
from pouf.data.inputs import normalise
from pouf.data.tables import read_table
from pouf.data.texts import Texts
from pouf.errors import InputError, Unreadable
from pouf.integrations.serve.guard import Limits
from pouf.integrations.serve.predictor import RunPredictor
from pouf.integrations.serve.schemas import PredictRequest


class RequestReader:
    """Reads samples from requests; raises `InputError` if it can't."""

    def __init__(self, predictor: RunPredictor, limits: Limits) -> None:
        self.classifier, self.limits = predictor.classifier, limits
        self.modality, self.columns = predictor.classifier.backbone.modality, predictor.classifier.columns
        self.width = predictor.adapted.prototypes.shape[1]

    def samples(self, question: PredictRequest) -> list[Any]:
        fields = {name: value for name, value in question.model_dump().items() if value is not None}
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
            return normalise([item], self.modality, self.columns).data.read_for(0, self.classifier.backbone.image_size)
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
