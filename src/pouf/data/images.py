"""Folders of images, and pictures in memory."""

from __future__ import annotations

import io
import logging
import os
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from pouf.data.base import Unlabelled
from pouf.data.contents import Contents, RemoteFile, as_url, content_digest, files_below, local_copy
from pouf.errors import InputError, Unreadable, optional
from pouf.files import read_bytes

HEIC = (".heic", ".heif")  # need an extra; without it they are skipped, with the reason
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", *HEIC)
NO_IMAGES = f"expected {', '.join(EXTENSIONS)} files in it or its sub-folders"
logger = logging.getLogger(__name__)


# EXIF orientation -> the transposition that turns the image upright.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class TarMember(NamedTuple):
    """A file inside a tar archive, by the position of its bytes."""

    archive: Path
    offset: int
    size: int

    def read_bytes(self) -> bytes:
        with self.archive.open("rb") as stream:
            stream.seek(self.offset)
            content = stream.read(self.size)
        if len(content) < max(self.size, 1):
            raise OSError("the archive is truncated or damaged here")
        return content


class ImageFile(NamedTuple):
    """The bytes of an image file."""

    content: bytes

    @property
    def size(self) -> int:
        return len(self.content)

    def read_bytes(self) -> bytes:
        return self.content


Item = str | Path | TarMember | RemoteFile | ImageFile | Image.Image


def as_item(item: Any) -> Any:
    """Bytes of a file, or an undecoded image of `datasets`, `{"bytes": …, "path": …}`, as an item; other values are
    returned unchanged."""
    if isinstance(item, (bytes, bytearray, memoryview)):
        return ImageFile(bytes(item))
    if not isinstance(item, Mapping) or item.keys() != {"bytes", "path"}:
        return item
    if item["bytes"] is None and item["path"] is not None:
        return Path(item["path"])
    return ImageFile(item["bytes"] or b"")  # without either it is unreadable, and skipped


