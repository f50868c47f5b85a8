"""Templates: class names as sentences, and clozes, which are templates with a mask and label words."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import NamedTuple

from pouf.data.class_names import ClassSet, Taxonomy, display_name, read_lines
from pouf.errors import InputError
from pouf.models.text_side import TextSide

DEFAULT_TEMPLATES = {"image": ("a photo of a {}.",), "text": ("{}",), "vector": ("{}",)}


def check_templates(templates: Sequence[str]) -> tuple[str, ...]:
    """The templates as a tuple, or an error if one lacks its slot."""
    if isinstance(templates, str):
        templates = (templates,)
    if not templates:
        raise InputError("no template given: expected at least one like 'a photo of a {}.'")
    for template in templates:
        if template.count("{}") != 1:
            raise InputError(
                f"template {template!r} has {template.count('{}')} slots for the class name, expected one: "
                "write {} where the name goes, as in 'a photo of a {}.'"
            )
    return tuple(templates)


def check_distinct(text_side: TextSide, classes: ClassSet, templates: Sequence[str]) -> None:
    """Raise an error if the tokens of two classes are the same, since the text side could not distinguish them."""
    texts = class_texts(classes)
    for template in templates:
        name_by_tokens: dict[tuple[tuple[int, ...], ...], str] = {}
        tokens = iter(
            text_side.all_token_ids([prompt for own in texts for text in own for prompt in fill([template], text)])
        )
        for name, class_prompts in zip(classes.names, texts, strict=True):
            ids = tuple(tuple(next(tokens)) for _ in class_prompts)
            other = name_by_tokens.setdefault(ids, name)
            if other == name:
                continue
            if max(map(len, ids)) >= text_side.max_length:
                raise InputError(
                    f"template {template!r} is cut to the {text_side.max_length} tokens that the model reads, and the "
                    f"rest is the same for {other!r} and {name!r}: shorten the template, or the names"
                )
            raise InputError(
                f"the model's tokenizer does not know the names {other!r} and {name!r} and turns both into the same "
                "tokens: give them names in its language and alphabet"
            )


def read_templates(given: Sequence[str]) -> tuple[str, ...]:
    """Templates from the command line: each a sentence, or a file with one per line."""
    templates: list[str] = []
    for value in given:
        templates += read_lines(value) if os.path.isfile(value) else [value]
    return tuple(templates)


def fill(templates: Sequence[str], text: str) -> list[str]:
    """A name or a description in every template: `a photo of a {}.`, `back pack` → `a photo of a back pack.`"""
    return [template.replace("{}", text) for template in templates]


def class_texts(classes: ClassSet) -> tuple[tuple[str, ...], ...]:
    """The texts of each class in prompts: its descriptions, or its name with spaces for underscores.

    If names are paths, as `animal/dog`, also the names of the ancestors: the prototype is the mean over all of them.
    """
    if classes.descriptions is None and (taxonomy := Taxonomy.from_names(classes.names)) is not None:
        return tuple(tuple(map(display_name, taxonomy.texts(k))) for k in range(len(classes.names)))
    return classes.descriptions or tuple((display_name(name),) for name in classes.names)


MASK = "[MASK]"
MAX_LENGTH = 256  # tokens of a filled template, by default

TextSample = str | tuple[str, ...]  # one text, or a pair

# The index in a sample of each field of a template.
FIELDS = {"text": 0, "text_a": 0, "text_b": 1}

# Edits of a text before it is filled in: LM-BFF drops the full stop of a sentence that becomes the start of a
# question, and lowers the first letter after a comma.
EDITS: dict[str, Callable[[str], str]] = {
    "drop_last": lambda text: text[:-1],
    "lower_first": lambda text: text[:1].lower() + text[1:],
}


class Slot(NamedTuple):
    """`{text_a:drop_last,first=240}`: a field, edits of its text, and its maximum number of tokens."""

    field: str
    edits: tuple[str, ...]
    limit: int | None


class Piece(NamedTuple):
    """A part of a filled template. Only the texts of a sample may be shortened."""

    string: str
    is_text: bool = False
    limit: int | None = None


class Example(NamedTuple):
    """A sample with demonstrations before or after it, each a sample and the index of its class."""

    sample: TextSample
    before: tuple[tuple[TextSample, int], ...] = ()
    after: tuple[tuple[TextSample, int], ...] = ()
    own_limit: int | None = None  # maximum tokens of the sample's first text
    shot_limit: int | None = None  # maximum tokens of each text of a demonstration
    cut_solved: bool = False  # if the input is too long, cut demonstrations at its far end, rather than every text


@dataclass(frozen=True)
class Cloze:
    """A template with a gap, and the label words that can fill it.

    Args:
        template: text with one `[MASK]` and `{text}`, or `{text_a}` and `{text_b}` for pairs. Spaces count. Edits
            follow a colon: `{text_a:drop_last}? [MASK], {text_b:lower_first}`.
        words: one or several words of each class, each a single token of the model.
        max_length: maximum tokens of a filled template; texts are shortened to fit, the template never.
    """

    template: str
    words: tuple[tuple[str, ...], ...]
    max_length: int = MAX_LENGTH

    def __post_init__(self) -> None:
        masks = self.template.count(MASK)
        if masks != 1:
            raise InputError(
                f"template {self.template!r} has {masks} masks, expected one: write [MASK] where the word goes, "
                "as in '{text} It was [MASK].'"
            )
        if not self.columns:
            raise InputError(f"template {self.template!r} has no slot for the text: write {{text}} where it goes")
        if "text" in self.columns and len(self.columns) > 1:
            raise InputError(f"template {self.template!r} mixes {{text}} with {{text_a}} and {{text_b}}: use either")
        if self.max_length < 1:
            raise InputError(
                f"a maximum length of {self.max_length} tokens is too small: give at least the template's length"
            )
        if any(not words or not all(word.strip() for word in words) for words in self.words):
            raise InputError("a class has no label word: give each class at least one, as 'terrible,great'")
        used = Counter(word for words in self.words for word in words)
        doubles = sorted(word for word, count in used.items() if count > 1)
        if doubles:
            raise InputError(f"label words must differ between and within classes; repeated: {', '.join(doubles)}")

    @cached_property
    def parts(self) -> tuple[str | Slot, ...]:
        """The parts of the template: literal strings, `[MASK]` as one of its own, and slots."""
        found = re.split(r"(\{[^{}]*\}|\[MASK\])", self.template)
        return tuple(_slot(part, self.template) if part.startswith("{") else part for part in found if part)

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that the template reads, in their order in a sample."""
        used = {part.field for part in self.parts if isinstance(part, Slot)}
        if "text_b" in used:
            used.add("text_a")  # samples are pairs, even if the template skips the first text
        return tuple(field for field in FIELDS if field in used)

    def fill(self, sample: TextSample, mask: str) -> list[Piece]:
        """The template filled with a sample, with `mask` in its gap."""
        texts = (sample,) if isinstance(sample, str) else sample
        if len(texts) != len(self.columns):
            raise InputError(
                f"a sample of {len(texts)} text{'s' * (len(texts) != 1)} for template {self.template!r}, which reads "
                f"{' and '.join(self.columns)}"
            )
        pieces = []
        for part in self.parts:
            if isinstance(part, str):
                pieces.append(Piece(mask if part == MASK else part))
            else:
                text = reduce(lambda text, edit: EDITS[edit](text), part.edits, texts[FIELDS[part.field]].strip())
                pieces.append(Piece(text, is_text=True, limit=part.limit))
        return pieces

    def solve(self, sample: TextSample, label: int) -> list[Piece]:
        """The template filled with a sample, with the word of its class in its gap."""
        word = self.words[label][0]
        # The word's token is the one with a leading space, even at the start of the template.
        return self.fill(sample, f" {word}" if self.parts[0] == MASK else word)

    def statement(self, label: int) -> str:
        """The template without its text, with the word of a class in its gap: "It was great."."""
        return "".join(part for part in self.parts if isinstance(part, str)).replace(MASK, self.words[label][0]).strip()

    def with_suffix(self, sentence: str) -> Cloze:
        """The cloze with this sentence after each text. It is never shortened."""
        template = re.sub(r"\{[^{}]*\}", lambda slot: f"{slot[0]} {sentence}", self.template, count=1)
        return replace(self, template=template)


