"""The paper's tasks: image data sets in their original folders, language tasks with templates, words and metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

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
        found = find_folders(root, self.folder, self.official or self.folder)
        if not found:
            raise InputError(f"no {self.folder} in {str(root)!r}: {self.layout()}")
        return found[0]

    def _domain(self, base: Path, domain: str) -> Path:
        """Its folder; the expected one, where there is none."""
        found = find_folders(base, self.domains[domain])
        if len(found) > 1:
            raise InputError(f"{str(base)!r} has {' and '.join(path.name for path in found)}: keep one of them")
        return found[0] if found else base / self.domains[domain]

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


def find_folders(parent: Path, *names: str) -> list[Path]:
    """The folders of these names in another one; case, hyphens, underscores and spaces do not matter."""

    def key(name: str) -> str:
        return re.sub("[-_ ]", "", name.lower())

    inside = [path for path in sorted(parent.iterdir()) if path.is_dir()] if parent.is_dir() else []
    return [path for name in names for path in inside if key(path.name) == key(name)]


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


SEEDS = (42, 21, 87, 13, 100)
IN_CONTEXT_LENGTH = 512
SHOTS = 16  # labelled training examples a class, and as many for development
# Gao et al.'s settings for each seed, the best on D_dev taken: the paper's figures of these rows were made so.
GRID: dict[str, tuple[float, ...]] = {"batch_size": (2, 4, 8), "optimisation.lr": (1e-5, 2e-5, 5e-5)}
GRID_METHODS = ("fine-tuning", "lm-bff")

ONE_SENTENCE_SENTIMENT = "{text} It was [MASK]."
INFERENCE = "{text_a:drop_last}? [MASK], {text_b:lower_first}"
PARAPHRASE = "{text_a} [MASK], {text_b:lower_first}"


@dataclass(frozen=True)
class Layout:
    """Where a task lies in the archives of GLUE and LM-BFF.

    Columns are names where the file has a header, else positions.
    """

    folder: str
    columns: tuple[str, ...] | tuple[int, ...]
    label: str | int
    test: str = "dev"  # the file that has labels and is not for training: GLUE keeps those of its test to itself
    labelled_test: bool = False  # the archive has a test with labels too, and the paper judges on dev all the same


@dataclass(frozen=True)
class Task:
    """One column of the paper's table.

    Args:
        words: label → the word that stands for it, in the order of LM-BFF. The last one is the positive class.
        raw: what the archives write for these labels, where it is not the label itself.
        also: what the hub calls them, where that is neither.
        metrics: the first is the one in the table.
        scale: for a regression between two words, the score of the second.
        draws: demonstrations that a prediction of LM-BFF is averaged over.
        double: twice the length where LM-BFF shows demonstrations.
        own_limit, shot_limit: most tokens of a text beside solved ones, and of each solved one's.
        transport, information: weights in the unsupervised setting, where they are not the usual 1 and .6.
    """

    name: str
    template: str
    words: dict[str, str]
    layout: Layout
    raw: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    max_length: int = 128
    scale: float | None = None
    draws: int = 16
    double: bool = False
    own_limit: int | None = None
    shot_limit: int | None = None
    transport: float = 1.0
    information: float = 0.6

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.words)

    @property
    def pair(self) -> bool:
        return "{text}" not in self.template

    def length(self, demonstrations: Literal["", "after", "before"]) -> int:
        """Most tokens: as many as the model reads in context, before a text; LM-BFF's own numbers after it."""
        if demonstrations == "before":
            return IN_CONTEXT_LENGTH
        return self.max_length * (2 if demonstrations and self.double else 1)


BAD_OR_GOOD = {"negative": "terrible", "positive": "great"}
FIVE_STEPS = {
    "very negative": "terrible",
    "negative": "bad",
    "neutral": "okay",
    "positive": "good",
    "very positive": "great",
}
THREE_WAYS = {"contradiction": "No", "entailment": "Yes", "neutral": "Maybe"}
TWO_WAYS = {"not_entailment": "No", "entailment": "Yes"}
SAME_OR_NOT = {"not_equivalent": "No", "equivalent": "Yes"}
QUESTIONS = {
    "description": "Description", "entity": "Entity", "abbreviation": "Expression", "human": "Human",
    "location": "Location", "number": "Number",
}  # fmt: skip
BINARY = ("0", "1")
SHORT = ("neg", "pos")
PAIR = ("sentence1", "sentence2")
DOUBLE: dict[str, Any] = {"double": True, "own_limit": 110}
RTE_TEMPLATE = INFERENCE.replace("drop_last", "drop_last,first=240")