class Images(Unlabelled):
    """Images by path, inside tar archives, or in memory."""

    modality = "image"

    def __init__(self, items: Sequence[Item], ids: Sequence[str] | None = None, source: str = "the list") -> None:
        names = [printable_path(item) if isinstance(item, (str, Path)) else str(i) for i, item in enumerate(items)]
        super().__init__(names if ids is None else ids, source)
        self.items = items
        self.contents = Contents(len(items), partial(_bytes_of, items))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Images:
        """All images below a folder, at any depth, sorted by path; sub-folders carry no meaning.

        A tar archive counts as a folder; a folder of archives without images, as all of them together. Links out of
        the folder are skipped, so that a downloaded folder can't make other files of this machine be read. An address
        such as `s3://bucket/photos` is read through fsspec, each image when it is needed.
        """
        url = as_url(folder)
        if url is not None and not url.endswith(".tar"):
            named = dict(files_below(url, EXTENSIONS))
            if not named:
                raise InputError(f"no images in {url!r}: {NO_IMAGES}")
            return cls(list(named.values()), list(named), url)
        folder = local_copy(folder)
        if folder.is_file() and folder.suffix == ".tar":
            return cls.from_archives([folder], str(folder))
        if folder.is_file() and folder.suffix.lower() in EXTENSIONS:
            return cls([folder], [folder.name], str(folder))
        if folder.suffix.lower() in EXTENSIONS and not folder.exists():
            raise InputError(f"no image {str(folder)!r}: expected a file or a folder of them")
        if not folder.is_dir():
            raise InputError(f"no image folder {str(folder)!r}: expected a folder with {', '.join(EXTENSIONS)} files")
        paths: list[Path] = []
        others: list[Path] = []
        for root, folders, names in os.walk(folder):
            # Hidden files and folders (.DS_Store, .thumbnails) are the system's, not the user's.
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                if not name.startswith("."):
                    (paths if name.lower().endswith(EXTENSIONS) else others).append(Path(root, name))
        home = folder.resolve()
        archives = [] if paths else sorted(path for path in folder.rglob("*.tar") if not _is_outside(path, home))
        if archives:
            return cls.from_archives(archives, str(folder))
        if not paths:
            raise InputError(f"no images in {str(folder)!r}: {NO_IMAGES}")
        if others:
            endings = Counter(path.suffix.lower() or "without an ending" for path in others)
            listed = ", ".join(f"{n} {ending}" for ending, n in endings.most_common(5))
            logger.warning(
                "ignored in %s, not images: %s; the first is %s", folder, listed, printable_path(min(others).name)
            )
        paths.sort()
        images = cls(paths, [printable_path(path.relative_to(folder).as_posix()) for path in paths], str(folder))
        for index, path in enumerate(paths):
            if _is_outside(path, home):
                images.skipped[index] = "a link out of the folder: copy the file itself into the folder"
        return images

    @classmethod
    def from_archives(cls, archives: Sequence[str | Path], source: str | None = None) -> Images:
        """The images in tar archives, as WebDataset writes them. Only headers are read, and nothing is unpacked."""
        members: list[TarMember] = []
        ids: list[str] = []
        for archive in map(Path, archives):
            try:
                found = list(_image_members(archive))
            except (OSError, tarfile.TarError) as error:
                raise InputError(f"{str(archive)!r} is not a readable tar archive ({error}): unpack it") from None
            ids += [printable_path(f"{archive.name}/{name}") for name, _ in found]
            members += [member for _, member in found]
        source = source if source is not None else ", ".join(map(str, archives))
        if not members:
            raise InputError(f"no images in {source}: expected {', '.join(EXTENSIONS)} files in the archives")
        return cls(members, ids, source)

    def read(self, index: int, side: int | None = None) -> Image.Image:
        if index in self.skipped:
            raise Unreadable(self.skipped[index])
        item = self.items[index]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns of damaged metadata, which is not used
                if isinstance(item, Image.Image):
                    return decode(item, side)
                if str(self.ids[index]).lower().endswith(HEIC):
                    _open_heic()
                if isinstance(item, RemoteFile):
                    self.digest(index)  # from the store's metadata, if it has some
                with Image.open(io.BytesIO(self.contents.take(index))) as image:
                    return decode(image, side)
        except UnidentifiedImageError:
            raise Unreadable("not an image, or not in a format that Pillow knows") from None
        # A damaged file can raise nearly anything from a decoder: SyntaxError, struct.error, zlib.error, …
        except Exception as error:
            raise Unreadable(str(error) or type(error).__name__) from error

    def content_order(self) -> OrderByContent:
        return OrderByContent([self._size(item) for item in self.items], self.digest)

    @staticmethod
    def _size(item: Item) -> int:
        if isinstance(item, Image.Image):
            return item.width * item.height
        if isinstance(item, (TarMember, RemoteFile, ImageFile)):
            return item.size
        try:
            return os.stat(item).st_size
        except OSError:
            return -1  # reading it will report the error

    def digest(self, index: int) -> bytes:
        known = self.contents.known_digest(index)
        if known is not None:
            return known
        item = self.items[index]
        if isinstance(item, RemoteFile) and item.mark:
            return self.contents.remember(index, item.digest(), fixed=True)
        if isinstance(item, Image.Image):
            return self.contents.remember(index, content_digest(_pixels(item)))
        return self.contents.digest(index)

    def known_digest(self, index: int) -> bytes | None:
        return self.contents.known_digest(index)

    def remember(self, index: int, digest: bytes) -> None:
        self.contents.remember(index, digest)

    def peek(self) -> AbstractContextManager[None]:
        return self.contents.peek()


def _bytes_of(items: Sequence[Item], index: int) -> bytes:
    item = items[index]
    if isinstance(item, (TarMember, RemoteFile, ImageFile)):
        return item.read_bytes()
    return read_bytes(item)  # type: ignore[arg-type]