def _slot(part: str, template: str) -> Slot:
    field, _, rest = part[1:-1].partition(":")
    if field not in FIELDS:
        hint = " or ".join(f"{{{name}}}" for name in FIELDS)
        raise InputError(f"template {template!r} has an unknown slot {part!r}: write {hint}")
    edits, limit = [], None
    for word in filter(None, rest.split(",")):
        if re.fullmatch(r"first=[1-9]\d*", word):
            limit = int(word.removeprefix("first="))
        elif word in EDITS:
            edits.append(word)
        else:
            raise InputError(f"template {template!r} has an unknown edit {word!r}: use {', '.join(EDITS)} or first=N")
    return Slot(field, tuple(edits), limit)


def read_words(given: str) -> list[list[str]]:
    """Label words from the command line: `terrible,great`, or `bad|terrible,good|great` where a class has several."""
    return [entry.split("|") for entry in given.split(",")]


def make_cloze(
    classes: ClassSet,
    templates: Sequence[str] | None,
    words: Sequence[str] | Sequence[Sequence[str]] | None,
    max_length: int | None,
) -> Cloze | None:
    """The cloze of templates and words, or None if there are no words and no template has a mask.

    Descriptions of classes are taken as their words.
    """
    templates = [templates] if isinstance(templates, str) else templates
    if words is None and not any(MASK in template for template in templates or ()):
        return None
    if templates is None or len(templates) != 1:
        raise InputError("label words need exactly one template with [MASK], as '{text} It was [MASK].'")
    names = classes.names
    if words is not None and classes.descriptions is not None:
        raise InputError("the class descriptions already give the words: leave the other words out")
    taxonomy = Taxonomy.from_names(names)
    default = names if taxonomy is None else [taxonomy.texts(k)[0] for k in range(len(names))]
    entries = list(classes.descriptions or default if words is None else words)
    if len(entries) != len(names):
        raise InputError(
            f"{len(entries)} label words for {len(names)} classes ({', '.join(names)}): give one entry per class, in "
            "the order of the classes; several words of one class are joined as good|great"
        )
    per_class = tuple((entry,) if isinstance(entry, str) else tuple(entry) for entry in entries)
    stripped = tuple(tuple(word.strip() for word in group) for group in per_class)
    return Cloze(templates[0], stripped, MAX_LENGTH if max_length is None else max_length)
