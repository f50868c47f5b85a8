"""What people hand over, as data: a text, a path, a picture, an array, a list of them, a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from pouf.data.base import Modality, Unlabelled
from pouf.data.images import EXTENSIONS, Images
from pouf.data.texts import RowNumbers, Texts
from pouf.data.vectors import FEATURES, Vectors
from pouf.errors import InputError

Inputs = Unlabelled | str | Path | Iterable[Any]  # pictures, arrays and datasets among the iterables
COLUMNS: dict[Modality, Sequence[str]] = {"image": ("image", "img"), "text": ("text", "sentence"), "vector": FEATURES}


class Given(NamedTuple):
    data: Unlabelled
    single: bool  # one sample was given and not a list, so one answer is wanted


def as_data(inputs: Inputs, modality: Modality, columns: Sequence[str] = ("text",)) -> Given:
    """Inputs as data of a model's kind.

    A `str` is a text for a text model and a path for the others; a `Path` is a file or a folder; a picture, an array of
    one sample, a text or (for templates with two slots) a tuple of two is one sample; all else is a list of samples.

    Args:
        columns: of a file or a dataset, that make a sample of text.
    """
    if isinstance(inputs, Unlabelled):
        return Given(inputs, False)
    if hasattr(inputs, "column_names"):
        return Given(_from_dataset(inputs, modality, columns), False)
    read = {"image": _images, "text": _texts, "vector": _vectors}[modality]
    return read(inputs, columns)


def _images(inputs: Any, columns: Sequence[str]) -> Given:
    if isinstance(inputs, (str, Path)):
        return Given(Images.from_folder(inputs), str(inputs).lower().endswith(EXTENSIONS) and Path(inputs).is_file())
    single = isinstance(inputs, Image.Image) or (isinstance(inputs, (np.ndarray, Tensor)) and inputs.ndim in (2, 3))
    return Given(Images([_picture(item) for item in ([inputs] if single else inputs)]), single)


def _picture(item: Any) -> Any:
    """Arrays as Pillow images: (h, w), (h, w, 3) or, as torch has them, (3, h, w); floats from 0 to 1."""
    if not isinstance(item, (np.ndarray, Tensor)):
        return item
    pixels = item.detach().cpu().numpy() if isinstance(item, Tensor) else item
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3, 4):
        pixels = np.moveaxis(pixels, 0, 2)
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4)):
        raise InputError(f"expected a picture of shape (h, w) or (h, w, 3), not {pixels.shape}")
    if pixels.dtype.kind == "f":
        pixels = (pixels.clip(0, 1) * 255).round()
    return Image.fromarray(pixels.squeeze(2).astype(np.uint8) if pixels.shape[2:] == (1,) else pixels.astype(np.uint8))


def _texts(inputs: Any, columns: Sequence[str]) -> Given:
    if isinstance(inputs, Path):
        return Given(Texts.from_file(inputs, columns), False)
    pair = isinstance(inputs, tuple) and len(columns) == len(inputs) == 2 and all(isinstance(i, str) for i in inputs)
    single = isinstance(inputs, str) or pair
    samples = [inputs] if single else [tuple(item) if isinstance(item, list) else item for item in inputs]
    return Given(Texts(samples), single)


def _vectors(inputs: Any, columns: Sequence[str]) -> Given:
    if isinstance(inputs, (str, Path)):
        return Given(Vectors.from_file(inputs), False)
    if not isinstance(inputs, (np.ndarray, Tensor)):
        rows = list(inputs)
        inputs = np.stack([np.asarray(row) for row in rows]) if rows else np.zeros((0, 1), np.float32)
        if inputs.dtype.kind in "iu":
            inputs = inputs.astype(np.float32)
    single = inputs.ndim == 1
    return Given(Vectors(inputs[None] if single else inputs), single)


def _from_dataset(dataset: Any, modality: Modality, columns: Sequence[str]) -> Unlabelled:
    """A `datasets.Dataset`: one column, or two for pairs, by their usual names; no other is looked at."""
    there = list(dataset.column_names or ())
    named = tuple(columns) if modality == "text" and len(columns) == 2 else None
    if named is None:
        usual = [*columns, *COLUMNS[modality]] if modality == "text" else COLUMNS[modality]
        named = tuple(name for name in usual if name in there)[:1]
    if not named or any(name not in there for name in named):
        wanted = " and ".join(columns) if len(columns) == 2 else " or ".join(COLUMNS[modality])
        raise InputError(
            f"the dataset has no column {wanted}, only: {', '.join(there)}: rename one, or hand over dataset[column]"
        )
    if not hasattr(dataset, "__len__"):
        raise InputError("the dataset is a stream without an end: wrap it with Stream.from_dataset, or take some of it")
    column = _Column(dataset, named)
    if modality == "image":
        return Images(column, RowNumbers(len(column)), "the dataset")
    if modality == "text":
        return Texts(list(column), source="the dataset")
    return Vectors(np.asarray(list(column), dtype=np.float32), "the dataset")


class _Column(Sequence[Any]):
    """A column of a dataset, read row by row when asked for: pictures need not fit into memory."""

    def __init__(self, dataset: Any, names: Sequence[str]) -> None:
        self.dataset, self.names = dataset.select_columns(list(names)), names

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        row = self.dataset[index]
        return row[self.names[0]] if len(self.names) == 1 else tuple(row[name] for name in self.names)
