"""Image folders of every shape, pictures of every kind, and files that are no pictures."""

import gc
import os
import shutil
import tarfile
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import train
from PIL import Image

from pouf import Classifier, Images, InputError, Recipe
from pouf.data.batches import BatchReader, read_batches
from pouf.data.images import _open_heic
from pouf.data.labels import read_labelled
from pouf.data.views import crop_flip
from pouf.errors import Unreadable
from pouf.inference.cache import FeatureCache
from pouf.inference.encode import InferenceConfig
from pouf.runs.predict import prediction_rows, write_rows


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
    try:
        Image.open(tmp_path / f"a.{kind}").load()
    except OSError:
        pytest.skip("this Pillow can't read the YCbCr that it wrote")
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
        BatchReader(data, tiny.backbone.prepare), data.random_batches(2, torch.Generator().manual_seed(0))
    )
    read = []
    for _ in range(20):
        read.append(next(batches))
        data.skipped.update(read[-1].failed)
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
    with pytest.raises(Unreadable, match="not an image, or not in a format"):
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


def test_large_images_are_decoded_no_larger_than_the_model_needs(tmp_path: Path) -> None:
    large = photo((1600, 1200))
    for name in ("a.jpg", "b.png"):
        large.save(tmp_path / name)
    data = Images.from_folder(tmp_path)
    for index in range(2):
        assert data.read(index).size == (1600, 1200)
        small = data.read(index, 100)
        assert 200 <= min(small.size) < 400 and abs(small.width * 3 - small.height * 4) <= 3
        whole, reduced = (np.asarray(image.resize((50, 50)), float) for image in (data.read(index), small))
        assert np.abs(whole - reduced).mean() < 2
    assert data.read(0, 301).size == (1600, 1200), "below four times the side nothing changes"


def test_a_turned_photograph_is_reduced_and_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photo((1600, 1200)).save(tmp_path / "a.jpg", exif=exif)
    image = Images.from_folder(tmp_path).read(0, 100)
    assert image.size == (300, 400)
    assert near(colour_at(image, 0.5, 0.1), RED) and near(colour_at(image, 0.5, 0.9), BLUE)


def test_an_image_of_too_many_pixels_is_skipped_before_it_is_decoded(tmp_path: Path) -> None:
    """13,300 x 13,300 pixels of one colour are 170 kB in a file and half a gigabyte in memory."""
    Image.new("1", (13300, 13300)).save(tmp_path / "bomb.png")
    # Whoever decodes it says that it is cut.
    (tmp_path / "bomb.png").write_bytes((tmp_path / "bomb.png").read_bytes()[:200])
    with pytest.raises(Unreadable, match=r"13300 x 13300 pixels, above the limit of 89,478,485"):
        Images.from_folder(tmp_path).read(0)


@pytest.mark.parametrize("values", [[0, 70_000, 1_000_000], [-500, 0, 500], [0, 128, 255], [0, 1, 2_147_483_647]])
def test_whole_numbers_of_32_bits_keep_their_contrast(tmp_path: Path, values: list[int]) -> None:
    Image.fromarray(np.array([values], np.int32)).save(tmp_path / "a.tiff")
    pixels = np.asarray(Images.from_folder(tmp_path).read(0))[0, :, 0].astype(int)
    assert pixels[0] == 0 and pixels[-1] == 255 and (np.diff(pixels) >= 0).all()


