"""Standard fine-tuning: an encoder under a classification head that knows nothing yet. It needs labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pouf.models.base import Backbone, Scores, Tensors
from pouf.models.cloze import Sample
from pouf.models.text_side import tokenizer_facts


class SequenceClassifier(Backbone):
    """Any `…ForSequenceClassification`. Its features are its logits, and the prototypes the unit vectors there.

    Class names play no part: what a class is, only labelled shots tell.
    """

    modality = "text"

    def __init__(self, model: nn.Module, tokenizer: Any, max_length: int) -> None:
        super().__init__()
        self.model: Any = model
        self.tokenizer = tokenizer
        self.max_length = min(max_length, tokenizer.model_max_length)
        self.register_buffer("logit_scale", torch.tensor(0.0), persistent=False)

    def preprocessing(self) -> str:
        return f"{self.max_length} {tokenizer_facts(self.tokenizer)}"

    def prepare(self, samples: Sequence[Sample]) -> Tensors:
        pairs = [(sample,) if isinstance(sample, str) else sample for sample in samples]
        columns = [list(column) for column in zip(*pairs, strict=True)]
        return dict(
            self.tokenizer(*columns, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt")
        )

    def encode_inputs(self, batch: Tensors) -> Tensor:
        logits: Tensor = self.model(**batch).logits
        return logits

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        """One unit vector each: names are as good as numbers here."""
        return torch.eye(len(prompts), device=self.device)

    def prototypes(self, classes: Sequence[str], templates: Sequence[str]) -> Tensor:
        return self.encode_prompts(classes)

    def scores(self, features: Tensor, prototypes: Tensor) -> Scores:
        return Scores(F.normalize(features, dim=1) @ prototypes.T, features @ prototypes.T, 1 / self.logit_scale.exp())

    def save_pretrained(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
