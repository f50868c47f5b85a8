"""Vectors from files: every format, memory-mapped where it can be, bad rows skipped, clear errors."""

import zipfile
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
from helpers import groups
from PIL import Image
from safetensors.numpy import save_file

from pouf import Classifier, InputError, Texts
from pouf.data.vectors import Vectors, read_arrays
from pouf.validation.review import sample_questions

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


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (torch.eye(4).to_sparse(), "expected a dense tensor"),
        (torch.ones(2, 4, device="meta"), "expected a dense tensor"),
        (torch.ones(2, 4, dtype=torch.complex64).conj(), "expected a dense tensor"),
        (np.ma.masked_array(np.ones((2, 4)), mask=[[0, 0, 0, 1], [0, 0, 0, 0]]), "some of its numbers are masked"),
    ],
)
def test_what_does_not_hold_all_its_numbers_is_refused(array, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Vectors(array)


@pytest.mark.parametrize("dtype", [">f4", ">f8", "<f2", np.longdouble])
def test_other_precisions_and_byte_orders_are_the_same_numbers(tmp_path: Path, dtype: object) -> None:
    np.save(tmp_path / "a.npy", ARRAY.astype(dtype))
    data = Vectors.from_file(tmp_path / "a.npy")
    assert np.allclose(data.tensor().float().numpy(), ARRAY, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_numbers_that_numpy_has_no_kind_for_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(ARRAY).to(dtype)
    safetensors.torch.save_file({"features": tensor}, tmp_path / "a.safetensors")
    for data in (Vectors.from_file(tmp_path / "a.safetensors"), Vectors(tensor)):
        assert np.array_equal(data.array, tensor.float().numpy())


@pytest.mark.parametrize("rows", [[[1.0, 2.0], [1.0], [1.0, 2.0, 3.0]], [[1.0, 2.0], None, [1.0]], [[], []]])
@pytest.mark.parametrize("kind", [pyarrow.list_, pyarrow.large_list])
def test_parquet_lists_of_several_lengths_are_never_reshaped(tmp_path: Path, rows: list, kind: object) -> None:
    table = pyarrow.table({"embedding": pyarrow.array(rows, kind(pyarrow.float32()))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match="differ in length"):
        Vectors.from_file(tmp_path / "a.parquet")


def test_a_number_that_is_too_large_counts_as_not_finite() -> None:
    array = ARRAY.astype(np.float64)
    array[3, 1] = 1e300
    assert set(Vectors(array).skipped) == {3}


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e25, 1e38])
def test_vectors_and_prototypes_of_any_scale_are_the_same_directions(scale: float) -> None:
    features, prototypes = groups(n=12)
    largest = features.abs().max()
    expected = Classifier.from_vectors(prototypes, list("abcdef")).predict_proba(features)
    mixed = features.clone()
    mixed[3:9] *= scale / largest
    data = Vectors(mixed)
    assert not data.skipped
    classifier = Classifier.from_vectors(prototypes * (scale / prototypes.abs().max()), list("abcdef"))
    assert torch.allclose(classifier.predict_proba(data), expected, atol=1e-4)
    assert torch.allclose(mixed[3:9] * (largest / scale), features[3:9]), "the user's own array is as it was"


def test_a_parquet_row_without_a_vector_is_skipped(tmp_path: Path) -> None:
    rows = pyarrow.array([[1.0, 2.0], None, [0.0, 3.0]], pyarrow.list_(pyarrow.float32()))
    fixed = pyarrow.array([[1.0, 2.0], None, [0.0, 3.0]], pyarrow.list_(pyarrow.float32(), 2))
    for kind, column in (("list", rows), ("fixed", fixed)):
        table = pyarrow.table({"embedding": column, "id": ["a", "b", "c"]})
        pyarrow.parquet.write_table(table, tmp_path / f"{kind}.parquet")
        data = Vectors.from_file(tmp_path / f"{kind}.parquet")
        assert set(data.skipped) == {1} and data.read(2).tolist() == [0.0, 3.0] and data.ids == ["a", "b", "c"]


@pytest.mark.parametrize("features", [np.ones((6, 4), np.int64), np.ones(4, np.float32), np.ones((2, 3, 4))])
def test_numbers_called_features_are_not_passed_over_for_another_array(tmp_path: Path, features: np.ndarray) -> None:
    np.savez(tmp_path / "a.npz", features=features, other=ARRAY)
    with pytest.raises(InputError, match=r"not features .*\(6, 4\)\. Choose with FILE::NAME"):
        Vectors.from_file(tmp_path / "a.npz")
    assert np.array_equal(Vectors.from_file(tmp_path / "a.npz::other").array, ARRAY)


def test_an_archive_with_two_arrays_of_one_name_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", features=ARRAY)
    np.save(tmp_path / "b.npy", 2 * ARRAY)
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.write(tmp_path / "b.npy", "features")  # numpy calls this one by the same name
    with pytest.raises(InputError, match="two arrays named 'features'"):
        Vectors.from_file(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("npz.npy", lambda file: np.savez(file, features=ARRAY)),
        ("torch.npy", lambda file: torch.save(torch.from_numpy(ARRAY), file)),
        ("torch.npz", lambda file: torch.save(torch.from_numpy(ARRAY), file)),
        ("npy.npz", lambda file: np.save(file, ARRAY)),
    ],
)
def test_a_file_under_another_formats_name_is_refused(tmp_path: Path, name: str, write) -> None:
    with (tmp_path / name).open("wb") as stream:
        write(stream)
    with pytest.raises(InputError, match=r"(?i)name it|save it as"):
        Vectors.from_file(tmp_path / name)


