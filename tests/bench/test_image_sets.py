"""The paper's image data sets in their own folders."""

from pathlib import Path

import pytest
from PIL import Image

from pouf import InputError
from pouf.bench.tasks import IMAGE_SETS, OFFICE_31, OFFICE_HOME


def put(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(file)


def test_the_class_lists_are_complete() -> None:
    assert (len(OFFICE_31), len(OFFICE_HOME)) == (31, 65)
    assert OFFICE_31[0] == "back_pack" and OFFICE_31[-1] == "trash_can"
    assert [len(IMAGE_SETS[name].domains) for name in ("office31", "office-home", "domainnet")] == [3, 4, 6]


def test_office_31_has_its_images_one_folder_deeper(tmp_path: Path) -> None:
    put(tmp_path / "Office-31/amazon/images/bike/1.jpg")
    put(tmp_path / "Office-31/amazon/images/trash_can/2.jpg")
    put(tmp_path / "Office-31/amazon/images/no_such_class/3.jpg")
    classes, labelled = IMAGE_SETS["office31"].read(tmp_path, "amazon")
    assert classes == OFFICE_31 and labelled.labels == [1, 30]


@pytest.mark.parametrize("folder", ["OfficeHome", "office-home", "OfficeHomeDataset_10072016"])
@pytest.mark.parametrize("domain", ["Real World", "Real_World", "RealWorld"])
def test_office_home_is_found_by_the_names_that_its_copies_have(tmp_path: Path, folder: str, domain: str) -> None:
    put(tmp_path / folder / domain / "Alarm_Clock/1.jpg")
    _, labelled = IMAGE_SETS["office-home"].read(tmp_path, "real-world")
    assert labelled.labels == [0]
    (tmp_path / folder / "real-world").mkdir()
    with pytest.raises(InputError, match="keep one of them"):
        IMAGE_SETS["office-home"].read(tmp_path, "real-world")


def test_domainnet_takes_what_its_lists_name(tmp_path: Path) -> None:
    for name in ("axe/1.jpg", "axe/2.jpg", "bee/3.jpg"):
        put(tmp_path / "domainnet/clipart" / name)
    (tmp_path / "domainnet/clipart_train.txt").write_text("clipart/axe/1.jpg 0\n")
    (tmp_path / "domainnet/clipart_test.txt").write_text("clipart/bee/3.jpg 1\n")
    classes, labelled = IMAGE_SETS["domainnet"].read(tmp_path, "clipart")
    assert classes == ["axe", "bee"] and labelled.labels == [0, 1]
    assert list(labelled.inputs.ids) == ["axe/1.jpg", "bee/3.jpg"]
    for split, name, label in (("train", "axe/1.jpg", 0), ("test", "bee/3.jpg", 1)):
        classes, labelled = IMAGE_SETS["domainnet"].read(tmp_path, "clipart", split)
        assert classes == ["axe", "bee"], "whatever the list"
        assert (list(labelled.inputs.ids), labelled.labels) == ([name], [label])
    (tmp_path / "domainnet/lists").mkdir()
    for split in ("train", "test"):
        name = f"clipart_{split}.txt"
        (tmp_path / "domainnet" / name).rename(tmp_path / "domainnet/lists" / name)
    assert IMAGE_SETS["domainnet"].read(tmp_path, "clipart", "test")[1].labels == [1], "in a folder of their own"
    (tmp_path / "domainnet/clipart_train.txt").write_text("clipart/axe/2.jpg 0\n")
    with pytest.raises(InputError, match=r"clipart_train.txt in .* are not the same"):
        IMAGE_SETS["domainnet"].read(tmp_path, "clipart", "train")
    for name in ("clipart_train.txt", "lists/clipart_test.txt"):
        (tmp_path / "domainnet" / name).unlink()
    with pytest.raises(InputError, match=r"no list .*clipart_test.txt.*expected domainnet/"):
        IMAGE_SETS["domainnet"].read(tmp_path, "clipart", "test")


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_an_error_about_missing_data_names_their_layout(tmp_path: Path, name: str) -> None:
    image_set = IMAGE_SETS[name]
    with pytest.raises(InputError, match=rf"no {image_set.folder} in .*expected {image_set.folder}/"):
        image_set.read(tmp_path, next(iter(image_set.domains)))
    (tmp_path / image_set.folder).mkdir()
    with pytest.raises(InputError, match=r"no folder .*<class>/\*\.jpg"):
        image_set.read(tmp_path, next(iter(image_set.domains)))
