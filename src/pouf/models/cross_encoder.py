"""Cross-encoders: NLI classifiers and rerankers that score a text together with a sentence; not trained here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pouf.errors import InputError

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
