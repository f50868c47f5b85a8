"""Real transformers models, small, built from their config classes with random weights and saved as on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizer,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    Dinov2Config,
    Dinov2Model,
    MPNetConfig,
    MPNetModel,
    PreTrainedTokenizerFast,
    ResNetConfig,
    ResNetModel,
    Siglip2Config,
    Siglip2ImageProcessor,
    Siglip2Model,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
)

from pouf.models.load import embedded_folder

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


def word_tokenizer(length: int = 16, more: str = "") -> PreTrainedTokenizerFast:
    """One token a word, an end token after the sentence and none before, as SigLIP's."""
    vocab = {word: i for i, word in enumerate(dict.fromkeys(["<pad>", "</s>", "<unk>", *WORDS, *more]))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
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
    text = {**TEXT, "vocab_size": 64, "max_position_embeddings": 32, "projection_size": 32}
    vision = {**TEXT, "num_patches": 16, "patch_size": 8}
    model = Siglip2Model(Siglip2Config(text_config=text, vision_config=vision))
    # transformers opens it with a tokenizer that reads letter by letter.
    tokenizer = word_tokenizer(32, "abcdefghijklmnopqrstuvwxyz")
    return save(folder, model, tokenizer, Siglip2ImageProcessor(patch_size=8, max_num_patches=16))


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


def vision_model(folder: Path, kind: str) -> Path:
    """A vision model without a text side, a transformer or a convolutional one."""
    torch.manual_seed(0)
    if kind == "dinov2":
        small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
        model: Any = Dinov2Model(Dinov2Config(**small))
    else:
        model = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]))
    size = {"height": 16, "width": 16}
    return save(folder, model, CLIPImageProcessor(size=size, crop_size=size))


def cross_encoder(folder: Path, labels: list[str]) -> Path:
    """A model that reads two texts together, with an output for each label."""
    torch.manual_seed(0)
    size = {**TEXT, "vocab_size": 64, "max_position_embeddings": 66, "initializer_range": 0.5}
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    folder.mkdir()
    return save(folder, BertForSequenceClassification(BertConfig(**size, **names)), bert_tokenizer(folder))


CLOZE_WORDS = (
    "the a it was is film book food service great terrible good bad okay so very not and but i we they loved hated "
    "who where what how many is this number human location description yes no maybe"
).split()


