"""Causal language models (GPT-2, Llama, Qwen, SmolLM, …): the label words as possible next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pouf.errors import InputError
from pouf.models.base import Tensors
from pouf.models.cloze import MASK, Cloze, Piece, Slot, TextSample
from pouf.models.masked_lm import Head, MaskedLM
from pouf.models.masked_text import MaskedText
from pouf.recipe import Kind

GAP = "\0"  # placeholder of the word, where the text is then cut


class CausalText(MaskedText):
    """Filled templates up to the gap, which must be at their end, since a causal model reads nothing after it."""

    def _check(self, tokenizer: Any, cloze: Cloze) -> None:
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token  # masked out and after the end: any token will do
        gap = cloze.parts.index(MASK)
        after = "".join(part for part in cloze.parts[gap + 1 :] if isinstance(part, str))
        if any(isinstance(part, Slot) for part in cloze.parts[gap + 1 :]) or any(map(str.isalnum, after)):
            raise InputError(
                f"template {cloze.template!r} continues after [MASK], which a causal language model can't read: put it "
                "at the end, as in '{text} It was [MASK]'"
            )

    def _frame(self) -> tuple[list[int], list[int]]:
        """The special tokens before a text; none after it, since the word follows there."""
        bare, framed = self._ids("a"), self.tokenizer("a")["input_ids"]
        start = next((i for i in range(len(framed)) if framed[i : i + len(bare)] == bare), 0)
        return framed[:start], []

    def _fill(self, sample: TextSample) -> list[Piece]:
        pieces = self.cloze.fill(sample, GAP)
        before = pieces[: [piece.string for piece in pieces].index(GAP)]
        if before and not before[-1].is_text:
            before[-1] = before[-1]._replace(string=before[-1].string.rstrip())  # the space belongs to the word
        return before

    def _separator(self) -> str:
        raise InputError("demonstrations are for masked language models")

    def _position(self, ids: Sequence[int]) -> int:
        return len(ids) - 1


class CausalLM(MaskedLM):
    """Features are the last hidden state of the filled template, prototypes the decoder's rows of the label words.

        sim = cos(f, w_k)      for the transport, at T = 0.1
        logits = f · w_k       the model's own scores of these words as the next token

    with w_k the mean over the words of class k.
    """

    text_kind = CausalText
    supports_suffix = False

    @property
    def kind(self) -> Kind:
        return "causal"

    @property
    def transformer(self) -> None:
        """Its upper layers are not tuned alone."""

    @property
    def head(self) -> Head:
        decoder = self.model.get_output_embeddings()
        return Head(lambda hidden: hidden, decoder.weight, getattr(decoder, "bias", None))

    def _check(self) -> None:
        """Nothing to check: every causal model of transformers has a decoder over its vocabulary."""

    @property
    def _placeholder(self) -> int:
        return 0  # any token: attention follows the mask, and padding is on the right

    def _hidden(self, tokens: Tensors) -> Tensor:
        hidden: Tensor = self.model.base_model(**tokens, use_cache=False).last_hidden_state
        return hidden
