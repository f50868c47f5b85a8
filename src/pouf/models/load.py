"""From a name or a folder to a backbone."""

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

from pouf.errors import InputError, nearest
from pouf.models.base import Backbone
from pouf.models.causal_lm import CausalLM
from pouf.models.cloze import Cloze
from pouf.models.cross_encoder import CrossEncoder
from pouf.models.dual_encoder import DualEncoder
from pouf.models.masked_lm import HEADS, MaskedLM
from pouf.models.open_clip import PREFIX as OPEN_CLIP
from pouf.models.open_clip import load_open_clip
from pouf.models.sentence_encoder import LAYOUT_FILES, SentenceEncoder, read_layout
from pouf.models.sequence_classifier import SequenceClassifier
from pouf.reading import check_finite

logger = logging.getLogger(__name__)
EMBEDDED = "pouf/tiny-clip"
# Where none is named: small enough for a laptop, weights as safetensors, a free licence. The CLIP is of the size that
# the default settings were measured with.
DEFAULT_MODELS: dict[str, str] = {
    "image": "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
    "text": "sentence-transformers/all-MiniLM-L6-v2",
    "cloze": "FacebookAI/roberta-base",
}

# Poolers that no output here comes from, and constants that older versions of transformers saved as weights.
UNUSED = re.compile(r"(^|\.)(pooler\.|(position_ids|token_type_ids|inv_freq|masked_bias|attn\.bias|attention\.bias)$)")

# Checkpoints are often stored in half precision; training is in fp32 unless asked for otherwise.
PRECISION = torch.float32


def embedded_folder() -> Path:
    """The tiny CLIP that comes with the package, in the layout of any other CLIP."""
    return Path(str(resources.files("pouf") / "assets" / "tiny-clip"))


