"""CSV, TSV, JSONL, Parquet and plain text, with rows that can't be read."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from small_models import sentence_encoder

from pouf import Classifier, InputError, Texts
from pouf.data.batches import BatchReader, read_batches
from pouf.data.labels import NO_LABEL, read_labelled


def readable(data: Texts) -> list[str]:
    """What the data's own batches read of it, by length."""
    reader = BatchReader(data, lambda samples: {"read": samples})
    found: list[str] = []
    for read in read_batches(reader, data.batches(8)):
        data.skipped.update(read.failed)
        found += read.tensors.get("read", ())
    return found


ROWS = ["a good film", 'the "sea", again', "zwei\nZeilen", "ünïcode ☂"]


def write(file: Path, rows: list[str], column: str = "text") -> Path:
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({column: rows, "label": ["x"] * len(rows)}), file)
    elif file.suffix == ".jsonl":
        file.write_text("\n".join(json.dumps({column: row, "label": "x"}) for row in rows), encoding="utf-8")
    elif file.suffix in (".csv", ".tsv"):
        mark = "," if file.suffix == ".csv" else "\t"
        quoted = ['"' + row.replace('"', '""') + '"' for row in rows]
        file.write_text("\n".join([f"{column}{mark}label", *(f"{row}{mark}x" for row in quoted)]), encoding="utf-8-sig")
    else:
        file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return file


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_tables_are_read_whole(tmp_path: Path, ending: str) -> None:
    data = Texts.from_file(write(tmp_path / f"a{ending}", ROWS))
    assert [data.read(i) for i in range(len(data))] == ROWS
    assert data.ids == ["0", "1", "2", "3"]


def test_plain_text_is_one_a_line(tmp_path: Path) -> None:
    data = Texts.from_file(write(tmp_path / "a.txt", ["one", "", "two"]))
    assert readable(data) == ["one", "two"]
    assert data.skipped == {1: "the text is empty"}


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_another_column_can_be_named(tmp_path: Path, ending: str) -> None:
    file = write(tmp_path / f"a{ending}", ROWS, column="review")
    assert Texts.from_file(file, "review").read(0) == ROWS[0]
    with pytest.raises(InputError, match=r"has no column 'text', only: review, label"):
        Texts.from_file(file)


def test_bad_rows_are_skipped_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n{"text": \n{"other": 1}\n{"text": 3}\n"bare"\n{"text": "  "}\n')
    data = Texts.from_file(file)
    assert sorted(readable(data)) == ["bare", "good"]
    assert sorted(data.skipped) == [1, 2, 3, 5]
    assert "not valid JSON" in data.skipped[1] and "no 'text'" in data.skipped[2] and "int" in data.skipped[3]


def test_a_text_longer_than_the_csv_modules_limit_is_read(tmp_path: Path) -> None:
    data = Texts.from_file(write(tmp_path / "a.csv", ["x" * 200_000]))
    assert len(data.read(0)) == 200_000


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"", "no texts in"),
        ("a.jsonl", b"", "no texts in"),
        ("a.csv", b"text\n\x81\xfe\n", "not UTF-8"),
        ("a.parquet", b"nonsense", "not a readable Parquet file"),
        ("a.docx", b"x", "expected a file that ends in .csv"),
    ],
)
def test_files_that_cannot_be_used_are_errors(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        Texts.from_file(tmp_path / name)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        Texts.from_file(tmp_path / "a.csv")


def test_batches_hold_texts_of_similar_length_and_features_come_back_in_order(tmp_path: Path) -> None:
    texts = ["cat " * n + "dog" for n in (9, 1, 7, 3, 8, 2)]
    assert [[draw.position for draw in batch] for batch in Texts(texts).batches(2)] == [[1, 5], [3, 2], [4, 0]]
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path), ["good", "bad"])
    alone = torch.cat([classifier.features([text]) for text in texts])
    assert torch.allclose(classifier.features(texts, batch_size=2), alone, atol=1e-5)


def test_the_order_of_rows_does_not_steer_the_training() -> None:
    forth, back = Texts(ROWS), Texts(ROWS[::-1])
    assert [forth.read(i) for i in forth.content_order()] == [back.read(i) for i in back.content_order()]


def test_labelled_texts_match_classes_by_name(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"text": "a", "label": "Not_Good"}, {"text": "b", "label": "fine"}]
    file.write_text("\n".join(map(json.dumps, rows)) + '\n{"text": broken\n')
    labelled = read_labelled(file, ["fine", "not good"], "text")
    assert labelled.labels == [1, 0, NO_LABEL]
    assert readable(labelled.inputs) == ["a", "b"]


def test_labels_that_are_no_class_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "label": "fine"}\n{"text": "b", "label": "bad"}')
    with pytest.raises(InputError, match="1 of 2 labels are no class, such as 'bad'"):
        read_labelled(file, ["fine", "good"], "text")


def test_labelled_images_take_the_nearest_folder_that_is_a_class(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("Back_Pack/x/1.png", "mug/2.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    assert read_labelled(tmp_path, ["mug", "back pack"], "image").labels == [1, 0]
    Image.new("RGB", (4, 4)).save(tmp_path / "3.png")
    with pytest.raises(InputError, match="1 of 3 labels are no class"):
        read_labelled(tmp_path, ["mug", "back pack"], "image")
