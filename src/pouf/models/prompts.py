"""Templates and class names → the sentences that the text side reads."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pouf.data.class_names import ClassSet, display_name, read_lines
from pouf.data.taxonomy import Taxonomy
from pouf.errors import InputError
from pouf.models.text_side import TextSide

DEFAULT_TEMPLATES = {"image": ("a photo of a {}.",), "text": ("{}",), "vector": ("{}",)}


def check_templates(templates: Sequence[str]) -> tuple[str, ...]:
    """The templates, or an error where one lacks its slot."""
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
    """An error where the text side would read the same of two classes: it knows nothing else of them."""
    texts = class_texts(classes)
    for template in templates:
        met: dict[tuple[tuple[int, ...], ...], str] = {}
        tokens = iter(
            text_side.all_token_ids([prompt for own in texts for text in own for prompt in fill([template], text)])
        )
        for name, own in zip(classes.names, texts, strict=True):
            ids = tuple(tuple(next(tokens)) for _ in own)
            other = met.setdefault(ids, name)
            if other == name:
                continue
            if max(map(len, ids)) >= text_side.max_length:
                raise InputError(
                    f"template {template!r} is cut to the {text_side.max_length} tokens that the model reads, and what "
                    f"is left is the same for {other!r} and {name!r}: shorten the template, or the names"
                )
            raise InputError(
                f"the model's tokenizer reads classes {other!r} and {name!r} alike, as words it does not know: give "
                "them names in its language and letters"
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
    """What stands for each class in a prompt: its descriptions, or its name as a person would say it.

    Where names are paths, as `animal/dog`, the names of the ancestors as well: prototypes are means over all of them.
    """
    if classes.descriptions is None and (taxonomy := Taxonomy.from_names(classes.names)) is not None:
        return tuple(tuple(map(display_name, taxonomy.texts(k))) for k in range(len(classes.names)))
    return classes.descriptions or tuple((display_name(name),) for name in classes.names)
