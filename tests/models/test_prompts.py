"""Class names and templates: what is accepted, and what the error says."""

from pathlib import Path

import pytest

from pouf import InputError
from pouf.data.class_names import check_classes, read_classes
from pouf.models.prompts import check_templates, fill, read_templates


def test_underscores_are_read_as_spaces() -> None:
    assert fill(["a photo of a {}.", "{}"], "back_pack") == ["a photo of a back pack.", "back pack"]


def test_braces_in_a_class_name_stay_as_they_are() -> None:
    assert fill(["a {}."], "{0}") == ["a {0}."]


@pytest.mark.parametrize("given", ["cat,dog,sea lion", " cat , dog,,sea lion,"])
def test_classes_from_a_list(given: str) -> None:
    assert read_classes(given) == ("cat", "dog", "sea lion")


def test_classes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "classes.txt"
    file.write_text("cat\n\n  dog \nsea, lion\n", encoding="utf-8-sig")
    assert read_classes(str(file)) == ("cat", "dog", "sea, lion")


def test_a_list_longer_than_a_file_name_may_be_is_still_a_list() -> None:
    names = [f"class number {i}" for i in range(1000)]
    assert len(read_classes(",".join(names))) == 1000


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (["cat", "dog", "Cat"], "duplicate class names: cat"),
        (["back_pack", "back pack"], "duplicate class names: back pack"),
        (["cat"], "at least 2"),
        (["cat", "_"], "a class name is empty"),
        ("cat", "list of names"),
    ],
)
def test_classes_that_cannot_work_are_refused(classes: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_classes(classes)


def test_a_missing_class_file_is_said() -> None:
    with pytest.raises(InputError, match=r"no class file 'classes.txt': expected a file with one name a line, or"):
        read_classes("classes.txt")


@pytest.mark.parametrize("template", ["a photo", "{} and {}", "{name}"])
def test_a_template_without_its_slot_is_refused(template: str) -> None:
    with pytest.raises(InputError, match=r"expected one: write \{\} where the name goes"):
        check_templates([template])


def test_no_template_is_refused() -> None:
    with pytest.raises(InputError, match="no template given"):
        check_templates([])


def test_templates_from_options_and_files(tmp_path: Path) -> None:
    file = tmp_path / "templates.txt"
    file.write_text("a {}.\nthe {}.\n")
    assert read_templates(["{}", str(file)]) == ("{}", "a {}.", "the {}.")
