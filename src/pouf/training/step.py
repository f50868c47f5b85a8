"""What a step computes, as one module: inputs and prompts of this process in, the loss of all processes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pouf.classifier import Classifier
from pouf.errors import InputError
from pouf.models.base import Scores
from pouf.parallel.process_group import ProcessGroup
from pouf.recipe import Recipe

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

    def __init__(self, classifier: Classifier, recipe: Recipe, world: ProcessGroup, touches_inputs: bool) -> None:
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


def _first(rows: Tensor, kept: int) -> Tensor:
    return rows if kept == len(rows) else rows[:kept].clone()


def precision(recipe: Recipe, device: torch.device, losses: bool = False) -> torch.autocast:
    """Half precision where the recipe asks for it. Losses are computed in fp32 all the same."""
    half = recipe.compute.precision in HALVES and not losses
    return torch.autocast(device.type, HALVES.get(recipe.compute.precision, torch.bfloat16), enabled=half)


@contextmanager
def training_mode(classifier: Classifier, recipe: Recipe, seed: int) -> Iterator[None]:
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
