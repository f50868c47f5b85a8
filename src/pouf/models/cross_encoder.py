"""Models that read a text and a sentence about it together: NLI classifiers and rerankers. They predict alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pouf.errors import InputError

PAIRS = 32  # read at once


class CrossEncoder:
    """A sequence classifier of transformers, as a scorer of texts by the prompts of each class.

    With a label that says entailment, a class scores by that logit of (text, prompt); with a single output, as
    rerankers have, by that one. A class of several prompts has their mean.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        labels = {str(label).lower(): int(place) for place, label in model.config.id2label.items()}
        entails = [place for label, place in labels.items() if label.startswith("entail")]
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
        sentences = [sentence for own in prompts for sentence in own]
        pairs = [(text, sentence) for text in texts for sentence in sentences]
        order = sorted(range(len(pairs)), key=lambda place: len(pairs[place][0]) + len(pairs[place][1]))
        scores = torch.zeros(len(pairs))
        for start in range(0, len(order), PAIRS):
            places = order[start : start + PAIRS]
            first, second = zip(*(pairs[place] for place in places), strict=True)
            batch = self.tokenizer(
                list(first), list(second), padding=True, truncation="only_first", max_length=self.max_length,
                return_tensors="pt",
            ).to(self.model.device)  # fmt: skip
            scores[places] = self.model(**batch).logits[:, self.output].float().cpu()
        by_class = scores.view(len(texts), -1).split([len(own) for own in prompts], dim=1)
        return torch.stack([own.mean(1) for own in by_class], 1).log_softmax(1)

    def to(self, device: Any) -> CrossEncoder:
        self.model.to(device)
        return self
