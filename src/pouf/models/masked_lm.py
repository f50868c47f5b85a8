"""Language models with label words: masked ones, and causal ones (GPT-2, Llama, Qwen, SmolLM, …)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pouf.data.class_names import ClassSet
from pouf.errors import InputError
from pouf.models.base import Scores, Tensors, TransformersBackbone
from pouf.models.lower_layers import last_hidden_state
from pouf.models.masked_text import MASK_POSITION, MaskedText
from pouf.models.templates import MASK, Cloze, Example, Piece, Slot, TextSample
from pouf.models.text_side import (
    WINDOW_WEIGHT,
    describe_tokenizer,
    encode_windows,
    replaced_embeddings,
    stack,
    tokenizer_facts,
)
from pouf.parallel.fsdp import full_tensor
from pouf.recipe import Kind

TRANSPORT_TEMPERATURE = 0.1  # of the transport plan, the paper's for texts
WINDOW_SLACK = 2  # tokens that a window may gain at its edges, where it cuts words
CLOZE_STEPS = [
    "put the text into `template`, and `mask_token` in the place of [MASK]; the name of a special token inside a text "
    "is broken up by a space after its first character",
    "shorten the text, never the template, until all of it has `max_length` tokens at most, special tokens included",
    "pad the batch to its longest text on the right; `attention_mask` is 1 for tokens and 0 for padding",
    "`mask_position` is where the mask stands in `input_ids`, counted from 0",
]
CLOZE_WINDOW_STEPS = [
    "a text with more tokens than the template leaves room for is cut into texts of about the same length, each of "
    "which goes into the template by itself; all tensors are (batch, windows, …), and a text with fewer windows than "
    "others repeats its first",
    "`window_weight` (batch, windows) is the number of characters of a window, 0 for a repeated one",
]


class Head(NamedTuple):
    """The end of a masked language model: logits = transform(hidden) @ weight.T + bias."""

    transform: Callable[[Tensor], Tensor]  # (n, h) -> (n, d): dense, activation, layer norm
    weight: Tensor  # (v, d), tied to the input embeddings where the model was trained so
    bias: Tensor | None  # (v,)


def _dense(dense: Any, activation: Any, norm: Any, decoder: Any) -> Head:
    return Head(lambda h: norm(activation(dense(h))), decoder.weight, getattr(decoder, "bias", None))


def _bert(model: Any) -> Head:
    head = model.cls.predictions
    return Head(head.transform, head.decoder.weight, head.decoder.bias)


def _roberta(model: Any) -> Head:
    return _dense(model.lm_head.dense, F.gelu, model.lm_head.layer_norm, model.lm_head.decoder)


def _distilbert(model: Any) -> Head:
    return _dense(model.vocab_transform, model.activation, model.vocab_layer_norm, model.vocab_projector)


def _albert(model: Any) -> Head:
    head = model.predictions
    return _dense(head.dense, head.activation, head.LayerNorm, head.decoder)


def _deberta(model: Any) -> Head:
    if model.legacy:
        return _bert(model)
    head = model.lm_predictions.lm_head
    found = _dense(head.dense, head.transform_act_fn, head.LayerNorm, model.get_input_embeddings())
    return found._replace(bias=head.bias)


def _electra(model: Any) -> Head:
    return Head(model.generator_predictions, model.generator_lm_head.weight, model.generator_lm_head.bias)


def _modernbert(model: Any) -> Head:
    return Head(model.head, model.decoder.weight, model.decoder.bias)


# By `config.model_type`. To add an architecture, add a function that returns the parts of its head.
HEADS: dict[str, Callable[[Any], Head]] = {
    "albert": _albert,
    "bert": _bert,
    "camembert": _roberta,
    "deberta": _deberta,
    "deberta-v2": _deberta,  # DeBERTa-v3 too
    "distilbert": _distilbert,
    "electra": _electra,
    "modernbert": _modernbert,
    "mpnet": _roberta,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
}


class MaskedLM(TransformersBackbone):
    """Features are the head's transform of the mask's hidden state, prototypes the decoder's rows of the label words.

        sim = cos(f, w_k)          for the transport, at T = 0.1
        logits = f · w_k + b_k     the model's own scores of these words

    where w_k and b_k are means over the words of class k. Only the hidden state at the mask goes through the head,
    and only the label words are scored.
    """

    modality = "text"
    added_by_tuners = ("input_prompt", "adapter")
    unit_prototypes = False  # the logits need the lengths
    encoder_makes_prototypes = False  # they are rows of the decoder
    supports_demonstrations = True
    supports_windows = True
    supports_suffix = True
    supports_upper = True

    kind: Kind = "cloze"
    label_ids: Tensor
    text_kind = MaskedText  # turns samples into token ids
    options: Mapping[str, Any] = {}  # of the model's calls

    def __init__(self, model: nn.Module, tokenizer: Any, cloze: Cloze) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.cloze = cloze
        self.check_model(model)
        self.texts = self.text_kind(tokenizer, cloze, longest_input(model.config, tokenizer))
        ids = self.texts.label_ids()
        self.register_buffer("label_ids", torch.tensor([i for row in ids for i in row]), persistent=False)
        self.words_per_class = [len(row) for row in ids]
        self.register_buffer("logit_scale", torch.tensor(math.log(1 / TRANSPORT_TEMPERATURE)), persistent=False)
        self.input_prompt: nn.Parameter | None = None

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.cloze.columns

    def check_question(self, classes: ClassSet, templates: Sequence[str] | None) -> tuple[str, ...]:
        """The template of the cloze, or an error if the classes don't fit its words."""
        if classes.descriptions is not None:
            raise InputError("this model has label words and reads no descriptions: give names alone")
        words, k = len(self.cloze.words), len(classes.names)
        if words != k:
            raise InputError(f"the model has label words for {words} classes, not for {k}")
        return (self.cloze.template,)

    def can_name(self, name: str) -> bool:
        """Whether the name is a single token."""
        try:
            self.texts.one_token(name)
        except InputError:
            return False
        return True

    def name_prototypes(self, names: Sequence[str], templates: Sequence[str]) -> Tensor:
        return self.encode_prompts(names)

    def card_facts(self) -> dict[str, Any]:
        return {"words": self.cloze.words, "max_length": self.cloze.max_length, "windows": self.windows}

    def describe_inputs(self) -> dict[str, Any]:
        facts = describe_tokenizer(self.tokenizer, self.cloze.max_length)
        facts["tokenizer"]["mask_token"] = self.tokenizer.mask_token
        words = [list(group) for group in self.cloze.words]
        steps = [*CLOZE_STEPS, *CLOZE_WINDOW_STEPS] if self.windows else CLOZE_STEPS
        return facts | {"steps": steps, "template": self.cloze.template, "words": words}

    @staticmethod
    def check_model(model: Any) -> None:
        """Raise an error if the head is unknown, or is not tied to the embeddings although the config says so."""
        kind = model.config.model_type
        if kind not in HEADS:
            raise InputError(
                f"the masked-LM head of {kind!r} is not known: expected a model of type {', '.join(HEADS)}. To add "
                "one, add the parts of its head to pouf.models.masked_lm.HEADS."
            )
        tied = getattr(model.config, "tie_word_embeddings", True)
        if tied and HEADS[kind](model).weight is not model.get_input_embeddings().weight:
            raise InputError(
                f"the decoder of this {kind} is not tied to its input embeddings, although its config says so"
            )

    @property
    def head(self) -> Head:
        return HEADS[self.model.config.model_type](self.model)

    def add_input_prompt(self, words: str) -> nn.Parameter:
        """Add trainable vectors (p, h) before the embedded input, initialised with the embeddings of `words`."""
        if self.input_prompt is None:
            ids = self.tokenizer(words, add_special_tokens=False)["input_ids"]
            if not ids:
                raise InputError("the context of prompt tuning is empty: give the words to start from")
            self.input_prompt = nn.Parameter(
                full_tensor(self.model.get_input_embeddings().weight).detach()[ids].clone()
            )
        return self.input_prompt

    def preprocessing(self) -> str:
        return f"{self.texts.cloze.template} {self.texts.max_length} {tokenizer_facts(self.tokenizer)}"

    def prepare(self, samples: Sequence[TextSample | Example]) -> Tensors:
        reserved = 0 if self.input_prompt is None else len(self.input_prompt)
        if not self.windows or any(isinstance(sample, Example) for sample in samples):
            return self.texts(samples, room=reserved)
        room = self.texts.text_room(reserved) - WINDOW_SLACK
        rows = [self.texts.windows(str(sample), room) for sample in samples]
        return stack(
            self.texts([window for own in rows for window in own], room=reserved),
            [[len(window) for window in own] for own in rows],
        )

    def use_windows(self) -> None:
        slots = [part for part in self.cloze.parts if isinstance(part, Slot)]
        if len(slots) != 1 or slots[0].limit is not None:
            raise InputError(f"windows need a template for one text without a limit, not {self.cloze.template!r}")
        if self.texts.text_room() <= 2 * WINDOW_SLACK:
            raise InputError(f"template {self.cloze.template!r} leaves no room for windows: raise the maximum length")
        super().use_windows()

    def text_lengths(self, samples: Sequence[TextSample | Example]) -> tuple[list[int], int] | None:
        if len(self.columns) != 1:
            return None
        ids = self.tokenizer([str(sample) for sample in samples], add_special_tokens=False, verbose=False)["input_ids"]
        return [len(own) for own in ids], self.texts.text_room()

    def has_room_for_suffix(self, sentence: str) -> bool:
        """Whether most of a text still fits if this sentence follows it."""
        tokens = self.tokenizer(sentence, add_special_tokens=False)["input_ids"]
        return 4 * len(tokens) < longest_input(self.model.config, self.tokenizer)

    @contextmanager
    def with_suffix(self, sentence: str) -> Iterator[None]:
        """While open, this sentence follows every text."""
        texts, longest = self.texts, longest_input(self.model.config, self.tokenizer)
        cloze = texts.cloze.with_suffix(sentence)
        more = len(self.tokenizer(sentence, add_special_tokens=False)["input_ids"])
        self.texts = self.text_kind(self.tokenizer, replace(cloze, max_length=cloze.max_length + more), longest)
        try:
            yield
        finally:
            self.texts = texts

    def encode_inputs(self, batch: Tensors) -> Tensor:
        """Features (n, d); of windows their mean, whose logits are the means of the windows' logits."""
        if WINDOW_WEIGHT not in batch:
            return self._encode(batch)
        return encode_windows(self._encode, batch, unit=False, at_once=self.sharded)

    def _encode(self, batch: Tensors) -> Tensor:
        tokens = {name: tensor for name, tensor in batch.items() if name != MASK_POSITION}
        position = batch[MASK_POSITION]
        prompted: AbstractContextManager[None] = nullcontext()
        if self.input_prompt is not None:
            p = len(self.input_prompt)
            # Placeholder tokens: the model assigns positions and attention as for any token that is not padding.
            tokens["input_ids"] = F.pad(tokens["input_ids"], (p, 0), value=self.tokenizer.mask_token_id or 0)
            tokens["attention_mask"] = F.pad(tokens["attention_mask"], (p, 0), value=1)
            if "token_type_ids" in tokens:
                tokens["token_type_ids"] = F.pad(tokens["token_type_ids"], (p, 0), value=0)
            position = position + p
            positions = torch.arange(p, device=position.device).expand(position.shape[0], -1)
            vectors = self.input_prompt.expand(position.shape[0], -1, -1)
            prompted = replaced_embeddings(self.model.get_input_embeddings(), positions, vectors)
        with prompted:
            hidden = last_hidden_state(self.model.base_model, tokens, self.options)  # (n, length, h)
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return self.head.transform(hidden[rows, position])

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        """The decoder's rows of single words."""
        ids = [self.texts.one_token(word) for word in prompts]
        return self.head.weight[torch.tensor(ids, device=self.device)]

    def prototypes(self, prompts: Sequence[Sequence[str]]) -> Tensor:
        """(k, d), not normalised, since the logits depend on the norms."""
        return self._class_means(self.head.weight[self.label_ids])

    def scores(self, features: Tensor, prototypes: Tensor) -> Scores:
        sim = F.normalize(features, dim=1) @ F.normalize(prototypes, dim=1).T
        logits = features @ prototypes.T
        bias = self.head.bias
        if bias is not None:
            logits = logits + self._class_means(bias[self.label_ids, None]).squeeze(1)
        return Scores(sim, logits, 1 / self.logit_scale.exp())

    def _class_means(self, rows: Tensor) -> Tensor:
        """Rows of all words (w, d) -> means over the words of each class (k, d)."""
        return torch.stack([group.mean(0) for group in rows.split(self.words_per_class)])


