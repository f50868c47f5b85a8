"""What is trained, as the one module that engines wrap: inputs and prompts of this process in, scores of all out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pouf.classifier import Classifier
from pouf.errors import InputError
from pouf.models.base import Scores, class_means
from pouf.parallel.process_group import ProcessGroup
from pouf.recipe import Recipe
from pouf.tuners import SoftPrompt

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