def test_a_parquet_page_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    rows = [[float(i), 1.0] for i in range(500)]
    pyarrow.parquet.write_table(
        pyarrow.table({"embedding": rows, "text": ["some text"] * 500}), file, write_page_checksum=True,
        compression="none", use_dictionary=False,
    )  # fmt: skip
    content = bytearray(file.read_bytes())
    for value in (np.float64(400.0).tobytes(), b"some text"):
        content[content.rindex(value, 0, -2000) + 6] ^= 1
    file.write_bytes(content)
    for read in (Vectors.from_file, Texts.from_file):
        with pytest.raises(InputError, match=r"(?i)crc|checksum"):
            read(file)


def test_prototypes_may_have_numbers_as_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", prototypes=ARRAY, names=np.arange(6))
    assert Classifier.from_vectors(tmp_path / "p.npz").classes == ("0", "1", "2", "3", "4", "5")
    np.savez(tmp_path / "q.npz", prototypes=ARRAY, names=np.arange(6)[:, None])
    with pytest.raises(InputError, match="a list of names"):
        Classifier.from_vectors(tmp_path / "q.npz")
    with pytest.raises(InputError, match="a class name must be a text, not 0"):
        Classifier.from_vectors(torch.from_numpy(ARRAY), range(6))


@pytest.mark.parametrize("ending", [".npz", ".parquet"])
def test_vectors_bring_ids_and_what_they_were_made_of(tmp_path: Path, ending: str) -> None:
    features, prototypes = (array.numpy() for array in groups(n=12))
    lists = {"ids": [f"r{i}" for i in range(12)], "texts": [f"text number {i}" for i in range(12)]}
    file = tmp_path / f"f{ending}"
    if ending == ".npz":
        np.savez(file, features=features, **lists)
    else:
        pandas.DataFrame({"features": list(features), **lists}).to_parquet(file)
    data = Vectors.from_file(file)
    assert list(data.ids) == lists["ids"] and data.show(3, 64) == "text number 3"
    classifier = Classifier.from_vectors(torch.from_numpy(prototypes), list("abcdef"))
    classifier = classifier.adapt(data, output=tmp_path / "run", settings={"steps": 2}).classifier
    assert (tmp_path / "run" / "predictions.csv").read_text().splitlines()[1].startswith("r0,")
    assert "text number 3" in (tmp_path / "run" / "report.html").read_text()
    review, samples = sample_questions(classifier, classifier, data, 4)
    assert all(
        sample == f"text number {question.id[1:]}" for question, sample in zip(review.questions, samples, strict=True)
    )


def test_vectors_show_the_images_that_they_were_made_of(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    np.savez(tmp_path / "f.npz", features=np.eye(2, dtype=np.float32), paths=np.array(["a.png", "gone.png"]))
    data = Vectors.from_file(tmp_path / "f.npz")
    assert data.show(0, 64).getpixel((1, 1)) == (255, 0, 0)
    assert data.show(1, 64).tolist() == [0.0, 1.0], "a picture that is gone leaves the vector"
    named = Vectors.from_file(tmp_path / "f.npz", ["paths"])
    assert named.display_columns() == {"paths": ["a.png", "gone.png"]}


def test_lists_beside_the_vectors_that_do_not_fit_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = np.eye(4, dtype=np.float32)
    np.savez(tmp_path / "a.npz", features=rows, ids=np.arange(3), paths=np.array(["a.png"] * 4))
    assert list(Vectors.from_file(tmp_path / "a.npz").ids) == ["0", "1", "2", "3"]
    assert "'ids' does not have one entry for each of the 4 vectors" in caplog.text
    assert "4 of 4 paths do not exist" in caplog.text
    np.savez(tmp_path / "b.npz", features=rows, ids=np.array(["a", "a", "b", "c"]))
    Vectors.from_file(tmp_path / "b.npz")
    assert "the ids are not distinct" in caplog.text
