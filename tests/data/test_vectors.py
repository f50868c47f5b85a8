"""Vectors from files: every format, memory-mapped where it can be, bad rows skipped, clear errors."""

from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.numpy import save_file

from pouf import InputError
from pouf.data.vectors import Vectors, read_arrays

ARRAY = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def written(folder: Path, kind: str) -> Path:
    file = folder / f"vectors.{kind}"
    if kind == "npy":
        np.save(file, ARRAY)
    elif kind == "npz":
        np.savez(file, features=ARRAY, labels=np.arange(6))
    elif kind == "safetensors":
        save_file({"features": ARRAY}, file)
    else:
        table = pyarrow.table({"embedding": ARRAY.tolist(), "title": list("abcdef")})
        pyarrow.parquet.write_table(table, file)
    return file


@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors", "parquet"])
def test_every_format_gives_the_same_vectors(tmp_path: Path, kind: str) -> None:
    data = Vectors.from_file(written(tmp_path, kind))
    assert np.allclose(data.array, ARRAY) and len(data) == 6 and data.ids[5] == "5"


def test_a_file_of_numbers_stays_on_disk(tmp_path: Path) -> None:
    data = Vectors.from_file(written(tmp_path, "npy"))
    assert isinstance(data.array, np.memmap)
    assert np.shares_memory(data.tensor().numpy(), data.array)


def test_rows_that_are_no_directions_are_skipped() -> None:
    array = ARRAY.copy()
    array[1, 2], array[4] = np.nan, 0
    assert set(Vectors(array).skipped) == {1, 4}


def test_the_order_of_training_follows_the_contents_and_not_the_rows() -> None:
    shuffled = np.random.default_rng(1).permutation(6)
    one, other = Vectors(ARRAY), Vectors(ARRAY[shuffled])
    assert np.array_equal(ARRAY[one.content_order()], ARRAY[shuffled][other.content_order()])


def test_one_array_of_several_is_chosen_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "both.npz"
    np.savez(file, left=ARRAY, right=ARRAY[:2], names=np.array(list("abcdef")))
    assert len(Vectors.from_file(f"{file}::right")) == 2
    assert read_arrays(f"{file}::left").first(["names"]).tolist() == list("abcdef")
    with pytest.raises(InputError, match=r"expected one array of shape \(n, d\).*left \(6, 4\).*FILE::NAME"):
        Vectors.from_file(file)
    with pytest.raises(InputError, match="has no array 'middle', only: left, right, names"):
        Vectors.from_file(f"{file}::middle")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.npy", b"nothing", "can't be read as npy"),
        ("a.npz", b"nothing", "can't be read as npz"),
        ("a.safetensors", b"nothing", "can't be read as safetensors"),
        ("a.parquet", b"nothing", "can't be read as parquet"),
        ("a.txt", b"nothing", "expected a file that ends in .npy, .npz"),
    ],
)
def test_bad_files_say_what_was_expected(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        Vectors.from_file(tmp_path / name)
    with pytest.raises(InputError, match="no file"):
        Vectors.from_file(tmp_path / "missing.npy")


@pytest.mark.parametrize("array", [np.zeros(3, np.float32), np.zeros((3, 2), np.int64), torch.zeros(2, 2, 2)])
def test_other_shapes_and_kinds_are_refused(array) -> None:
    with pytest.raises(InputError, match=r"expected numbers of shape \(n, d\)"):
        Vectors(array)
