"""What a model must offer to be adapted. Bring your own: subclass `Backbone` and pass it to `Classifier`."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pouf.data.base import Modality, Unlabelled
from pouf.errors import InputError
from pouf.models.cloze import Cloze
from pouf.models.prompts import fill
from pouf.models.text_side import TextSide

Tensors = dict[str, Tensor]

# Of a config of transformers: where it came from, not what it computes.
UNIMPORTANT = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")


class Scores(NamedTuple):
    """How n inputs and k classes match."""

    sim: Tensor  # (n, k), cosine similarity of features and prototypes
    logits: Tensor  # (n, k), what the model predicts with
    temperature: Tensor  # scalar, T of the transport plan


class Backbone(nn.Module, ABC):
    """A dual encoder: inputs and class prompts, each to a vector of the same space.

    A model of your own needs three methods and one attribute:

        class Mine(Backbone):
            modality = "image"                              # or "text"

            def __init__(self):
                super().__init__()
                self.logit_scale = nn.Parameter(torch.tensor(2.66))     # log(1/T); a buffer if it is not trained
                …

            def prepare(self, samples):                     # PIL images or strings → tensors, first dimension n
            def encode_inputs(self, batch):                 # those tensors, on the model's device → (n, d)
            def encode_prompts(self, prompts):              # list of m sentences → (m, d)

    Vectors need no normalisation. Anything registered as a parameter is trained by `full`, LayerNorms by `layernorm`.
    For `prompt`, also set `text_side`; for cropped views of images, also set `image_size`; if features depend on
    settings that are no weights, also tell them in `preprocessing`.
    """

    modality: Modality
    logit_scale: Tensor
    image_size: int | None = None
    text_side: TextSide | None = None
    added_by_tuners: tuple[str, ...] = ()  # attributes that are parameters once a tuner asks for them
    cloze: Cloze | None = None  # the question that a masked language model is asked

    @abstractmethod
    def prepare(self, samples: Sequence[Any]) -> Tensors:
        """Raw samples to tensors on the CPU, each with first dimension n."""

    @abstractmethod
    def encode_inputs(self, batch: Tensors) -> Tensor:
        """(n, d), differentiable."""

    @abstractmethod
    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        """(m, d), differentiable."""

    def ready_features(self, data: Unlabelled) -> Tensor | None:
        """(n, d) where the data are features already, for all samples and without a copy; None otherwise."""
        return None

    def prototypes(self, classes: Sequence[str], templates: Sequence[str]) -> Tensor:
        """The mean over the templates of each class's prompts: (k, d), each of length 1."""
        prompts = [prompt for name in classes for prompt in fill(templates, name)]
        encoded = F.normalize(self.encode_prompts(prompts), dim=1)
        return F.normalize(encoded.view(len(classes), len(templates), -1).mean(1), dim=1)

    def scores(self, features: Tensor, prototypes: Tensor) -> Scores:
        """sim = cos(f, w), logits = sim / T: (n, d), (k, d) -> Scores."""
        sim = F.normalize(features, dim=1) @ F.normalize(prototypes, dim=1).T
        scale = self.logit_scale.squeeze().exp()
        return Scores(sim, sim * scale, 1 / scale)

    def preprocessing(self) -> str:
        """Everything beside the weights that features depend on, as text: it is part of their fingerprint."""
        return ""

    def input_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that features depend on; all of them, unless a model knows better."""
        yield from self.state_dict().items()

    def fingerprint(self) -> str:
        """What features of this model are kept under: the same exactly where they would be the same."""
        config = getattr(getattr(self, "model", None), "config", None)
        # Two models can have the same weights and differ in an activation or a number of heads.
        facts = {} if config is None else {k: v for k, v in config.to_dict().items() if k not in UNIMPORTANT}
        named = f"{type(self).__qualname__} {self.preprocessing()} {json.dumps(facts, sort_keys=True, default=str)}"
        digest = blake2b(named.encode(), digest_size=16)
        for name, tensor in self.input_weights():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            bytes_of: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            digest.update(bytes_of)
        return digest.hexdigest()

    @property
    def device(self) -> torch.device:
        return self.logit_scale.device

    def set_temperature(self, temperature: float) -> None:
        with torch.no_grad():
            self.logit_scale.fill_(math.log(1 / temperature))

    def save_pretrained(self, folder: Path) -> None:
        """The weights; models from transformers write their usual folder instead."""
        save_file({k: v.contiguous() for k, v in self.state_dict().items()}, folder / "model.safetensors")

    def load_weights(self, folder: Path) -> None:
        """The inverse of this class's `save_pretrained`, for a model that was built by its user."""
        self.load_state_dict(load_file(folder / "model.safetensors"))


def check_modality(backbone: Backbone, modality: Modality) -> None:
    if backbone.modality != modality:
        raise InputError(f"this model reads {backbone.modality}s, but the data are {modality}s: choose another model")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """While open, everything is in evaluation mode; afterwards each part is in the mode that it was in before."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
