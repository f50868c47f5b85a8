"""Answers of a teacher: from files and arrays to one row for each input, or an error that names the first bad row."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pouf import InputError, Texts
from pouf.data.labels import Teacher, read_teacher

CLASSES = ("cat", "sea lion", "dog")
ROWS = [[0.7, 0.2, 0.1], [0.0, 0.0, 0.0], [0.1, 0.1, 0.8]]


@pytest.fixture
def data() -> Texts:
    return Texts(["one", "two", "three"])


def write(folder: Path, text: str, name: str = "answers.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "cat,sea lion,dog\n.7,.2,.1\n,,\n.1,.1,.8\n"),
        ("a.csv", "dog,cat,sea lion,id\n.8,.1,.1,2\n.1,.7,.2,0\n"),
        ("a.jsonl", '{"id": 2, "cat": 0.1, "sea lion": 0.1, "dog": 0.8}\n'
                    '{"id": 0, "cat": 0.7, "sea lion": 0.2, "dog": 0.1}'),
        ("a.csv", "row,class,p_cat,p_sea lion,p_dog\n2,dog,.1,.1,.8\n0,cat,.7,.2,.1\n"),
    ],
)  # fmt: skip
def test_a_file_is_read_by_order_or_by_id_and_blank_rows_have_no_answer(
    data: Texts, tmp_path: Path, name: str, text: str
) -> None:
    found = read_teacher(write(tmp_path, text, name), CLASSES, data)
    assert torch.allclose(found.probabilities, torch.tensor(ROWS))
    assert found.answered.tolist() == [True, False, True]


def test_a_label_with_a_confidence_leaves_the_rest_to_the_others(data: Texts, tmp_path: Path) -> None:
    found = read_teacher(write(tmp_path, "label,confidence\ndog,0.8\n,\nSea_Lion,\n"), CLASSES, data)
    assert torch.allclose(found.probabilities, torch.tensor([[0.1, 0.1, 0.8], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))


def test_arrays_have_their_columns_by_name_and_their_rows_by_id(data: Texts, tmp_path: Path) -> None:
    rows = np.array([ROWS[2], ROWS[0]], np.float32)[:, [2, 0, 1]]
    np.savez(tmp_path / "a.npz", probabilities=rows, names=["dog", "cat", "sea_lion"], ids=["2", "0"])
    found = read_teacher(tmp_path / "a.npz", CLASSES, data)
    assert torch.allclose(found.probabilities, torch.tensor(ROWS))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cat,sea lion,dog\n.7,.2,.1\n.7,.2,.1\n", "2 rows for 3 inputs"),
        ("cat,dog\n.5,.5\n.5,.5\n.5,.5\n", "no column 'sea lion'"),
        ("cat,sea lion,dog\n.7,.2,.1\n.7,.2,.3\n1,1,1\n", r"row 1 \(0.7, 0.2, 0.3\) sums to 1.2"),
        ("cat,sea lion,dog\n1,0,0\n1,0,0\nnan,0,1\n", "row 2"),
        ("cat,sea lion,dog\n1,0,0\n2,-1,0\n1,0,0\n", "row 1"),
        ("cat,sea lion,dog\n1,0,0\nhigh,0,0\n1,0,0\n", "row 1 has 'high'"),
        ("id,cat,sea lion,dog\n1,1,0,0\n2,1,0,0\n1,1,0,0\n", "'1' occurs twice"),
        ("id,cat,sea lion,dog\n1,1,0,0\n7,1,0,0\n", "no input has the id '7'"),
        ("id,cat,sea lion,dog\n2,.5,0,0\n", "the row of '2'"),
        ("label\ncat\ndoge\ncat\n", "'doge' in row 1 is no class. Did you mean 'dog'"),
        ("label,confidence\ncat,1\ncat,7\ncat,1\n", "confidence 7"),
        ("cat,sea lion,dog\n0,0,0\n0,0,0\n0,0,0\n", "no input has an answer"),
    ],
)
def test_a_bad_file_is_an_error_with_the_first_offender(data: Texts, tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_teacher(write(tmp_path, text), CLASSES, data)


def test_few_answers_have_batches_of_their_own(data: Texts) -> None:
    one = Teacher(torch.tensor([[0.0, 0, 0], [0, 1, 0], [0, 0, 0]])).shots(data)
    assert one.inputs.indices == [1] and one.targets.tolist() == [[0, 1, 0]]
    assert Teacher(torch.tensor(ROWS)).shots(data).inputs is data
