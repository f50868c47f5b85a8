"""From a name or a folder to a backbone."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from pouf.backbones.base import Backbone
from pouf.backbones.dual_encoder import DualEncoder
from pouf.backbones.sentence_encoder import LAYOUT_FILES, SentenceEncoder, read_layout
from pouf.errors import InputError

EMBEDDED = "pouf/tiny-clip"


def embedded_folder() -> Path:
    """The tiny CLIP that comes with the package, in the layout of any other CLIP."""
    return Path(str(resources.files("pouf") / "assets" / "tiny-clip"))


def load_backbone(name_or_path: str | Path) -> Backbone:
    """A model of transformers, by its name on the hub, by a local folder, or `pouf/tiny-clip` for the embedded one."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    name = str(embedded_folder()) if str(name_or_path) == EMBEDDED else os.fspath(name_or_path)
    if not os.path.isdir(name) and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise InputError(f"no model folder {name!r}: expected a folder with config.json and weights, or a hub name")
    try:
        config = AutoConfig.from_pretrained(name)
        if getattr(config, "is_encoder_decoder", False):
            raise _unsuitable(name, config)
        # Checkpoints are often stored in half precision; training is in fp32 unless asked for otherwise.
        model = AutoModel.from_pretrained(name, config=config, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"can't load model {str(name_or_path)!r}: {reason} Expected a local folder, a hub name such as "
            f"openai/clip-vit-base-patch16, or {EMBEDDED}."
        ) from error
    if hasattr(model, "get_image_features") and hasattr(model, "get_text_features"):
        return DualEncoder(model, tokenizer, _image_processor(name))
    if tokenizer.pad_token is None or "pixel_values" in model.main_input_name:
        raise _unsuitable(name, config)
    layout = _layout_folder(name)
    pooling, length = read_layout(layout)
    longest = min(length or 512, tokenizer.model_max_length, getattr(config, "max_position_embeddings", 512))
    return SentenceEncoder(model, tokenizer, pooling, longest, layout)


def _image_processor(name: str) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(name)


def _layout_folder(name: str) -> Path:
    """The folder with the files of sentence-transformers; from the hub these alone are fetched."""
    if os.path.isdir(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=[*LAYOUT_FILES, "*_*/config.json"]))


def _unsuitable(name: str, config: Any) -> InputError:
    return InputError(
        f"model {name!r} is of type {config.model_type!r}: expected a dual encoder with get_image_features and "
        "get_text_features (CLIP, SigLIP, …) or a sentence encoder (BERT, MPNet, …)"
    )
