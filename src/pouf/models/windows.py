"""Long texts in windows of the model's length, each encoded separately, with pooled features."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.data.base import Unlabelled, Unreadable

if TYPE_CHECKING:
    from pouf.models.base import Backbone

logger = logging.getLogger(__name__)
Tensors = dict[str, Tensor]
T = TypeVar("T")
WINDOW_WEIGHT = "window_weight"  # (n, w), tokens of each window; 0 for padding windows
WINDOWS_AT_ONCE = 256  # windows encoded at once when no gradient is needed
MAX_MEASURED_TEXTS = 1000  # for an estimate of their lengths


def split_evenly(tokens: Sequence[T], room: int) -> list[Sequence[T]]:
    """Consecutive windows of at most `room` tokens, all of about the same length; at least one window."""
    count = max(1, -(-len(tokens) // room))
    bounds = [len(tokens) * i // count for i in range(count + 1)]
    return [tokens[start:end] for start, end in pairwise(bounds)]


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


def encode_windows(
    encode: Callable[[Tensors], Tensor], batch: Tensors, unit: bool, rows: int = WINDOWS_AT_ONCE
) -> Tensor:
    """Means over the windows of each text, weighted by their tokens: what `stack` made -> (n, d).

    Args:
        unit: normalise the features of each window first.
        rows: windows encoded at once when no gradient is needed.
    """
    weight = batch[WINDOW_WEIGHT]
    flat = {name: tensor.flatten(0, 1) for name, tensor in batch.items() if name != WINDOW_WEIGHT}
    if torch.compiler.is_compiling():  # an exported model has no branches that depend on the data
        encoded = encode(flat)
    else:
        real = weight.flatten().nonzero().flatten()
        parts = real.split(len(real) if torch.is_grad_enabled() else rows)
        own = torch.cat([encode({name: tensor[part] for name, tensor in flat.items()}) for part in parts])
        encoded = own.new_zeros(weight.numel(), own.shape[1]).index_copy(0, real, own)
    if unit:
        encoded = F.normalize(encoded, dim=1)
    share = (weight / weight.sum(1, keepdim=True)).to(encoded.dtype)
    return (encoded.view(*weight.shape, -1) * share[..., None]).sum(1)


class Cut(NamedTuple):
    """How much of the texts exceeds the model's length."""

    texts: int
    cut: int  # of these, longer than the model reads
    lost: float  # share of all tokens
    room: int  # tokens of a text that are read
    measured: int  # texts that this is an estimate from

    def __str__(self) -> str:
        about = "about " if self.measured < self.texts else ""
        return (
            f"{about}{self.cut:,} of {self.texts:,} texts are longer than the {self.room} tokens that the model reads: "
            f"{self.lost:.0%} of all tokens are lost"
        )


def warn_about_cut_texts(backbone: Backbone, data: Unlabelled, remedy: str) -> None:
    """Log how many of these texts are cut, and how much of them is lost."""
    if (found := measure_cut(backbone, data)) is not None:
        logger.warning("%s%s", found, f"; {remedy}" if backbone.supports_windows else "")


def measure_cut(backbone: Backbone, data: Unlabelled) -> Cut | None:
    """How much of these texts is cut, measured on at most 1,000 of them; None if nothing is."""
    if backbone.windows or data.modality != "text" or data.streamed or not len(data):
        return None
    samples = []
    for index in range(0, len(data), max(1, len(data) // MAX_MEASURED_TEXTS)):
        try:
            samples.append(data.read(index))
        except Unreadable:
            continue
    found = backbone.text_lengths(samples) if samples else None
    if found is None:
        return None
    lengths, room = found
    longer = sum(length > room for length in lengths)
    if not longer:
        return None
    lost = sum(max(0, length - room) for length in lengths) / sum(lengths)
    return Cut(len(data), round(longer * len(data) / len(samples)), lost, room, len(samples))
