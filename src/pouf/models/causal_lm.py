"""Causal language models (GPT-2, Llama, Qwen, SmolLM, …): the words of the classes as what comes next."""

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

GAP = "\0"  # stands where the word would come, until the text is cut there


class CausalText(MaskedText):
    """Filled templates up to the gap, which is at their end: a causal model does not see what comes after."""

    def _check(self, tokenizer: Any, cloze: Cloze) -> None:
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token  # masked out, and after the end: any token will do
        at = cloze.parts.index(MASK)
        after = "".join(part for part in cloze.parts[at + 1 :] if isinstance(part, str))
        if any(isinstance(part, Slot) for part in cloze.parts[at + 1 :]) or any(map(str.isalnum, after)):
            raise InputError(
                f"template {cloze.template!r} goes on after [MASK], which a causal language model can't see: put it at "
                "the end, as in '{text} It was [MASK]'"
            )

    def _frame(self) -> tuple[list[int], list[int]]:
        """What the tokenizer sets before a text; nothing after it, where the word comes."""
        bare, framed = self._ids("a"), self.tokenizer("a")["input_ids"]
        at = next((i for i in range(len(framed)) if framed[i : i + len(bare)] == bare), 0)
        return framed[:at], []

    def _fill(self, sample: TextSample) -> list[Piece]:
        pieces = self.cloze.fill(sample, GAP)
        kept = pieces[: [piece.string for piece in pieces].index(GAP)]
        if kept and not kept[-1].is_text:
            kept[-1] = kept[-1]._replace(string=kept[-1].string.rstrip())  # the space belongs to the word
        return kept

    def _separator(self) -> str:
        raise InputError("solved examples beside a text are for masked language models")

    def _position(self, ids: Sequence[int]) -> int:
        return len(ids) - 1


class CausalLM(MaskedLM):
    """Features are the last hidden state of the filled template, prototypes the decoder's rows of the label words.

        sim = cos(f, w_k)      for the transport, at T = 0.1
        logits = f · w_k       what the model itself would say of these words as the next one

    with w_k the mean over the words of class k.
    """

    text_kind = CausalText
    supports_suffix = False

    @property
    def kind(self) -> Kind:
        return "causal"

    @property
    def head(self) -> Head:
        decoder = self.model.get_output_embeddings()
        return Head(lambda hidden: hidden, decoder.weight, getattr(decoder, "bias", None))

    def _check(self) -> None:
        """Any model that transformers has as a causal one has a decoder over its vocabulary."""

    @property
    def _placeholder(self) -> int:
        return 0  # any: attention goes by the mask, and padding stands after the end

    def _hidden(self, tokens: Tensors) -> Tensor:
        hidden: Tensor = self.model.base_model(**tokens, use_cache=False).last_hidden_state
        return hidden
