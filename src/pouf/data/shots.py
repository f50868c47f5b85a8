"""A few examples with labels that a user gives on purpose. The target itself stays unlabelled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pouf.data.base import Modality, Unlabelled
from pouf.data.labelled import NO_LABEL, Labelled, read_labelled


class Shots(NamedTuple):
    """Inputs and what they should be: (n, k), rows sum to 1. A hard label is a row with a single 1."""

    inputs: Unlabelled
    targets: Tensor

    @classmethod
    def from_labelled(cls, labelled: Labelled, classes: int) -> Shots:
        labels = torch.tensor([max(label, 0) for label in labelled.labels])
        for index, label in enumerate(labelled.labels):
            if label == NO_LABEL:
                labelled.inputs.skipped[index] = "no label can be read in this row"
        return cls(labelled.inputs, torch.nn.functional.one_hot(labels, classes).float())


def read_shots(
    path: str | Path,
    classes: Sequence[str],
    modality: Modality,
    columns: Sequence[str] = ("text",),
    label: str = "label",
) -> Shots:
    """Labelled examples from a file, or from an image folder with one sub-folder a class."""
    return Shots.from_labelled(read_labelled(path, classes, modality, columns, label), len(classes))
