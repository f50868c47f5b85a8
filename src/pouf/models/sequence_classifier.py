"""Models with a classification head: for fine-tuning with labels, and cross-encoders as teachers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.errors import InputError
from pouf.models.base import Scores, Tensors, TransformersBackbone
from pouf.models.templates import TextSample
from pouf.models.text_side import describe_tokenizer, tokenizer_facts

MIN_SHARE = 1e-4  # distance that a share keeps from 0 and 1


class SequenceClassifier(TransformersBackbone):
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
        return self.tokenize(self.max_length, *columns)

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


PAIRS_AT_ONCE = 32


class CrossEncoder:
    """A sequence classifier of transformers that scores texts by the prompts of each class.

    The score of (text, prompt) is the logit of the label entailment, or the only output of a reranker. A class with
    several prompts gets their mean.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        labels = {str(label).lower(): int(index) for index, label in model.config.id2label.items()}
        entails = [index for label, index in labels.items() if label.startswith("entail")]
        if not entails and model.config.num_labels != 1:
            raise InputError(
                f"model {name!r} classifies into {', '.join(map(str, labels))}: expected one with a label for "
                "entailment, or a reranker with a single output"
            )
        self.output = entails[0] if entails else 0
        self.max_length = min(512, tokenizer.model_max_length)

    @torch.no_grad()
    def log_probabilities(self, texts: Sequence[str], prompts: Sequence[Sequence[str]]) -> Tensor:
        """(n, k): softmax over the classes of the scores of each text."""
        sentences = [sentence for group in prompts for sentence in group]
        pairs = [(text, sentence) for text in texts for sentence in sentences]
        order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]) + len(pairs[i][1]))
        scores = torch.zeros(len(pairs))
        for start in range(0, len(order), PAIRS_AT_ONCE):
            indices = order[start : start + PAIRS_AT_ONCE]
            first, second = zip(*(pairs[i] for i in indices), strict=True)
            batch = self.tokenizer(
                list(first), list(second), padding=True, truncation="only_first", max_length=self.max_length,
                return_tensors="pt",
            ).to(self.model.device)  # fmt: skip
            scores[indices] = self.model(**batch).logits[:, self.output].float().cpu()
        by_class = scores.view(len(texts), -1).split([len(group) for group in prompts], dim=1)
        return torch.stack([group.mean(1) for group in by_class], 1).log_softmax(1)

    def to(self, device: Any) -> CrossEncoder:
        self.model.to(device)
        return self
