"""Labelled data, for evaluation and as few shots, and soft labels of a teacher. The target data have no labels."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.data.base import Modality, Subset, Unlabelled
from pouf.data.class_names import normalise_name
from pouf.data.inputs import normalise
from pouf.data.tables import TABLE_READERS, BadRow, Columns, MissingColumn, read_table
from pouf.data.texts import Texts
from pouf.data.vectors import (
    CLASS_KEYS,
    FEATURE_KEYS,
    ID_KEYS,
    LABEL_KEYS,
    VECTOR_READERS,
    Vectors,
    as_matrix,
    read_arrays,
)
from pouf.errors import InputError, did_you_mean

logger = logging.getLogger(__name__)


class Labelled(NamedTuple):
    """Inputs and their labels, in the same order."""

    inputs: Unlabelled
    labels: list[int]  # indices of classes; NO_LABEL for a row that is skipped


NO_LABEL = -1


def read_labelled(
    path: str | Path,
    classes: Sequence[str],
    modality: Modality,
    text_columns: Sequence[str] = ("text",),
    label_column: str = "label",
) -> Labelled:
    """Labelled data from a path.

    Images: a folder with one sub-folder per class; the label is the nearest folder above an image that is named after
    a class. Texts: a file with a column of texts (two for pairs) and one of labels. Vectors: a file with a list of
    labels beside them. Case, spaces and underscores do not matter in labels.
    """
    known = {normalise_name(name): i for i, name in enumerate(classes)}
    if modality == "vector":
        return _labelled_vectors(path, classes, known, label_column)
    if modality == "image":
        images = normalise(Path(path), modality).data
        found = [_folder_label(Path(path), identifier, known) for identifier in images.ids]
        _check_found(found, classes, str(path), "a sub-folder named after its class")
        if all("/" not in identifier for identifier in images.ids):
            logger.warning(
                "%s has no sub-folders: all %d images are labelled %r, the name of the folder itself",
                path, len(images), classes[int(found[0])],
            )  # fmt: skip
        return Labelled(images, [label for label in found if isinstance(label, int)])
    table = read_table(path, *text_columns, label_column)
    texts = Texts.from_columns(table, text_columns, str(path))
    found = [_row_label(value, known) for value in table[label_column]]
    _check_found(found, classes, str(path), f"a class's name in column {label_column!r}")
    texts.skipped |= {i: "this row has no readable label" for i, label in enumerate(found) if label == NO_LABEL}
    return Labelled(texts, [label for label in found if isinstance(label, int)])


def _labelled_vectors(path: str | Path, classes: Sequence[str], known: dict[str, int], label: str) -> Labelled:
    """A file of vectors with a list of labels beside them: names of classes, or their positions."""
    arrays = read_arrays(path)
    vectors = Vectors(arrays.vectors(FEATURE_KEYS), str(path))
    labels = arrays.first((label, *LABEL_KEYS))
    if labels is None or len(labels) != len(vectors):
        raise InputError(f"{str(path)!r}: expected a list of {len(vectors)} labels beside the vectors, named {label!r}")
    found: list[int | str] = [
        int(value) if labels.dtype.kind in "iu" and 0 <= value < len(classes) else _row_label(value, known)
        for value in labels.tolist()
    ]
    _check_found(found, classes, str(path), "positions or names of classes")
    return Labelled(vectors, [value for value in found if isinstance(value, int)])


def _row_label(value: Any, known: dict[str, int]) -> int | str:
    if isinstance(value, BadRow):
        return NO_LABEL
    return known.get(normalise_name(str(value)), str(value))


def _folder_label(folder: Path, identifier: str, known: dict[str, int]) -> int | str:
    folders = (folder.resolve().name, *Path(identifier).parts[:-1])
    # The nearest folder, or several with a / between them, as animal/dog.
    named = ("/".join(folders[first : last + 1]) for last in reversed(range(len(folders))) for first in range(last + 1))
    return next((known[normalise_name(name)] for name in named if normalise_name(name) in known), folders[-1])


def _check_found(found: Sequence[int | str], classes: Sequence[str], source: str, expected: str) -> None:
    unknown_labels = Counter(label for label in found if isinstance(label, str))
    if unknown_labels:
        examples = ", ".join(repr(name) for name, _ in unknown_labels.most_common(5))
        raise InputError(
            f"{source}: {unknown_labels.total()} of {len(found)} labels are no class, such as {examples}; "
            f"expected {expected}: {', '.join(classes[:5])}{', …' if len(classes) > 5 else ''}"
        )


class Shots(NamedTuple):
    """Labelled inputs: targets (n, k), rows sum to 1; a hard label is a row with a single 1.

    A row without a label is 0, and its input is in `inputs.skipped`.
    """

    inputs: Unlabelled
    targets: Tensor

    def fingerprint(self) -> str:
        """A hash of inputs and targets."""
        return f"{self.inputs.fingerprint()} {blake2b(self.targets.numpy().tobytes(), digest_size=8).hexdigest()}"

    @classmethod
    def from_labelled(cls, labelled: Labelled, classes: int) -> Shots:
        labels, inputs = torch.tensor(labelled.labels), labelled.inputs.with_own_skipped()
        for index in (labels == NO_LABEL).nonzero().flatten().tolist():
            inputs.skipped.setdefault(index, "it has no label")
        return cls(inputs, (labels[:, None] == torch.arange(classes)).float())


def read_shots(
    path: str | Path,
    classes: Sequence[str],
    modality: Modality,
    text_columns: Sequence[str] = ("text",),
    label_column: str = "label",
) -> Shots:
    """Labelled examples from a file, or from an image folder with one sub-folder per class."""
    return Shots.from_labelled(read_labelled(path, classes, modality, text_columns, label_column), len(classes))


TOLERANCE = 0.02  # allowed distance of a row's sum from 1, for rounded probabilities
LABELS = (("label", "confidence"), ("class", "probability"))  # columns of a file with one class for each row


class Teacher(NamedTuple):
    """Class probabilities of the inputs, in their order: (n, k), rows sum to 1; zeros are no answer."""

    probabilities: Tensor
    source: str = "the teacher"

    @property
    def answered(self) -> Tensor:
        """(n,), which inputs have an answer."""
        return self.probabilities.sum(1) > 0

    def shots(self, data: Unlabelled) -> Shots:
        """Shots for training: all inputs, or only the answered ones if they are less than half."""
        if 2 * int(self.answered.sum()) >= len(self.probabilities):
            return Shots(data, self.probabilities)
        rows = self.answered.nonzero().flatten().tolist()
        return Shots(Subset(data, rows), self.probabilities[rows])

    def to_json(self) -> dict[str, Any]:
        return {"source": self.source, "answers": int(self.answered.sum())}

    def fingerprint(self) -> str:
        return blake2b(self.probabilities.contiguous().numpy().tobytes(), digest_size=8).hexdigest()

    @classmethod
    def from_rows(
        cls, rows: Any, data: Unlabelled, classes: Sequence[str], ids: Iterable[Any] | None = None,
        source: str = "the teacher",
    ) -> Teacher:  # fmt: skip
        """A teacher from rows (m, k), one for each input, or for each of the inputs that `ids` name; checks them."""
        values = torch.from_numpy(as_matrix(rows, source).astype("float32"))
        if values.shape[1] != len(classes):
            raise InputError(f"{source}: {values.shape[1]} columns of probabilities for {len(classes)} classes")
        names = [str(name).strip() for name in ids] if ids is not None else None
        sums = values.sum(1)
        wrong = ~values.isfinite().all(1) | (values < 0).any(1) | ((sums - 1).abs() > TOLERANCE) & (sums != 0)
        for row in wrong.nonzero().flatten().tolist()[:1]:
            which = f"row {row}" if names is None else f"the row of {names[row]!r}"
            listed = ", ".join(f"{value:g}" for value in values[row, :5].tolist()) + ", …" * (len(classes) > 5)
            raise InputError(
                f"{source}: {which} ({listed}) sums to {float(sums[row]):g}: expected probabilities, sum 1"
            )
        indices = indices_by_id(names, len(values), data, source)
        probabilities = torch.zeros(len(data), len(classes))
        probabilities[indices] = values / sums.clamp_min(1e-9)[:, None]
        teacher = cls(probabilities, source)
        if not bool(teacher.answered.any()):
            raise InputError(f"{source}: no input has an answer")
        return teacher


def indices_by_id(ids: Sequence[str] | None, rows: int, data: Unlabelled, source: str) -> list[int]:
    """The indices of the inputs of some rows: by their ids, or all inputs in their order."""
    if ids is None:
        if rows != len(data):
            raise InputError(
                f"{source}: {rows} rows for {len(data)} inputs: give one row for each in their order, or name the "
                "inputs in a column id"
            )
        return list(range(rows))
    known = {name: index for index, name in enumerate(data.ids)}
    used: set[str] = set()
    for name in ids:
        if name in used:
            raise InputError(f"{source}: the id {name!r} occurs twice")
        if name not in known:
            raise InputError(f"{source}: no input has the id {name!r}; the first one has {data.ids[0]!r}")
        used.add(name)
    return [known[name] for name in ids]


def is_file_of_answers(name: str | Path) -> bool:
    """Whether this is a file of a table or an array, not a model."""
    return Path(str(name).partition("::")[0]).suffix.lower() in (*TABLE_READERS, *VECTOR_READERS)


def read_teacher(file: str | Path, classes: Sequence[str], data: Unlabelled) -> Teacher:
    """One row for each input in their order, or by a column `id`; a column for each class, or `label` and `confidence`.

    Prediction files of pouf have this format. A row of blank cells or zeros has no answer.
    """
    source = str(file)
    if Path(source.partition("::")[0]).suffix.lower() in VECTOR_READERS.keys() - TABLE_READERS.keys():
        return _from_arrays(source, classes, data)
    id_columns = ("id", "row", "path", *data.id_columns)
    ids = next((table[name] for name in id_columns if (table := _columns(file, [name])) is not None), None)
    table = _columns(file, classes) or _columns(file, [f"p_{name}" for name in classes])
    if table is not None:
        rows = [
            [0.0 if all(map(_is_blank, values)) else _number(value, row, source) for value in values]
            for row, values in enumerate(zip(*table.values(), strict=True))
        ]
        return Teacher.from_rows(torch.tensor(rows).view(len(rows), len(classes)), data, classes, ids, source)
    for label, confidence in LABELS:
        labels = _columns(file, [label])
        if labels is not None:
            sure = (_columns(file, [confidence]) or {confidence: [1.0] * len(labels[label])})[confidence]
            return Teacher.from_rows(_spread(labels[label], sure, classes, source), data, classes, ids, source)
    read_table(file, *classes)  # says which column is missing
    raise InputError(f"{source!r}: expected a column for each class, or a column label")


def _columns(file: str | Path, names: Sequence[str]) -> Columns | None:
    """The columns, or None if one of them is missing."""
    try:
        return read_table(file, *names)
    except MissingColumn:
        return None


def _from_arrays(file: str, classes: Sequence[str], data: Unlabelled) -> Teacher:
    arrays = read_arrays(file)
    rows, names = arrays.vectors(("probabilities",)), arrays.first(CLASS_KEYS)
    if names is not None and len(names) == rows.shape[1]:
        known = [normalise_name(str(name)) for name in names.tolist()]
        for name in classes:
            if normalise_name(name) not in known:
                raise InputError(
                    f"{file!r} has no class {name!r}, only: {', '.join(known[:10])}{did_you_mean(name, known)}"
                )
        rows = rows[:, [known.index(normalise_name(name)) for name in classes]]
    ids = arrays.first(ID_KEYS)
    return Teacher.from_rows(rows, data, classes, None if ids is None else ids.tolist(), file)


def _is_blank(value: Any) -> bool:
    return value is None or isinstance(value, BadRow) or not str(value).strip()


def _number(value: Any, row: int, source: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(f"{source}: row {row} has {str(value)!r} instead of a probability") from None


def _spread(labels: Sequence[Any], confidences: Sequence[Any], classes: Sequence[str], source: str) -> Tensor:
    """(n, k): the confidence for the label, the rest spread evenly over the others."""
    known = {normalise_name(name): k for k, name in enumerate(classes)}
    rows = torch.zeros(len(labels), len(classes))
    for row, (label, confidence) in enumerate(zip(labels, confidences, strict=True)):
        if _is_blank(label):
            continue
        if normalise_name(str(label)) not in known:
            raise InputError(f"{source}: {str(label)!r} in row {row} is no class{did_you_mean(str(label), classes)}")
        sure = 1.0 if _is_blank(confidence) else _number(confidence, row, source)
        if not 0 < sure <= 1 or math.isnan(sure):
            raise InputError(f"{source}: row {row} has the confidence {sure:g}: expected a number above 0, at most 1")
        rows[row] = (1 - sure) / (len(classes) - 1)
        rows[row, known[normalise_name(str(label))]] = sure
    return rows
