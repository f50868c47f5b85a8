"""Labelled data, for evaluation and as few shots that the user gives. The target data have no labels."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.data.base import Modality, Unlabelled
from pouf.data.class_names import normalise_name
from pouf.data.inputs import normalise
from pouf.data.tables import BadRow, read_table
from pouf.data.texts import Texts
from pouf.data.vectors import FEATURE_KEYS, LABEL_KEYS, Vectors, read_arrays
from pouf.errors import InputError

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
