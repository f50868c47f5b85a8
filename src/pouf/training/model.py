"""What is trained, as the one module that engines wrap: inputs and prompts of this process in, scores of all out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pouf.base import BaseClassifier
from pouf.errors import InputError
from pouf.models.base import Scores
from pouf.parallel.process_group import ProcessGroup
from pouf.recipe import Recipe

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Chunk(NamedTuple):
    """Inputs or prompts that are encoded at once."""

    content: dict[str, Tensor] | list[int]  # tensors of inputs, or numbers of prompts
    seed: int  # of dropout
    rows: int  # that count: 0 of a padding sample


class StepModel(nn.Module):
    """Inputs and prompts of this process -> scores of all processes; or one chunk -> its features."""

    def __init__(self, classifier: BaseClassifier, recipe: Recipe, world: ProcessGroup) -> None:
        super().__init__()
        self.classifier, self.recipe, self.world = classifier, recipe, world
        encode = classifier.backbone.encode_inputs
        self.encode_inputs: Callable[[dict[str, Tensor]], Tensor] = (
            torch.compile(encode) if recipe.compute.compile else encode
        )

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
            return self.encode(inputs)
        features = [self._rows(each) for each in inputs]
        with precision(self.recipe, self.classifier.device):
            if prompts is None:
                with self._dropout(seed):
                    prototypes = self.classifier.prototypes().float()
            else:
                prototypes = self.classifier.prototypes_of(self._gather(self._rows(prompts))).float()
        with precision(self.recipe, self.classifier.device, losses=True):
            return [self.classifier.backbone.scores(self._gather(each), prototypes) for each in features]

    def encode(self, chunk: Chunk) -> Tensor:
        """(rows, d), in the recipe's precision and with its dropout: the same seed drops the same units."""
        device, content = self.classifier.device, chunk.content
        with self._dropout(chunk.seed), precision(self.recipe, device):
            if isinstance(content, dict):
                rows = self.encode_inputs({name: tensor.to(device) for name, tensor in content.items()}).float()
            else:
                rows = self.classifier.encode_prompts(content)
                rows = rows if self.world.size == 1 else rows.float()
        return rows if chunk.rows == len(rows) else rows[: chunk.rows].clone()

    def _rows(self, side: list[Chunk] | Tensor) -> Tensor:
        return side if isinstance(side, Tensor) else torch.cat([self.encode(chunk) for chunk in side])

    def _gather(self, rows: Tensor) -> Tensor:
        return rows if self.world.size == 1 else self.world.gather(rows)

    def _dropout(self, seed: int) -> AbstractContextManager[None]:
        return dropout(self.classifier, seed) if self.recipe.optimisation.dropout else nullcontext()


def precision(recipe: Recipe, device: torch.device, losses: bool = False) -> torch.autocast:
    """Half precision where the recipe asks for it. Losses are computed in fp32 all the same."""
    half = recipe.compute.precision in HALVES and not losses
    return torch.autocast(device.type, HALVES.get(recipe.compute.precision, torch.bfloat16), enabled=half)


@contextmanager
def dropout(classifier: BaseClassifier, seed: int) -> Iterator[None]:
    """While open, units are dropped, by a seed of their own: the caller's random numbers are left alone.

    The classifier stays in training mode: activations that are computed again, for their gradient, drop the same units.
    """
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
