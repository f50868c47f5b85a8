"""The loss of a step and its gradient: all at once, or exactly the same in the memory of one chunk.

Texts of similar length are encoded together, so that little of what is computed is padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pouf.losses.objective import Loss, Objective, Targets
from pouf.training.model import Chunk, Engine


@dataclass
class Side:
    """What this process has of a batch, or of the prompts: features, or chunks from which they are computed."""

    trained: bool = False  # the features change with the weights
    chunked: bool = False  # so many that no more than a chunk is encoded with its graph at once
    features: Tensor | None = None  # (n_local, d), where nothing is left to be encoded
    parts: list[Chunk] = field(default_factory=list)  # where they are read already
    indices: Sequence[int] = ()  # which samples the rows of all processes are, in the order of ranks

    def chunks(self) -> Iterator[Chunk]:
        """What is to be encoded."""
        yield from self.parts

    def chunks_again(self, gradient: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        """The same once more, each chunk with its rows of the gradient of the features."""
        yield from zip(self.parts, gradient.split([chunk.rows for chunk in self.parts]), strict=True)


class Batch(NamedTuple):
    """What this process has of one step."""

    inputs: list[Side]  # the unlabelled ones, and those with labels or answers of a teacher where those are others
    prompts: Side | None  # None where prototypes are not made of prompts
    seed: int  # of dropout, where they are not
    tables: Mapping[str, tuple[int, Tensor]]  # of all samples, by term: which of `inputs`, and targets (samples, k)

    @property
    def chunked(self) -> bool:
        """Whether a side that is trained is encoded in chunks, and the step needs two passes."""
        return any(side.trained and side.chunked for side in self.sides)

    @property
    def sides(self) -> list[Side]:
        return self.inputs if self.prompts is None else [*self.inputs, self.prompts]

    @property
    def targets(self) -> Targets:
        """Class probabilities of the samples of this step, once they are read."""
        return {term: (position, rows[self.inputs[position].indices]) for term, (position, rows) in self.tables.items()}


def whole(engine: Engine, batch: Batch, objective: Objective) -> Loss:
    """The loss over all processes; afterwards weights have their gradients."""
    inputs = [side.parts if side.trained else _encode(engine, side) for side in batch.inputs]
    scores = engine.model(inputs, batch.prompts.parts if batch.prompts is not None else None, batch.seed)
    loss = objective(scores, batch.targets)
    engine.backward(loss.total)
    return loss


def two_pass(engine: Engine, batch: Batch, objective: Objective) -> Loss:
    """The same for a batch of any size, one chunk in memory at a time: GradCache (Gao et al., 2021).

    First pass: all chunks are encoded without a graph, and the loss is differentiated by their features alone. Second
    pass: each chunk is encoded again with its graph, which takes its rows of that gradient to the weights. Processes
    exchange gradients once, after the last chunk; where weights are sharded, after each.
    """
    features = [_encode(engine, side).requires_grad_(side.trained) for side in batch.sides]
    inputs, prompts = features[: len(batch.inputs)], features[-1] if batch.prompts is not None else None
    with engine.no_sync():
        loss = objective(engine.model(inputs, prompts, batch.seed), batch.targets)
        engine.backward(loss.total)
    for is_last, chunk, gradient in _second_pass(batch.sides, features):
        with nullcontext() if is_last else engine.no_sync():
            rows = engine.model(chunk)
            if rows.requires_grad:  # not where nothing on this side is trained
                rows.backward(gradient)
    return loss


@torch.no_grad()
def _encode(engine: Engine, side: Side) -> Tensor:
    """(n_local, d), without a graph."""
    return torch.cat([engine.model(chunk) for chunk in side.chunks()]) if side.features is None else side.features


def _second_pass(sides: list[Side], features: list[Tensor]) -> Iterator[tuple[bool, Chunk, Tensor]]:
    """Whether it is the last, each chunk of what is trained, and the gradient of its rows."""
    waiting: tuple[Chunk, Tensor] | None = None
    for side, rows in zip(sides, features, strict=True):
        gradient = rows.grad if rows.grad is not None else torch.zeros_like(rows)
        for chunk in side.chunks_again(gradient) if side.trained else ():
            if waiting is not None:
                yield False, *waiting
            waiting = chunk
    if waiting is not None:
        yield True, *waiting


# What one more group costs, in tokens: its backward pass goes over all weights again. Measured with MiniLM on a CPU.
GROUP_COST = {"cpu": 160}
OTHER_COST = 4096  # of devices that compute long rows as fast as short ones


def split_by_length(chunk: Chunk, device: torch.device) -> tuple[list[Chunk], list[int]]:
    """Groups of similar length, each padded to its own longest, and the rows of the chunk in their order.

    Anything without an attention mask is one group.
    """
    tensors, n = chunk.content, chunk.rows
    mask = tensors.get("attention_mask") if isinstance(tensors, dict) else None
    if mask is None or mask.ndim != 2 or len(mask) != n or n < 2:
        return [chunk], list(range(n))
    assert isinstance(tensors, dict)
    width = mask.shape[1]
    lengths = (mask.ne(0) * torch.arange(1, width + 1)).amax(1).tolist()  # padding on the left stays
    groups = length_groups(lengths, GROUP_COST.get(device.type, OTHER_COST))
    if len(groups) == 1:
        return [chunk], list(range(n))
    parts = []
    for number, rows in enumerate(groups):
        longest = max(lengths[row] for row in rows)
        cut = {name: _cut(tensor[rows], width, longest) for name, tensor in tensors.items()}
        parts.append(Chunk(cut, (chunk.seed + number * 7919) % 2**62, len(rows)))
    return parts, [row for rows in groups for row in rows]


def _cut(tensor: Tensor, width: int, longest: int) -> Tensor:
    return tensor[:, :longest].contiguous() if tensor.ndim >= 2 and tensor.shape[1] == width else tensor


def length_groups(lengths: Sequence[int], group_cost: float) -> list[list[int]]:
    """Positions in groups of similar length that cost least together.

    A group of m texts costs m times its longest, in tokens, and `group_cost`.
    """
    distinct = sorted(set(lengths))
    count = [0, *(sum(length <= bound for length in lengths) for bound in distinct)]  # texts up to each length
    best, start = [0.0], [0]  # of the texts up to each length: the lowest cost, and where its last group begins
    for end, longest in enumerate(distinct, 1):
        costs = [best[i] + (count[end] - count[i]) * longest + group_cost for i in range(end)]
        start.append(min(range(end), key=costs.__getitem__))
        best.append(costs[start[-1]])
    groups: list[list[int]] = []
    end = len(distinct)
    while end:
        wanted = set(distinct[start[end] : end])
        groups.append([row for row, length in enumerate(lengths) if length in wanted])
        end = start[end]
    return groups[::-1]
