"""Texts of similar length are encoded together, so that little of what is computed is padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pouf.training.model import Chunk

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
