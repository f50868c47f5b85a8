"""The data of the demo. The demo itself is run by test_report.py, which looks at its report."""

from pathlib import Path

from PIL import Image

from pouf.demo import DIGITS, write_digits


def test_the_digits_are_written_as_images_a_class_a_folder(tmp_path: Path) -> None:
    folder = write_digits(tmp_path)
    assert {path.name for path in folder.iterdir()} == set(DIGITS)
    paths = list(folder.rglob("*.png"))
    assert len(paths) == 1797
    image = Image.open(paths[0])
    assert (image.size, image.mode, image.getextrema()[1]) == ((8, 8), "L", 255)
