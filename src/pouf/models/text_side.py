"""Sentences → vectors, with support for soft prompts, and long texts in windows."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pouf.data.base import Unlabelled
from pouf.errors import InputError, Unreadable
from pouf.parallel.process_group import split_into

if TYPE_CHECKING:
    from pouf.models.base import Backbone

PROMPTS_AT_ONCE = 256  # sentences encoded at once, at most

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
        chunks = self._tokenize(tuple(sentences))
        device = self.embedding.weight.device
        encoded = torch.cat(
            [self.encode_tokens({name: t.to(device) for name, t in chunk.tokens.items()}) for chunk in chunks]
        )
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

    def _tokenize(self, sentences: tuple[str, ...]) -> list[PromptChunk]:
        if sentences not in self._tokenized:
            if len(self._tokenized) == MAX_CACHED_CHUNKS:
                del self._tokenized[next(iter(self._tokenized))]  # the oldest
            ids = self.all_token_ids(sentences)
            order = torch.tensor(sorted(range(len(ids)), key=lambda i: len(ids[i])))
            self._tokenized[sentences] = [
                PromptChunk(chunk, self.pad([ids[i] for i in chunk])) for chunk in order.split(PROMPTS_AT_ONCE)
            ]
        return self._tokenized[sentences]


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer sets before and after a text."""
    bare, framed = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    raise InputError(f"the tokenizer changes a text when it adds special tokens: {bare} became {framed}")


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


logger = logging.getLogger(__name__)
Tensors = dict[str, Tensor]
T = TypeVar("T")
WINDOW_WEIGHT = "window_weight"  # (n, w), tokens of each window; 0 for padding windows
WINDOWS_AT_ONCE = 256  # windows encoded at once when no gradient is needed
MAX_MEASURED_TEXTS = 1000  # for an estimate of their lengths


def split_evenly(tokens: list[T], room: int) -> list[list[T]]:
    """Consecutive windows of at most `room` tokens, all of about the same length; at least one window."""
    return split_into(tokens, max(1, -(-len(tokens) // room)))


def stack(batch: Tensors, lengths: Sequence[Sequence[int]]) -> Tensors:
    """Windows of n texts, one after another, as a batch of texts: (m, …) -> (n, w, …), and their weights (n, w).

    A text with fewer windows than others repeats its first, with weight 0.

    Args:
        lengths: for each text, the tokens of each of its windows.
    """
    width = max(len(own) for own in lengths)
    index, weight = torch.zeros(2, len(lengths), width, dtype=torch.long)
    first = 0
    for i, own in enumerate(lengths):
        index[i] = first
        index[i, : len(own)] += torch.arange(len(own))
        weight[i, : len(own)] = torch.tensor(own).clamp_min(1)
        first += len(own)
    return {name: tensor[index] for name, tensor in batch.items()} | {WINDOW_WEIGHT: weight.float()}


def encode_windows(encode: Callable[[Tensors], Tensor], batch: Tensors, unit: bool, at_once: bool = False) -> Tensor:
    """Means over the windows of each text, weighted by their tokens: what `stack` made -> (n, d).

    Args:
        unit: normalise the features of each window first.
        at_once: encode all windows in one call, whether a gradient is needed or not.
    """
    weight = batch[WINDOW_WEIGHT]
    flat = {name: tensor.flatten(0, 1) for name, tensor in batch.items() if name != WINDOW_WEIGHT}
    if torch.compiler.is_compiling():  # an exported model has no branches that depend on the data
        encoded = encode(flat)
    else:
        real = weight.flatten().nonzero().flatten()
        parts = real.split(len(real) if at_once or torch.is_grad_enabled() else WINDOWS_AT_ONCE)
        own = torch.cat([encode({name: tensor[part] for name, tensor in flat.items()}) for part in parts])
        encoded = own.new_zeros(weight.numel(), own.shape[1]).index_copy(0, real, own)
    if unit:
        encoded = F.normalize(encoded, dim=1)
    share = (weight / weight.sum(1, keepdim=True)).to(encoded.dtype)
    return (encoded.view(*weight.shape, -1) * share[..., None]).sum(1)


def warn_about_cut_texts(backbone: Backbone, data: Unlabelled, remedy: str) -> None:
    """Log how much of these texts is longer than the model reads, measured on at most 1,000 of them."""
    if backbone.windows or data.modality != "text" or data.streamed:
        return
    samples = []
    for index in range(0, len(data), max(1, len(data) // MAX_MEASURED_TEXTS)):
        with suppress(Unreadable):
            samples.append(data.read(index))
    lengths, room = (backbone.text_lengths(samples) if samples else None) or ([], 0)
    longer = sum(length > room for length in lengths)
    if longer:
        logger.warning(
            "%s%s of %s texts are longer than the %d tokens that the model reads: %.0f%% of all tokens are lost%s",
            "about " * (len(samples) < len(data)), f"{round(longer * len(data) / len(samples)):,}", f"{len(data):,}",
            room, 100 * sum(max(0, length - room) for length in lengths) / sum(lengths),
            f"; {remedy}" if backbone.supports_windows else "",
        )  # fmt: skip
