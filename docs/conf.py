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
html_static_path: list[str] = []
exclude_patterns = ["images/*.md"]


def setup(app: Sphinx) -> None:
    app.connect("source-read", _complete)


def _complete(app: Sphinx, name: str, source: list[str]) -> None:
    """The commands go onto their page; files of the repository that are no pages of the site are named, not linked."""
    if name == "cli":
        source[0] += command_reference()
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2` in the repository)", source[0])


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
    default = option.show_default if isinstance(option.show_default, str) else option.default
    shown = "" if default in (None, False, True) or callable(default) else f"`{default}`"
    cells = " ".join(f"`{each}`" for each in names), shown, option.help or ""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