def _csv(folder: str) -> Layout:
    """LM-BFF's own files: no header, label and text."""
    return Layout(folder, (1,), 0, test="test")


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("SST-2", ONE_SENTENCE_SENTIMENT, BAD_OR_GOOD, Layout("SST-2", ("sentence",), "label"), BINARY, SHORT),
        Task("SST-5", ONE_SENTENCE_SENTIMENT, FIVE_STEPS, _csv("sst-5"), ("0", "1", "2", "3", "4"),
             **DOUBLE, shot_limit=20),
        Task("MR", ONE_SENTENCE_SENTIMENT, BAD_OR_GOOD, _csv("mr"), BINARY, SHORT, **DOUBLE, shot_limit=50),
        Task("CR", ONE_SENTENCE_SENTIMENT, BAD_OR_GOOD, _csv("cr"), BINARY, SHORT, **DOUBLE, shot_limit=50),
        Task("MPQA", ONE_SENTENCE_SENTIMENT, BAD_OR_GOOD, _csv("mpqa"), BINARY, SHORT, **DOUBLE),
        Task("Subj", "{text} This is [MASK].", {"subjective": "subjective", "objective": "objective"},
             _csv("subj"), BINARY, **DOUBLE, shot_limit=50),
        Task("TREC", "[MASK]: {text}", QUESTIONS, _csv("trec"), ("0", "1", "2", "3", "4", "5"),
             ("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM"), **DOUBLE),
        Task("CoLA", "{text} This is [MASK].", {"not_grammatical": "incorrect", "grammatical": "correct"},
             Layout("CoLA", (3,), 1), BINARY, ("unacceptable", "acceptable"), metrics=("matthews", "accuracy")),
        Task("MNLI", INFERENCE, THREE_WAYS, Layout("MNLI", PAIR, "gold_label", test="dev_matched"),
             max_length=256, draws=4),
        Task("MNLI-mm", INFERENCE, THREE_WAYS, Layout("MNLI", PAIR, "gold_label", test="dev_mismatched"),
             max_length=256, draws=4),
        Task("SNLI", INFERENCE, THREE_WAYS, Layout("SNLI", PAIR, "gold_label", labelled_test=True), max_length=256,
             draws=4),
        Task("QNLI", INFERENCE, TWO_WAYS, Layout("QNLI", ("question", "sentence"), "label")),
        Task("RTE", RTE_TEMPLATE, TWO_WAYS, Layout("RTE", PAIR, "label"), max_length=256),
        Task("MRPC", PARAPHRASE, SAME_OR_NOT, Layout("MRPC", ("#1 String", "#2 String"), "Quality"), BINARY,
             metrics=("f1", "accuracy"), transport=1e-2, information=1e-4),
        Task("QQP", PARAPHRASE, SAME_OR_NOT, Layout("QQP", ("question1", "question2"), "is_duplicate"), BINARY,
             ("not_duplicate", "duplicate"),
             metrics=("f1", "accuracy"), draws=4, transport=1e-2, information=1e-4),
        Task("STS-B", PARAPHRASE, {"0": "No", "1": "Yes"}, Layout("STS-B", PAIR, "score"),
             metrics=("pearson", "spearman"), scale=5.0),
    )
}  # fmt: skip


def accuracy(predicted: Tensor, targets: Tensor) -> float:
    """Share of samples whose most likely class is right."""
    return (predicted.argmax(1) == targets.argmax(1)).double().mean().item()


def f1(predicted: Tensor, targets: Tensor) -> float:
    """Harmonic mean of precision and recall of the last class, as "equivalent" of MRPC; 0 where it is never right."""
    from sklearn.metrics import f1_score

    positive = predicted.shape[1] - 1
    truth, guess = (targets.argmax(1) == positive).numpy(), (predicted.argmax(1) == positive).numpy()
    return float(f1_score(truth, guess, zero_division=0.0))


def matthews(predicted: Tensor, targets: Tensor) -> float:
    """Matthews' correlation of classes, in [-1, 1]; 0 where one class alone is predicted."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(targets.argmax(1).numpy(), predicted.argmax(1).numpy()))


def pearson(predicted: Tensor, targets: Tensor) -> float:
    """Correlation of the last class's probability with its target; 0 where either never changes."""
    return _correlation("pearsonr", predicted, targets)


def spearman(predicted: Tensor, targets: Tensor) -> float:
    """Correlation of the ranks of the last class's probability and of its target; 0 where either never changes."""
    return _correlation("spearmanr", predicted, targets)


def _correlation(name: str, predicted: Tensor, targets: Tensor) -> float:
    from scipy import stats

    x, y = predicted[:, -1].double().numpy(), targets[:, -1].double().numpy()
    if len(x) < 2 or x.max() == x.min() or y.max() == y.min():
        return 0.0
    return float(getattr(stats, name)(x, y).statistic)


TASK_METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}
