"""Real transformers models, small, built from their config classes with random weights and saved as on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    BertTokenizer,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedTokenizerFast,
    Siglip2Config,
    Siglip2ImageProcessor,
    Siglip2Model,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
)

from pouf.backbones.load import embedded_folder

WORDS = "a photo of the it is about text cat dog sea air good bad great film book . , how many who where".split()

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = {**TEXT, "image_size": 16, "patch_size": 8}


def save(folder: Path, *parts: Any) -> Path:
    for part in parts:
        part.save_pretrained(folder)
    return folder


def clip(folder: Path, eos_token_id: int | None = None) -> Path:
    """CLIP with its 77 positions. `eos_token_id=2` is what OpenAI's own configs hold: the pooling then seeks the
    highest id instead of the end token."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    end = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    text = {**TEXT, "vocab_size": len(tokenizer), "max_position_embeddings": 77, "eos_token_id": end}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=VISION, projection_dim=24))
    size = {"height": 16, "width": 16}
    return save(folder, model, tokenizer, CLIPImageProcessor(size=size, crop_size=size))


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, an end token after the sentence and none before, as SigLIP's."""
    vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=16
    )


def siglip(folder: Path) -> Path:
    torch.manual_seed(0)
    text = {**TEXT, "vocab_size": 64, "max_position_embeddings": 16, "projection_size": 32}
    model = SiglipModel(SiglipConfig(text_config=text, vision_config=VISION))
    processor = SiglipImageProcessor(size={"height": 16, "width": 16})
    return save(folder, model, word_tokenizer(), processor)


def siglip2(folder: Path) -> Path:
    """SigLIP 2 with images of any shape (NaFlex): pixels come as patches with a mask."""
    torch.manual_seed(0)
    text = {**TEXT, "vocab_size": 64, "max_position_embeddings": 16, "projection_size": 32}
    vision = {**TEXT, "num_patches": 16, "patch_size": 8}
    model = Siglip2Model(Siglip2Config(text_config=text, vision_config=vision))
    return save(folder, model, word_tokenizer(), Siglip2ImageProcessor(patch_size=8, max_num_patches=16))


def bert_tokenizer(folder: Path) -> BertTokenizer:
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n")
    return BertTokenizer(str(folder / "vocab.txt"), model_max_length=64)


def sentence_encoder(folder: Path, kind: str = "bert", pooling: str = "mean_tokens") -> Path:
    """A sentence encoder in the layout of sentence-transformers."""
    torch.manual_seed(0)
    size = {**TEXT, "vocab_size": 64, "max_position_embeddings": 66}
    model = BertModel(BertConfig(**size)) if kind == "bert" else MPNetModel(MPNetConfig(**size))
    save(folder, model, bert_tokenizer(folder))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    modes = {f"pooling_mode_{mode}": mode == pooling for mode in ("mean_tokens", "max_tokens", "cls_token")}
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32, "do_lower_case": False}))
    return folder
