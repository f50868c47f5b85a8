"""One step over all processes: whole or in pieces, by plain torch, DDP or FSDP2.

Everything that a step computes goes through the `forward` of one module, which is what the engines wrap. Every process
goes through it equally often, with a borrowed sample where it has none of its own: engines talk while they compute.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pouf.base import BaseClassifier
from pouf.distributed import (
    World,
    launched_precision,
    launched_resharding,
    launched_sharding,
    launched_wrapping,
    named_losses,
)
from pouf.errors import InputError
from pouf.models.base import Scores
from pouf.recipe import Recipe
from pouf.tuners import Tuner

T = TypeVar("T")
PROMPTS = 256  # encoded at once at most
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Piece(NamedTuple):
    """Samples that are encoded at once."""

    tensors: dict[str, Tensor]
    seed: int  # of dropout
    kept: int  # rows that count: 0 of a borrowed sample


class PromptPiece(NamedTuple):
    rows: list[int]
    seed: int
    kept: int


class OwnInputs(NamedTuple):
    """What this process has of a batch: features that are there already, or one piece to be encoded with the rest.

    `again` gives the pieces of the features once more, each with its rows of their gradient.
    """

    features: Tensor | None  # (n_local, d), without a graph
    piece: Piece | None
    again: Callable[[Tensor], Iterator[tuple[Piece, Tensor]]] | None


class StepLoss(NamedTuple):
    loss: Tensor  # scalar, differentiable
    terms: dict[str, Tensor]  # scalars, before weighting
    scores: Scores  # of the first batch, over all processes


LossOf = Callable[[list[Scores]], StepLoss]


class StepModule(nn.Module):
    """Inputs and prompts of this process -> the loss of all processes."""

    def __init__(self, classifier: BaseClassifier, recipe: Recipe, world: World, touches_inputs: bool) -> None:
        super().__init__()
        self.classifier, self.recipe, self.world, self.touches_inputs = classifier, recipe, world, touches_inputs
        encode = classifier.backbone.encode_inputs
        self.encode: Callable[[dict[str, Tensor]], Tensor] = torch.compile(encode) if recipe.compute.compile else encode

    def forward(self, what: str, *given: Any) -> Any:
        """One of the methods below, by name: engines wrap no other than `forward`."""
        return getattr(self, what)(*given)

    def inputs(self, piece: Piece) -> Tensor:
        """(kept, d), in the recipe's precision and with its dropout. The same seed drops the same units."""
        tensors = {name: tensor.to(self.classifier.device) for name, tensor in piece.tensors.items()}
        with training_mode(self.classifier, self.recipe, piece.seed), precision(self.recipe, self.classifier.device):
            return _first(self.encode(tensors).float(), piece.kept)

    def prompts(self, piece: PromptPiece) -> Tensor:
        """(kept, d), each of length 1."""
        with training_mode(self.classifier, self.recipe, piece.seed), precision(self.recipe, self.classifier.device):
            encoded = _first(self.classifier.encode_prompts(piece.rows), piece.kept)
            return encoded if self.world.size == 1 else encoded.float()

    def whole(self, inputs: list[Piece | Tensor], prompts: list[PromptPiece], seed: int, loss_of: LossOf) -> StepLoss:
        """Everything at once."""
        features = []
        for own in inputs:
            with torch.set_grad_enabled(self.touches_inputs):
                features.append(self.inputs(own) if isinstance(own, Piece) else own)
        encoded = torch.cat([self.prompts(piece) for piece in prompts]) if prompts else None
        return self.head(features, encoded, seed, loss_of)

    def head(self, features: list[Tensor], encoded: Tensor | None, seed: int, loss_of: LossOf) -> StepLoss:
        """From what this process encoded: (n_local, d) of each batch, (m_local, d) of the prompts."""
        backbone, gather = self.classifier.backbone, self.world.gather
        with precision(self.recipe, self.classifier.device):
            if encoded is not None:
                prototypes = self.classifier.prototypes_of(gather(encoded)).float()
            else:
                with training_mode(self.classifier, self.recipe, seed):
                    prototypes = self.classifier.prototypes().float()
        with precision(self.recipe, self.classifier.device, losses=True):
            return loss_of([backbone.scores(gather(own), prototypes) for own in features])