def printable_path(path: str | Path) -> str:
    """A path as printable text: bytes that are not UTF-8 become `\\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _is_outside(path: Path, root: Path) -> bool:
    """Whether a link leads out of a folder."""
    # `Path.resolve` raises an error at circular links.
    return path.is_symlink() and root not in Path(os.path.realpath(path)).parents


def _image_members(archive: Path) -> Iterator[tuple[str, TarMember]]:
    """The images of an archive by name; if it is truncated, one unreadable image stands for the lost part."""
    with tarfile.open(archive, "r:") as listing:
        try:
            for entry in listing:
                if entry.isfile() and entry.name.lower().endswith(EXTENSIONS):
                    yield entry.name, TarMember(archive, entry.offset_data, entry.size)
        except tarfile.TarError:
            if not listing.offset:
                raise
        end = listing.offset
    with archive.open("rb") as stream:
        stream.seek(end)
        is_complete = stream.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)  # tarfile itself does not check this
    if not is_complete:
        yield f"from byte {end}", TarMember(archive, end, 0)


@cache
def _open_heic() -> None:
    """Register the image format of iPhones with Pillow."""
    optional("pillow_heif", "heic", "a HEIC image").register_heif_opener()


def _pixels(image: Image.Image) -> bytes:
    return f"{image.mode} {image.size} ".encode() + image.tobytes()


class OrderByContent(Sequence[int]):
    """Indices sorted by file size, and by content among equal sizes, which are sorted only when they are accessed.

    So a million files need no reading to be put in order.
    """

    def __init__(self, sizes: Sequence[int], digest: Callable[[int], bytes]) -> None:
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._order = np.argsort(self._sizes, kind="stable")
        self._sorted_sizes = self._sizes[self._order]
        self._digest = digest
        self._settled = np.zeros(len(self._order), dtype=bool)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        if not self._settled[index]:
            size = self._sorted_sizes[index]
            first, last = np.searchsorted(self._sorted_sizes, size), np.searchsorted(self._sorted_sizes, size, "right")
            if last - first > 1:
                self._order[first:last] = sorted(self._order[first:last].tolist(), key=self._digest)
            self._settled[first:last] = True
        return int(self._order[index])


def decode(image: Image.Image, side: int | None = None) -> Image.Image:
    """The first frame, upright, as 8-bit RGB, no larger than needed.

    Args:
        side: of the square that a model reads. An image whose shorter side is at least four times as long is reduced
            by an integer factor to two to four times that size (JPEGs while decoding), since a batch of large
            photographs would take gigabytes.
    """
    image.seek(0)
    draft_jpeg(image, side)
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise Unreadable(
            f"{image.width} x {image.height} pixels, above the limit of {limit:,}: make it smaller, or raise "
            "PIL.Image.MAX_IMAGE_PIXELS"
        )
    image.load()
    rgb = to_rgb(image)
    factor = min(rgb.size) // (2 * side) if side else 1
    rgb = rgb.reduce(factor) if factor > 1 else rgb.copy() if rgb is image else rgb
    turn = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    return rgb if turn is None else rgb.transpose(turn)


def draft_jpeg(image: Image.Image, side: int | None) -> None:
    """Set the reduced size at which a large JPEG will be decoded, see `decode`."""
    factor = min(image.size) // (2 * side) if side else 1
    if factor > 1:
        image.draft("RGB", (image.width // factor, image.height // factor))


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB.

    Transparent pixels become white: the colour stored behind them is arbitrary.
    Grey of more than 8 bits is scaled down; Pillow would clip it.
    """
    if image.mode.startswith(("I", "F")):
        return _grey_to_rgb(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(ground, image).convert("RGB")
    return image.convert("RGB")


def _grey_to_rgb(image: Image.Image) -> Image.Image:
    """16-bit values range from 0 to 65,535 and floats from 0 to 1; wider ranges are scaled to fit."""
    pixels = np.array(image, dtype=np.float64)
    if not np.isfinite(pixels).all():
        raise Unreadable("the image contains pixels that are not finite")
    low, high = float(pixels.min(initial=0.0)), float(pixels.max(initial=0.0))
    if image.mode.startswith("F"):
        low, high = min(low, 0.0), max(high, 1.0)
    elif low >= 0 and high <= 65535:
        low, high = 0.0, 65535.0 if high > 255 or image.mode != "I" else 255.0
    pixels -= low  # in place: a large image would take gigabytes
    pixels *= 255.0 / (high - low)
    return Image.fromarray(pixels.round(out=pixels).astype(np.uint8)).convert("RGB")
