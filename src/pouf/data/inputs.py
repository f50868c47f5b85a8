"""Everything that users pass as inputs (a text, a path, a picture, an array, lists, datasets) as `Unlabelled` data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from pouf.data.base import Modality, Unlabelled
from pouf.data.images import EXTENSIONS, Images, as_item
from pouf.data.streams import Stream
from pouf.data.tables import TABLE_READERS, find_columns
from pouf.data.texts import RowNumbers, Texts
from pouf.data.vectors import FEATURE_KEYS, Vectors, to_numpy
from pouf.errors import InputError

Inputs = Unlabelled | str | Path | Iterable[Any]  # Iterable covers lists, arrays and datasets
COLUMNS: dict[Modality, Sequence[str]] = {
    "image": ("image", "img", "bytes", "path"), "text": ("text", "sentence"), "vector": FEATURE_KEYS,
}  # fmt: skip


class NormalisedInput(NamedTuple):
    """Inputs as data, and whether they were a single sample."""

    data: Unlabelled
    single: bool  # one sample was given, not a list, so one prediction is returned


def normalise(
    inputs: Inputs, modality: Modality, columns: Sequence[str] = ("text",), id_columns: Sequence[str] = ()
) -> NormalisedInput:
    """Inputs as data of a modality; used by Python, the command line, the server and cluster jobs alike.

    A `str` is a text for a text model and a path for the others; a `Path` is a file or a folder; a picture, an array of
    one sample, a text or (for templates with two slots) a tuple of two is one sample; anything else is a list of
    samples.

    Args:
        columns: columns of a file or a dataset that make up a sample of text.
        id_columns: columns of a file that name the samples in predictions.
    """
    if id_columns:
        return NormalisedInput(_with_id_columns(inputs, modality, columns, id_columns), False)
    if isinstance(inputs, Unlabelled):
        return NormalisedInput(inputs, False)
    if hasattr(inputs, "to_pandas") and not hasattr(inputs, "with_format"):
        inputs = inputs.to_pandas()  # a table of pyarrow or polars
    if hasattr(inputs, "column_names") and isinstance(inputs, Mapping):
        raise InputError(
            f"expected one split of a dataset, not all of them: choose one, as dataset[{next(iter(inputs), 'train')!r}]"
        )
    if hasattr(inputs, "column_names"):
        return NormalisedInput(_from_dataset(inputs, modality, columns), False)
    if hasattr(inputs, "iloc") and hasattr(inputs, "columns"):
        return NormalisedInput(_from_frame(inputs, modality, columns), False)
    if isinstance(inputs, (bytes, bytearray)):
        decoded = "data.decode()" if modality == "text" else "Image.open(io.BytesIO(data))"
        raise InputError(f"expected {modality}s, a path or a list of them, not bytes: give {decoded}")
    if not isinstance(inputs, (Path, Image.Image, Iterable)):  # a str is iterable
        raise InputError(f"expected {modality}s, a path or a list of them, not {type(inputs).__name__}")
    read = {"image": _images, "text": _texts, "vector": _vectors}[modality]
    return read(inputs, columns)


def split_columns(columns: str | None, usual: Sequence[str]) -> tuple[str, ...]:
    """The columns that make up a sample: as many as the template or the model reads."""
    if columns is None:
        return tuple(usual)
    names = tuple(columns.split(","))
    if len(names) != len(usual):
        expected = "one column" if len(usual) == 1 else "two columns, as question,answer"
        raise InputError(f"text_column={columns!r} names {len(names)} columns, expected {expected}")
    return names


def _with_id_columns(inputs: Any, modality: Modality, columns: Sequence[str], id_columns: Sequence[str]) -> Unlabelled:
    if modality == "image" or not isinstance(inputs, (str, Path)):
        raise InputError("id columns are for a file of texts or vectors; images are named by their paths")
    if modality == "vector":
        return Vectors.from_file(inputs, id_columns)
    return Texts.from_file(inputs, columns, id_columns)


def _images(inputs: Any, columns: Sequence[str]) -> NormalisedInput:
    if isinstance(inputs, (str, Path)):
        is_file = str(inputs).lower().endswith(EXTENSIONS) and Path(inputs).is_file()
        return NormalisedInput(Images.from_folder(inputs), is_file)
    single = isinstance(inputs, Image.Image)
    if isinstance(inputs, (np.ndarray, Tensor)):  # three dimensions without one of colours are (n, h, w), grey
        single = inputs.ndim == 2 or (inputs.ndim == 3 and bool({1, 3, 4} & {inputs.shape[0], inputs.shape[2]}))
    return NormalisedInput(Images([_picture(item) for item in ([inputs] if single else inputs)]), single)


def _picture(item: Any) -> Any:
    """Arrays as Pillow images: (h, w), (h, w, 3) or, as in torch, (3, h, w); other items as `as_item` has them."""
    if not isinstance(item, (np.ndarray, Tensor)):
        return as_item(item)
    pixels = item.detach().cpu().numpy() if isinstance(item, Tensor) else item
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3, 4):
        pixels = np.moveaxis(pixels, 0, 2)
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4)):
        raise InputError(f"expected a picture of shape (h, w) or (h, w, 3), not {pixels.shape}")
    if pixels.dtype.kind == "b":
        pixels = pixels * np.uint8(255)
    if pixels.dtype != np.uint8:
        pixels = _bytes(pixels)
    return Image.fromarray(pixels.squeeze(2).astype(np.uint8) if pixels.shape[2:] == (1,) else pixels.astype(np.uint8))


def _bytes(pixels: np.ndarray) -> np.ndarray:
    """Floats from 0 to 1, or integers from 0 to 255, as the latter."""
    floats = pixels.dtype.kind == "f"
    top, slack = (1, 0.05) if floats else (255, 0)  # what enlarging overshoots by
    low, high = (pixels.min(), pixels.max()) if pixels.size else (0, 0)
    if not -slack <= low <= high <= top + slack:  # as is NaN
        kind = "floats from 0 to 1" if floats else "integers from 0 to 255"
        raise InputError(f"pixels must be {kind}, not from {low:.6g} to {high:.6g}: scale them")
    return (pixels.clip(0, 1) * 255).round() if floats else pixels


def _texts(inputs: Any, columns: Sequence[str]) -> NormalisedInput:
    if isinstance(inputs, Path):
        return NormalisedInput(Texts.from_file(inputs, columns), False)
    pair = isinstance(inputs, tuple) and len(columns) == len(inputs) == 2 and all(isinstance(i, str) for i in inputs)
    single = isinstance(inputs, str) or pair
    if isinstance(inputs, str) and _names_a_file(inputs):
        raise InputError(
            f"{inputs!r} is read as one text, although it names a file: give Path({inputs!r}), or [{inputs!r}]"
        )
    samples = [inputs] if single else [tuple(item) if isinstance(item, list) else item for item in inputs]
    return NormalisedInput(Texts(samples), single)


def _names_a_file(text: str) -> bool:
    """An existing file, or a single word with the file ending of a table."""
    if len(text) < 256 and os.path.isfile(text):
        return True
    return len(text.split()) == 1 and text.lower().endswith(tuple(TABLE_READERS))


def _vectors(inputs: Any, columns: Sequence[str]) -> NormalisedInput:
    if isinstance(inputs, (str, Path)):
        return NormalisedInput(Vectors.from_file(inputs), False)
    if not isinstance(inputs, (np.ndarray, Tensor)):
        rows = [to_numpy(row) if isinstance(row, Tensor) else np.asarray(row) for row in inputs]
        if len({row.shape for row in rows}) > 1:
            raise InputError(f"the vectors differ in length: {sorted({str(row.shape) for row in rows})[:5]}")
        inputs = np.stack(rows) if rows else np.zeros((0, 1), np.float32)
        if inputs.dtype.kind in "iu":
            inputs = inputs.astype(np.float32)
    single = inputs.ndim == 1
    return NormalisedInput(Vectors(inputs[None] if single else inputs), single)


def _from_dataset(dataset: Any, modality: Modality, columns: Sequence[str]) -> Unlabelled:
    """A `datasets.Dataset`, streamed or not: one column, or two for pairs, by their usual names."""
    if getattr(dataset, "format", {}).get("type") != "custom":  # formatted as torch, numpy, …: pictures would be arrays
        dataset = dataset.with_format(None)
    names = list(dataset.column_names or next(iter(dataset), ()))  # of a stream, by its first row
    named = sample_columns(names, modality, columns, "the dataset")
    if not hasattr(dataset, "__len__"):
        if modality == "vector":
            raise InputError("vectors can't be read from a stream: take a part of the dataset, or save it as an array")
        return Stream.from_dataset(dataset, named, modality)
    if modality == "image":  # a transform of the dataset may have turned pictures into arrays
        return Images(_Column(dataset, named, _picture), RowNumbers(len(dataset)), "the dataset")
    column = _Column(dataset, named)
    if modality == "text":
        return Texts(list(column), source="the dataset")
    return Vectors(np.asarray(list(column), dtype=np.float32), "the dataset")


def sample_columns(names: Sequence[str], modality: Modality, columns: Sequence[str], source: str) -> tuple[str, ...]:
    """The columns of a table that make up a sample: two for pairs of texts, else the first with a usual name."""
    if modality == "text" and len(columns) == 2:
        found, expected = tuple(columns), " and ".join(columns)
    else:
        usual = dict.fromkeys([*columns, *COLUMNS["text"]] if modality == "text" else COLUMNS[modality])
        found, expected = tuple(name for name in usual if name in names)[:1], " or ".join(usual)
    if not found or any(name not in names for name in found):
        raise InputError(
            f"{source} has no column {expected}, only: {', '.join(names)}: rename one, or pass the column alone"
        )
    return found


def _from_frame(frame: Any, modality: Modality, columns: Sequence[str]) -> Unlabelled:
    """A `pandas.DataFrame`: its index gives the ids; vectors are all its columns."""
    ids, source = [str(name) for name in frame.index], "the DataFrame"
    if modality == "vector":
        vectors = Vectors(frame.to_numpy(np.float32), source)
        vectors.ids = ids
        return vectors
    names = [str(name) for name in frame.columns]
    needed = columns if modality == "text" else [next((n for n in ("image", "path") if n in names), "image")]
    first, *others = (frame.iloc[:, i].tolist() for i in find_columns(names, needed, source))
    if modality == "image":
        return Images([_picture(item) for item in first], ids, source)
    return Texts(list(zip(first, *others, strict=True)) if others else first, ids, source)


class _Column(Sequence[Any]):
    """A column of a dataset, read row by row on access, since pictures may not fit into memory."""

    def __init__(self, dataset: Any, names: Sequence[str], convert: Callable[[Any], Any] = lambda item: item) -> None:
        self.dataset, self.names, self.convert = dataset.select_columns(list(names)), names, convert

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        row = self.dataset[index]
        return self.convert(row[self.names[0]] if len(self.names) == 1 else tuple(row[name] for name in self.names))