def longest_input(config: Any, tokenizer: Any) -> int:
    """Maximum number of tokens of an input."""
    positions = getattr(config, "max_position_embeddings", None) or 512
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        positions -= config.pad_token_id + 1  # these start their position numbers there
    return int(min(positions, tokenizer.model_max_length))


GAP = "\0"  # placeholder of the word, where the text is then cut


class CausalText(MaskedText):
    """Filled templates up to the gap, which must be at their end, since a causal model reads nothing after it."""

    def __init__(self, tokenizer: Any, cloze: Cloze, longest: int) -> None:
        super().__init__(tokenizer, cloze, longest)
        self._end = []  # the word follows there

    def _check(self, tokenizer: Any, cloze: Cloze) -> None:
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token  # masked out and after the end: any token will do
        gap = cloze.parts.index(MASK)
        after = "".join(part for part in cloze.parts[gap + 1 :] if isinstance(part, str))
        if any(isinstance(part, Slot) for part in cloze.parts[gap + 1 :]) or any(map(str.isalnum, after)):
            raise InputError(
                f"template {cloze.template!r} continues after [MASK], which a causal language model can't read: put it "
                "at the end, as in '{text} It was [MASK]'"
            )

    def _fill(self, sample: TextSample) -> list[Piece]:
        pieces = self.cloze.fill(sample, GAP)
        before = pieces[: [piece.string for piece in pieces].index(GAP)]
        if before and not before[-1].is_text:
            before[-1] = before[-1]._replace(string=before[-1].string.rstrip())  # the space belongs to the word
        return before

    def _separator(self) -> str:
        raise InputError("demonstrations are for masked language models")

    def _position(self, ids: Sequence[int]) -> int:
        return len(ids) - 1


class CausalLM(MaskedLM):
    """Features are the last hidden state of the filled template, prototypes the decoder's rows of the label words.

        sim = cos(f, w_k)      for the transport, at T = 0.1
        logits = f · w_k       the model's own scores of these words as the next token

    with w_k the mean over the words of class k.
    """

    kind: Kind = "causal"
    text_kind = CausalText
    options: Mapping[str, Any] = {"use_cache": False}
    supports_suffix = False
    supports_upper = False

    @property
    def head(self) -> Head:
        decoder = self.model.get_output_embeddings()
        return Head(lambda hidden: hidden, decoder.weight, getattr(decoder, "bias", None))

    @staticmethod
    def check_model(model: Any) -> None:
        """Nothing to check: every causal model of transformers has a decoder over its vocabulary."""
