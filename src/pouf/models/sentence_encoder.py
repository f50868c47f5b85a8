"""Sentence encoders: one encoder for unlabelled texts and class prompts."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from pouf.errors import InputError
from pouf.files import read_json
from pouf.models.base import Tensors, TransformersBackbone
from pouf.models.lower_layers import last_hidden_state
from pouf.models.text_side import (
    TextSide,
    describe_tokenizer,
    encode_windows,
    special_tokens,
    split_evenly,
    stack,
    tokenizer_facts,
)

LAYOUT_FILES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
REMEDY = "download the model again"
SENTENCE_TEMPERATURE = 0.1  # these models have none; this is the paper's for texts


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average over the tokens that are not padding: (n, l, d), (n, l) -> (n, d)."""
    weight = mask[..., None].to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1)


def max_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Maximum over the tokens that are not padding: (n, l, d), (n, l) -> (n, d)."""
    return hidden.masked_fill(mask[..., None] == 0, -math.inf).amax(1)


def first_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """The first token: (n, l, d), (n, l) -> (n, d)."""
    return hidden[:, 0]


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": mean_pool, "max": max_pool, "cls": first_pool}


class SentenceEncoder(TransformersBackbone):
    """A text encoder with pooling, as sentence-transformers saves them (BERT, MPNet, RoBERTa, …)."""

    modality = "text"
    text_side: TextSide
    supports_windows = True
    supports_upper = True

    def __init__(
        self, model: nn.Module, tokenizer: Any, pooling: str, max_length: int, extras: Path | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.pool = POOLINGS[pooling]
        self.extras = extras
        self.register_buffer("logit_scale", torch.tensor(math.log(1 / SENTENCE_TEMPERATURE)), persistent=False)
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        self.text_side = TextSide(tokenizer, partial(_encode, model, self.pool), embedding, max_length)

    def preprocessing(self) -> str:
        return f"{self.pool.__name__} {self.text_side.max_length} {tokenizer_facts(self.tokenizer)}"

    def prepare(self, samples: Sequence[str]) -> Tensors:
        if self.windows:
            before, after = special_tokens(self.tokenizer)
            rows = [split_evenly(ids, self._room) for ids in self._all_tokens(samples)]
            framed = [[*before, *window, *after] for own in rows for window in own]
            return stack(self.text_side.pad(framed), [[len(window) for window in own] for own in rows])
        return self.tokenize(self.text_side.max_length, list(samples))

    @property
    def _room(self) -> int:
        return self.text_side.max_length - sum(map(len, special_tokens(self.tokenizer)))

    def _all_tokens(self, samples: Sequence[str]) -> list[list[int]]:
        """Token ids of whole texts of any length."""
        ids: list[list[int]] = self.tokenizer(
            list(samples), add_special_tokens=False, truncation=False, split_special_tokens=True, verbose=False
        )["input_ids"]
        return ids

    def text_lengths(self, samples: Sequence[str]) -> tuple[list[int], int]:
        return [len(ids) for ids in self._all_tokens(samples)], self._room

    def encode_inputs(self, batch: Tensors) -> Tensor:
        encode = partial(_encode, self.model, self.pool)
        return encode_windows(encode, batch, unit=True, at_once=self.sharded) if self.windows else encode(batch)

    def card_facts(self) -> dict[str, Any]:
        return {"windows": self.windows}

    def describe_inputs(self) -> dict[str, Any]:
        return describe_tokenizer(self.tokenizer, self.text_side.max_length, self.windows)

    def save_pretrained(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        super().save_pretrained(folder, weights)
        if self.extras is not None:
            copy_layout(self.extras, folder)


def _encode(model: Any, pool: Callable[[Tensor, Tensor], Tensor], batch: Tensors) -> Tensor:
    return pool(last_hidden_state(model, batch), batch["attention_mask"])


def read_layout(folder: Path) -> tuple[str, int | None]:
    """Pooling and maximum length from the files that sentence-transformers writes beside a model."""
    modules = {module.type.rsplit(".", 1)[-1]: module for module in _modules(folder)}
    unsupported = modules.keys() - {"Transformer", "Pooling", "Normalize"}
    if unsupported:
        raise InputError(
            f"{folder} has a sentence-transformers module {', '.join(sorted(unsupported))} that pouf can't train; "
            "expected Transformer, Pooling and Normalize. Write a pouf.Backbone for it."
        )
    declared = folder / (modules["Pooling"].path if "Pooling" in modules else "1_Pooling") / "config.json"
    if "Pooling" in modules and not declared.is_file():
        raise InputError(f"{str(declared)!r}, which modules.json names, is missing: {REMEDY}")
    pooling = _pooling(_optional_json(declared), folder)
    length = _optional_json(folder / "sentence_bert_config.json").get("max_seq_length")
    if length is not None and (not isinstance(length, int) or length < 1):
        raise InputError(f"{folder} has a max_seq_length of {length!r}: expected a number of tokens")
    return pooling, length


def _pooling(config: dict[str, Any], folder: Path) -> str:
    named = {"pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max", "pooling_mode_cls_token": "cls"}
    enabled = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    usual = [] if any(key.startswith("pooling_mode_") for key in config) else ["mean"]
    mode = config.get("pooling_mode", [named.get(key, key) for key in enabled] or usual)
    modes = [mode] if isinstance(mode, str) else list(mode)
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise InputError(f"{folder} pools by {' + '.join(modes) or 'nothing'}; expected one of {', '.join(POOLINGS)}")
    return str(modes[0])


def copy_layout(source: Path, target: Path) -> None:
    """Copy the files that sentence-transformers needs to open the adapted model."""
    for name in LAYOUT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    for module in _modules(source):
        config = Path(module.path) / "config.json"
        if module.path and (source / config).is_file():
            (target / config).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / config, target / config)


class _Module(BaseModel):
    """The used fields of an entry of modules.json."""

    type: str
    path: str = ""


def _modules(folder: Path) -> list[_Module]:
    """The modules in modules.json. Paths out of the folder are refused: saving would write there."""
    if not (folder / "modules.json").is_file():
        return []
    modules: list[_Module] = read_json(folder / "modules.json", list[_Module], REMEDY)
    for module in modules:
        if Path(module.path).is_absolute() or ".." in Path(module.path).parts:
            raise InputError(f"{folder} has a module at {module.path!r}, outside of its folder: do not use this model")
    return modules


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file, dict[str, Any], REMEDY) if file.is_file() else {}
