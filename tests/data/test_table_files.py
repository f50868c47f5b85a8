"""Tables as people have them: any delimiter and encoding, wrong quotes, blank rows, other case; nothing goes unsaid."""

import datetime
import json
import logging
from pathlib import Path

import openpyxl
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pouf import InputError, Texts
from pouf.data.class_names import class_set, find_class
from pouf.data.inputs import normalise
from pouf.data.tables import BadRow, read_table
from pouf.data.texts import LargeTexts
from pouf.errors import Unreadable

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"]


def read(file: Path, content: str | bytes) -> list[str]:
    """The texts of a file; in angle brackets why one can't be read."""
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    texts, found = Texts.from_file(file), []
    for i in range(len(texts)):
        try:
            found.append(texts.read(i))
        except Unreadable as error:
            found.append(f"<{error}>")
    return found


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiter_and_encoding_are_found(tmp_path: Path, delimiter: str, encoding: str) -> None:
    rows = [["id", "text", "label"], ["1", '"un, deux; trois\tquatre|cinq"', "x"], ["2", "café and more words", "y"]]
    content = "\r\n".join(delimiter.join(row) for row in rows).encode(encoding)
    assert read(tmp_path / "a.csv", content) == ["un, deux; trois\tquatre|cinq", "café and more words"]


def test_an_encoding_that_is_guessed_is_said_and_one_that_cant_be_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(tmp_path / "a.csv", "text\nun café noir\n".encode("cp1252")) == ["un café noir"]
    assert "is not UTF-8 (line 2: invalid continuation byte) and was read as Windows-1252" in caplog.text
    for content in ("text\nкафе и море\n".encode("cp1251"), "text\nun café\n".encode("cp1252") + "été\n".encode()):
        with pytest.raises(InputError, match=r"is not UTF-8 text \(line 2: .*save it as UTF-8"):
            read(tmp_path / "a.csv", content)


@pytest.mark.parametrize(
    "content",
    ['text,label\n"open,a\nworld,b\nagain,c\n', 'text,label\n"open,a\nworld,b\n"again",c\n', 'text\n"a" b\nc\n'],
    ids=["to the end", "to the next quote", "text after a quote"],
)
def test_an_open_quote_is_an_error_and_merges_no_rows(tmp_path: Path, content: str) -> None:
    with pytest.raises(InputError, match=r"the row at line 2 can't be read .* Is a quotation mark left open"):
        read(tmp_path / "a.csv", content)


def test_unquoted_delimiters_cut_no_text(tmp_path: Path) -> None:
    why = "<3 values for 2 columns: a text that holds ',' needs quotes>"
    assert read(tmp_path / "a.csv", "text,label\nhello, you,a\nworld,b\nagain,c,\n") == [why, "world", "again"]
    one_column = 'text\nhello, you; there\n"quoted, ""too"""\n'
    assert read(tmp_path / "a.csv", one_column) == ["hello, you; there", 'quoted, "too"']


def test_blank_rows_keep_the_numbers_of_the_rows_after_them(tmp_path: Path) -> None:
    blank = ["a", "<the row is blank>", "b"]
    assert read(tmp_path / "a.csv", "\ntext,label\na,1\n\nb,2\n\n\n") == blank
    lines = '{"text": "a"}\n\n{"text": "b"}\n\n'
    assert read(tmp_path / "a.jsonl", lines) == ["a", "<the line is blank>", "b"]
    large = LargeTexts(tmp_path / "a.jsonl", ["text"])
    assert len(large) == 3 and large.read(2) == "b"


def test_a_column_that_occurs_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 2 columns 'text': rename"):
        read(tmp_path / "a.csv", "text,text\na,b\n")
    assert read(tmp_path / "a.jsonl", '{"text": "a", "text": "b"}\n"c"') == [
        "<not valid JSON: 'text' occurs twice>",
        "c",
    ]


def test_columns_match_in_any_case_and_the_nearest_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, content in {"a.csv": "Text ,n\na,1\n", "a.jsonl": '{"TEXT": "a"}'}.items():
        assert read(tmp_path / name, content) == ["a"]
    assert "a.csv has no column 'text': 'Text ' is read." in caplog.text and "'TEXT' is read" in caplog.text
    assert LargeTexts(tmp_path / "a.jsonl", ["text"]).read(0) == "a"
    with pytest.raises(
        InputError, match=r"no column 'text', only: texts, n: give text_column= to read another. Did you mean 'texts'"
    ):
        read(tmp_path / "a.csv", "texts,n\na,1\n")


def test_halves_of_characters_and_nul_are_skipped(tmp_path: Path) -> None:
    found = read(tmp_path / "a.jsonl", r'{"text": "a\ud800"}' + "\n" + r'{"text": "b\u0000"}' + "\n" + '{"text": "😀"}')
    assert found == ["<the text contains half a character (a lone surrogate)>",
                     "<the text contains a NUL character: is it text at all?>", "😀"]  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "a"}, {"text": "b"}]',
        '["a", "b"]',
        '{"text": ["a", "b"], "n": [1, 2]}',
        '{"text": {"0": "a", "7": "b"}}',
    ],
)
def test_json_holds_rows_or_columns(tmp_path: Path, content: str) -> None:
    assert read(tmp_path / "a.json", content) == ["a", "b"]


