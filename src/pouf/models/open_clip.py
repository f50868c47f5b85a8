"""Models of open_clip and timm, through the open_clip library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pouf.errors import InputError, optional
from pouf.models.base import Backbone, Tensors

OPEN_CLIP_PREFIX = "open_clip:"  # of names, as open_clip:ViT-B-16/dfn2b and open_clip:hf-hub:timm/ViT-B-16-SigLIP


class OpenClip(Backbone):
    """A dual encoder of open_clip.

    Args:
        model: with `encode_image`, `encode_text`, `logit_scale` and `visual.image_size`.
        preprocess: a Pillow image to a tensor (3, s, s).
        tokenize: sentences to tokens (m, length).
    """

    modality = "image"

    def __init__(
        self, model: Any, preprocess: Callable[[Any], Tensor], tokenize: Callable[[list[str]], Tensor]
    ) -> None:
        super().__init__()
        self.model, self.preprocess, self.tokenize = model, preprocess, tokenize
        side = model.visual.image_size
        self.image_size = int(side if isinstance(side, int) else max(side))

    @property
    def logit_scale(self) -> Tensor:  # type: ignore[override]
        scale: Tensor = self.model.logit_scale
        return scale

    def preprocessing(self) -> str:
        return str(self.preprocess)

    def input_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().input_weights():
            if name.startswith("model.visual."):
                yield name, tensor

    def prepare(self, samples: Sequence[Any]) -> Tensors:
        return {"pixels": torch.stack([self.preprocess(image) for image in samples])}

    def encode_inputs(self, batch: Tensors) -> Tensor:
        features: Tensor = self.model.encode_image(batch["pixels"])
        return features

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        features: Tensor = self.model.encode_text(self.tokenize(list(prompts)).to(self.device))
        return features

    def scores(self, features: Tensor, prototypes: Tensor) -> Any:
        found = super().scores(features, prototypes)
        bias = getattr(self.model, "logit_bias", None)  # of SigLIP
        return found if bias is None else found._replace(logits=found.logits + bias)


def load_open_clip(name: str) -> OpenClip:
    """A model by `open_clip:ARCHITECTURE/WEIGHTS`, or by another name of open_clip, as `open_clip:hf-hub:timm/…`."""
    library = optional("open_clip", "open-clip", f"the model {name!r}")
    given = name.removeprefix(OPEN_CLIP_PREFIX)
    elsewhere = given.startswith(("hf-hub:", "local-dir:"))
    architecture, _, weights = (given, "", "") if elsewhere else given.partition("/")
    if not elsewhere and not weights:
        known = [tag for model, tag in library.list_pretrained() if model == architecture]
        raise InputError(
            f"model {name!r} names no weights: expected {OPEN_CLIP_PREFIX}{architecture}/TAG"
            + (f", with one of {', '.join(known)}" if known else "")
        )
    try:
        model, _, preprocess = library.create_model_and_transforms(
            architecture, pretrained=weights or None, precision="fp32"
        )
        tokenizer = library.get_tokenizer(architecture)
    except Exception as error:  # of the library, the hub or damaged files
        raise InputError(f"can't load model {name!r}: {str(error).strip() or type(error).__name__}") from error
    return OpenClip(model, preprocess, tokenizer)
