"""Precomputed features and prototypes without a model, as from a vector database."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pouf.data.base import Unlabelled
from pouf.data.class_names import Classes, ClassSet, class_set, number_duplicates
from pouf.data.vectors import (
    CLASS_KEYS,
    PROTOTYPE_KEYS,
    Vectors,
    as_matrix,
    read_arrays,
    rescale_extreme_rows,
    row_maxima,
)
from pouf.errors import InputError
from pouf.files import read_tensors
from pouf.models.base import Backbone, Tensors

CLIP_TEMPERATURE = 0.01  # of CLIP and most of its relatives


class Precomputed(Backbone):
    """Trainable prototypes (k, d), and a linear map of the features (d, d) that starts as the identity.

    Args:
        prototypes: (k, d), one for each class, in the order of the classes.
        temperature: softmax temperature of the model that computed the vectors; CLIP's is 0.01.
    """

    modality = "vector"
    added_by_tuners = ("map",)
    reads_names = False
    saved_whole = True

    def __init__(self, prototypes: Tensor, temperature: float = CLIP_TEMPERATURE) -> None:
        super().__init__()
        table = as_matrix(prototypes, "the prototypes")
        largest = row_maxima(table)
        bad = ~np.isfinite(largest) | (largest == 0)
        if bad.any():
            raise InputError(f"prototype {int(bad.argmax())} is zero, or not finite: give one vector per class")
        unit = nn.functional.normalize(torch.from_numpy(rescale_extreme_rows(table, largest)).float(), dim=1)
        self.table = nn.Parameter(unit.clone())
        self.map: nn.Parameter | None = None
        self.register_buffer("start", unit)  # the zero-shot prototypes, saved too
        self.register_buffer("logit_scale", torch.tensor(math.log(1 / temperature)))

    @classmethod
    def from_saved(cls, folder: Path, adapted: bool) -> Precomputed:
        """Load what `save_pretrained` wrote.

        Args:
            adapted: load the tuned weights, not those before training.
        """
        tensors = read_tensors(folder / "model.safetensors")
        if not {"start", "table", "logit_scale"} <= tensors.keys():
            raise InputError(f"{str(folder / 'model.safetensors')!r} lacks its prototypes: restore it, or adapt again")
        backbone = cls(tensors["start"])
        if adapted:
            if "map" in tensors:
                backbone.add_map()
            backbone.load_weights(folder)
        else:
            backbone.logit_scale.copy_(tensors["logit_scale"])
        return backbone

    def check_question(self, classes: ClassSet, templates: Sequence[str] | None) -> tuple[str, ...]:
        if classes.descriptions is not None:
            raise InputError("descriptions need a model that reads them: give the names alone")
        return super().check_question(classes, templates)

    @property
    def own_prototypes(self) -> nn.Parameter:
        return self.table

    def card_facts(self) -> dict[str, Any]:
        return {"vectors": True}

    def describe_inputs(self) -> dict[str, Any]:
        return {"steps": ["float32 vectors of the model that computed the prototypes, of any norm"]}

    def add_map(self) -> nn.Parameter:
        """Pass features through a trainable linear map, the identity at first."""
        if self.map is None:
            self.map = nn.Parameter(torch.eye(self.table.shape[1], device=self.device))
        return self.map

    def prepare(self, samples: Sequence[Any]) -> Tensors:
        return {"vectors": self._checked(torch.from_numpy(np.stack(samples)))}

    def encode_inputs(self, batch: Tensors) -> Tensor:
        vectors = nn.functional.normalize(batch["vectors"].float(), dim=1)
        return vectors if self.map is None else vectors @ self.map.T

    def ready_features(self, data: Unlabelled) -> Tensor | None:
        if self.map is not None or not isinstance(data, Vectors):
            return None
        return self._checked(data.tensor())

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        raise InputError("prompts need a model that reads them: give prototypes instead")

    def prototypes(self, prompts: Sequence[Sequence[str]]) -> Tensor:
        return nn.functional.normalize(self.table, dim=1)

    def _checked(self, vectors: Tensor) -> Tensor:
        if vectors.shape[1] != self.table.shape[1]:
            raise InputError(
                f"features have {vectors.shape[1]} dimensions, but prototypes {self.table.shape[1]}: "
                "take both from the same model"
            )
        return vectors


def read_vectors(prototypes: Tensor | str | Path, classes: Classes | None) -> tuple[Precomputed, Sequence[str]]:
    """Prototypes and the names of their classes, which may stand in the same file. See `Classifier.from_vectors`."""
    if isinstance(prototypes, (str, Path)):
        prototypes, names = read_prototypes(prototypes)
        classes = names if classes is None else classes
    prototypes = torch.from_numpy(as_matrix(prototypes, "the prototypes"))
    if isinstance(classes, (Mapping, Path)):
        classes, descriptions = class_set(classes)
        if descriptions is not None:
            raise InputError("vectors come without a model that could read descriptions: give the names alone")
    if classes is None or len(classes) != len(prototypes):
        found = "none" if classes is None else len(classes)
        raise InputError(
            f"expected names for {len(prototypes)} prototypes, not {found}: give the classes in their order"
        )
    return Precomputed(prototypes), number_duplicates(classes)


def read_prototypes(file: str | Path) -> tuple[Tensor, list[str] | None]:
    """One vector per class, (k, d), and the names of the classes if the file has them."""
    arrays = read_arrays(file)
    named = arrays.first(CLASS_KEYS)
    prototypes = torch.from_numpy(np.array(as_matrix(arrays.vectors(PROTOTYPE_KEYS), str(file)), dtype=np.float32))
    if named is not None and named.ndim != 1:
        raise InputError(f"{str(file)!r}: expected a list of names beside the prototypes, not shape {named.shape}")
    return prototypes, None if named is None else [str(name) for name in named.tolist()]
