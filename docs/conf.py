"""The site: `sphinx-build -W -b html docs site`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer.main
from sphinx.application import Sphinx

import pouf
from pouf.cli import app

project = "pouf"
author = "the pouf authors"
version = release = pouf.__version__
copyright = "the pouf authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"

autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
# Written for readers of the source: one backtick is code there as it is here.
default_role = "code"

html_theme = "furo"
html_title = f"pouf {release}"
html_static_path = ["_static"]
html_css_files = ["pouf.css"]
exclude_patterns = ["images/*.md"]


def setup(app: Sphinx) -> None:
    app.connect("source-read", _complete)
    app.connect("autodoc-process-docstring", _mark_examples, priority=400)  # before napoleon's own


def _complete(app: Sphinx, name: str, source: list[str]) -> None:
    """The commands go onto their page; files of the repository that are no pages of the site are named, not linked."""
    if name == "cli":
        source[0] += command_reference()
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2` in the repository)", source[0])


def _mark_examples(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Indented paragraphs of a docstring are code; the lines of `Args:` follow it without a blank line."""
    for i in range(len(lines) - 1, 0, -1):
        before = next((line for line in reversed(lines[:i]) if line.strip()), " ")
        if lines[i].startswith("    ") and not lines[i - 1].strip() and not before.startswith(" "):
            lines[i:i] = ["::", ""]


def command_reference() -> str:
    """Every command with all of its options, as Markdown."""
    return "\n".join(_commands(typer.main.get_command(app), "pouf"))


def _commands(command: Any, name: str) -> Iterator[str]:
    for inner, sub in getattr(command, "commands", {}).items():
        yield from _commands(sub, f"{name} {inner}")
    if not hasattr(command, "commands"):
        text, *examples = re.split(r"\n\s*\x08\n", command.help or "")
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        usage = " ".join([name, *(each.metavar if each.required else f"[{each.metavar}]" for each in arguments)])
        yield f"\n## {name}\n\n{text.strip()}\n\n```text\n{usage} [OPTIONS]\n" + "".join(examples).strip() + "\n```\n"
        yield "| option | default | |\n|---|---|---|"
        yield from map(_row, sorted(command.params, key=lambda each: getattr(each, "hidden", False)))


def _row(option: Any) -> str:
    names = [option.metavar] if option.param_type_name == "argument" else [*option.opts, *option.secondary_opts]
    if isinstance(option.show_default, str):
        shown = option.show_default
    else:
        shown = "" if option.default in (None, False, True) or callable(option.default) else f"`{option.default}`"
    cells = " ".join(f"`{each}`" for each in names), shown, re.sub(r"--[a-z-]+", r"`\g<0>`", option.help or "")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