@pytest.mark.parametrize("values", [[0.0, 5000.0, 10000.0], [-1.0, 0.0, 1.0]])
def test_floats_beyond_one_are_scaled(tmp_path: Path, values: list[float]) -> None:
    Image.fromarray(np.array([values], np.float32)).save(tmp_path / "a.tiff")
    pixels = np.asarray(Images.from_folder(tmp_path).read(0))[0, :, 0].astype(int)
    assert pixels[0] == 0 and 120 <= pixels[1] <= 135 and pixels[2] == 255


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_pixels_that_are_no_numbers_are_no_image(tmp_path: Path, value: float) -> None:
    Image.fromarray(np.array([[value, 0.5, 1.0]], np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(Unreadable, match="not finite"):
        Images.from_folder(tmp_path).read(0)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("listed", [False, True])
def test_pipes_devices_and_links_to_elsewhere_are_skipped_and_never_opened(
    tmp_path: Path, tiny: Classifier, listed: bool
) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    (inside / "sub").mkdir(parents=True)
    outside.mkdir()
    photo().save(inside / "sub" / "good.png")
    photo().save(outside / "secret.png")
    os.mkfifo(inside / "pipe.png")
    (inside / "zero.png").symlink_to("/dev/zero")
    (inside / "secret.png").symlink_to(outside / "secret.png")
    (inside / "near.png").symlink_to("sub/good.png")
    data = Images(sorted(inside.rglob("*.png"))) if listed else Images.from_folder(inside)
    encoded = tiny.encode(data, InferenceConfig(cache=FeatureCache(tmp_path / "cache")))
    read = {Path(data.ids[i]).name for i in encoded.indices}
    # Whoever names a file means it; a folder is only searched.
    assert read == ({"good.png", "near.png", "secret.png"} if listed else {"good.png", "near.png"})
    reasons = {Path(data.ids[i]).name: why for i, why in data.skipped.items()}
    assert reasons["pipe.png"] == "not a regular file"
    assert listed or "a link out of the folder" in reasons["secret.png"]


@pytest.mark.parametrize("alone", [False, True])
def test_links_that_lead_in_a_circle_are_skipped(tmp_path: Path, tiny: Classifier, alone: bool) -> None:
    if not alone:
        photo().save(tmp_path / "good.png")
    for name, target in (("a.png", "b.png"), ("b.png", "a.png"), ("folder", "folder"), ("x.tar", "x.tar")):
        (tmp_path / name).symlink_to(target)
    data = Images.from_folder(tmp_path)
    with pytest.raises(InputError, match="none of the 2 inputs") if alone else nullcontext():
        assert [data.ids[i] for i in tiny.encode(data).indices] == ["good.png"]
    assert {data.ids[i] for i in data.skipped} == {"a.png", "b.png"}


def test_names_that_are_not_utf8_are_shown_and_predictions_written(tmp_path: Path, tiny: Classifier) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    try:
        photo().save(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.png"))
    except OSError:
        pytest.skip("this file system knows UTF-8 alone")
    data = Images.from_folder(folder)
    assert data.ids == ["caf\\xe9.png"]
    blocks = tiny.score_blocks(tiny.encode(data))
    write_rows(tmp_path / "out.csv", prediction_rows(tiny.classes, data, blocks))
    assert "caf\\xe9.png" in (tmp_path / "out.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize("where", ["in a header", "after a member", "a spoiled header"])
def test_a_cut_archive_says_what_is_lost(tmp_path: Path, tiny: Classifier, where: str) -> None:
    """tarfile takes most of this for the end. Names that lead out of the folder are names: nothing is unpacked."""
    for i in range(3):
        photo((40, 30 + i)).save(tmp_path / f"{i}.png")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for i in range(3):
            archive.add(tmp_path / f"{i}.png", f"../../{i}.png")
        end = archive.offset
    content = bytearray((tmp_path / "a.tar").read_bytes())
    last = content.rindex(b"../../2.png")
    if where == "a spoiled header":
        content[last + 150] ^= 1
    else:
        del content[last + 200 if where == "in a header" else end :]
    (tmp_path / "a.tar").write_bytes(content)
    data = Images.from_folder(tmp_path / "a.tar")
    encoded = tiny.encode(data)
    assert len(encoded.indices) == (3 if where == "after a member" else 2)
    (reason,) = data.skipped.values()
    assert reason == "the archive is truncated or damaged here" and "a.tar/from byte" in data.ids[-1]


def test_photographs_of_iphones_are_read_and_other_files_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, not_installed: Callable[[str], None]
) -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.from_pillow(Image.new("RGB", (64, 64), "red")).save(tmp_path / "a.HEIC")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "clip.mov").write_bytes(b"film")
    images = Images.from_folder(tmp_path)
    red, green, _ = images.read(0).getpixel((5, 5))
    assert len(images) == 1 and red > 200 and green < 60
    assert "not images: 1 .mov, 1 .txt; the first is clip.mov" in caplog.text or "1 .txt, 1 .mov" in caplog.text
    _open_heic.cache_clear()
    not_installed("pillow_heif")
    with pytest.raises(Unreadable, match=r"a HEIC image needs pillow_heif: pip install \"pouf\[heic\]\""):
        images.read(0)


def test_a_flat_folder_of_labelled_images_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mug").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "mug" / "1.png")
    assert read_labelled(tmp_path / "mug", ["back pack", "mug"], "image").labels == [1]
    assert "has no sub-folders: all 1 images are labelled 'mug'" in caplog.text


def test_images_are_free_once_nobody_uses_them() -> None:
    """Without waiting for Python's collector of cycles: a server decodes many."""
    gc.disable()
    try:
        image = Image.new("RGB", (8, 8))
        freed = weakref.ref(image)
        images = Images([image])
        images.read(0)
        del image, images
        assert freed() is None
    finally:
        gc.enable()