def load_backbone(
    name_or_path: str | Path, cloze: Cloze | None = None, revision: str | None = None, trust_model: bool = False
) -> Backbone:
    """A model of transformers, by its name on the hub, by a local folder, or `pouf/tiny-clip` for the embedded one; or
    one of open_clip, as `open_clip:ViT-B-16/dfn2b`.

    With a cloze it is a masked language model, or a causal one; otherwise a dual encoder, or a sentence encoder for
    both sides.

    Args:
        trust_model: load pickled weights, and run code that comes with the model.
    """
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    if str(name_or_path).startswith(OPEN_CLIP):
        if cloze is not None:
            raise InputError(f"{name_or_path} reads images: a template with [MASK] is for language models")
        return load_open_clip(str(name_or_path))
    name = _local_or_hub(name_or_path)
    source = _Source(name, revision, trust_model)
    with _clear_errors(source, "roberta-base" if cloze else "openai/clip-vit-base-patch16"):
        config = AutoConfig.from_pretrained(name, **source.options)
        source.check_size(config)
        causal = cloze is not None and config.model_type not in HEADS
        if causal and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise InputError(
                f"model {name!r} is of type {config.model_type!r}, whose masked-LM head is not known: expected one of "
                f"{', '.join(HEADS)}, or a causal language model"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise _unsuitable(name, config)
        tokenizer = source.tokenizer()
        if cloze is not None and causal:
            model, lacks = source.load(AutoModelForCausalLM, config=config)
            source.check_whole(lacks)
            return CausalLM(model, tokenizer, cloze)
        if cloze is not None:
            return MaskedLM(_masked_lm(source, config), tokenizer, cloze)
        model, lacks = source.load(AutoModel, config=config)
        if hasattr(model, "get_image_features") and hasattr(model, "get_text_features"):
            source.check_whole(lacks)
            encoder = DualEncoder(model, tokenizer, AutoImageProcessor.from_pretrained(name, **source.options))
            encoder.check_image_processor(name)
            return encoder
        if tokenizer.pad_token is None or "pixel_values" in model.main_input_name:
            raise _unsuitable(name, config)
        source.check_whole([weight for weight in lacks if "pooler" not in weight.split(".")])
        _forget_pooler(model, lacks)
        layout = _layout_folder(source)
        known = (layout / "modules.json").is_file()
        generates = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if not known and generates and config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            raise _unsuitable(name, config)
        if not known and any("MaskedLM" in kind for kind in config.architectures or ()):
            logger.warning(
                "%s is a masked language model, and without a template with [MASK] it is used as a sentence encoder, "
                "by the mean of its tokens. Give such a template, or a model of sentence-transformers.", name_or_path,
            )  # fmt: skip
        pooling, length = read_layout(layout)
        longest = min(length or 512, tokenizer.model_max_length, getattr(config, "max_position_embeddings", 512))
        return SentenceEncoder(model, tokenizer, pooling, longest, layout)


class _Source(NamedTuple):
    """Where a model comes from, and how far it is trusted."""

    name: str
    revision: str | None
    trusted: bool

    @property
    def options(self) -> dict[str, Any]:
        # Said outright: without a word, transformers asks on the terminal whether to run a stranger's code.
        return {"revision": self.revision, "trust_remote_code": self.trusted}

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.name, **self.options)
        if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):  # transformers makes an empty one where none is
            raise InputError(f"model {self.name!r} has no tokenizer: expected its tokenizer.json beside the weights")
        return tokenizer

    def check_size(self, config: Any) -> None:
        """An error where the config describes more than the files hold: random numbers would fill the rest."""
        from transformers import MODEL_MAPPING, AutoModel

        files = [file for ending in ("safetensors", "bin") for file in Path(self.name).glob(f"*.{ending}")]
        if not files or type(config) not in MODEL_MAPPING or hasattr(config, "quantization_config"):
            return
        with torch.device("meta"):
            model = AutoModel.from_config(config)
        needed, stored = model.num_parameters(), sum(file.stat().st_size for file in files)
        if needed > stored:  # of a byte each at the least
            raise InputError(
                f"can't load model {self.name!r}: by its config.json it is of type {config.model_type!r} with "
                f"{needed:,} weights, and its files of weights have {stored:,} bytes. Are they cut, or is it the "
                "config of another model?"
            )

    def load(self, kind: Any, **more: Any) -> tuple[Any, list[str]]:
        """A model with finite weights, and the names of those that it lacks or has in another shape.

        transformers fills them with random numbers.
        """
        safe = None if self.trusted else True  # a pickle runs whatever code was put into it
        with _without_bars():
            model, info = kind.from_pretrained(
                self.name, **self.options, **more, dtype=PRECISION, use_safetensors=safe, output_loading_info=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
        check_finite(dict(model.state_dict()), f"model {self.name!r}")
        if surplus := _surplus(model, info["unexpected_keys"]):
            raise InputError(
                f"model {self.name!r} holds {len(surplus)} weights of its encoder that its config.json has no place "
                f"for, such as {surplus[0]}: they would be left out. Get it again from where it came."
            )
        lacks = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
        return model, sorted(lacks)

    def check_whole(self, lacks: Sequence[str]) -> None:
        if lacks:
            raise InputError(
                f"model {self.name!r} is not whole: {len(lacks)} of its weights are missing or of another shape, such "
                f"as {lacks[0]}. Get it again from where it came."
            )


def _surplus(model: Any, unexpected: Iterable[str]) -> list[str]:
    """Weights inside the encoder that it has no place for. Those of heads, which are beside it, are not used here."""
    prefix = model.base_model_prefix
    parts = {name for name, _ in getattr(model, prefix or " ", model).named_children()}
    inside = [name for name in sorted(unexpected) if name.removeprefix(f"{prefix}.").split(".")[0] in parts]
    return [name for name in inside if not UNUSED.search(name)]


@torch.no_grad()
def _forget_pooler(model: Any, lacks: Sequence[str]) -> None:
    """A layer that is never used here, and that many checkpoints lack: zeros instead of another draw at each time."""
    for name, parameter in model.named_parameters():
        if name in lacks:
            parameter.zero_()


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
    """A text encoder under a new head, whose weights come from the seed unless they were saved.

    Args:
        outputs: one for each class; a single one is a regression between two.
        fresh: the head is new; otherwise it must be there as well.
    """
    from transformers import AutoModelForSequenceClassification

    source = _Source(_local_or_hub(name_or_path), revision, trust_model)
    with _clear_errors(source, "roberta-base"), torch.random.fork_rng():
        torch.manual_seed(seed)
        model, lacks = source.load(AutoModelForSequenceClassification, num_labels=outputs)
        encoder = f"{model.base_model_prefix}."
        new = {weight for weight in lacks if not weight.startswith(encoder) or "pooler" in weight.split(".")}
        source.check_whole([weight for weight in lacks if not fresh or weight not in new])
        return SequenceClassifier(model, source.tokenizer(), max_length, seed)


def load_cross_encoder(
    name_or_path: str | Path, revision: str | None = None, trust_model: bool = False
) -> CrossEncoder | None:
    """An NLI classifier or a reranker; None where the model is no sequence classifier."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    source = _Source(_local_or_hub(name_or_path), revision, trust_model)
    with _clear_errors(source, "cross-encoder/nli-deberta-v3-small"):
        config = AutoConfig.from_pretrained(source.name, **source.options)
        if not any(kind.endswith("ForSequenceClassification") for kind in config.architectures or ()):
            return None
        model, lacks = source.load(AutoModelForSequenceClassification)
        source.check_whole(lacks)
        return CrossEncoder(model, source.tokenizer(), str(name_or_path))


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
def _clear_errors(source: _Source, example: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # a damaged config, tokenizer or file of weights can raise nearly anything
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        told = f"can't load model {source.name!r}: {reason.removesuffix('.')}."
        if not source.trusted and "trust_remote_code" in str(error):
            told = f"model {source.name!r} brings Python code of its own, which is not run unless you trust the model."
        elif not source.trusted and "no file named model.safetensors" in str(error):
            told += " Pickled weights (.bin) can run any code and are not loaded unless you trust the model."
        expected = f"Expected a local folder, a hub name such as {example}, or {EMBEDDED}"
        raise InputError(f"{told} {expected}{nearest(source.name, [EMBEDDED]) or '.'}") from error


def _masked_lm(source: _Source, config: Any) -> Any:
    """The model with its head."""
    from transformers import AutoModelForMaskedLM

    model, lacks = source.load(AutoModelForMaskedLM, config=config)
    if lacks and getattr(config, "legacy", False):
        config.legacy = False  # DeBERTa's own checkpoints hold the newer head, and their configs do not say so
        model, lacks = source.load(AutoModelForMaskedLM, config=config)
    encoder = f"{model.base_model_prefix}."
    source.check_whole([weight for weight in lacks if weight.startswith(encoder)])
    if lacks:
        raise InputError(
            f"model {source.name!r} has no trained masked-LM head ({len(lacks)} weights are missing, such as "
            f"{lacks[0]}): choose a checkpoint that was saved with one, as roberta-base. A sentence encoder is used "
            "without [MASK], with class names in {}."
        )
    return model


def _layout_folder(source: _Source) -> Path:
    """The folder with the files of sentence-transformers; from the hub these alone are fetched."""
    if os.path.isdir(source.name):
        return Path(source.name)
    from huggingface_hub import snapshot_download

    files = [*LAYOUT_FILES, "*_*/config.json"]
    return Path(snapshot_download(source.name, revision=source.revision, allow_patterns=files))


def _unsuitable(name: str, config: Any) -> InputError:
    return InputError(
        f"model {name!r} is of type {config.model_type!r}: expected a dual encoder with get_image_features and "
        "get_text_features (CLIP, SigLIP, …) or a sentence encoder (BERT, MPNet, …); a masked or causal "
        "language model needs a template with [MASK]"
    )


@contextmanager
def _without_bars() -> Iterator[None]:
    """Without a bar of transformers for each model that is read."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def calm_libraries() -> None:
    """Our progress bars and messages are the ones to see, not those of the libraries."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
