"""The paper's image data sets in their original folders, and two small ones beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pouf import InputError
from pouf.data.class_names import normalise_name
from pouf.data.images import EXTENSIONS, Images
from pouf.data.labels import Labelled

Split = Literal["train", "test"]
OFFICE_31 = """
back_pack bike bike_helmet bookcase bottle calculator desk_chair desk_lamp desktop_computer file_cabinet headphones
keyboard laptop_computer letter_tray mobile_phone monitor mouse mug paper_notebook pen phone printer projector
punchers ring_binder ruler scissors speaker stapler tape_dispenser trash_can
""".split()
OFFICE_HOME = """
Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair Clipboards Computer Couch
Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops Flowers Folder Fork Glasses Hammer Helmet
Kettle Keyboard Knives Lamp_Shade Laptop Marker Monitor Mop Mouse Mug Notebook Oven Pan Paper_Clip Pen Pencil
Postit_Notes Printer Push_Pin Radio Refrigerator Ruler Scissors Screwdriver Shelf Sink Sneakers Soda Speaker Spoon
TV Table Telephone ToothBrush Toys Trash_Can Webcam
""".split()
CALTECH_10 = "backpack bike calculator headphones keyboard laptop monitor mouse mug projector".split()
PACS = "dog elephant giraffe guitar horse house person".split()


@dataclass(frozen=True)
class ImageSet:
    """A data set with several domains.

    Args:
        folder: of the data set, under the one that holds all; case, hyphens and underscores do not matter.
        domains: our names -> their folders, found in the same way; spaces do not matter either.
        inside: a folder between the domain and its classes.
        classes: the names, in order; None reads them from the lists of files, or from the folders.
        recipe: the paper's settings, without "-full" and "-prompt".
        lists: `<domain>_train.txt` has the images to adapt to, `<domain>_test.txt` those to be judged on, with path and
            number per line; beside the domains or in a folder beside them.
        official: the folder's name in the archive, where it differs.
    """

    folder: str
    domains: dict[str, str]
    classes: tuple[str, ...] | None
    recipe: str
    inside: str = ""
    lists: bool = False
    official: str = ""

    def read(self, root: Path, domain: str, split: Split | None = None) -> tuple[list[str], Labelled]:
        """The classes and the labelled images of a domain; where they are listed, of one list or of both."""
        base = self.find(root)
        folder = self._domain(base, domain) / self.inside
        if not folder.is_dir():
            raise InputError(f"no folder {str(folder)!r}: {self.layout()}")
        everything = self._listed(base, domain, ("train", "test")) if self.lists else set()
        listed = self._listed(base, domain, (split,)) if self.lists and split is not None else everything
        own = base / "classes.txt"  # a stand-in has classes of its own
        if own.is_file():
            classes = own.read_text(encoding="utf-8").split()
        elif self.classes is not None:
            classes = list(self.classes)
        else:
            classes = sorted(
                {path.split("/")[1] for path in everything} or {p.name for p in folder.iterdir() if p.is_dir()}
            )
        positions = {normalise_name(name): k for k, name in enumerate(classes)}
        paths: list[Path] = []
        labels: list[int] = []
        for directory in sorted(folder.iterdir()):
            if directory.is_dir() and normalise_name(directory.name) in positions:
                for path in sorted(directory.iterdir()):
                    named = f"{self.domains[domain]}/{directory.name}/{path.name}"
                    if path.suffix.lower() in EXTENSIONS and (not listed or named in listed):
                        paths.append(path)
                        labels.append(positions[normalise_name(directory.name)])
        if not paths:
            raise InputError(
                f"no images of the classes {', '.join(classes[:3])}, … in {str(folder)!r}: {self.layout()}"
            )
        return classes, Labelled(
            Images(paths, [path.relative_to(folder).as_posix() for path in paths], str(folder)), labels
        )

    def find(self, root: Path) -> Path:
        inside = sorted(root.iterdir()) if root.is_dir() else []
        names = {_folder_key(self.folder), _folder_key(self.official or self.folder)}
        for candidate in inside:
            if candidate.is_dir() and _folder_key(candidate.name) in names:
                return candidate
        raise InputError(f"no {self.folder} in {str(root)!r}: {self.layout()}")

    def _domain(self, base: Path, domain: str) -> Path:
        """Its folder; the expected one, where there is none."""
        name = self.domains[domain]
        found = [
            path for path in sorted(base.iterdir()) if path.is_dir() and _folder_key(path.name) == _folder_key(name)
        ]
        if len(found) > 1:
            raise InputError(f"{str(base)!r} has {' and '.join(path.name for path in found)}: keep one of them")
        return found[0] if found else base / name

    def layout(self) -> str:
        domains = "|".join(self.domains.values())
        middle = f"{self.inside}/" if self.inside else ""
        lists = f" and {self.folder}/<domain>_train.txt, <domain>_test.txt" if self.lists else ""
        return f"expected {self.folder}/{{{domains}}}/{middle}<class>/*.jpg{lists}"

    def _listed(self, base: Path, domain: str, splits: Sequence[Split]) -> set[str]:
        files = [_list(base, f"{self.domains[domain]}_{split}.txt") for split in splits]
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise InputError(f"no list {str(missing[0])!r}, nor in a folder beside it: {self.layout()}")
        lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
        return {line.rsplit(" ", 1)[0] for line in lines if line.strip()}


def _list(base: Path, name: str) -> Path:
    """A list of images, beside the domains or in a folder beside them; the expected one, where there is none."""
    found = [file for file in (base / name, *sorted(base.glob(f"*/{name}"))) if file.is_file()]
    if len({file.read_bytes() for file in found}) > 1:
        raise InputError(f"{name} in {str(base)!r} and in one of its folders are not the same: keep one of them")
    return found[0] if found else base / name


def _folder_key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


IMAGE_SETS: dict[str, ImageSet] = {
    "office31": ImageSet(
        "office31", {"amazon": "amazon", "dslr": "dslr", "webcam": "webcam"}, tuple(OFFICE_31), "office31", "images"
    ),
    "office-home": ImageSet(
        "office-home", {"art": "Art", "clipart": "Clipart", "product": "Product", "real-world": "Real World"},
        tuple(OFFICE_HOME), "office-home", official="OfficeHomeDataset_10072016",
    ),
    "domainnet": ImageSet(
        "domainnet", {name: name for name in ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")}, None,
        "domainnet", lists=True,
    ),
    "office-caltech": ImageSet(
        "office_caltech10", {"dslr": "dslr", "webcam": "webcam"}, tuple(CALTECH_10), "office31"
    ),
    "pacs": ImageSet(
        "pacs", {"art-painting": "art_painting", "cartoon": "cartoon", "photo": "photo", "sketch": "sketch"},
        tuple(PACS), "office31",
    ),
}  # fmt: skip


def image_tasks(*names: str) -> list[str]:
    """`set:domain` for each domain of these data sets."""
    return [f"{name}:{domain}" for name in names for domain in IMAGE_SETS[name].domains]
