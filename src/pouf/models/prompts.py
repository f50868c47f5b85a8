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
