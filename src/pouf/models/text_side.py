"""Sentences → vectors, with support for soft prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PROMPTS_AT_ONCE = 256  # sentences encoded at once

MAX_CACHED_CHUNKS = 1024  # tokenized sets of prompts that are cached: at least the chunks of a step


class PromptChunk(NamedTuple):
    """Tokenized sentences that are encoded together."""

    positions: Tensor  # (m,), indices of its sentences
    tokens: dict[str, Tensor]  # (m, length)


class TextSide:
    """A tokenizer and the text encoder behind it.

    Sentences are encoded in the order of their length and padded to the longest of their chunk only. Padding is
    masked, or has no influence under a causal mask, so the result is that of padding to the model's full length. SigLIP
    is the exception: it was trained to attend to its padding, so `full_length` pads as in training.

    Args:
        tokenizer: of transformers.
        encode: tokens from the tokenizer, on the model's device -> (m, d). Not a method of the backbone: a reference
            cycle would keep the weights alive after use.
        embedding: the token embedding layer.
        max_length: sentences are cut to this many tokens.
        full_length: pad every sentence to `max_length`.
    """

    def __init__(
        self,
        tokenizer: Any,
        encode: Callable[[dict[str, Tensor]], Tensor],
        embedding: nn.Embedding,
        max_length: int,
        full_length: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.encode_tokens = encode
        self.embedding = embedding
        self.max_length = max_length
        self.full_length = full_length
        # The prompts of a run stay the same from step to step: they are tokenized once.
        self._tokenized: dict[tuple[str, ...], list[PromptChunk]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_tokenized": {}}

    def __call__(self, sentences: Sequence[str]) -> Tensor:
        """(m, d), in the given order, differentiable."""
        chunks = self._chunks_of(tuple(sentences))
        device = self.embedding.weight.device
        encoded = torch.cat([self.encode_tokens(_to(chunk.tokens, device)) for chunk in chunks])
        order = torch.cat([chunk.positions for chunk in chunks]).to(device)
        return encoded[order.argsort()]

    def pad(self, ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Token ids of several lengths → tensors of one."""
        padding = "max_length" if self.full_length else "longest"
        padded = self.tokenizer.pad(
            {"input_ids": list(ids)}, padding=padding, max_length=self.max_length, return_tensors="pt"
        )
        if self.full_length:
            padded.pop("attention_mask")  # the model attends to its padding
        return dict(padded)

    def token_ids(self, text: str, special: bool = False) -> list[int]:
        return self.all_token_ids([text], special)[0]

    def all_token_ids(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """Token ids of each text, cut to the model's length. Names of special tokens in texts are plain text."""
        ids: list[list[int]] = self.tokenizer(
            list(texts), add_special_tokens=special, truncation=True, max_length=self.max_length,
            split_special_tokens=True,
        )["input_ids"]  # fmt: skip
        return ids

    def frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer sets before and after a sentence."""
        bare, framed = self.token_ids("a"), self.token_ids("a", special=True)
        for start in range(len(framed) - len(bare) + 1):
            if framed[start : start + len(bare)] == bare:
                return framed[:start], framed[start + len(bare) :]
        raise ValueError(f"the tokenizer changes a sentence when it adds special tokens: {bare} became {framed}")

    def _chunks_of(self, sentences: tuple[str, ...]) -> list[PromptChunk]:
        if sentences not in self._tokenized:
            if len(self._tokenized) == MAX_CACHED_CHUNKS:
                del self._tokenized[next(iter(self._tokenized))]  # the oldest
            self._tokenized[sentences] = self._tokenize(sentences)
        return self._tokenized[sentences]

    def _tokenize(self, sentences: tuple[str, ...]) -> list[PromptChunk]:
        ids = self.all_token_ids(sentences)
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        chunks = [order[start : start + PROMPTS_AT_ONCE] for start in range(0, len(order), PROMPTS_AT_ONCE)]
        return [PromptChunk(torch.tensor(chunk), self.pad([ids[i] for i in chunk])) for chunk in chunks]


def tokenizer_facts(tokenizer: Any) -> str:
    """Everything that the tokens of a text depend on, as text."""
    if not tokenizer.is_fast:  # one written in Python: its class, its words and its settings
        return f"{type(tokenizer).__qualname__} {sorted(tokenizer.get_vocab().items())} {tokenizer.init_kwargs}"
    facts = json.loads(tokenizer.backend_tokenizer.to_str())
    # Without truncation and padding, which are those of the last call.
    return json.dumps({name: value for name, value in facts.items() if name not in ("truncation", "padding")})


TEXT_STEPS = [
    "tokenize with the special tokens of the tokenizer around the text; the name of a special token inside a text is "
    "plain text",
    "cut to `max_length` tokens, special tokens included",
    "pad the batch to its longest text; `attention_mask` is 1 for tokens and 0 for padding",
]


WINDOW_STEPS = [
    "tokenize without special tokens; cut the tokens of a text into windows of about the same length, as few as leave "
    "each with the special tokens around it at `max_length` tokens at most",
    "`input_ids` and `attention_mask` are (batch, windows, length), padded to the longest window; a text with fewer "
    "windows than others repeats its first",
    "`window_weight` (batch, windows) is the number of tokens of a window without special ones, 0 for a repeated one",
]


def describe_tokenizer(tokenizer: Any, max_length: int, windows: bool = False) -> dict[str, Any]:
    """How texts become tensors, for users of an exported model."""
    facts = {
        "files": "tokenizer.json and related files, beside this file", "max_length": max_length,
        "pad_token_id": tokenizer.pad_token_id, "padding": "on the right, to the longest of the batch",
    }  # fmt: skip
    return {"steps": WINDOW_STEPS if windows else TEXT_STEPS, "tokenizer": facts}


@contextmanager
def replaced_embeddings(embedding: nn.Embedding, positions: Tensor, vectors: Tensor) -> Iterator[None]:
    """While open, the tokens at `positions` (m, p) of every sentence are read as `vectors` (m, p, h).

    Works for all models, with or without `inputs_embeds`.
    """

    def put(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        index = positions[..., None].expand(-1, -1, output.shape[-1])
        return output.scatter(1, index, vectors.to(output.dtype))

    handle = embedding.register_forward_hook(put)
    try:
        yield
    finally:
        handle.remove()


def _to(tokens: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tokens.items()}
