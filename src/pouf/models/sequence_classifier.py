"""Standard fine-tuning: an encoder with a new classification head, which needs labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.models.base import Backbone, Scores, Tensors, model_weights
from pouf.models.cloze import TextSample
from pouf.models.text_side import describe_tokenizer, tokenizer_facts

MIN_SHARE = 1e-4  # distance that a share keeps from 0 and 1


class SequenceClassifier(Backbone):
    """Any `…ForSequenceClassification`. Its features are its logits, and the prototypes the unit vectors there.

    Class names are not read: classes are defined by labelled shots alone.

    With one output it is a regression between two classes: its feature is the share y of the second, and its logits are
    log(1 - y) and log y, so that squared error on the probabilities is squared error on y. y is clamped to [0, 1],
    with a straight-through gradient.
    """

    modality = "text"
    reads_names = False

    def __init__(self, model: Any, tokenizer: Any, max_length: int, head_seed: int) -> None:
        super().__init__()
        self.head_seed = head_seed
        self.model = model
        self.tokenizer = tokenizer
        self.max_length = min(max_length, tokenizer.model_max_length)
        self.regression: bool = model.config.num_labels == 1
        self.register_buffer("logit_scale", torch.tensor(0.0), persistent=False)

    def preprocessing(self) -> str:
        return f"{self.max_length} {tokenizer_facts(self.tokenizer)}"

    def prepare(self, samples: Sequence[TextSample]) -> Tensors:
        pairs = [(sample,) if isinstance(sample, str) else sample for sample in samples]
        columns = [list(column) for column in zip(*pairs, strict=True)]
        return dict(
            self.tokenizer(
                *columns, padding=True, truncation=True, max_length=self.max_length, split_special_tokens=True,
                return_tensors="pt",
            )
        )  # fmt: skip

    def encode_inputs(self, batch: Tensors) -> Tensor:
        logits: Tensor = self.model(**batch).logits
        return logits

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        """One unit vector per prompt."""
        return torch.eye(len(prompts), device=self.device)

    def prototypes(self, prompts: Sequence[Sequence[str]]) -> Tensor:
        return torch.eye(len(prompts), device=self.device)

    def scores(self, features: Tensor, prototypes: Tensor) -> Scores:
        if self.regression:
            y = features[:, 0] + (features[:, 0].clamp(MIN_SHARE, 1 - MIN_SHARE) - features[:, 0]).detach()
            logits = torch.stack([1 - y, y], 1).log()
            return Scores(logits, logits, 1 / self.logit_scale.exp())
        return Scores(F.normalize(features, dim=1) @ prototypes.T, features @ prototypes.T, 1 / self.logit_scale.exp())

    def card_facts(self) -> dict[str, Any]:
        return {"max_length": self.max_length, "regression": self.regression}

    def describe_inputs(self) -> dict[str, Any]:
        return describe_tokenizer(self.tokenizer, self.max_length)

    def save_pretrained(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        self.model.save_pretrained(folder, state_dict=model_weights(weights))
        self.tokenizer.save_pretrained(folder)
