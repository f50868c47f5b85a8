"""The loss of a step and its gradient: all at once, or exactly the same in the memory of one chunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from pouf.losses.objective import Loss, Objective
from pouf.training.batches import Batch, Side
from pouf.training.engine import Engine
from pouf.training.model import Chunk


def whole(engine: Engine, batch: Batch, objective: Objective) -> Loss:
    """The loss over all processes; afterwards weights have their gradients."""
    inputs = [list(side.chunks()) if side.trained else encode(engine, side) for side in batch.inputs]
    prompts = list(batch.prompts.chunks()) if batch.prompts is not None else None
    scores = engine.model(inputs, prompts, batch.seed)
    loss = objective(scores, batch.targets())
    engine.backward(loss.total, scores)
    return loss


def two_pass(engine: Engine, batch: Batch, objective: Objective) -> Loss:
    """The same for a batch of any size, one chunk in memory at a time: GradCache (Gao et al., 2021).

    First pass: all chunks are encoded without a graph, and the loss is differentiated by their features alone. Second
    pass: each chunk is encoded again with its graph, which takes its rows of that gradient to the weights. Processes
    exchange gradients once, after the last chunk; where weights are sharded, after each.
    """
    sides = [*batch.inputs, *([batch.prompts] if batch.prompts is not None else [])]
    features = [encode(engine, side).requires_grad_(side.trained) for side in sides]
    with engine.no_sync():
        inputs, prompts = features[: len(batch.inputs)], features[-1] if batch.prompts is not None else None
        scores = engine.model(inputs, prompts, batch.seed)
        loss = objective(scores, batch.targets())
        engine.backward(loss.total)
    for is_last, chunk, gradient in _second_pass(sides, features):
        with nullcontext() if is_last else engine.no_sync():
            rows = engine.model(chunk)
            if rows.requires_grad:  # not where nothing on this side is trained
                rows.backward(gradient)
    return loss


@torch.no_grad()
def encode(engine: Engine, side: Side) -> Tensor:
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
