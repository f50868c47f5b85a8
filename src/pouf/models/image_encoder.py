"""Vision models without a text side, as DINO or an image classifier: features of images and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from pouf.errors import InputError
from pouf.models.base import Backbone, Tensors


class ImageEncoder(Backbone):
    """Any vision model of transformers, with its image processor. A feature is the mean over tokens, or over pixels."""

    modality = "image"
    reads_names = False

    def __init__(self, model: Any, image_processor: Any) -> None:
        super().__init__()
        self.model, self.image_processor = model, image_processor
        self.register_buffer("logit_scale", torch.tensor(0.0), persistent=False)

    def preprocessing(self) -> str:
        return str(self.image_processor.to_json_string())

    def prepare(self, samples: Sequence[Image.Image]) -> Tensors:
        return dict(self.image_processor(images=list(samples), return_tensors="pt"))

    def encode_inputs(self, batch: Tensors) -> Tensor:
        hidden: Tensor = self.model(**batch).last_hidden_state  # (n, tokens, d), or (n, d, h, w)
        return hidden.mean(1) if hidden.ndim == 3 else hidden.flatten(2).mean(2)

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        raise InputError("a vision model without a text side has features alone: give it as second features")
