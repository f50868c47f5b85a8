"""Helpers for offline HTML pages, shared by report, review and server."""

from __future__ import annotations

import base64
import io
import json
import re
from importlib import resources
from typing import Any

from jinja2 import Environment, select_autoescape
from markupsafe import Markup, escape
from PIL import Image


def render(template: str, **values: Any) -> str:
    """Render a template of `templates`; values other than Markup are escaped."""
    environment = Environment(autoescape=select_autoescape(default=True, default_for_string=True))
    environment.filters["code"] = lambda words: Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(words))))
    source = (resources.files("pouf") / "reporting" / "templates" / template).read_text(encoding="utf-8")
    return environment.from_string(source).render(**values)


def script_data(value: Any) -> Markup:
    """JSON for a script element, with "<" escaped so that it can't end the element."""
    return Markup(json.dumps(value, ensure_ascii=False).replace("<", "\\u003c"))


def thumbnail(image: Image.Image, side: int) -> str:
    """A small picture as a data URL."""
    small = image.copy()
    small.thumbnail((side, side))
    kind = "png" if max(small.size) <= 16 else "jpeg"
    stream = io.BytesIO()
    small.save(stream, kind.upper(), quality=80)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def as_text(sample: Any) -> str:
    """A text or a pair of texts as one string; empty for other samples."""
    return " / ".join(sample) if isinstance(sample, tuple) else sample if isinstance(sample, str) else ""
