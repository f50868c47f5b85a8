"""From a name or a folder to a backbone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from pouf.errors import InputError
from pouf.models.base import Backbone
from pouf.models.cloze import Cloze
from pouf.models.dual_encoder import DualEncoder
from pouf.models.masked_lm import HEADS, MaskedLM
from pouf.models.sentence_encoder import LAYOUT_FILES, SentenceEncoder, read_layout
from pouf.models.sequence_classifier import SequenceClassifier

EMBEDDED = "pouf/tiny-clip"

# Checkpoints are often stored in half precision; training is in fp32 unless asked for otherwise.
PRECISION = torch.float32


def embedded_folder() -> Path:
    """The tiny CLIP that comes with the package, in the layout of any other CLIP."""
    return Path(str(resources.files("pouf") / "assets" / "tiny-clip"))


def load_backbone(name_or_path: str | Path, cloze: Cloze | None = None, revision: str | None = None) -> Backbone:
    """A model of transformers, by its name on the hub, by a local folder, or `pouf/tiny-clip` for the embedded one.

    With a cloze it is a masked language model; otherwise a dual encoder, or a sentence encoder for both sides.
    """
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    name = _local_or_hub(name_or_path)
    with _clear_errors(name_or_path, "roberta-base" if cloze else "openai/clip-vit-base-patch16"):
        config = AutoConfig.from_pretrained(name, revision=revision)
        if cloze is not None and config.model_type not in HEADS:
            raise InputError(
                f"model {name!r} is of type {config.model_type!r}, whose masked-LM head is not known: expected one of "
                f"{', '.join(HEADS)}"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise _unsuitable(name, config)
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
        if cloze is not None:
            return MaskedLM(_masked_lm(name, config, revision), tokenizer, cloze)
        model = AutoModel.from_pretrained(name, config=config, dtype=PRECISION, revision=revision)
    if hasattr(model, "get_image_features") and hasattr(model, "get_text_features"):
        return DualEncoder(model, tokenizer, _image_processor(name, revision))
    if tokenizer.pad_token is None or "pixel_values" in model.main_input_name:
        raise _unsuitable(name, config)
    layout = _layout_folder(name, revision)
    pooling, length = read_layout(layout)
    longest = min(length or 512, tokenizer.model_max_length, getattr(config, "max_position_embeddings", 512))
    return SentenceEncoder(model, tokenizer, pooling, longest, layout)


def load_sequence_classifier(
    name_or_path: str | Path, outputs: int, seed: int, max_length: int, revision: str | None = None
) -> SequenceClassifier:
    """A text encoder under a new head, whose weights come from the seed unless they were saved.

    Args:
        outputs: one for each class; a single one is a regression between two.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    name = _local_or_hub(name_or_path)
    with _clear_errors(name_or_path, "roberta-base"), torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=outputs, dtype=PRECISION, revision=revision
        )
        return SequenceClassifier(model, AutoTokenizer.from_pretrained(name, revision=revision), max_length)


def lasting_name(name_or_path: str | Path) -> str:
    """What to call a model in a saved run: a local folder by its whole path."""
    name = str(name_or_path)
    return os.path.abspath(name) if name != EMBEDDED and os.path.isdir(name) else name


def _local_or_hub(name_or_path: str | Path) -> str:
    name = str(embedded_folder()) if str(name_or_path) == EMBEDDED else os.fspath(name_or_path)
    if not os.path.isdir(name) and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise InputError(f"no model folder {name!r}: expected a folder with config.json and weights, or a hub name")
    return name


@contextmanager
def _clear_errors(name_or_path: str | Path, example: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"can't load model {str(name_or_path)!r}: {reason} Expected a local folder, a hub name such as "
            f"{example}, or {EMBEDDED}."
        ) from error


def _masked_lm(name: str, config: Any, revision: str | None) -> Any:
    """The model with its head, or an error: transformers fills what a checkpoint lacks with random numbers."""
    from transformers import AutoModelForMaskedLM

    def load() -> tuple[Any, Any]:
        loaded: tuple[Any, Any] = AutoModelForMaskedLM.from_pretrained(
            name, config=config, dtype=PRECISION, revision=revision, output_loading_info=True
        )
        return loaded

    model, info = load()
    if info["missing_keys"] and any("lm_predictions" in key for key in info["unexpected_keys"]):
        config.legacy = False  # DeBERTa's own checkpoints hold the newer head, and their configs do not say so
        model, info = load()
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"model {name!r} has no trained masked-LM head ({len(missing)} weights are missing, such as "
            f"{missing[0]}): choose a checkpoint that was saved with one, as roberta-base. A sentence encoder is used "
            "without [MASK], with class names in {}."
        )
    return model


def _image_processor(name: str, revision: str | None) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(name, revision=revision)


def _layout_folder(name: str, revision: str | None) -> Path:
    """The folder with the files of sentence-transformers; from the hub these alone are fetched."""
    if os.path.isdir(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, allow_patterns=[*LAYOUT_FILES, "*_*/config.json"]))


def _unsuitable(name: str, config: Any) -> InputError:
    return InputError(
        f"model {name!r} is of type {config.model_type!r}: expected a dual encoder with get_image_features and "
        "get_text_features (CLIP, SigLIP, …) or a sentence encoder (BERT, MPNet, …)"
    )


def calm_libraries() -> None:
    """Our progress bars and messages are the ones to see, not those of the libraries."""
    import logging

    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
