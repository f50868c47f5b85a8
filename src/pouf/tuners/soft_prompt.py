"""Context vectors that take the place of a template's words (CoOp's parametrisation)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pouf.errors import InputError
from pouf.models.prompts import spoken
from pouf.models.text_side import TextSide, replaced_embeddings
from pouf.recipe import Tuning


class SoftPrompt(nn.Module):
    """Prototypes from `[context] name.`, where the context is p trainable vectors instead of words.

    The vectors start as the embeddings of the context's words, so that before the first step the prototypes are those
    of the template "a photo of a {}.". They are (p, h), shared by all classes, or (k, p, h), one context each.
    """

    def __init__(self, text_side: TextSide, classes: Sequence[str], tuning: Tuning) -> None:
        super().__init__()
        self.text_side = text_side
        words = text_side.token_ids(tuning.context)
        if not words:
            raise InputError("the context of prompt tuning is empty: give the words to start from, as 'a photo of a'")
        rows = [self._lay_out(name, words, tuning.position) for name in classes]
        self.tokens = text_side.pad([ids for ids, _ in rows])  # (k, length)
        self.positions = torch.tensor([at for _, at in rows])  # (k, p), where the context stands
        if int(self.tokens["input_ids"].shape[1]) > text_side.max_length:
            raise InputError(f"a class name is too long for the model's {text_side.max_length} tokens: shorten it")
        start = text_side.embedding.weight.detach()[words].clone()  # (p, h)
        if tuning.class_specific:
            start = start.expand(len(classes), -1, -1).clone()
        self.vectors = nn.Parameter(start)

    def forward(self) -> Tensor:
        """(k, d)."""
        device = self.vectors.device
        vectors = self.vectors.expand(len(self.positions), -1, -1)  # (k, p, h)
        tokens = {name: tensor.to(device) for name, tensor in self.tokens.items()}
        with replaced_embeddings(self.text_side.embedding, self.positions.to(device), vectors):
            return self.text_side.encode_tokens(tokens)

    def _lay_out(self, name: str, words: list[int], position: str) -> tuple[list[int], list[int]]:
        """Token ids of one class's prompt, and the places of the context in it."""
        before, after = self.text_side.frame()
        ids = self.text_side.token_ids
        half = len(words) // 2
        if position == "end":  # [context] name.
            lead, middle, tail, close = words, ids(f"{spoken(name)}."), [], []
        elif position == "middle":  # [first half] name [second half].
            lead, middle, tail, close = words[:half], ids(spoken(name)), words[half:], ids(".")
        else:  # name [context].
            lead, middle, tail, close = [], ids(spoken(name)), words, ids(".")
        sentence = [*before, *lead, *middle, *tail, *close, *after]
        first = len(before)
        second = first + len(lead) + len(middle)
        return sentence, [*range(first, first + len(lead)), *range(second, second + len(tail))]
