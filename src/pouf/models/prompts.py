"""Templates and class names → the sentences that the text side reads."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pouf.data.class_names import read_lines, spoken
from pouf.errors import InputError

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


def read_templates(given: Sequence[str]) -> tuple[str, ...]:
    """Templates from the command line: each a sentence, or a file with one a line."""
    templates: list[str] = []
    for value in given:
        templates += read_lines(value) if os.path.isfile(value) else [value]
    return tuple(templates)


def fill(templates: Sequence[str], name: str) -> list[str]:
    """One class in every template: `a photo of a {}.`, `back_pack` → `a photo of a back pack.`"""
    return [template.replace("{}", spoken(name)) for template in templates]
