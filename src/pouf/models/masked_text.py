"""Filled templates → token ids with one mask each, cut where they are too long."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.errors import InputError
from pouf.models.cloze import Cloze, Example, Piece, Sample

MASK_POSITION = "mask_position"


class Span(NamedTuple):
    """Where a text stands in a filled template, by characters."""

    piece: int
    start: int
    end: int


class MaskedText:
    """A tokenizer of transformers that reads samples through a template with a mask.

    The filled template is tokenized as a whole, so that every piece gets the tokens it has in running text.
    """

    def __init__(self, tokenizer: Any, cloze: Cloze, longest: int) -> None:
        if tokenizer.mask_token is None:
            raise InputError("the model's tokenizer has no mask token: choose a masked language model, as roberta-base")
        if not tokenizer.is_fast:
            raise InputError("the model's tokenizer has no tokenizer.json: convert it to a fast one with transformers")
        self.tokenizer = tokenizer
        self.cloze = cloze
        self.max_length = min(cloze.max_length, longest)
        self._special = re.compile("|".join(re.escape(token) for token in tokenizer.all_special_tokens))

    def __call__(self, samples: Sequence[Sample | Example], room: int = 0) -> dict[str, Tensor]:
        """Token ids (n, length) padded to the longest, with `mask_position` (n,); `room` tokens are left free."""
        longest = self.max_length - room
        pieces = [self._pieces(self._fitting(sample, longest)) for sample in samples]
        ids = [encoding.ids for encoding in self._tokenize(pieces)]
        for i, tokens in enumerate(ids):
            if len(tokens) > longest:
                ids[i] = self._shortened(pieces[i], longest)
        # On the right, whatever the tokenizer's habit: the mask is counted from the left.
        batch = dict(
            self.tokenizer.pad({"input_ids": ids}, padding="longest", padding_side="right", return_tensors="pt")
        )
        return batch | {MASK_POSITION: torch.tensor([row.index(self.tokenizer.mask_token_id) for row in ids])}

    def label_ids(self) -> list[list[int]]:
        """The token of each word of each class, or an error for a word that has several."""
        ids = [[self.one_token(word) for word in words] for words in self.cloze.words]
        spelled: dict[int, str] = {}
        for words, tokens in zip(self.cloze.words, ids, strict=True):
            for word, token in zip(words, tokens, strict=True):
                if token in spelled:
                    raise InputError(f"label words {spelled[token]!r} and {word!r} are the same token for this model")
                spelled[token] = word
        return ids

    def _pieces(self, sample: Sample | Example) -> list[Piece]:
        example = sample if isinstance(sample, Example) else Example(sample)
        separator = Piece(self.tokenizer.sep_token or "\n")

        def solved(shown: Sample, label: int) -> list[Piece]:
            return self._inert([_at_most(example.shot_limit, piece) for piece in self.cloze.solve(shown, label)])

        pieces: list[Piece] = []
        for shown, label in example.before:
            pieces += [*solved(shown, label), separator]
        own = self.cloze.fill(example.sample, self.tokenizer.mask_token)
        first = next((i for i, piece in enumerate(own) if piece.is_text), 0)
        own[first] = _at_most(example.own_limit, own[first])
        pieces += self._inert(own)
        for shown, label in example.after:
            pieces += [separator, *solved(shown, label)]
        return self._limited(pieces)

    def _fitting(self, sample: Sample | Example, longest: int) -> Sample | Example:
        """As many of the examples before a sample as leave it whole; the farthest go first."""
        if not isinstance(sample, Example) or not sample.before:
            return sample
        fits, too_many = 0, len(sample.before) + 1
        while too_many - fits > 1:
            tried = (fits + too_many) // 2
            shown = sample._replace(before=sample.before[len(sample.before) - tried :])
            if len(self._tokenize([self._pieces(shown)])[0].ids) <= longest:
                fits = tried
            else:
                too_many = tried
        return sample._replace(before=sample.before[len(sample.before) - fits :])

    def _inert(self, pieces: list[Piece]) -> list[Piece]:
        """A text that holds the name of a special token must not be read as one: `[MASK]` → `[ MASK]`."""
        return [
            piece._replace(string=self._special.sub(lambda m: f"{m[0][0]} {m[0][1:]}", piece.string))
            if piece.is_text
            else piece
            for piece in pieces
        ]

    def _tokenize(self, filled: Sequence[list[Piece]]) -> list[Any]:
        strings = ["".join(piece.string for piece in pieces) for pieces in filled]
        encodings: list[Any] = self.tokenizer(strings, verbose=False).encodings
        return encodings

    def _limited(self, pieces: list[Piece]) -> list[Piece]:
        """Texts with a limit of their own, as `{text_a:first=240}`."""
        if all(piece.limit is None for piece in pieces):
            return pieces
        (encoding,) = self._tokenize([pieces])
        keep = [len(tokens) for tokens in _tokens_of(encoding, pieces)]
        limits = [piece.limit for piece in pieces if piece.is_text]
        return _cut(
            encoding, pieces, [n if limit is None else min(n, limit) for n, limit in zip(keep, limits, strict=True)]
        )

    def _shortened(self, pieces: list[Piece], longest: int) -> list[int]:
        """Take tokens from the longest texts until everything fits; the template and the mask stay."""
        while True:
            (encoding,) = self._tokenize([pieces])
            surplus = len(encoding.ids) - longest
            if surplus <= 0:
                ids: list[int] = encoding.ids
                return ids
            keep = [len(tokens) for tokens in _tokens_of(encoding, pieces)]
            if sum(keep) < surplus:
                raise InputError(
                    f"template {self.cloze.template!r} needs {len(encoding.ids) - sum(keep)} tokens without its "
                    f"texts, but there is room for {longest}: shorten it, or raise the maximum length"
                )
            for _ in range(surplus):
                keep[keep.index(max(keep))] -= 1
            pieces = _cut(encoding, pieces, keep)

    def one_token(self, word: str) -> int:
        ids = self._in_context(word)
        if len(ids) == 1 and ids[0] != self.tokenizer.unk_token_id:
            return ids[0]
        parts = " + ".join(self.tokenizer.convert_ids_to_tokens(ids))
        near = self._near(word)
        hint = f" Try {', '.join(near)}." if near else " Try a more common word."
        raise InputError(
            f"label word {word!r} is {len(ids)} tokens ({parts}) for this model; a prototype is one row of its "
            f"decoder.{hint}"
            if len(ids) != 1
            else f"label word {word!r} is unknown to this model's tokenizer ({parts}).{hint}"
        )

    def _in_context(self, word: str) -> list[int]:
        """The tokens of a word in the template's gap: after a space or at the start, or glued to what stands before."""
        before = self.cloze.template.partition("[MASK]")[0]
        if not before or before[-1].isspace() or before[-1] == "}":
            return self._ids(f" {word}")
        alone, together = self._ids(before[-1]), self._ids(before[-1] + word)
        return together[len(alone) :] if together[: len(alone)] == alone else together

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _near(self, word: str) -> list[str]:
        """Words of the vocabulary that are spelled alike and are one token."""
        spoken = {token.lstrip("Ġ▁ ") for token in self.tokenizer.get_vocab() if not token.startswith("##")}
        stem = word.lower()[: max(3, len(word) // 2)]
        alike = [w for w in spoken if len(w) > 2 and w.isalpha() and w.lower().startswith(stem)]
        close = difflib.get_close_matches(word, sorted(alike), n=12, cutoff=0.3)
        if len(close) < 3:
            close += difflib.get_close_matches(word, sorted(w for w in spoken if len(w) > 2), n=6, cutoff=0.6)
        return [w for w in dict.fromkeys(close) if len(self._in_context(w)) == 1][:3]


def _at_most(limit: int | None, piece: Piece) -> Piece:
    """A text with a limit, the lower of its own and this one."""
    if limit is None or not piece.is_text:
        return piece
    return piece._replace(limit=limit if piece.limit is None else min(limit, piece.limit))


def _spans(pieces: Sequence[Piece]) -> list[Span]:
    spans, at = [], 0
    for i, piece in enumerate(pieces):
        if piece.is_text:
            spans.append(Span(i, at, at + len(piece.string)))
        at += len(piece.string)
    return spans


def _tokens_of(encoding: Any, pieces: Sequence[Piece]) -> list[list[int]]:
    """For each text its tokens, by position. A token that has a character of a text belongs to it."""
    real = [
        (i, start, end)
        for i, ((start, end), special) in enumerate(zip(encoding.offsets, encoding.special_tokens_mask, strict=True))
        if end > start and not special
    ]
    return [[i for i, start, end in real if span.start < end and start < span.end] for span in _spans(pieces)]


def _cut(encoding: Any, pieces: Sequence[Piece], keep: Sequence[int]) -> list[Piece]:
    """Each text reduced to its first `keep` tokens."""
    shorter = list(pieces)
    for span, tokens, n in zip(_spans(pieces), _tokens_of(encoding, pieces), keep, strict=True):
        if n < len(tokens):
            end = max(encoding.offsets[tokens[n]][0] - span.start, 0)
            text = pieces[span.piece].string
            # Never the same text again, or shortening would not end.
            shorter[span.piece] = pieces[span.piece]._replace(
                string=text[: min(end, len(text) - 1)].rstrip(), limit=None
            )
    return shorter
