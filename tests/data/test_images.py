"""Image folders of every shape, pictures of every kind, and files that are no pictures."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import train
from PIL import Image

from pouf import Classifier, Images, InputError, Recipe
from pouf.data.augment import crop_flip
from pouf.data.base import Unreadable
from pouf.data.loader import Reader, read_batches
from pouf.inference import InferenceConfig


def photo(size: tuple[int, int] = (40, 30)) -> Image.Image:
    """Red on the left, blue on the right: upright and mirrored are told apart."""
    image = Image.new("RGB", size, "red")
    image.paste("blue", (size[0] // 2, 0, *size))
    return image


def colour_at(image: Image.Image, x: float, y: float) -> tuple[int, ...]:
    return image.getpixel((int(x * image.width), int(y * image.height)))


def near(colour: tuple[int, ...], expected: tuple[int, int, int], tolerance: int = 60) -> bool:
    return all(abs(a - b) <= tolerance for a, b in zip(colour, expected, strict=True))


RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def test_a_folder_may_be_flat_nested_or_one_sub_folder_a_class(tmp_path: Path) -> None:
    for name in ("b.png", "cat/a.JPG", "deep/er/c.webp", "dog/d.jpeg", "dog/e.bmp", "f.gif"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        photo().save(tmp_path / name)
    for name in ("notes.txt", ".hidden.png", "._b.png", ".thumbnails/b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(tmp_path / "b.png", tmp_path / name)
    data = Images.from_folder(tmp_path)
    assert data.ids == ["b.png", "cat/a.JPG", "deep/er/c.webp", "dog/d.jpeg", "dog/e.bmp", "f.gif"]
    for i in range(len(data)):
        image = data.read(i)
        assert (image.mode, image.size) == ("RGB", (40, 30))
        assert near(colour_at(image, 0.1, 0.5), RED) and near(colour_at(image, 0.9, 0.5), BLUE), data.ids[i]


def test_one_file_is_a_folder_of_one(tmp_path: Path) -> None:
    photo().save(tmp_path / "a.png")
    assert Images.from_folder(tmp_path / "a.png").ids == ["a.png"]


def test_exif_rotation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90° to see it upright
    photo().save(tmp_path / "a.jpg", exif=exif)
    image = Images.from_folder(tmp_path).read(0)
    assert image.size == (30, 40)
    assert near(colour_at(image, 0.5, 0.1), RED) and near(colour_at(image, 0.5, 0.9), BLUE)


@pytest.mark.parametrize("mode", ["CMYK", "L", "1", "P", "YCbCr"])
def test_colour_spaces_become_rgb(tmp_path: Path, mode: str) -> None:
    kind = "png" if mode in ("L", "1", "P") else "tiff" if mode == "YCbCr" else "jpg"
    photo().convert(mode).save(tmp_path / f"a.{kind}")
    image = Images.from_folder(tmp_path).read(0)
    assert image.mode == "RGB"
    if mode not in ("L", "1"):
        assert near(colour_at(image, 0.1, 0.5), RED) and near(colour_at(image, 0.9, 0.5), BLUE)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_become_white(tmp_path: Path, mode: str) -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((0, 0, 255, 255), (4, 0, 8, 8))
    if mode == "P":
        image.quantize(4).save(tmp_path / "a.png")
    else:
        image.convert(mode).save(tmp_path / "a.png")
    read = Images.from_folder(tmp_path).read(0)
    assert near(colour_at(read, 0.1, 0.5), WHITE, 0)
    assert not near(colour_at(read, 0.9, 0.5), WHITE)


def test_sixteen_bit_grey_is_scaled_and_not_clipped(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(4, 0)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    values = np.asarray(Images.from_folder(tmp_path).read(0))[0, :, 0]
    assert np.abs(values.astype(int) - np.arange(256)).max() <= 1


def test_floating_point_grey_is_scaled(tmp_path: Path) -> None:
    Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32)[None]).save(tmp_path / "a.tiff")
    values = np.asarray(Images.from_folder(tmp_path).read(0))[0, :, 0]
    assert (values[0], values[-1]) == (0, 255)


def test_the_first_frame_of_a_gif_is_read(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(
        tmp_path / "a.gif", save_all=True, append_images=[Image.new("RGB", (8, 8), "blue")]
    )
    assert near(colour_at(Images.from_folder(tmp_path).read(0), 0.5, 0.5), RED)


def broken_folder(folder: Path) -> Path:
    for i in range(4):
        photo((40 + i, 30)).save(folder / f"good{i}.png")
    whole = (folder / "good0.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.webp").write_text("not a picture")
    (folder / "gone.png").symlink_to(folder / "nowhere.png")
    return folder


def test_files_that_cannot_be_read_are_skipped_counted_and_listed(tmp_path: Path, tiny: Classifier) -> None:
    data = Images.from_folder(broken_folder(tmp_path))
    encoded = tiny.encode(data)
    assert [data.ids[i] for i in encoded.indices] == ["good0.png", "good1.png", "good2.png", "good3.png"]
    assert {data.ids[i] for i in data.skipped} == {"cut.png", "empty.jpg", "text.webp", "gone.png"}
    assert all(data.skipped.values()), "each has a reason"


def test_broken_files_are_met_once_and_then_left_out(tmp_path: Path, tiny: Classifier) -> None:
    data = Images.from_folder(broken_folder(tmp_path))
    batches = read_batches(
        Reader(data, tiny.backbone.prepare), data.random_batches(2, torch.Generator().manual_seed(0))
    )
    read = [next(batches) for _ in range(20)]
    failed = [index for batch in read for index in batch.failed]
    assert len(failed) == len(set(failed)) == len(data.skipped) == 4
    assert all(len(batch.indices) == 2 for batch in read[-10:])
    assert {index for batch in read for index in batch.indices} == set(range(8)) - set(failed)


def test_worker_processes_read_the_same_in_the_same_order(tmp_path: Path, tiny: Classifier) -> None:
    data = Images.from_folder(broken_folder(tmp_path))
    alone = tiny.encode(data, InferenceConfig(2))
    again = Images.from_folder(tmp_path)
    together = tiny.encode(again, InferenceConfig(2, workers=2))
    assert together.indices == alone.indices and torch.equal(together.features, alone.features)
    assert again.skipped == data.skipped


def test_the_order_by_content_reads_only_what_is_asked_for(tmp_path: Path) -> None:
    """A million files must be in order as soon as they are listed."""
    for i in range(30):
        (tmp_path / f"{i}.png").write_bytes(bytes([i]) * (10 + i // 3))  # three of each size
    data = Images.from_folder(tmp_path)
    read = []
    original = data.digest
    data.digest = lambda index: read.append(index) or original(index)
    order = data.content_order()
    assert read == []
    order[4]
    assert len(read) == 3
    assert sorted(order) == list(range(30)) and len(read) == 30


def test_nothing_readable_is_an_error_with_an_example(tmp_path: Path, tiny: Classifier) -> None:
    (tmp_path / "a.png").write_text("no")
    with pytest.raises(InputError, match=r"none of the 1 inputs in .* can be read; the first, a.png: "):
        tiny.encode(Images.from_folder(tmp_path))
    with pytest.raises(InputError, match="none of the 1 inputs"):
        train(tiny, Images.from_folder(tmp_path), Recipe.load("demo"))


def test_the_python_interface_raises_rather_than_dropping_rows(tmp_path: Path, tiny: Classifier) -> None:
    with pytest.raises(InputError, match="4 of 8 inputs can't be read"):
        tiny.predict(broken_folder(tmp_path))


def test_empty_and_missing_folders_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no images in .*expected .jpg"):
        Images.from_folder(tmp_path)
    with pytest.raises(InputError, match="no image folder"):
        Images.from_folder(tmp_path / "nowhere")


def test_reading_an_unreadable_image_says_why(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no")
    with pytest.raises(Unreadable, match="cannot identify"):
        Images.from_folder(tmp_path).read(0)


def test_the_crop_is_square_random_and_repeatable() -> None:
    first = [np.asarray(crop_flip(photo(), 28, torch.Generator().manual_seed(seed))) for seed in range(20)]
    again = [np.asarray(crop_flip(photo(), 28, torch.Generator().manual_seed(seed))) for seed in range(20)]
    assert all(view.shape == (28, 28, 3) for view in first)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({view.tobytes() for view in first}) > 10


def test_half_of_the_crops_are_flipped() -> None:
    generator = torch.Generator().manual_seed(0)
    views = [np.asarray(crop_flip(photo(), 28, generator)).astype(int) for _ in range(300)]
    # Where a view shows both halves, red is on the left unless it was flipped.
    lean = [view[:, 0, 0].mean() - view[:, -1, 0].mean() for view in views]
    upright, mirrored = sum(x > 100 for x in lean), sum(x < -100 for x in lean)
    assert 0.35 < mirrored / (upright + mirrored) < 0.65


def test_crops_cover_areas_from_small_to_whole() -> None:
    """The ramp's range tells the width of the cut."""
    ramp = Image.fromarray(np.linspace(0, 255, 256).astype(np.uint8)[None].repeat(256, 0)).convert("RGB")
    generator = torch.Generator().manual_seed(0)
    widths = [np.ptp(np.asarray(crop_flip(ramp, 224, generator)).astype(int)) / 255 for _ in range(200)]
    assert min(widths) < 0.45 and max(widths) > 0.95
