"""What is trained, as the one module that engines wrap: inputs and prompts of this process in, scores of all out.

An engine is that module by plain torch, DDP or FSDP2, with its optimizer. Every process goes through it equally often,
with a borrowed sample where it has none of its own: engines communicate while they compute.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pouf.classifier import Classifier
from pouf.errors import InputError
from pouf.losses.objective import Objective
from pouf.models.base import Scores, class_means
from pouf.parallel.fsdp import average_gradients, clip_gradients, is_shard, local, reshard
from pouf.parallel.process_group import ProcessGroup, connection_errors, launched_precision, launched_sharding
from pouf.recipe import Optimisation, Recipe
from pouf.tuners import SoftPrompt, Tuner

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Chunk(NamedTuple):
    """Inputs or prompts that are encoded at once."""

    content: dict[str, Tensor] | list[int]  # tensors of inputs, or numbers of prompts
    seed: int  # of dropout
    rows: int  # that count: 0 of a padding sample


class StepModel(nn.Module):
    """Inputs and prompts of this process -> scores of all processes; or one chunk -> its features.

    Args:
        used: fields of the scores that the loss depends on. The others have no graph: DDP waits for every weight behind
            an output.
    """

    def __init__(
        self, classifier: Classifier, recipe: Recipe, world: ProcessGroup, used: Collection[str] = Scores._fields
    ) -> None:
        super().__init__()
        self.unused = [name for name in Scores._fields if name not in used]
        self.classifier, self.recipe, self.world, self.device = classifier, recipe, world, classifier.device
        encode = classifier.backbone.encode_inputs
        self.encode_inputs: Callable[[dict[str, Tensor]], Tensor] = (
            torch.compile(encode) if recipe.compute.compile else encode
        )
        self.autocast = precision(recipe, classifier.device)
        self.fp32 = precision(recipe, classifier.device, losses=True)
        self.prompts_per_class = prompt_counts(classifier)
        self.prompts = [prompt for own in classifier.prompts() for prompt in own] if self.prompts_per_class else []

    def forward(
        self, inputs: Chunk | Sequence[list[Chunk] | Tensor], prompts: list[Chunk] | Tensor | None = None, seed: int = 0
    ) -> Tensor | list[Scores]:
        """Scores of each batch over all processes, (n, k); of a single chunk its features, (rows, d).

        Args:
            inputs: for each batch what this process has of it: chunks, or features (n_local, d).
            prompts: chunks of this process's share, or encoded ones (m_local, d); None where none are read.
            seed: of dropout, in prototypes that are not made of prompts.
        """
        if isinstance(inputs, Chunk):
            return self._encode(inputs)
        features = [self._rows(each) for each in inputs]
        encoded = self._rows(prompts) if prompts is not None else None
        with self.autocast:
            prototypes = self._prototypes(encoded, seed)
        with self.fp32:
            scores = [self.classifier.backbone.scores(self._gather(each), prototypes) for each in features]
        return [each._replace(**{name: getattr(each, name).detach() for name in self.unused}) for each in scores]

    def _encode(self, chunk: Chunk) -> Tensor:
        """(rows, d), in the recipe's precision and with its dropout: the same seed drops the same units."""
        content, soft = chunk.content, self.classifier.prompt
        with self._dropout(chunk.seed), self.autocast:
            if isinstance(content, dict):
                rows = self.encode_inputs({name: tensor.to(self.device) for name, tensor in content.items()}).float()
            elif isinstance(soft, SoftPrompt):
                rows = soft.encode(content)
            else:
                read = self.classifier.backbone.encode_prompts([self.prompts[number] for number in content])
                rows = F.normalize(read, dim=1)
            if self.world.size > 1:
                rows = rows.float()
        return rows if chunk.rows == len(rows) else rows[: chunk.rows].clone()

    def _prototypes(self, encoded: Tensor | None, seed: int) -> Tensor:
        """(k, d), from this process's share of the encoded prompts, or from what takes their place."""
        if encoded is None:
            with self._dropout(seed):
                return self.classifier.prototypes().float()
        rows = self._gather(encoded)
        if not isinstance(self.classifier.prompt, SoftPrompt) or len(rows) > len(self.prompts_per_class):
            rows = F.normalize(class_means(rows, self.prompts_per_class), dim=1)
        return rows.float()

    def _rows(self, side: list[Chunk] | Tensor) -> Tensor:
        return side if isinstance(side, Tensor) else torch.cat([self._encode(chunk) for chunk in side])

    def _gather(self, rows: Tensor) -> Tensor:
        return rows if self.world.size == 1 else self.world.gather(rows)

    def _dropout(self, seed: int) -> AbstractContextManager[None]:
        return dropout(self.classifier, seed) if self.recipe.optimisation.dropout else nullcontext()


def prompt_counts(classifier: Classifier) -> list[int]:
    """How many prompts are encoded for each prototype; nothing where none are."""
    if isinstance(classifier.prompt, SoftPrompt):
        return classifier.prompt.counts
    reads = classifier.prompt is None and classifier.backbone.reads_prompts
    return [len(own) for own in classifier.prompts()] if reads else []


def precision(recipe: Recipe, device: torch.device, losses: bool = False) -> torch.autocast:
    """Half precision where the recipe asks for it. Losses are computed in fp32 all the same."""
    half = recipe.compute.precision in HALVES and not losses
    return torch.autocast(device.type, HALVES.get(recipe.compute.precision, torch.bfloat16), enabled=half)


