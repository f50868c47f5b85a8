"""Features that were computed elsewhere: npy, npz, safetensors, Parquet."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pouf.data.base import Unlabelled, Unreadable
from pouf.data.texts import RowNumbers
from pouf.errors import InputError, optional

Array = NDArray[Any]
ROWS = 65536  # looked at together


class Vectors(Unlabelled):
    """Vectors (n, d) in memory or memory-mapped. One that is not finite, or all zeros, counts as unreadable."""

    modality = "vector"

    def __init__(self, array: Array | Tensor, source: str = "the array") -> None:
        values = array.detach().cpu().numpy() if isinstance(array, Tensor) else array
        if values.ndim != 2 or values.dtype.kind != "f":
            raise InputError(f"{source}: expected numbers of shape (n, d), not {values.dtype} of shape {values.shape}")
        super().__init__(RowNumbers(len(values)), source)
        self.array = values
        for start in range(0, len(values), ROWS):
            norms = np.linalg.norm(values[start : start + ROWS].astype(np.float32), axis=1)
            for row in np.flatnonzero(~np.isfinite(norms) | (norms == 0)):
                self.skipped[start + int(row)] = "the vector is zero, or not finite"

    @classmethod
    def from_file(cls, file: str | Path) -> Vectors:
        """npy and safetensors stay on disk, memory-mapped; npz and Parquet are read."""
        return cls(read_arrays(file).vectors(FEATURES), str(file))

    def read(self, index: int) -> Array:
        if index in self.skipped:
            raise Unreadable(self.skipped[index])
        row: Array = self.array[index]
        return row

    def tensor(self) -> Tensor:
        """(n, d), the same memory: it is not to be written to."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a file opened for reading can't be written to
            return torch.from_numpy(self.array)

    def content_order(self) -> Sequence[int]:
        """By their numbers alone: the first four tell nearly all apart, the whole row those that share them."""
        first = np.ascontiguousarray(self.array[:, :4], dtype=np.float32)
        order = np.lexsort(first.T)
        same = np.flatnonzero((first[order[1:]] == first[order[:-1]]).all(1))  # equal to the next in line
        for run in np.split(same, np.flatnonzero(np.diff(same) > 1) + 1):
            if len(run):
                tied = order[run[0] : run[-1] + 2]
                order[run[0] : run[-1] + 2] = sorted(tied, key=lambda row: self.array[row].tobytes())
        return order  # type: ignore[return-value]


FEATURES = ("features", "embeddings", "embedding", "x")
PROTOTYPES = ("prototypes", "text", "embeddings", "embedding")
NAMES = ("names", "classes", "class_names", "name")
LABELS = ("labels", "label", "y")


class Arrays(NamedTuple):
    """What a file holds, by name."""

    file: str
    by_name: dict[str, Array]

    def vectors(self, usual: Sequence[str]) -> Array:
        """The array (n, d): the only one there is, or the one with a usual name."""
        tables = {name: array for name, array in self.by_name.items() if array.ndim == 2 and array.dtype.kind == "f"}
        named = [name for name in usual if name in tables]
        if len(tables) != 1 and not named:
            there = ", ".join(f"{name} {array.shape}" for name, array in self.by_name.items()) or "nothing"
            raise InputError(
                f"{self.file!r}: expected one array of shape (n, d), or one named {' or '.join(usual)}, not {there}. "
                f"Choose with FILE::NAME"
            )
        return tables[named[0]] if named else next(iter(tables.values()))

    def first(self, usual: Sequence[str]) -> Array | None:
        """A list that stands beside the vectors, if there is one."""
        return next((self.by_name[name] for name in usual if name in self.by_name), None)


def read_arrays(file: str | Path) -> Arrays:
    """The arrays of a file; `FILE::NAME` takes one of them."""
    path, _, wanted = str(file).partition("::")
    if not Path(path).is_file():
        raise InputError(f"no file {path!r}: expected vectors in {', '.join(READERS)}")
    reader = READERS.get(Path(path).suffix.lower())
    if reader is None:
        raise InputError(
            f"can't read {Path(path).name!r} as vectors: expected a file that ends in {', '.join(READERS)}"
        )
    try:
        arrays = reader(Path(path))
    except (ValueError, OSError, KeyError) as error:
        raise InputError(f"{path!r} can't be read as {Path(path).suffix[1:]}: {error}") from None
    if wanted:
        if wanted not in arrays:
            raise InputError(f"{path!r} has no array {wanted!r}, only: {', '.join(arrays)}")
        arrays = {name: array for name, array in arrays.items() if name == wanted or array.ndim == 1}
    return Arrays(str(file), arrays)


def _npy(file: Path) -> dict[str, Array]:
    return {FEATURES[0]: np.load(file, mmap_mode="r", allow_pickle=False)}


def _npz(file: Path) -> dict[str, Array]:
    with np.load(file, allow_pickle=False) as archive:
        return dict(archive)


def _safetensors(file: Path) -> dict[str, Array]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        # Memory-mapped: nothing is read before it is used. numpy has no bfloat16.
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(error) from None
    return {n: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for n, t in tensors.items()}


def _parquet(file: Path) -> dict[str, Array]:
    pyarrow = optional("pyarrow", "parquet", "a Parquet file")
    table = optional("pyarrow.parquet", "parquet", "a Parquet file").read_table(file)
    arrays = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if pyarrow.types.is_list(column.type) or pyarrow.types.is_fixed_size_list(column.type):
            flat = column.flatten().to_numpy(zero_copy_only=False)
            if len(column) == 0 or len(flat) % len(column):
                raise ValueError(f"the vectors in column {name!r} are not all of one length")
            arrays[name] = flat.reshape(len(column), -1)
        else:
            arrays[name] = np.array(column.to_pylist())
    return arrays


READERS: dict[str, Callable[[Path], dict[str, Array]]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".parquet": _parquet,
}
