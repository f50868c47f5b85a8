"""Tuners of what makes the prototypes: context vectors instead of a template's words (CoOp), or the prototypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pouf.errors import InputError
from pouf.models.base import class_means
from pouf.models.text_side import TextSide, replaced_embeddings, special_tokens
from pouf.parallel.fsdp import full_tensor
from pouf.tuners.base import Target, Tuner, TunerSettings


def prompt(target: Target, settings: TunerSettings) -> Tuner:
    """Context vectors before the class names, and the temperature: 4 x 512 + 1 = 2,049 numbers for CLIP ViT-B/16.

    For a masked language model, where classes are fixed words, the vectors precede the embedded input.
    """
    backbone = target.backbone
    if (vectors := backbone.add_input_prompt(settings.context)) is not None:
        named = {"backbone.input_prompt": vectors}
        return Tuner(named, touches_inputs=True, touches_prompts=False, keeps_base=True)
    if backbone.text_side is None:
        raise InputError(f"{type(backbone).__name__} has no text_side, which prompt tuning needs: tune 'full' instead")
    soft = target.prompt
    if not isinstance(soft, SoftPrompt):
        soft = SoftPrompt(backbone.text_side, target.texts, settings).to(backbone.device)
    named = {"prompt.vectors": soft.vectors}
    named |= {f"backbone.{n}": p for n, p in backbone.named_parameters() if n.split(".")[-1] == "logit_scale"}
    return Tuner(named, touches_inputs=False, touches_prompts=True, keeps_base=True, prompt=soft)


class SoftPrompt(nn.Module):
    """Prototypes from `[context] name.`, where the context is p trainable vectors instead of words.

    The vectors are initialised with the embeddings of the context's words, so that the initial prototypes are those of
    the template "a photo of a {}.". They are (p, h), shared by all classes, or (k, p, h), one context each. A class
    with descriptions has one prompt for each, and their mean as its prototype.
    """

    positions: Tensor

    def __init__(self, text_side: TextSide, texts: Sequence[Sequence[str]], settings: TunerSettings) -> None:
        super().__init__()
        self.text_side = text_side
        words = text_side.token_ids(settings.context)
        if not words:
            raise InputError("the context of prompt tuning is empty: give the words to start from, as 'a photo of a'")
        self.counts = [len(group) for group in texts]
        rows = [self._lay_out(text, words, settings.position) for group in texts for text in group]
        tokens = text_side.pad([ids for ids, _ in rows])  # (m, length), m = k if each class has one text
        if int(tokens["input_ids"].shape[1]) > text_side.max_length:
            raise InputError(
                f"a class name or description is too long for the model's {text_side.max_length} tokens: shorten it"
            )
        start = full_tensor(text_side.embedding.weight).detach()[words].clone()  # (p, h)
        if settings.class_specific:
            start = start.expand(len(texts), -1, -1).clone()
        self.vectors = nn.Parameter(start)
        self.token_names = list(tokens)
        for name, tensor in tokens.items():
            self.register_buffer(f"token_{name}", tensor, persistent=False)
        # (m, p), of the context tokens
        self.register_buffer("positions", torch.tensor([positions for _, positions in rows]), persistent=False)

    def forward(self) -> Tensor:
        """(k, d), each of length 1."""
        encoded = self.encode(range(len(self.positions)))
        return encoded if len(encoded) == len(self.counts) else F.normalize(class_means(encoded, self.counts), dim=1)

    def encode(self, rows: Sequence[int]) -> Tensor:
        """Some of the m prompts, by index: (len(rows), d), each of length 1."""
        vectors: Tensor = self.vectors  # (p, h) or (k, p, h)
        if vectors.ndim == 3 and len(vectors) < len(self.positions):
            vectors = vectors.repeat_interleave(torch.tensor(self.counts, device=vectors.device), dim=0)
        vectors = vectors.expand(len(self.positions), -1, -1)  # (m, p, h)
        tokens = {name: getattr(self, f"token_{name}") for name in self.token_names}
        positions = self.positions
        if list(rows) != list(range(len(positions))):
            chosen = torch.tensor(list(rows), device=positions.device)
            vectors, positions = vectors[chosen], positions[chosen]
            tokens = {name: tensor[chosen] for name, tensor in tokens.items()}
        with replaced_embeddings(self.text_side.embedding, positions, vectors):
            return F.normalize(self.text_side.encode_tokens(tokens), dim=1)

    def _lay_out(self, text: str, words: list[int], position: str) -> tuple[list[int], list[int]]:
        """Token ids of one prompt, and the positions of the context in it."""
        before, after = special_tokens(self.text_side.tokenizer)
        ids = self.text_side.token_ids
        half = len(words) // 2
        if position == "end":  # [context] name.
            lead, middle, tail, close = words, ids(text if text.endswith(".") else f"{text}."), [], []
        elif position == "middle":  # [first half] name [second half].
            lead, middle, tail, close = words[:half], ids(text), words[half:], ids(".")
        else:  # name [context].
            lead, middle, tail, close = [], ids(text), words, ids(".")
        sentence = [*before, *lead, *middle, *tail, *close, *after]
        first = len(before)
        second = first + len(lead) + len(middle)
        return sentence, [*range(first, first + len(lead)), *range(second, second + len(tail))]


def prototypes(target: Target, settings: TunerSettings) -> Tuner:
    """The prototypes themselves: k x d numbers. Neither encoder is trained, so every input is encoded once."""
    if (own_table := target.backbone.own_prototypes) is not None:
        return Tuner({"backbone.table": own_table}, touches_inputs=False, touches_prompts=True, keeps_base=False)
    table = target.prompt
    if not isinstance(table, PrototypeTable):
        with torch.no_grad():
            table = PrototypeTable(target.prototypes(), unit=target.backbone.unit_prototypes)
    return Tuner(
        {"prompt.table": table.table}, touches_inputs=False, touches_prompts=True, keeps_base=True, prompt=table
    )


def linear_map(target: Target, settings: TunerSettings) -> Tuner:
    """The prototypes and a linear map of the features."""
    named = {"backbone.map": target.backbone.add_map()}
    if (own_table := target.backbone.own_prototypes) is not None:
        named = {"backbone.table": own_table, **named}
    return Tuner(named, touches_inputs=True, touches_prompts=True, keeps_base=False)


class PrototypeTable(nn.Module):
    """Trainable prototypes (k, d).

    Args:
        start: (k, d), their initial values, from the text side.
        unit: normalise them; not for masked language models: their logits depend on the norms.
    """

    def __init__(self, start: Tensor, unit: bool) -> None:
        super().__init__()
        self.unit = unit
        self.table = nn.Parameter(start.detach().float().clone())

    def forward(self) -> Tensor:
        return F.normalize(self.table, dim=1) if self.unit else self.table
