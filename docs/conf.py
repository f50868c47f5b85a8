"""The site: `sphinx-build -W -b html docs site`."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

import pouf

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
    app.connect("source-read", _outside)


def _outside(app: Sphinx, name: str, source: list[str]) -> None:
    """Links to files of the repository that are no pages of the site: there they are named instead."""
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2` in the repository)", source[0])
