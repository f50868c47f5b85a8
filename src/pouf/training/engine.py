"""One step over all processes: whole or in pieces, by plain torch, DDP or FSDP2.

Everything that a step computes goes through one module, which is what DDP wraps. Every process goes through it equally
often, with a borrowed sample where it has none of its own: engines talk while they compute.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pouf.classifier import Classifier
from pouf.errors import InputError
from pouf.parallel.fsdp import average_gradients, clip_gradients, reshard
from pouf.parallel.padding import PROMPTS, in_pieces
from pouf.parallel.process_group import ProcessGroup, connection_errors, launched_precision, launched_sharding
from pouf.parallel.shards import local
from pouf.recipe import Recipe
from pouf.training.step import LossOf, OwnInputs, Piece, PromptPiece, StepLoss, StepModule
from pouf.tuners import Tuner

T = TypeVar("T")


class Engine:
    """Takes the steps. Alone, it is plain torch.

    With several processes the weights are copied in each (DDP), unless they were sharded over all before (FSDP2).
    """

    def __init__(self, classifier: Classifier, tuner: Tuner, recipe: Recipe, world: ProcessGroup) -> None:
        self.classifier, self.tuner, self.world = classifier, tuner, world
        self.recipe = as_launched(recipe, world)
        self.device = classifier.device
        self.counts = classifier.prompts_per_class()
        self.sharded = classifier.backbone.sharded
        self.parameters: dict[str, nn.Parameter] = tuner.parameters
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.recipe.compute.precision == "fp16")
        self.model: nn.Module = StepModule(classifier, self.recipe, world, tuner.touches_inputs)
        if world.size > 1 and not self.sharded:
            self.model = _wrapped(self.model, self.device)
        self.inputs: list[OwnInputs] = []
        self.leaves: list[Tensor] = []
        self.pieces: list[PromptPiece] = []

    def encode(self, piece: Piece) -> Tensor:
        """A piece of inputs without a graph: (kept, d)."""
        with torch.no_grad():
            return self.model("inputs", piece)  # type: ignore[no-any-return]

    def loss(self, inputs: list[OwnInputs], seed: int, loss_of: LossOf) -> StepLoss:
        """The loss of a batch over all processes, differentiable by `backward`.

        Args:
            inputs: of one or several batches.
            seed: of the dropout of prompts.
            loss_of: scores of these batches over all processes -> the loss.
        """
        self.inputs, self.pieces = inputs, self._prompt_pieces(seed)
        chunked = self.recipe.compute.chunk > 0 and self.tuner.touches_prompts
        if not (any(own.again for own in inputs) or (chunked and len(self.pieces) > 1)):
            self.leaves = []
            own = [own.piece if own.piece is not None else own.features for own in inputs]
            return self.model("whole", own, self.pieces, seed, loss_of)  # type: ignore[no-any-return]
        features = [own.features if own.piece is None else self.encode(own.piece) for own in inputs]
        with torch.no_grad():
            encoded = torch.cat([self.model("prompts", piece) for piece in self.pieces]) if self.pieces else None
        self.leaves = [each for each in (*features, encoded) if each is not None]
        for number, leaf in enumerate(self.leaves):
            leaf.requires_grad_(self.tuner.touches_inputs if number < len(inputs) else self.tuner.touches_prompts)
        with self._quiet():
            return self.model("head", features, encoded, seed, loss_of)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        """The exact gradient of a batch of any size, in the memory of one piece.

        Where a step goes in pieces, they were encoded without a graph, and the loss is differentiated by what came of
        them alone. Then each piece is encoded again with its graph, which takes its rows of that gradient to the
        weights. Processes exchange gradients once, after the last piece; where weights are sharded, after each.
        """
        with connection_errors():
            if not self.leaves:
                self.scaler.scale(loss).backward()
            else:
                with self._quiet():
                    self.scaler.scale(loss).backward()
                for is_last, (what, piece, gradient) in _with_last(self._again()):
                    with nullcontext() if is_last else self._quiet():
                        rows = self.model(what, piece)
                        if rows.requires_grad:  # not where nothing on this side is trained
                            rows.backward(gradient)
            if self.sharded:
                average_gradients(self.parameters.values(), self.world)

    def _again(self) -> Iterator[tuple[str, Piece | PromptPiece, Tensor]]:
        """All pieces with the gradients of their rows."""
        encoded = self.leaves[len(self.inputs)] if self.pieces else None
        for own, features in zip(self.inputs, self.leaves, strict=False):
            if not self.tuner.touches_inputs or (own.again is None and own.piece is None):
                continue
            gradient = features.grad if features.grad is not None else torch.zeros_like(features)
            if own.piece is not None:
                yield "inputs", own.piece, gradient
            else:
                assert own.again is not None
                yield from (("inputs", piece, rows) for piece, rows in own.again(gradient))
        if encoded is not None and self.tuner.touches_prompts:
            gradient = encoded.grad if encoded.grad is not None else torch.zeros_like(encoded)
            for piece, rows in zip(self.pieces, gradient.split([piece.kept for piece in self.pieces]), strict=True):
                yield "prompts", piece, rows

    def _quiet(self) -> AbstractContextManager[Any]:
        """While open, DDP keeps gradients to itself."""
        return self.model.no_sync() if isinstance(self.model, nn.parallel.DistributedDataParallel) else nullcontext()

    def _prompt_pieces(self, seed: int) -> list[PromptPiece]:
        """This process's prompts, in equally many pieces on all processes."""
        total = sum(self.counts)
        if not total:
            return []
        most = -(-total // self.world.size)  # prompts of a process
        size = min(self.recipe.compute.chunk or most, most)
        if self.sharded:
            size = min(size, PROMPTS)
        first = self.world.rank * (total + 1)
        cut = in_pieces(list(self.world.share(range(total))), -(-most // size))
        return [PromptPiece(rows or [0], (seed + (first + i) * 7919) % 2**62, len(rows)) for i, rows in enumerate(cut)]

    def clip_gradients(self, limit: float) -> Tensor:
        """The norm of all gradients before they are cut to the limit."""
        parameters = list(self.parameters.values())
        if not self.sharded:
            return torch.nn.utils.clip_grad_norm_(parameters, limit)
        return clip_gradients(parameters, limit)

    def all_finite(self) -> bool:
        """The weights, on all processes."""
        return all(self.world.gather_objects(all(bool(local(p).isfinite().all()) for p in self.parameters.values())))

    def settle(self) -> None:
        """After the last step, however it ended: gradients and whole layers go."""
        self.classifier.eval()
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.sharded:
            reshard(self.classifier.backbone)


def as_launched(recipe: Recipe, world: ProcessGroup) -> Recipe:
    """With the precision and the sharding that `accelerate launch` asks for."""
    changes: dict[str, Any] = {}
    said, own = launched_precision(), recipe.compute.precision
    if said is not None and own not in ("fp32", said):
        raise InputError(f"accelerate asks for mixed_precision {said}, the recipe for {own}: set one of them only")
    if said is not None:
        changes["compute.precision"] = said
    if launched_sharding():
        changes["compute.shard"] = True
    recipe = recipe.with_settings(changes) if changes else recipe
    if recipe.compute.shard and world.size > 1 and recipe.compute.compile:
        raise InputError("compute.compile does not go together with sharded weights: leave one of them out")
    if recipe.compute.shard and world.size > 1 and recipe.compute.precision == "fp16":
        raise InputError("fp16 needs a scale of the loss that shards can't agree on: take bf16, or do not shard")
    return recipe


def _wrapped(module: nn.Module, device: torch.device) -> nn.Module:
    """Prepared by accelerate: DDP, with gradients in buckets that are sent while others are computed."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    # Which parameters a step uses differs from piece to piece. Buffers are constants here.
    of_ddp = DistributedDataParallelKwargs(
        find_unused_parameters=True, broadcast_buffers=False, gradient_as_bucket_view=True
    )
    try:
        accelerator = Accelerator(cpu=device.type == "cpu", kwargs_handlers=[of_ddp])
    except ValueError as error:
        raise InputError(f"accelerate can't start as it was launched: {error}") from None
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # later versions of torch have another name for broadcast_buffers
        return accelerator.prepare_model(module, device_placement=False)  # type: ignore[no-any-return]


def _with_last(items: Iterator[T]) -> Iterator[tuple[bool, T]]:
    """Each with whether it is the last."""
    for waiting in items:
        for item in items:
            yield False, waiting
            waiting = item
        yield True, waiting
