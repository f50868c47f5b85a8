"""Loading a backbone by name or from a folder."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pouf.data.class_names import Classes, class_set
from pouf.errors import InputError, did_you_mean
from pouf.files import check_finite
from pouf.models.base import Backbone
from pouf.models.masked_lm import HEADS, CausalLM, MaskedLM
from pouf.models.sentence_encoder import LAYOUT_FILES, SentenceEncoder, read_layout
from pouf.models.sequence_classifier import CrossEncoder, SequenceClassifier
from pouf.models.templates import Cloze, check_templates, make_cloze
from pouf.models.vision import OPEN_CLIP_PREFIX as OPEN_CLIP
from pouf.models.vision import DualEncoder, ImageEncoder, load_open_clip

logger = logging.getLogger(__name__)
EMBEDDED = "pouf/tiny-clip"
# The default models: small enough for a laptop, weights as safetensors, a free licence. The CLIP has the size that
# the default settings were measured with.
DEFAULT_MODELS: dict[str, str] = {
    "image": "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
    "text": "sentence-transformers/all-MiniLM-L6-v2",
    "cloze": "FacebookAI/roberta-base",
}

# Weights that no output here depends on: poolers, and constants that older versions of transformers saved.
UNUSED = re.compile(r"(^|\.)(pooler\.|(position_ids|token_type_ids|inv_freq|masked_bias|attn\.bias|attention\.bias)$)")


def embedded_folder() -> Path:
    """The folder of the tiny CLIP in this package."""
    return Path(str(resources.files("pouf") / "assets" / "tiny-clip"))


def load_backbone(
    name_or_path: str | Path, cloze: Cloze | None = None, revision: str | None = None, trust_model: bool = False
) -> Backbone:
    """A model of transformers by hub name or local folder, `pouf/tiny-clip` for the embedded one, or a model of
    open_clip, as `open_clip:ViT-B-16/dfn2b`.

    With a cloze it is a masked or causal language model; otherwise a dual encoder, or a sentence encoder for inputs
    and prompts.

    Args:
        trust_model: load pickled weights, and run code that comes with the model.
    """
    from transformers import AutoImageProcessor, AutoModel

    if str(name_or_path).startswith(OPEN_CLIP):
        if cloze is not None:
            raise InputError(f"{name_or_path} reads images: a template with [MASK] is for language models")
        return load_open_clip(str(name_or_path))
    example = "roberta-base" if cloze else "openai/clip-vit-base-patch16"
    with _model_source(name_or_path, revision, trust_model, example) as source:
        config = source.config()
        source.check_size(config)
        if cloze is not None:
            return _load_language_model(source, config, cloze)
        if getattr(config, "is_encoder_decoder", False):
            raise _unsuitable(source.name, config)
        tokenizer = source.tokenizer()
        model, missing = source.load(AutoModel, config=config)
        if hasattr(model, "get_image_features") and hasattr(model, "get_text_features"):
            source.check_complete(missing)
            encoder = DualEncoder(model, tokenizer, AutoImageProcessor.from_pretrained(source.name, **source.options))
            encoder.check_image_processor(source.name)
            return encoder
        if tokenizer.pad_token is None or "pixel_values" in model.main_input_name:
            raise _unsuitable(source.name, config)
        source.zero_pooler(model, missing)
        return _sentence_encoder(source, config, model, tokenizer)


def load_for_classes(
    name_or_path: str | Path,
    classes: Classes,
    templates: Sequence[str] | None,
    words: Sequence[str] | Sequence[Sequence[str]] | None,
    max_length: int | None,
    windows: bool,
    revision: str | None,
    trust_model: bool,
) -> tuple[Backbone, Classes]:
    """A backbone for these classes, and the classes as it reads them. See `Classifier.from_pretrained`."""
    given = class_set(classes)  # before the model is loaded, which may take long
    cloze = make_cloze(given, templates, words, max_length)
    if cloze is None and max_length is not None:
        raise InputError("max_length is for a language model with a gap: give a template with [MASK] as well")
    if cloze is None and templates is not None:
        check_templates(templates)
    backbone = load_backbone(name_or_path, cloze, revision, trust_model)
    if windows:
        backbone.use_windows()
    # The descriptions of a masked language model are the words of its cloze.
    return backbone, given.as_given() if cloze is None else given.names


def _load_language_model(source: _ModelSource, config: Any, cloze: Cloze) -> MaskedLM:
    """A masked language model with its trained head, or a causal one."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.model_type not in HEADS and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(
            f"model {source.name!r} is of type {config.model_type!r}, whose masked-LM head is not known: expected one "
            f"of {', '.join(HEADS)}, or a causal language model"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise _unsuitable(source.name, config)
    tokenizer = source.tokenizer()
    if config.model_type not in HEADS:
        model, missing = source.load(AutoModelForCausalLM, config=config)
        source.check_complete(missing)
        return CausalLM(model, tokenizer, cloze)
    model, missing = source.load(AutoModelForMaskedLM, config=config)
    if missing and getattr(config, "legacy", False):
        config.legacy = False  # DeBERTa's own checkpoints have the newer head, which their configs do not declare
        model, missing = source.load(AutoModelForMaskedLM, config=config)
    source.check_complete([weight for weight in missing if weight.startswith(f"{model.base_model_prefix}.")])
    if missing:
        raise InputError(
            f"model {source.name!r} has no trained masked-LM head ({len(missing)} weights are missing, such as "
            f"{missing[0]}): choose a checkpoint that was saved with one, as roberta-base. A sentence encoder is used "
            "without [MASK], with class names in {}."
        )
    return MaskedLM(model, tokenizer, cloze)


