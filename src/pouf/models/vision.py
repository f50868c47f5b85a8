"""Models that read images: CLIP, SigLIP and similar, those of open_clip, and encoders without a text side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from pouf.errors import InputError, optional
from pouf.models.base import Backbone, Tensors, TransformersBackbone
from pouf.models.text_side import TextSide

MAX_SIDE = 8192  # pixels; larger inputs of an image encoder are refused
IMAGE_STEPS = [
    "decode the first frame and turn it upright by its EXIF orientation",
    "to 8-bit RGB; transparent pixels become white",
    "as `image_processor` says: resize, crop, rescale and normalise, in this order, each if its do_… is true",
    "channels first: (batch, channels, height, width), float32",
]
# Models that were trained with texts padded to the full length, without masking the padding.
ATTENDS_TO_PADDING = ("siglip", "siglip2")


class DualEncoder(TransformersBackbone):
    """Any model with `get_image_features` and `get_text_features`, its tokenizer and its image processor."""

    modality = "image"

    model: Any
    fixed_scale: Tensor

    def __init__(self, model: Any, tokenizer: Any, image_processor: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        if not hasattr(model, "logit_scale"):
            # ALIGN has a temperature instead; others have none.
            temperature = float(getattr(model, "temperature", 0.01))
            self.register_buffer("fixed_scale", torch.tensor(math.log(1 / temperature)), persistent=False)
        config: Any = model.config
        longest = getattr(config.text_config, "max_position_embeddings", 77)
        self.text_side = TextSide(
            tokenizer,
            partial(_text_features, model),  # a lambda would stay at the old model when this is copied
            _text_embedding(model),
            max_length=min(longest, tokenizer.model_max_length),
            full_length=config.model_type in ATTENDS_TO_PADDING,
        )
        self.image_size = _side(config.vision_config, image_processor)

    @property
    def logit_scale(self) -> Tensor:  # type: ignore[override]
        scale: Tensor = self.model.logit_scale if hasattr(self.model, "logit_scale") else self.fixed_scale
        return scale

    def input_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All but the text side and the temperature, which prompt tuning changes."""
        for name, tensor in super().input_weights():
            if not any(part.startswith(("text_", "logit_")) for part in name.split(".")):
                yield name, tensor

    @torch.no_grad()
    def check_image_processor(self, name: str) -> None:
        """Raise an error if the encoder can't read what the image processor makes of a test image."""
        sizes = [getattr(self.image_processor, kind, None) for kind in ("size", "crop_size")]
        sides = [side for size in sizes if size is not None for side in dict(size).values() if side is not None]
        why = next((f"a side of {side} pixels" for side in sides if not 0 < side <= MAX_SIDE), "")
        filters, named = list(Image.Resampling), getattr(self.image_processor, "resample", None)
        if named is not None and named not in filters:  # transformers would take another without a word
            why = f"resampling {named!r} is none of {', '.join(f'{each.value} {each.name}' for each in filters)}"
        try:
            assert self.image_size is not None
            image = Image.new("RGB", (self.image_size, self.image_size), "gray")
            with np.errstate(all="ignore"):
                if not why and not bool(self.encode_inputs(self.prepare([image])).isfinite().all()):
                    why = "its features are not finite"
        except Exception as error:  # wrong settings raise many kinds of errors
            why = " ".join(str(error).split())[:200] or type(error).__name__
        if why:
            raise InputError(
                f"model {name!r} can't read an image as its preprocessor_config.json prepares it ({why}): download "
                "that file again"
            )

    def encode_inputs(self, batch: Tensors) -> Tensor:
        return _pooled(self.model.get_image_features(**batch))

    def describe_inputs(self) -> dict[str, Any]:
        return {"steps": IMAGE_STEPS, "image_processor": self.image_processor.to_dict()}


def _text_features(model: Any, tokens: Tensors) -> Tensor:
    return _pooled(model.get_text_features(**tokens))


def _pooled(output: Any) -> Tensor:
    """The vector of each sample; before version 5, transformers returned a plain tensor."""
    pooled: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return pooled


def _text_embedding(model: Any) -> nn.Embedding:
    part: Any
    for part in (getattr(model, "text_model", None), getattr(model, "text_encoder", None), model):
        try:
            embedding = part.get_input_embeddings()
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(embedding, nn.Embedding):
            return embedding
    raise ValueError(f"{type(model).__name__} has no token embedding that transformers can find")


def _side(vision_config: Any, image_processor: Any) -> int:
    """Side of the square that the image encoder reads."""
    size = getattr(vision_config, "image_size", None)
    if isinstance(size, int):
        return size
    if hasattr(vision_config, "num_patches"):  # SigLIP 2 accepts any shape with this many patches
        return int(vision_config.patch_size * math.isqrt(vision_config.num_patches))
    crop = getattr(image_processor, "crop_size", None) or image_processor.size
    return int(crop.get("height") or crop["shortest_edge"])


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


class ImageEncoder(TransformersBackbone):
    """Any vision model of transformers, with its image processor. A feature is the mean over tokens, or over pixels."""

    modality = "image"
    reads_names = False

    def __init__(self, model: Any, image_processor: Any) -> None:
        super().__init__()
        self.model, self.image_processor = model, image_processor
        self.register_buffer("logit_scale", torch.tensor(0.0), persistent=False)

    def encode_inputs(self, batch: Tensors) -> Tensor:
        hidden: Tensor = self.model(**batch).last_hidden_state  # (n, tokens, d), or (n, d, h, w)
        return hidden.mean(1) if hidden.ndim == 3 else hidden.flatten(2).mean(2)

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        raise InputError("a vision model without a text side has features alone: give it as second features")
