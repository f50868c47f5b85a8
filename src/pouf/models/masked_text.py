"""Filled templates → token ids with one mask each, shortened to the model's length."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.errors import InputError
from pouf.models.templates import Cloze, Example, Piece, TextSample
from pouf.models.text_side import special_tokens, split_evenly

MASK_POSITION = "mask_position"
MAX_CACHED_SEGMENTS = 4096  # encodings of filled templates


class Segment(NamedTuple):
    """A filled template, of the sample or of a demonstration."""

    pieces: tuple[Piece, ...]
    left: str = ""  # the separator before it, if any
    right: str = ""  # the separator after it, if any

    def __str__(self) -> str:
        return self.left + "".join(piece.string for piece in self.pieces) + self.right

    def texts(self, encoding: Any) -> list[tuple[int, int, list[int]]]:
        """Of each text: its piece, its first character, and its tokens. A token with a character of a text is its."""
        real = [(i, first, last) for i, (first, last) in enumerate(encoding.offsets) if last > first]
        found, start = [], len(self.left)
        for number, piece in enumerate(self.pieces):
            end = start + len(piece.string)
            if piece.is_text:
                found.append((number, start, [i for i, first, last in real if start < last and first < end]))
            start = end
        return found


class MaskedText:
    """A tokenizer of transformers that reads samples through a template with a mask.

    The filled template is tokenized as a whole, so that every piece gets the same tokens as in running text. With
    demonstrations, each part between two separators is tokenized once and cached: tokenizers do not look across a
    special token.
    """

    def __init__(self, tokenizer: Any, cloze: Cloze, longest: int) -> None:
        if not tokenizer.is_fast:
            raise InputError("the model's tokenizer has no tokenizer.json: convert it to a fast one with transformers")
        self._check(tokenizer, cloze)
        self.tokenizer = tokenizer
        self.cloze = cloze
        self.max_length = min(cloze.max_length, longest)
        self._special = re.compile("|".join(re.escape(token) for token in tokenizer.all_special_tokens))
        self._start, self._end = special_tokens(tokenizer)
        self._encodings: dict[Segment, Any] = {}

    def _check(self, tokenizer: Any, cloze: Cloze) -> None:
        """Raise an error if the tokenizer or the template does not fit this kind of model."""
        if tokenizer.mask_token is None:
            raise InputError("the model's tokenizer has no mask token: choose a masked language model, as roberta-base")

    def _fill(self, sample: TextSample) -> list[Piece]:
        """The template filled with a sample, with the model's mask token in its gap."""
        return self.cloze.fill(sample, self.tokenizer.mask_token)

    def _position(self, ids: Sequence[int]) -> int:
        """The index of the mask."""
        return ids.index(self.tokenizer.mask_token_id)

    def __call__(self, samples: Sequence[TextSample | Example], room: int = 0) -> dict[str, Tensor]:
        """Token ids (n, length) padded to the longest, with `mask_position` (n,); `room` tokens stay free."""
        total = self.max_length - room
        longest = total - len(self._start) - len(self._end)
        rows = [self._segments(sample) for sample in samples]
        self._tokenize([segment for row in rows for segment in row])
        rows = [self._shortened(row, sample, longest) for row, sample in zip(rows, samples, strict=True)]
        ids = [[*self._start, *self._joined_ids(row), *self._end] for row in rows]
        # Cut as LM-BFF does: at the start if demonstrations come before the sample, else at the end.
        solved_first = [isinstance(sample, Example) and bool(sample.before) for sample in samples]
        ids = [row[-total:] if first else row[:total] for row, first in zip(ids, solved_first, strict=True)]
        # Always on the right: the mask's index is counted from the left.
        batch = dict(
            self.tokenizer.pad({"input_ids": ids}, padding="longest", padding_side="right", return_tensors="pt")
        )
        return batch | {MASK_POSITION: torch.tensor([self._position(row) for row in ids])}

    def text_room(self, reserved: int = 0) -> int:
        """Tokens that are left for a single text in the template, without reserved ones."""
        (segment,) = self._segments("")
        return self.max_length - reserved - len(self._start) - len(self._end) - len(self._ids_of(segment))

    def windows(self, text: str, room: int) -> list[str]:
        """A text in pieces of at most `room` tokens, of about the same length."""
        encoded = self.tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        windows = [window for window in split_evenly(encoded["offset_mapping"], room) if window]
        return [piece for own in windows if (piece := text[own[0][0] : own[-1][1]].strip())] or [text]

    def label_ids(self) -> list[list[int]]:
        """The token of each word of each class, or an error for a word with several tokens."""
        ids = [[self.one_token(word) for word in words] for words in self.cloze.words]
        word_by_token: dict[int, str] = {}
        for word, token in zip(chain(*self.cloze.words), chain(*ids), strict=True):
            if (other := word_by_token.setdefault(token, word)) != word:
                raise InputError(f"label words {other!r} and {word!r} are the same token for this model")
        return ids

    def _segments(self, sample: TextSample | Example) -> list[Segment]:
        """The filled templates of the demonstrations and the sample in order, each text within its own limit."""
        example = sample if isinstance(sample, Example) else Example(sample)
        own = self._fill(example.sample)
        first = next((i for i, piece in enumerate(own) if piece.is_text), 0)
        own[first] = _with_limit(example.own_limit, own[first])

        before, after = (
            [[_with_limit(example.shot_limit, piece) for piece in self.cloze.solve(*shot)] for shot in shots]
            for shots in (example.before, example.after)
        )
        filled = [*before, own, *after]
        separator = self._separator() if len(filled) > 1 else ""
        last = len(filled) - 1
        segments = [
            Segment(self._escape_special(pieces), separator if i else "", separator if i < last else "")
            for i, pieces in enumerate(filled)
        ]
        return [self._within_limits(segment) for segment in segments]

    def _separator(self) -> str:
        if self.tokenizer.sep_token is None:
            raise InputError("the model's tokenizer has no separator token, which demonstrations need")
        return str(self.tokenizer.sep_token)

    def _escape_special(self, pieces: list[Piece]) -> tuple[Piece, ...]:
        """Break up names of special tokens in texts, so that they are read as text: `[MASK]` → `[ MASK]`."""
        strings = (self._special.sub(lambda m: f"{m[0][0]} {m[0][1:]}", piece.string) for piece in pieces)
        return tuple(p._replace(string=string) if p.is_text else p for p, string in zip(pieces, strings, strict=True))

    def _tokenize(self, segments: Sequence[Segment]) -> list[Any]:
        """Encodings of segments with their separators; those not cached are tokenized in one call."""
        new = [segment for segment in dict.fromkeys(segments) if segment not in self._encodings]
        if len(self._encodings) + len(new) > MAX_CACHED_SEGMENTS:
            self._encodings, new = {}, list(dict.fromkeys(segments))
        if new:
            encodings = self.tokenizer(list(map(str, new)), add_special_tokens=False, verbose=False).encodings
            self._encodings.update(zip(new, encodings, strict=True))
        return [self._encodings[segment] for segment in segments]

    def _ids_of(self, segment: Segment) -> list[int]:
        (encoding,) = self._tokenize([segment])
        ids: list[int] = encoding.ids
        return ids[bool(segment.left) : len(ids) - bool(segment.right)]

    def _joined_ids(self, row: Sequence[Segment]) -> list[int]:
        ids = self._ids_of(row[0])
        for segment in row[1:]:
            ids = [*ids, self.tokenizer.sep_token_id, *self._ids_of(segment)]
        return ids

    def _within_limits(self, segment: Segment) -> Segment:
        """The segment with texts cut to their own limits, as `{text_a:first=240}`."""
        limits = [piece.limit for piece in segment.pieces if piece.is_text]
        if all(limit is None for limit in limits):
            return segment
        (encoding,) = self._tokenize([segment])
        whole = [len(tokens) for *_, tokens in segment.texts(encoding)]
        return _cut(encoding, segment, [min(n, limit or n) for n, limit in zip(whole, limits, strict=True)])

    def _shortened(self, row: list[Segment], sample: TextSample | Example, longest: int) -> list[Segment]:
        """Shorten to `longest` tokens: drop demonstrations before the sample, the farthest first, then tokens from the
        end of the longest texts. The template and the mask stay.

        With `cut_solved`, only the sample's own text is shortened here.
        """
        if isinstance(sample, Example) and sample.cut_solved:
            own = len(sample.before)
            return [*row[:own], *self._shortened(row[own : own + 1], sample.sample, longest), *row[own + 1 :]]
        removable = len(sample.before) if isinstance(sample, Example) else 0
        while removable and len(self._joined_ids(row)) > longest:
            row = [row[1]._replace(left=""), *row[2:]]
            removable -= 1
        while (surplus := len(self._joined_ids(row)) - longest) > 0:
            encodings = self._tokenize(row)
            texts = [(i, len(own)) for i, segment in enumerate(row) for *_, own in segment.texts(encodings[i])]
            keep = [n for _, n in texts]
            if sum(keep) < surplus:
                marks = len(self._start) + len(self._end)
                raise InputError(
                    f"template {self.cloze.template!r} needs {surplus + longest + marks - sum(keep)} tokens without "
                    f"its texts, but the maximum length is {longest + marks}: shorten it, or raise the maximum length"
                )
            for _ in range(surplus):
                keep[keep.index(max(keep))] -= 1
            row = [
                _cut(encodings[i], segment, [n for (j, _), n in zip(texts, keep, strict=True) if j == i])
                for i, segment in enumerate(row)
            ]
        return row

    def one_token(self, word: str) -> int:
        """The id of a word that is a single token, or an error with similar words that are."""
        ids = self._tokens_in_context(word)
        if len(ids) == 1 and ids[0] not in self.tokenizer.all_special_ids:
            return ids[0]
        if len(ids) == 1 and ids[0] != self.tokenizer.unk_token_id:
            raise InputError(f"label word {word!r} is a special token of this model: give a word of its language")
        parts = " + ".join(self.tokenizer.convert_ids_to_tokens(ids))
        near = self._similar_words(word)
        hint = f" Try {', '.join(near)}." if near else " Try a more common word."
        raise InputError(
            f"label word {word!r} is {len(ids)} tokens ({parts}) for this model; a prototype is one row of its "
            f"decoder.{hint}"
            if len(ids) != 1
            else f"label word {word!r} is unknown to this model's tokenizer ({parts}).{hint}"
        )

    def _tokens_in_context(self, word: str) -> list[int]:
        """The tokens of a word in the template's gap: with a leading space, or joined to the preceding character."""
        before = self.cloze.template.partition("[MASK]")[0]
        if not before or before[-1].isspace() or before[-1] == "}":
            return self._ids(f" {word}")
        alone, together = self._ids(before[-1]), self._ids(before[-1] + word)
        return together[len(alone) :] if together[: len(alone)] == alone else together

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _similar_words(self, word: str) -> list[str]:
        """Words of the vocabulary with similar spelling that are one token."""
        known_words = {token.lstrip("Ġ▁ ") for token in self.tokenizer.get_vocab() if not token.startswith("##")}
        stem = word.lower()[: max(3, len(word) // 2)]
        alike = [w for w in known_words if len(w) > 2 and w.isalpha() and w.lower().startswith(stem)]
        close = difflib.get_close_matches(word, sorted(alike), n=12, cutoff=0.3)
        if len(close) < 3:
            close += difflib.get_close_matches(word, sorted(w for w in known_words if len(w) > 2), n=6, cutoff=0.6)
        return [w for w in dict.fromkeys(close) if len(self._tokens_in_context(w)) == 1][:3]


def _with_limit(limit: int | None, piece: Piece) -> Piece:
    """The piece with the lower of its own limit and this one, if it is a text."""
    if limit is None or not piece.is_text:
        return piece
    return piece._replace(limit=limit if piece.limit is None else min(limit, piece.limit))


def _cut(encoding: Any, segment: Segment, keep: Sequence[int]) -> Segment:
    """Each text reduced to its first `keep` tokens."""
    shorter = list(segment.pieces)
    for (number, start, tokens), n in zip(segment.texts(encoding), keep, strict=True):
        text = shorter[number].string
        if n < len(tokens):
            end = max(encoding.offsets[tokens[n]][0] - start, 0)
            # At least one character less, so that shortening ends.
            text = text[: min(end, len(text) - 1)].rstrip()
        shorter[number] = Piece(text, is_text=True)
    return segment._replace(pieces=tuple(shorter))