def _sentence_encoder(source: _ModelSource, config: Any, model: Any, tokenizer: Any) -> SentenceEncoder:
    from huggingface_hub import snapshot_download
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    layout = Path(source.name)
    if not layout.is_dir():  # of the hub: no more than these files
        files = [*LAYOUT_FILES, "*_*/config.json"]
        layout = Path(snapshot_download(source.name, revision=source.revision, allow_patterns=files))
    if not (layout / "modules.json").is_file():  # not of sentence-transformers
        generates = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if generates and config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            raise _unsuitable(source.name, config)
        if any("MaskedLM" in kind for kind in config.architectures or ()):
            logger.warning(
                "%s is a masked language model, and without a template with [MASK] it is used as a sentence encoder, "
                "by the mean of its tokens. Give such a template, or a model of sentence-transformers.", source.name,
            )  # fmt: skip
    pooling, length = read_layout(layout)
    longest = min(length or 512, tokenizer.model_max_length, getattr(config, "max_position_embeddings", 512))
    return SentenceEncoder(model, tokenizer, pooling, longest, layout)


class _ModelSource(NamedTuple):
    """Where a model is loaded from, and whether its code may run."""

    name: str
    revision: str | None
    trusted: bool

    @property
    def options(self) -> dict[str, Any]:
        # Explicit: by default, transformers asks on the terminal whether to run the model's code.
        return {"revision": self.revision, "trust_remote_code": self.trusted}

    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.name, **self.options)

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.name, **self.options)
        if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):  # transformers makes an empty one if there is none
            raise InputError(f"model {self.name!r} has no tokenizer: expected its tokenizer.json beside the weights")
        return tokenizer

    def check_size(self, config: Any) -> None:
        """Raise an error if the config has more weights than the files: the others would be random numbers."""
        from transformers import MODEL_MAPPING, AutoModel

        files = [file for ending in ("safetensors", "bin") for file in Path(self.name).glob(f"*.{ending}")]
        if not files or type(config) not in MODEL_MAPPING or hasattr(config, "quantization_config"):
            return
        with torch.device("meta"):
            model = AutoModel.from_config(config)
        needed, stored = model.num_parameters(), sum(file.stat().st_size for file in files)
        if needed > stored:  # at least one byte each
            raise InputError(
                f"can't load model {self.name!r}: its config.json describes a {config.model_type!r} with "
                f"{needed:,} weights, but its weight files have {stored:,} bytes. Are they truncated, or is it the "
                "config of another model?"
            )

    def load(self, kind: Any, **more: Any) -> tuple[Any, list[str]]:
        """The model, with finite weights, and the names of missing weights and those of another shape.

        transformers fills these with random numbers.
        """
        from transformers.utils import logging as logs

        safe = None if self.trusted else True  # unpickling can run any code
        # Checkpoints are often stored in half precision; training is in fp32 by default.
        had_bars = logs.is_progress_bar_enabled()
        logs.disable_progress_bar()
        try:
            model, info = kind.from_pretrained(
                self.name, **self.options, **more, dtype=torch.float32, use_safetensors=safe, output_loading_info=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
        finally:
            if had_bars:
                logs.enable_progress_bar()
        check_finite(dict(model.state_dict()), f"model {self.name!r}")
        if surplus := _surplus(model, info["unexpected_keys"]):
            raise InputError(
                f"model {self.name!r} has {len(surplus)} encoder weights that don't fit its config.json, such as "
                f"{surplus[0]}: they would be ignored. Download it again."
            )
        missing = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
        return model, sorted(missing)

    def check_complete(self, missing: Sequence[str]) -> None:
        if missing:
            raise InputError(
                f"model {self.name!r} is incomplete: {len(missing)} of its weights are missing or have another shape, "
                f"such as {missing[0]}. Download it again."
            )

    @torch.no_grad()
    def zero_pooler(self, model: Any, missing: Sequence[str]) -> None:
        """A missing pooler, which is not used, becomes zero, so that loading is deterministic; else an error."""
        self.check_complete([weight for weight in missing if "pooler" not in weight.split(".")])
        for name, parameter in model.named_parameters():
            if name in missing:
                parameter.zero_()


def _surplus(model: Any, unexpected: Iterable[str]) -> list[str]:
    """Encoder weights that the config has no parameter for. Weights of heads are not needed and don't count."""
    prefix = model.base_model_prefix
    parts = {name for name, _ in getattr(model, prefix or " ", model).named_children()}
    inside = [name for name in sorted(unexpected) if name.removeprefix(f"{prefix}.").split(".")[0] in parts]
    return [name for name in inside if not UNUSED.search(name)]


def load_sequence_classifier(
    name_or_path: str | Path,
    outputs: int,
    seed: int,
    max_length: int,
    revision: str | None = None,
    *,
    fresh: bool = True,
    trust_model: bool = False,
) -> SequenceClassifier:
    """A text encoder with a classification head.

    Args:
        outputs: one for each class; a single one is a regression between two classes.
        seed: of the weights of a new head.
        fresh: the head is new; otherwise its weights must be in the files.
    """
    from transformers import AutoModelForSequenceClassification

    with _model_source(name_or_path, revision, trust_model, "roberta-base") as source, torch.random.fork_rng():
        torch.manual_seed(seed)
        model, missing = source.load(AutoModelForSequenceClassification, num_labels=outputs)
        encoder = f"{model.base_model_prefix}."
        new = {weight for weight in missing if not weight.startswith(encoder) or "pooler" in weight.split(".")}
        source.check_complete([weight for weight in missing if not fresh or weight not in new])
        return SequenceClassifier(model, source.tokenizer(), max_length, seed)


def load_cross_encoder(
    name_or_path: str | Path, revision: str | None = None, trust_model: bool = False
) -> CrossEncoder | None:
    """An NLI classifier or a reranker; None where the model is no sequence classifier."""
    from transformers import AutoModelForSequenceClassification

    with _model_source(name_or_path, revision, trust_model, "cross-encoder/nli-deberta-v3-small") as source:
        if not any(kind.endswith("ForSequenceClassification") for kind in source.config().architectures or ()):
            return None
        model, missing = source.load(AutoModelForSequenceClassification)
        source.check_complete(missing)
        return CrossEncoder(model, source.tokenizer(), str(name_or_path))


def load_feature_encoder(name_or_path: str | Path, revision: str | None = None, trust_model: bool = False) -> Backbone:
    """An encoder for features only: what `load_backbone` loads, or a vision model without a text side."""
    from transformers import MODEL_MAPPING, AutoImageProcessor, AutoModel

    if str(name_or_path).startswith(OPEN_CLIP):
        return load_backbone(name_or_path)
    with _model_source(name_or_path, revision, trust_model, "facebook/dinov2-small") as source:
        config = source.config()
        kind = MODEL_MAPPING.get(type(config), None)
        if getattr(kind, "main_input_name", "") == "pixel_values" and not hasattr(kind, "get_text_features"):
            model, missing = source.load(AutoModel, config=config)
            source.zero_pooler(model, missing)
            return ImageEncoder(model, AutoImageProcessor.from_pretrained(source.name, **source.options))
    return load_backbone(name_or_path, None, revision, trust_model)


def absolute_name(name_or_path: str | Path) -> str:
    """The name of a model in a saved run: the absolute path of a local folder."""
    name = str(name_or_path)
    return os.path.abspath(name) if name != EMBEDDED and os.path.isdir(name) else name


@contextmanager
def _model_source(
    name_or_path: str | Path, revision: str | None, trust_model: bool, example: str
) -> Iterator[_ModelSource]:
    """While open, errors say which model can't be loaded, and what is expected, as the example."""
    name = str(embedded_folder()) if str(name_or_path) == EMBEDDED else os.fspath(name_or_path)
    if not os.path.isdir(name) and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise InputError(f"no model folder {name!r}: expected a folder with config.json and weights, or a hub name")
    try:
        yield _ModelSource(name, revision, trust_model)
    except InputError:
        raise
    except Exception as error:  # damaged configs, tokenizers and weights raise many kinds of errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        problem = f"can't load model {name!r}: {reason.removesuffix('.')}."
        if not trust_model and "trust_remote_code" in str(error):
            problem = f"model {name!r} comes with Python code, which is not run unless you trust the model."
        elif not trust_model and "no file named model.safetensors" in str(error):
            problem += " Pickled weights (.bin) can run any code and are not loaded unless you trust the model."
        expected = f"Expected a local folder, a hub name such as {example}, or {EMBEDDED}"
        raise InputError(f"{problem} {expected}{did_you_mean(name, [EMBEDDED]) or '.'}") from error


def _unsuitable(name: str, config: Any) -> InputError:
    return InputError(
        f"model {name!r} is of type {config.model_type!r}: expected a dual encoder with get_image_features and "
        "get_text_features (CLIP, SigLIP, …) or a sentence encoder (BERT, MPNet, …); a masked or causal "
        "language model needs a template with [MASK]"
    )


def silence_libraries() -> None:
    """Turn off progress bars and messages below errors of transformers and the hub."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