class Engine:
    """Takes the steps. Alone, it is plain torch.

    With several processes the weights are copied in each (DDP) or sharded over all (FSDP2). In the latter case what is
    sharded is a copy: `classifier` has the weights of the last `publish`.
    """

    def __init__(self, classifier: BaseClassifier, tuner: Tuner, recipe: Recipe, world: World) -> None:
        self.classifier, self.tuner, self.world = classifier, tuner, world
        self.recipe = as_launched(recipe, world)
        self.device = classifier.device
        self.counts = classifier.prompts_per_class()
        self.sharded = self.recipe.compute.shard and world.size > 1
        self.parameters: dict[str, nn.Parameter] = tuner.parameters
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.recipe.compute.precision == "fp16")
        if self.sharded:
            self.trained = copy.deepcopy(classifier)
            self.model: nn.Module = self._module(self.trained)
            shard(self.model, self.device, world)
            named = dict(self.trained.named_parameters())
            self.parameters = {name: named[name] for name in tuner.parameters}
        else:
            self.trained = classifier
            self.model = self._module(classifier)
            if world.size > 1:
                self.model = _wrapped(self.model, self.device)
        self.inputs: list[OwnInputs] = []
        self.leaves: list[Tensor] = []
        self.pieces: list[PromptPiece] = []

    def _module(self, classifier: BaseClassifier) -> StepModule:
        return StepModule(classifier, self.recipe, self.world, self.tuner.touches_inputs)

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
        with named_losses():
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
            self._average_scalars()

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

    def _average_scalars(self) -> None:
        """FSDP2 shards no numbers without a dimension, such as the temperature: they stay in each process."""
        for parameter in self.parameters.values() if self.sharded else ():
            if parameter.dim() == 0 and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world.size

    def _prompt_pieces(self, seed: int) -> list[PromptPiece]:
        """This process's prompts, in equally many pieces on all processes."""
        total = sum(self.counts)
        if not total:
            return []
        most = -(-total // self.world.size)  # prompts of a process
        size = min(self.recipe.compute.chunk or most, most)
        if self.sharded:  # encoders cut at this size by themselves, and would do so unequally often
            size = min(size, PROMPTS)
        first = self.world.rank * (total + 1)
        cut = in_pieces(list(self.world.share(range(total))), -(-most // size))
        return [PromptPiece(rows or [0], (seed + (first + i) * 7919) % 2**62, len(rows)) for i, rows in enumerate(cut)]

    def clip_gradients(self, limit: float) -> Tensor:
        """The norm of all gradients before they are cut to the limit."""
        parameters = list(self.parameters.values())
        if not self.sharded:
            return torch.nn.utils.clip_grad_norm_(parameters, limit)
        plain = [p.grad for p in parameters if p.grad is not None and not _is_shard(p)]
        shards = [_local(p.grad) for p in parameters if p.grad is not None and _is_shard(p)]
        total = sum((g.pow(2).sum() for g in shards), torch.zeros((), device=self.device))
        dist.all_reduce(total)
        norm = (total + sum((g.pow(2).sum() for g in plain), torch.zeros_like(total))).sqrt()
        if math.isfinite(limit):
            for gradient in (*plain, *shards):
                gradient.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def all_finite(self) -> bool:
        """The weights, on all processes."""
        return all(self.world.gather_objects(all(bool(_local(p).isfinite().all()) for p in self.parameters.values())))

    @torch.no_grad()
    def publish(self) -> None:
        """Put the trained weights into the classifier, where they are not there anyway."""
        if self.sharded:
            for name, parameter in self.parameters.items():
                self.tuner.parameters[name].copy_(_full(parameter))

    def full(self, state: Any) -> Any:
        """The same with whole tensors in the place of shards; all processes must call it."""
        return _mapped(_full, state) if self.sharded else state

    @torch.no_grad()
    def take(self, values: Mapping[str, Tensor]) -> None:
        """Go on from these weights, by name."""
        for name, parameter in self.parameters.items():
            parameter.copy_(_as_shard(values[name].to(self.device), parameter))

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Whole tensors of a saved state, sharded as the weights are."""
        if self.sharded:
            own = [p for group in optimizer.param_groups for p in group["params"]]
            state = state | {
                "state": {
                    number: {k: _as_shard(v, own[number]) if _fits(v, own[number]) else v for k, v in each.items()}
                    for number, each in state["state"].items()
                }
            }
        optimizer.load_state_dict(state)


def as_launched(recipe: Recipe, world: World) -> Recipe:
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


def shard(module: nn.Module, device: torch.device, world: World) -> None:
    """Shard weights over all processes, layer by layer, in place (FSDP2)."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        raise InputError(f"sharded weights need torch 2.6 or later, not {torch.__version__}") from None
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (world.size,))
    scalars = {parameter for parameter in module.parameters() if parameter.dim() == 0}
    by_layer, names = launched_wrapping()
    for layer in _layers(module, names) if by_layer else ():
        fully_shard(layer, mesh=mesh, reshard_after_forward=launched_resharding(), ignored_params=scalars)
    fully_shard(module, mesh=mesh, ignored_params=scalars)


def _layers(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Modules of these classes; by default what stands in lists of modules, as the layers of transformers do."""
    if names:
        found = [part for part in module.modules() if type(part).__name__ in names]
        if not found:
            raise InputError(f"accelerate asks to wrap {', '.join(names)}, which this model has not")
        return found
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return [layer for each in lists for layer in each if not any(isinstance(p, nn.ModuleList) for p in layer.modules())]


def _first(rows: Tensor, kept: int) -> Tensor:
    return rows if kept == len(rows) else rows[:kept].clone()


def _is_shard(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")


def _full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if _is_shard(tensor) else tensor  # type: ignore[no-any-return]


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if _is_shard(tensor) else tensor  # type: ignore[no-any-return]


def _fits(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and _is_shard(parameter)


def _as_shard(whole: Tensor, like: Any) -> Tensor:
    if not _is_shard(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(change, each) for key, each in value.items()}
    return [_mapped(change, each) for each in value] if isinstance(value, list) else value


def in_pieces(items: list[T], count: int) -> list[list[T]]:
    """So many pieces of about equal size; some are empty where there are fewer items."""
    bounds = [len(items) * i // count for i in range(count + 1)]
    return [items[first:last] for first, last in pairwise(bounds)]


def _with_last(items: Iterator[T]) -> Iterator[tuple[bool, T]]:
    """Each with whether it is the last."""
    for waiting in items:
        for item in items:
            yield False, waiting
            waiting = item
        yield True, waiting


def precision(recipe: Recipe, device: torch.device, losses: bool = False) -> torch.autocast:
    """Half precision where the recipe asks for it. Losses are computed in fp32 all the same."""
    half = recipe.compute.precision in HALVES and not losses
    return torch.autocast(device.type, HALVES.get(recipe.compute.precision, torch.bfloat16), enabled=half)


@contextmanager
def training_mode(classifier: BaseClassifier, recipe: Recipe, seed: int) -> Iterator[None]:
    """With dropout where the recipe asks for it, by a seed of its own: the caller's random numbers are left alone.

    The classifier stays in training mode: activations that are computed again, for their gradient, drop the same units.
    """
    if not recipe.optimisation.dropout:
        yield
        return
    with torch.random.fork_rng([classifier.device] if classifier.device.type == "cuda" else []):
        torch.manual_seed(seed)
        classifier.train()
        yield


@contextmanager
def checkpointing(classifier: BaseClassifier) -> Iterator[None]:
    """While open, layers forget their activations and compute them again when their gradient is needed.

    transformers does so only for layers in training mode; these get it for themselves and not for their parts, so that
    dropout stays off.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model = getattr(classifier.backbone, "model", None)
    if model is None or not getattr(model, "supports_gradient_checkpointing", False):
        kind = type(classifier.backbone).__name__
        raise InputError(f"{kind} can't forget activations and compute them again: set compute.checkpointing = false")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        classifier.eval()
