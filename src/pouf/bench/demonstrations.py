"""Demonstrations as LM-BFF's published code shows them: how it shortens them, and which it takes."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.errors import InputError
from pouf.models.cloze import Example, Sample
from pouf.models.demonstrations import Demonstrations
from pouf.models.load import load_backbone
from pouf.models.sentence_encoder import SentenceEncoder

FILTER_RATE = 0.5  # of the shots of a class


class SimilarityFilter:
    """LM-BFF's `demo_filter`: of each class the half of the shots whose embeddings are most like the sample's.

    Args:
        model: any sentence encoder, by name or folder. Both texts of a pair are joined.
    """

    def __init__(self, model: str) -> None:
        encoder = load_backbone(model)
        if not isinstance(encoder, SentenceEncoder):
            raise InputError(f"{model!r} is no sentence encoder: filter demonstrations with one, as all-MiniLM-L6-v2")
        self.encoder = encoder.eval()
        self._known: dict[Sample, Tensor] = {}

    def __call__(self, sample: Sample, shots: tuple[tuple[Sample, int], ...]) -> tuple[tuple[Sample, int], ...]:
        """The most similar shots of each class, the sample itself left out."""
        others = [shot for shot in shots if shot[0] != sample]
        classes = sorted({label for _, label in others})
        most = max(1, int(len(others) // len(classes) * FILTER_RATE))
        similarity = torch.stack([self._embedding(text) for text, _ in others]) @ self._embedding(sample)
        order = similarity.argsort(descending=True, stable=True).tolist()
        return tuple(shot for k in classes for shot in [others[i] for i in order if others[i][1] == k][:most])

    def _embedding(self, sample: Sample) -> Tensor:
        if sample not in self._known:
            text = sample if isinstance(sample, str) else " ".join(sample)
            with torch.no_grad():
                encoded = self.encoder.encode_inputs(self.encoder.prepare([text]))
            self._known[sample] = F.normalize(encoded, dim=1)[0]
        return self._known[sample]


@dataclass(frozen=True)
class PublishedDemonstrations(Demonstrations):
    """What is too long loses the far end of its shots: the tail, or the head where they stand before the sample.

    Args:
        similar: which shots are drawn from, for a sample; None draws from all.
    """

    similar: SimilarityFilter | None = None

    def show(self, sample: Sample, draw: random.Random) -> Example:
        drawn_from = self if self.similar is None else replace(self, shots=self.similar(sample, self.shots))
        return super(PublishedDemonstrations, drawn_from).show(sample, draw)._replace(cut_solved=True)
