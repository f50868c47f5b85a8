"""Demonstrations: labelled examples in the input next to each sample, as in LM-BFF and in-context learning."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pouf.data.labels import Shots
from pouf.errors import InputError, Unreadable
from pouf.models.base import Backbone, Tensors
from pouf.models.templates import Example, TextSample

EXAMPLES_AT_ONCE = 64  # inputs encoded at once: larger batches are not faster and need more padding


@dataclass(frozen=True)
class Demonstrations:
    """Labelled shots, and how they are drawn.

    Args:
        shots: samples and the indices of their classes.
        place: "after" puts one shot of each class after the sample, as LM-BFF does; "before" up to `count` shots of
            any class before it, as in-context learning does, as many of them as fit.
        samples: number of draws that a prediction is averaged over.
        seed: of the draws. They depend on the sample's text, not on its index.
        own_limit, shot_limit: maximum tokens of the sample's first text, and of each text of a shot; None is no limit.
    """

    shots: tuple[tuple[TextSample, int], ...]
    place: Literal["after", "before"] = "after"
    samples: int = 16
    count: int = 32
    seed: int = 0
    own_limit: int | None = None
    shot_limit: int | None = None

    def __post_init__(self) -> None:
        if self.place not in ("after", "before"):
            raise InputError(f"unknown place {self.place!r} of demonstrations: choose after or before")
        if self.samples < 1 or self.count < 1:
            raise InputError("demonstrations need at least one sample and a count of at least one")

    @classmethod
    def from_shots(cls, shots: Shots, **settings: object) -> Demonstrations:
        """Demonstrations from shots; a soft label counts as its most likely class, unreadable inputs are left out."""
        labels = shots.targets.argmax(1).tolist()
        solved = []
        for index, label in enumerate(labels):
            if index in shots.inputs.skipped:
                continue
            try:
                solved.append((shots.inputs.read(index), label))
            except Unreadable as error:
                shots.inputs.skipped[index] = str(error)
        missing = set(range(shots.targets.shape[1])) - {label for _, label in solved}
        if missing:
            raise InputError(
                f"no shot of class number {min(missing)} in {shots.inputs.source}: demonstrations need one per class"
            )
        return cls(tuple(solved), **settings)  # type: ignore[arg-type]

    def show(self, sample: TextSample, draw: random.Random) -> Example:
        """The sample with drawn shots, never the sample itself."""
        others = [shot for shot in self.shots if shot[0] != sample]
        alone = Example(sample, own_limit=self.own_limit, shot_limit=self.shot_limit)
        if self.place == "before":
            return alone._replace(before=tuple(draw.sample(others, min(self.count, len(others)))))
        # If a class has no other shot than this sample, it has none left.
        by_class = [[shot for shot in others if shot[1] == label] for label in sorted({k for _, k in self.shots})]
        return alone._replace(after=tuple(draw.choice(shots) for shots in by_class if shots))

    def at_random(self, sample: TextSample, seed: int) -> Example:
        """For training: the shots depend on the seed."""
        return self.show(sample, random.Random(seed))

    def views(self, sample: TextSample) -> list[Example]:
        """For prediction: `samples` draws of shots, which depend on the text alone."""
        return [self.show(sample, random.Random(f"{self.seed} {view} {sample}")) for view in range(self.samples)]


class DemonstrationEncoder:
    """Encodes each sample with its demonstrations by a masked language model; features are means over all draws.

    The logits are linear in the features, so that they are the means of the draws' logits.

    All draws of a batch are prepared together. Equal inputs are encoded once, and inputs of similar length together,
    which needs less padding than encoding draw by draw.
    """

    def __init__(self, backbone: Backbone, demonstrations: Demonstrations) -> None:
        self.backbone, self.demonstrations = backbone, demonstrations
        self.device, self.ready_features = backbone.device, backbone.ready_features
        self.fingerprint, self.image_size = backbone.fingerprint, backbone.image_size
        self.sharded = backbone.sharded

    def prepare(self, samples: Sequence[Any]) -> Tensors:
        """Tensors of all draws of the first sample, then of the second, and so on."""
        return self.backbone.prepare([example for sample in samples for example in self.demonstrations.views(sample)])

    def encode_inputs(self, batch: Tensors) -> Tensor:
        """Mean features over the draws of each sample: tensors of (n · samples, …) -> (n, d)."""
        ids, which = batch["input_ids"].unique(dim=0, return_inverse=True)  # all of one length
        one_of_each = torch.empty(len(ids), dtype=torch.long, device=ids.device)
        one_of_each[which] = torch.arange(len(which), device=ids.device)
        different = {name: tensor[one_of_each] for name, tensor in batch.items()}
        lengths = different["attention_mask"].sum(1)
        order = lengths.argsort()
        parts = []
        # Processes that share sharded weights must call the model equally often.
        for rows in order.split(len(order) if self.sharded else EXAMPLES_AT_ONCE):
            longest = int(lengths[rows[-1]])
            cut = {name: t[rows, :longest] if t.ndim == 2 else t[rows] for name, t in different.items()}
            parts.append(self.backbone.encode_inputs(cut))
        features = torch.cat(parts)[order.argsort()[which]]  # (n · samples, d)
        return features.view(-1, self.demonstrations.samples, features.shape[1]).mean(1)