def byte_pair_tokenizer() -> Tokenizer:
    """As RoBERTa's and ModernBERT's: a word at the start of a text is another token than after a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([f"{word} {word} {word}" for word in CLOZE_WORDS], trainer)
    return tokenizer


def unigram_tokenizer() -> Tokenizer:
    """As ALBERT's, XLM-R's and DeBERTa-v3's: a space is part of the token after it."""
    pieces = ["<unk>", "▁", *(f"▁{word}" for word in CLOZE_WORDS), *"abcdefghijklmnopqrstuvwxyz.,?:!'"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0 - (len(piece) == 1)) for piece in pieces], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece_tokenizer() -> Tokenizer:
    """As BERT's."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = ["[UNK]", *dict.fromkeys(CLOZE_WORDS), *letters, *(f"##{c}" for c in letters), *".,?:![]<>/"]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(dict.fromkeys(pieces))}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


ROBERTA_MARKS = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>",
                 "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}  # fmt: skip
BERT_MARKS = {"sep_token": "[SEP]", "cls_token": "[CLS]", "unk_token": "[UNK]", "pad_token": "[PAD]",
              "mask_token": "[MASK]"}  # fmt: skip
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}

# Model type in transformers, tokenizer, its special tokens, and what else sets the architecture apart.
MASKED_LMS: dict[str, tuple[str, Any, dict[str, str], dict[str, Any]]] = {
    "albert": ("albert", unigram_tokenizer, BERT_MARKS, {"embedding_size": 16}),
    "bert": ("bert", word_piece_tokenizer, BERT_MARKS, {}),
    "camembert": ("camembert", unigram_tokenizer, ROBERTA_MARKS, {}),
    "deberta": ("deberta", byte_pair_tokenizer, BERT_MARKS, {**DISENTANGLED, "legacy": True}),
    "deberta-new-head": ("deberta", byte_pair_tokenizer, BERT_MARKS, {**DISENTANGLED, "legacy": False}),
    "deberta-v2": ("deberta-v2", unigram_tokenizer, BERT_MARKS, {**DISENTANGLED, "legacy": True}),
    "deberta-v3": (
        "deberta-v2", unigram_tokenizer, BERT_MARKS,
        {**DISENTANGLED, "legacy": False, "share_att_key": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm"},
    ),
    "distilbert": ("distilbert", word_piece_tokenizer, BERT_MARKS,
                   {"dim": 32, "hidden_dim": 64, "n_heads": 4}),
    "electra": ("electra", word_piece_tokenizer, BERT_MARKS, {"embedding_size": 16}),
    "modernbert": ("modernbert", byte_pair_tokenizer, BERT_MARKS, {"global_attn_every_n_layers": 2}),
    "mpnet": ("mpnet", word_piece_tokenizer, ROBERTA_MARKS, {}),
    "roberta": ("roberta", byte_pair_tokenizer, ROBERTA_MARKS, {}),
    "xlm-roberta": ("xlm-roberta", unigram_tokenizer, ROBERTA_MARKS, {}),
}  # fmt: skip


def masked_lm_tokenizer(build: Any, marks: dict[str, str]) -> PreTrainedTokenizerFast:
    tokenizer: Tokenizer = build()
    # As in RoBERTa and ALBERT, the mask takes the space before it.
    tokenizer.add_special_tokens(
        [AddedToken(mark, lstrip=name == "mask_token", special=True) for name, mark in sorted(marks.items())]
    )
    first, last = marks["cls_token"], marks["sep_token"]
    ids = [(mark, tokenizer.token_to_id(mark)) for mark in dict.fromkeys((first, last))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B:1 {last}:1", special_tokens=ids
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **marks)


def masked_lm(folder: Path, kind: str, layers: int = 2) -> Path:
    """A masked language model with its head, decoder tied, all weights and biases random."""
    torch.manual_seed(0)
    model_type, build, marks, extras = MASKED_LMS[kind]
    tokenizer = masked_lm_tokenizer(build, marks)
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": None}
    size = {**TEXT, "vocab_size": len(tokenizer), "max_position_embeddings": 64 + tokenizer.pad_token_id + 1}
    size["num_hidden_layers"] = layers
    model = AutoModelForMaskedLM.from_config(CONFIG_MAPPING[model_type](**size, **ids, **extras))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return save(folder, model, tokenizer)


GPT_MARKS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
LLAMA_MARKS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
QWEN_MARKS = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}

# Model type in transformers, tokenizer, its special tokens, whether texts begin with one, and the decoder's ties.
CAUSAL_LMS: dict[str, tuple[str, Any, dict[str, str], bool, dict[str, Any]]] = {
    "gpt2": ("gpt2", byte_pair_tokenizer, GPT_MARKS, False, {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "llama": ("llama", unigram_tokenizer, LLAMA_MARKS, True, {"tie_word_embeddings": False}),
    "qwen2": ("qwen2", byte_pair_tokenizer, QWEN_MARKS, False, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
}


def causal_lm(folder: Path, kind: str) -> Path:
    """A causal language model, all weights random."""
    torch.manual_seed(0)
    model_type, build, marks, begins, extras = CAUSAL_LMS[kind]
    tokenizer: Tokenizer = build()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in dict.fromkeys(marks.values())])
    if begins:
        first = marks["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **marks)
    ids = {"bos_token_id": fast.bos_token_id, "eos_token_id": fast.eos_token_id, "pad_token_id": None}
    size = {**TEXT, "vocab_size": len(fast), "max_position_embeddings": 64}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**size, **ids, **extras))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return save(folder, model, fast)


def reading_lm(folder: Path, domains: dict[str, float]) -> Path:
    """A BERT of one layer, set by hand: one head averages how good all words are, one hears the domain's word alone.

    Component 0 of a word is how good it is, 1 is the same for all, 2 marks the word of a domain, and 3 is what the
    model makes of that domain. 4 to 7 are these with the other sign, so that layer norms find a mean of 0.
    """
    tokenizer = masked_lm_tokenizer(word_piece_tokenizer, BERT_MARKS)
    size = {**TEXT, "num_hidden_layers": 1, "vocab_size": len(tokenizer), "max_position_embeddings": 65}
    config = BertConfig(**size, pad_token_id=tokenizer.pad_token_id, hidden_act="linear")
    model = AutoModelForMaskedLM.from_config(config)
    attention, known = model.bert.encoder.layer[0].attention, tokenizer.get_vocab()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if name.endswith("LayerNorm.weight") else 0.0)
        words, all_words = model.get_input_embeddings().weight, model.bert.embeddings.token_type_embeddings.weight
        all_words[0, 1], all_words[0, 5] = 1.0, -1.0
        for side, good in (("good loved great", 1.0), ("bad hated terrible", -1.0)):
            for word in side.split():
                words[known[word], 0], words[known[word], 4] = good, -good
        for word, favour in domains.items():
            words[known[word], :8] = torch.tensor([0.0, 0.0, 1.0, favour, 0.0, 0.0, -1.0, -favour])
        averages, hears = 0, 8  # where the two heads begin
        attention.self.query.weight[hears, 1] = attention.self.key.weight[hears, 2] = 2.0
        attention.self.value.weight[averages, 0] = attention.self.value.weight[hears, 3] = 1.0
        for head in (averages, hears):
            attention.output.dense.weight[0, head], attention.output.dense.weight[4, head] = 1.0, -1.0
        model.cls.predictions.transform.dense.weight.copy_(torch.eye(32))
    return save(folder, model, tokenizer)
