"""Folders of images, and pictures in memory."""

from __future__ import annotations

import io
import os
import tarfile
import warnings
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from pouf.data.base import Unlabelled, Unreadable
from pouf.errors import InputError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


class TarMember(NamedTuple):
    """A file inside a tar archive, by where its bytes lie."""

    archive: Path
    offset: int
    size: int

    def read_bytes(self) -> bytes:
        with self.archive.open("rb") as stream:
            stream.seek(self.offset)
            return stream.read(self.size)


Item = str | Path | TarMember | Image.Image


class Images(Unlabelled):
    """Images by path, inside tar archives, or already open."""

    modality = "image"

    def __init__(self, items: Sequence[Item], ids: Sequence[str] | None = None, source: str = "the list") -> None:
        names = [os.fspath(item) if isinstance(item, (str, Path)) else str(i) for i, item in enumerate(items)]
        super().__init__(names if ids is None else ids, source)
        self.items = items

    @classmethod
    def from_folder(cls, folder: str | Path) -> Images:
        """All images below a folder, at any depth, in the order of their paths. What lies where plays no part.

        A tar archive counts as a folder; a folder that holds archives and no images, as all of them together.
        """
        folder = Path(folder)
        if folder.is_file() and folder.suffix == ".tar":
            return cls.from_archives([folder], str(folder))
        if folder.is_file() and folder.suffix.lower() in EXTENSIONS:
            return cls([folder], [folder.name], str(folder))
        if folder.suffix.lower() in EXTENSIONS and not folder.exists():
            raise InputError(f"no image {str(folder)!r}: expected a file or a folder of them")
        if not folder.is_dir():
            raise InputError(f"no image folder {str(folder)!r}: expected a folder with {', '.join(EXTENSIONS)} files")
        paths: list[Path] = []
        for root, folders, names in os.walk(folder):
            # Hidden files and folders (.DS_Store, .thumbnails) are the system's, not the user's.
            folders[:] = [name for name in folders if not name.startswith(".")]
            paths += [Path(root, n) for n in names if n.lower().endswith(EXTENSIONS) and not n.startswith(".")]
        if not paths and (archives := sorted(folder.rglob("*.tar"))):
            return cls.from_archives(archives, str(folder))
        if not paths:
            raise InputError(
                f"no images in {str(folder)!r}: expected {', '.join(EXTENSIONS)} files in it or its sub-folders"
            )
        paths.sort()
        return cls(paths, [path.relative_to(folder).as_posix() for path in paths], str(folder))

    @classmethod
    def from_archives(cls, archives: Sequence[str | Path], source: str | None = None) -> Images:
        """The images in tar archives, as WebDataset writes them. Only headers are read, and nothing is unpacked."""
        members: list[TarMember] = []
        ids: list[str] = []
        for archive in map(Path, archives):
            try:
                with tarfile.open(archive, "r:") as listing:
                    for entry in listing:
                        if entry.isfile() and entry.name.lower().endswith(EXTENSIONS):
                            members.append(TarMember(archive, entry.offset_data, entry.size))
                            ids.append(f"{archive.name}/{entry.name}")
            except (OSError, tarfile.TarError) as error:
                raise InputError(f"{str(archive)!r} is no tar archive that can be read ({error}): unpack it") from None
        source = source if source is not None else ", ".join(map(str, archives))
        if not members:
            raise InputError(f"no images in {source}: expected {', '.join(EXTENSIONS)} files in the archives")
        return cls(members, ids, source)

    def read(self, index: int) -> Image.Image:
        item = self.items[index]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns of damaged metadata; the pixels are what counts
                if isinstance(item, Image.Image):
                    return to_rgb(item)
                with Image.open(io.BytesIO(item.read_bytes()) if isinstance(item, TarMember) else item) as image:
                    return to_rgb(image)
        # A damaged file can raise nearly anything from a decoder: SyntaxError, struct.error, zlib.error, …
        except Exception as error:
            raise Unreadable(str(error) or type(error).__name__) from error

    def content_order(self) -> OrderByContent:
        return OrderByContent([self._size(item) for item in self.items], self.digest)

    @staticmethod
    def _size(item: Item) -> int:
        if isinstance(item, Image.Image):
            return item.width * item.height
        if isinstance(item, TarMember):
            return item.size
        try:
            return os.stat(item).st_size
        except OSError:
            return -1  # reading it will say why

    def digest(self, index: int) -> bytes:
        item = self.items[index]
        try:
            content = _pixels(item) if isinstance(item, Image.Image) else _file(item).read_bytes()
        except OSError:
            return b""
        return blake2b(content, digest_size=16).digest()


def _file(item: str | Path | TarMember) -> Path | TarMember:
    return item if isinstance(item, TarMember) else Path(item)


def _pixels(image: Image.Image) -> bytes:
    return f"{image.mode} {image.size} ".encode() + image.tobytes()


class OrderByContent(Sequence[int]):
    """Positions by size, and among equal sizes by content, which is read only when a place among them is asked for.

    So a million files are in order as soon as they are listed.
    """

    def __init__(self, sizes: Sequence[int], digest: Callable[[int], bytes]) -> None:
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._order = np.argsort(self._sizes, kind="stable")
        self._sorted_sizes = self._sizes[self._order]
        self._digest = digest
        self._settled = np.zeros(len(self._order), dtype=bool)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, place: Any) -> Any:
        if not self._settled[place]:
            size = self._sorted_sizes[place]
            first, last = np.searchsorted(self._sorted_sizes, size), np.searchsorted(self._sorted_sizes, size, "right")
            if last - first > 1:
                self._order[first:last] = sorted(self._order[first:last].tolist(), key=self._digest)
            self._settled[first:last] = True
        return int(self._order[place])


def to_rgb(image: Image.Image) -> Image.Image:
    """The first frame, upright, as 8-bit RGB.

    Transparent pixels become white: the colour that is stored behind them was never meant to be seen.
    16-bit and floating-point grey is scaled to 8 bits, where Pillow would clip it.
    """
    image.seek(0)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        pixels = np.asarray(image, dtype=np.float64)
        # 16-bit formats use the range up to 65,535; floats are expected in [0, 1] unless they say otherwise.
        top = 65535.0 if image.mode.startswith("I") else max(1.0, float(pixels.max(initial=0.0)))
        return Image.fromarray((pixels.clip(0, top) * (255.0 / top)).round().astype(np.uint8)).convert("RGB")
    if image.mode == "RGB" and "transparency" not in image.info:
        return image.copy()
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(ground, image).convert("RGB")
    return image.convert("RGB")
