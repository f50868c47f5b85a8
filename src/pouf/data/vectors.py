"""Precomputed features: npy, npz, safetensors, Parquet."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0
from numpy.typing import NDArray
from torch import Tensor

from pouf.data.base import Unlabelled
from pouf.data.contents import local_copy
from pouf.data.images import Images
from pouf.data.tables import find_columns
from pouf.data.texts import RowNumbers, Texts
from pouf.errors import InputError, Unreadable, optional

Array = NDArray[Any]
BLOCK_ROWS = 65536  # rows processed at once
logger = logging.getLogger(__name__)


class Vectors(Unlabelled):
    """Vectors (n, d) in memory or memory-mapped. Zero and non-finite vectors count as unreadable."""

    modality = "vector"
    originals: Images | Texts | None = None  # the inputs that the vectors were computed from

    def __init__(self, array: Array | Tensor, source: str = "the array") -> None:
        values = as_matrix(array, source)
        super().__init__(RowNumbers(len(values)), source)
        largest = row_maxima(values)
        self.array = rescale_extreme_rows(values, largest)
        for row in np.flatnonzero(~np.isfinite(largest) | (largest == 0)):
            self.skipped[int(row)] = "the vector is zero, or not finite"

    @classmethod
    def from_file(cls, file: str | Path, id_columns: Sequence[str] = ()) -> Vectors:
        """Vectors of a file: npy and safetensors are memory-mapped; npz and Parquet are read.

        The file may have more lists: `ids`, and `texts` or `paths` of images, which are displayed for the vectors.

        Args:
            id_columns: lists that name the vectors, instead of `ids`.
        """
        arrays = read_arrays(file)
        vectors = cls(arrays.vectors(FEATURE_KEYS), str(file))
        lists = {name: array.tolist() for name, array in arrays.by_name.items() if array.shape == (len(vectors),)}
        indices = find_columns(list(lists), id_columns, str(file))
        vectors.set_ids({name: lists[list(lists)[i]] for name, i in zip(id_columns, indices, strict=True)})
        ids = None if id_columns else next((lists[name] for name in ID_KEYS if name in lists), None)
        for name in (*ID_KEYS, *PATH_KEYS, *TEXT_KEYS):
            if name in arrays.by_name and name not in lists:
                logger.warning(
                    "%s: %r does not have one entry for each of the %d vectors and is ignored", file, name, len(vectors)
                )
        if ids is not None and len(set(ids)) < len(ids):  # a review needs distinct ids
            logger.warning("%s: the ids are not distinct; row numbers are used instead", file)
        elif ids is not None:
            vectors.ids = [str(name) for name in ids]
            vectors.own_ids = {"id": ids}
        paths, texts = (next((lists[n] for n in usual if n in lists), None) for usual in (PATH_KEYS, TEXT_KEYS))
        if paths is not None:
            pictures = [Path(str(file).split("::")[0]).parent / str(path) for path in paths]
            if missing := sum(not picture.is_file() for picture in pictures):
                logger.warning("%s: %d of %d paths do not exist, the first is %s", file, missing, len(paths),
                               next(picture for picture in pictures if not picture.is_file()))  # fmt: skip
            vectors.originals = Images(pictures)
        elif texts is not None:
            vectors.originals = Texts(texts)
        return vectors

    def show(self, index: int, side: int) -> Any:
        try:
            return self.originals.read(index, side) if self.originals is not None else self.read(index)
        except Unreadable:  # the picture may be gone
            return self.read(index)

    def read(self, index: int, side: int | None = None) -> Array:
        if index in self.skipped:
            raise Unreadable(self.skipped[index])
        row: Array = self.array[index]
        return row.astype(np.float32) if row.dtype == np.float16 else row  # half precision can't hold squares

    def tensor(self) -> Tensor:
        """(n, d), sharing memory with the array: do not write to it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a file opened for reading can't be written to
            return torch.from_numpy(self.array)

    def content_order(self) -> Sequence[int]:
        """Sorted by the first four numbers of each row, and by the whole row among equal ones."""
        return self._order  # type: ignore[return-value]

    @cached_property
    def _order(self) -> Array:  # of a million vectors it takes two seconds
        first = np.ascontiguousarray(self.array[:, :4], dtype=np.float32)
        order = np.lexsort(first.T)
        same = np.flatnonzero((first[order[1:]] == first[order[:-1]]).all(1))  # equal to the next in order
        for run in np.split(same, np.flatnonzero(np.diff(same) > 1) + 1):
            if len(run):
                tied = order[run[0] : run[-1] + 2]
                order[run[0] : run[-1] + 2] = sorted(tied, key=lambda row: self.array[row].tobytes())
        return order

    def fingerprint(self) -> str:
        some = np.ascontiguousarray(self.array[:: max(1, len(self) // 256)])
        return blake2b(f"{self.array.shape} {some.dtype}".encode() + some.tobytes(), digest_size=16).hexdigest()


def as_matrix(array: Any, source: str) -> Array:
    """Floats (n, d) that torch accepts, in native byte order. Integers are accepted in a list, not in an array."""
    if isinstance(array, Tensor) and (
        array.layout != torch.strided or array.is_quantized or array.is_meta or array.is_conj()
    ):
        kind = f"{array.layout}, {array.dtype} on {array.device}"
        raise InputError(f"{source}: expected a dense tensor of numbers (n, d), not {kind}")
    try:
        values = to_numpy(array) if isinstance(array, Tensor) else np.asanyarray(array)
    except ValueError:
        raise InputError(f"{source}: expected numbers of shape (n, d), not rows of several lengths") from None
    if np.ma.is_masked(values):
        raise InputError(f"{source}: some of its numbers are masked: fill them, or leave out their rows")
    if values.dtype.kind in "iu" and not isinstance(array, (np.ndarray, Tensor)):
        values = values.astype(np.float32)
    if values.ndim != 2 or values.dtype.kind != "f" or values.shape[1] == 0:
        raise InputError(f"{source}: expected numbers of shape (n, d), not {values.dtype} of shape {values.shape}")
    if values.dtype.itemsize > 8:
        return values.astype(np.float64)
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def row_maxima(values: Array) -> Array:
    """(n,), the largest absolute value of each row. A number that float32 can't hold counts as infinite."""
    with np.errstate(over="ignore"):
        blocks = [values[start : start + BLOCK_ROWS] for start in range(0, len(values), BLOCK_ROWS)]
        return np.concatenate(
            [np.zeros(0, np.float32), *(abs(b.astype(np.float32, copy=False)).max(1) for b in blocks)]
        )


def rescale_extreme_rows(values: Array, largest: Array) -> Array:
    """The same directions; rows whose squares float32 can't hold are divided by their largest value."""
    unusual = np.isfinite(largest) & (largest > 0) & ((largest < 1e-8) | (largest > 1e15))
    if unusual.any():
        values = np.array(values)
        values[unusual] /= largest[unusual, None]
    return values


def to_numpy(tensor: Tensor) -> Array:
    """The tensor as an array; numpy has no bfloat16 and no float8."""
    tensor = tensor.detach().cpu()
    known = (torch.float16, torch.float32, torch.float64)
    array: Array = (tensor.float() if tensor.is_floating_point() and tensor.dtype not in known else tensor).numpy()
    return array


FEATURE_KEYS = ("features", "embeddings", "embedding", "x")
PROTOTYPE_KEYS = ("prototypes", "text", "embeddings", "embedding")
CLASS_KEYS = ("names", "classes", "class_names", "name")
ID_KEYS, TEXT_KEYS, PATH_KEYS = ("ids", "id"), ("texts", "text"), ("paths", "path")
LABEL_KEYS = ("labels", "label", "y")


class Arrays(NamedTuple):
    """The arrays of a file by name."""

    file: str
    by_name: dict[str, Array]
    chosen: str = ""  # the name of the one to use

    def vectors(self, usual: Sequence[str]) -> Array:
        """The array (n, d): the only one, or the one with a usual name."""
        if self.chosen:
            return self.by_name[self.chosen]
        tables = {name: array for name, array in self.by_name.items() if array.ndim == 2 and array.dtype.kind == "f"}
        if not tables and len(self.by_name) == 1:
            tables = dict(self.by_name)  # the only array: its user checks its type
        # An array of numbers with a usual name is used even if its shape or type is wrong.
        named = [name for name in usual if name in self.by_name and self.by_name[name].dtype.kind in "fiucb"][:1]
        if (len(tables) != 1 and not named) or any(name not in tables for name in named):
            kinds = {name: "" if array.dtype.kind == "f" else f"{array.dtype} " for name, array in self.by_name.items()}
            found = ", ".join(f"{name} {kinds[name]}{array.shape}" for name, array in self.by_name.items()) or "nothing"
            raise InputError(
                f"{self.file!r}: expected one array of shape (n, d), or one named {' or '.join(usual)}, not {found}. "
                f"Choose with FILE::NAME"
            )
        return tables[named[0]] if named else next(iter(tables.values()))

    def first(self, usual: Sequence[str]) -> Array | None:
        """The first list with one of these names, if any."""
        return next((self.by_name[name] for name in usual if name in self.by_name), None)


def read_arrays(file: str | Path) -> Arrays:
    """The arrays of a file; `FILE::NAME` chooses one of them."""
    path, _, chosen = str(file).partition("::")
    path = str(local_copy(path))
    if not Path(path).is_file():
        raise InputError(f"no file {path!r}: expected vectors in {', '.join(VECTOR_READERS)}")
    reader = VECTOR_READERS.get(Path(path).suffix.lower())
    if reader is None:
        raise InputError(
            f"can't read {Path(path).name!r} as vectors: expected a file that ends in {', '.join(VECTOR_READERS)}"
        )
    try:
        arrays = reader(Path(path))
    except InputError:
        raise
    except Exception as error:  # damaged files raise many kinds of errors in the readers of four formats
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{path!r} can't be read as {Path(path).suffix[1:]}: {why}") from None
    if chosen:
        if chosen not in arrays:
            raise InputError(f"{path!r} has no array {chosen!r}, only: {', '.join(arrays)}")
        arrays = {name: array for name, array in arrays.items() if name == chosen or array.ndim == 1}
    return Arrays(str(file), arrays, chosen)


def _npy(file: Path) -> dict[str, Array]:
    with file.open("rb") as stream:  # np.load opens a memory-mapped file three times
        start = stream.read(8)
        header = {b"\x93NUMPY\x01\x00": read_array_header_1_0, b"\x93NUMPY\x02\x00": read_array_header_2_0}.get(start)
        if header is not None:
            shape, is_fortran, dtype = header(stream)
            if shape and min(shape) > 0 and not dtype.hasobject:
                order: Literal["F", "C"] = "F" if is_fortran else "C"
                return {FEATURE_KEYS[0]: np.memmap(stream, dtype, "r", stream.tell(), shape, order)}
    array = np.load(file, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError(
            "it is an archive. If it is from numpy.savez, name it .npz; if from torch, save it as safetensors"
        )
    return {FEATURE_KEYS[0]: array}


def _npz(file: Path) -> dict[str, Array]:
    archive = np.load(file, allow_pickle=False)
    if isinstance(archive, np.ndarray):
        raise ValueError("it is a single array, not an archive: name it .npy")
    with archive:
        if len(set(archive.files)) < len(archive.files):
            double = next(name for name in archive.files if archive.files.count(name) > 1)
            raise ValueError(f"it contains two arrays named {double!r}")
        arrays = {name: archive[name] for name in archive.files}
    if others := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise ValueError(f"{others[0]!r} is not a numpy array: is it a file of torch? Save it as safetensors")
    return arrays


def _safetensors(file: Path) -> dict[str, Array]:
    from safetensors.torch import load_file

    # Memory-mapped: nothing is read before it is used.
    return {name: to_numpy(tensor) for name, tensor in load_file(file).items()}


def _parquet(file: Path) -> dict[str, Array]:
    pyarrow = optional("pyarrow", "parquet", "a Parquet file")
    optional("pyarrow.compute", "parquet", "a Parquet file")
    lists = (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list)
    table = optional("pyarrow.parquet", "parquet", "a Parquet file").read_table(file, page_checksum_verification=True)
    arrays = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if any(is_kind(column.type) for is_kind in lists):
            valid = column.is_valid().to_numpy(zero_copy_only=False)
            lengths = pyarrow.compute.list_value_length(column.drop_null()).unique().to_pylist()
            if len(lengths) != 1 or not lengths[0]:
                raise ValueError(f"the vectors in column {name!r} differ in length")
            vectors = column.drop_null().flatten().to_numpy(zero_copy_only=False).reshape(-1, lengths[0])
            if not valid.all():  # NaN rows are skipped later
                vectors, present = np.full((len(column), lengths[0]), np.nan, vectors.dtype), vectors
                vectors[valid] = present
            arrays[name] = vectors
        else:
            arrays[name] = np.array(column.to_pylist())
    return arrays


VECTOR_READERS: dict[str, Callable[[Path], dict[str, Array]]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".parquet": _parquet,
}