@contextmanager
def dropout(classifier: Classifier, seed: int) -> Iterator[None]:
    """While open, units are dropped, by a seed of their own: the caller's random numbers are left alone.

    The classifier stays in training mode: activations that are computed again, for their gradient, drop the same units.
    """
    with torch.random.fork_rng([classifier.device] if classifier.device.type == "cuda" else []):
        torch.manual_seed(seed)
        classifier.train()
        yield


@contextmanager
def checkpointing(classifier: Classifier) -> Iterator[None]:
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


class Engine:
    """The model of a step on one process or on several. Alone, it is plain torch.

    With several processes the weights are copied in each (DDP), unless they were sharded over all before (FSDP2).
    """

    def __init__(
        self, classifier: Classifier, tuner: Tuner, objective: Objective, recipe: Recipe, world: ProcessGroup
    ) -> None:
        self.classifier, self.tuner, self.world = classifier, tuner, world
        self.recipe = as_launched(recipe, world)
        self.device = classifier.device
        self.sharded = classifier.backbone.sharded
        self.parameters: dict[str, nn.Parameter] = tuner.parameters
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.recipe.compute.precision == "fp16")
        self.model: nn.Module = StepModel(classifier, self.recipe, world, objective.used)
        if world.size > 1 and not self.sharded:
            self.model = _wrapped(self.model, self.device)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of the loss to the weights."""
        with connection_errors():
            self.scaler.scale(loss).backward()

    def no_sync(self) -> AbstractContextManager[Any]:
        """While open, DDP leaves gradients where they are."""
        return self.model.no_sync() if isinstance(self.model, nn.parallel.DistributedDataParallel) else nullcontext()

    def clip_gradients(self, optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
        """Exchange and unscale all gradients, cut them to the limit, and return their norm before that."""
        parameters = list(self.parameters.values())
        if self.sharded:
            average_gradients(parameters, self.world)
        self.scaler.unscale_(optimizer)
        if not self.sharded:
            return torch.nn.utils.clip_grad_norm_(parameters, limit)
        return clip_gradients(parameters, limit)

    def all_finite(self) -> bool:
        """The weights, on all processes."""
        return all(self.world.gather_objects(all(bool(local(p).isfinite().all()) for p in self.parameters.values())))

    def release(self) -> None:
        """After the last step, however it ended: free gradients and whole layers."""
        self.classifier.eval()
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.sharded:
            reshard(self.classifier.backbone)


def as_launched(recipe: Recipe, world: ProcessGroup) -> Recipe:
    """With the precision and the sharding that `accelerate launch` asks for."""
    changes: dict[str, Any] = {}
    launched, own = launched_precision(), recipe.compute.precision
    if launched is not None and own not in ("fp32", launched):
        raise InputError(f"accelerate asks for mixed_precision {launched}, the recipe for {own}: set one of them only")
    if launched is not None:
        changes["compute.precision"] = launched
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


Groups = list[dict[str, Any]]


def make_optimizer(parameters: Mapping[str, nn.Parameter], settings: Optimisation) -> torch.optim.Optimizer:
    """Parameters by name. The temperature is a group of its own where it has a rate of its own."""
    own = {name for name in parameters if settings.temperature_lr and name.split(".")[-1] == "logit_scale"}
    groups: Groups = [
        {"params": [p for name, p in parameters.items() if name not in own], "share": 1.0},
        {"params": [parameters[name] for name in own], "share": settings.temperature_lr / settings.lr},
    ]
    # Shards and whole tensors can't be updated by one call.
    groups = [
        group | {"params": [p for p in group["params"] if is_shard(p) is sharded]}
        for group in groups
        for sharded in (False, True)
    ]
    groups = [group for group in groups if group["params"]]
    return OPTIMIZERS[settings.name](
        [group | {"fused": all(map(_can_fuse, group["params"]))} for group in groups], settings
    )


def _can_fuse(p: Tensor) -> bool:
    """Whether torch updates it in one pass over memory: on a CPU a seventh of the time."""
    return p.is_floating_point() and p.device.type in ("cpu", "cuda") and not is_shard(p)


OPTIMIZERS: dict[str, Callable[[Groups, Optimisation], torch.optim.Optimizer]] = {
    "sgd": lambda groups, s: torch.optim.SGD(
        groups,
        lr=s.lr,
        momentum=s.momentum,
        nesterov=s.nesterov and s.momentum > 0,
        weight_decay=s.weight_decay,
    ),
    "adamw": lambda groups, s: torch.optim.AdamW(groups, lr=s.lr, weight_decay=s.weight_decay),
}


def learning_rate(settings: Optimisation, step: int, steps: int) -> float:
    """The rate of update number `step`, from 0."""
    return settings.lr * SCHEDULES[settings.schedule](settings, step, steps)


SCHEDULES: dict[str, Callable[[Optimisation, int, int], float]] = {
    "paper": lambda s, step, steps: (1 + s.gamma * step) ** -s.alpha,
    "linear": lambda s, step, steps: 1 - step / steps,
    "cosine": lambda s, step, steps: 0.5 * (1 + math.cos(math.pi * step / steps)),
    "constant": lambda s, step, steps: 1.0,
}