def test_excel_cells_that_are_no_texts_are_skipped_and_name_inputs_all_the_same(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    day = datetime.datetime(2024, 1, 1)
    for row in (["Id", "Text"], [day, "a"], ["b", day], [3, True], [4.5, 2.5], ["#N/A", "#DIV/0!"], ["c", "#hash"]):
        book.active.append(row)
    book.save(tmp_path / "a.xlsx")
    found = read(tmp_path / "a.xlsx", (tmp_path / "a.xlsx").read_bytes())
    kinds = [f"<expected a text, not {kind}>" for kind in ("datetime", "bool", "float")]
    assert found == ["a", *kinds, "<the cell holds the error #DIV/0!>", "#hash"]
    named = Texts.from_file(tmp_path / "a.xlsx", id_columns=["id"])
    assert named.display_columns()["id"] == ["2024-01-01 00:00:00", "b", "3", "4.5", "", "c"]


@pytest.mark.parametrize("content", ['{"text": ["a"], "n": [1, 2]}', '{"text": "a"}', "3", "[", ""])
def test_json_that_is_no_table_is_an_error(tmp_path: Path, content: str) -> None:
    with pytest.raises(InputError, match=r"expected a list of rows|not valid JSON|blank"):
        read(tmp_path / "a.json", content)


def test_excel_files_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    book = openpyxl.Workbook()
    for row in ([], ["Id", "Text"], [1, "a"], [], [2, 5]):
        book.active.append(row)
    book.create_sheet("other")
    book.save(tmp_path / "a.xlsx")
    found = read(tmp_path / "a.xlsx", (tmp_path / "a.xlsx").read_bytes())
    assert found == ["a", "<the row is blank>", "<expected a text, not int>"]
    assert "has 2 sheets: the first" in caplog.text
    with pytest.raises(InputError, match="can't be read as an Excel file"):
        read(tmp_path / "b.xlsx", b"PK nonsense")


def test_data_frames_are_data() -> None:
    frame = pandas.DataFrame({"Text": ["a", "b"], "label": [1, 2]}, index=["x", "y"])
    texts = normalise(frame, "text").data
    assert [texts.read(0), texts.read(1)] == ["a", "b"] and list(texts.ids) == ["x", "y"]
    pair = normalise(frame.rename(columns={"label": "b"}), "text", ("text", "b")).data
    assert pair.items[0] == ("a", 1)
    assert normalise(frame[["label"]].astype(float), "vector").data.read(1).tolist() == [2.0]


def test_descriptions_are_read_from_csv(tmp_path: Path) -> None:
    file = tmp_path / "classes.csv"
    file.write_text("Class;description\nentity;a thing\n\nnumber;a date\nentity;an animal\n")
    assert class_set(file) == (("entity", "number"), (("a thing", "an animal"), ("a date",)))
    file.write_text("name,prompt 1,prompt 2\nentity,a thing,an animal\nnumber,a date,\n")
    assert class_set(file) == (("entity", "number"), (("a thing", "an animal"), ("a date",)))
    for names in ("class\ncat\ndog\n", "cat\ndog\n"):
        file.write_text(names)
        assert class_set(file) == (("cat", "dog"), None)
    for wrong, words in {
        "cat,a cat\ndog,a dog\n": "has the columns cat, a cat: expected class and description",
        "class,description\ncat,a cat\n,a dog\n": "a row without a class",
        "class,description\ncat,a cat\ndog,\n": "class 'dog' has an empty description",
        "class\ncat\ncat\ndog\n": "class 'cat' twice",
    }.items():
        file.write_text(wrong)
        with pytest.raises(InputError, match=words):
            class_set(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any")


@settings(max_examples=100, deadline=None)
@given(
    ending=st.sampled_from([".csv", ".tsv", ".jsonl", ".json", ".txt", ".parquet", ".xlsx"]),
    content=st.one_of(
        st.binary(max_size=80),
        st.text(alphabet="text,label;\t|\"'\n\r{}[]:ab1\0é😀", max_size=80).map(
            lambda t: ("text,label\n" + t).encode()
        ),
        st.text(max_size=40).map(lambda t: json.dumps({"text": t}).encode()),
    ),
)
def test_any_bytes_are_columns_of_one_length_or_one_clear_error(folder: Path, ending: str, content: bytes) -> None:
    logging.getLogger("pouf").setLevel(logging.ERROR)
    file = folder / f"a{ending}"
    file.write_bytes(content)
    try:
        table = read_table(file, "text", "label")
    except InputError:
        return
    finally:
        logging.getLogger("pouf").setLevel(logging.NOTSET)
    assert len(table["text"]) == len(table["label"])
    assert all(value is None or isinstance(value, (str, BadRow, int, float, dict, list)) for value in table["text"])


def test_a_class_is_found_by_its_name_or_by_the_beginning_of_one_name_alone() -> None:
    classes = ["phone", "mobile_phone", "punchers", "paper_notebook", "phone_book"]
    assert [find_class(name, classes) for name in ("Puncher", "Phone", "Mobile phone", "paper")] == [2, 0, 1, 3]
    with pytest.raises(InputError, match=r"no class 'p' among .*it may be phone, punchers, paper_notebook"):
        find_class("p", classes)
    for name in ("pone", " "):
        with pytest.raises(InputError, match=f"no class '{name}' among phone, mobile_phone"):
            find_class(name, classes)


def test_a_text_that_names_a_file_is_an_error(tmp_path: Path) -> None:
    """Whether the file is there or not: a text that looks like a data file is a slip."""
    (tmp_path / "reviews.csv").write_text("text\na\n")
    for name in (str(tmp_path / "reviews.csv"), "nothere.csv"):
        with pytest.raises(InputError, match=r"give Path\("):
            normalise(name, "text")
    assert normalise("what a great film.", "text").single
