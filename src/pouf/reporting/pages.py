"""Parts of offline pages: templates, thumbnails, and SVG with charts and legends."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, select_autoescape
from markupsafe import Markup, escape
from PIL import Image

from pouf.files import check_writable, write_text


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


# Colours by variable, as var(--ink). A page may override them, as the report does in dark mode.
LIGHT = {"ground": "#ffffff", "card": "#f5f6f8", "ink": "#1b1f24", "soft": "#5b6470", "line": "#d5d9df",
         "before": "#8a8f98", "after": "#0072b2", "good": "#00694e", "bad": "#a63c00",
         "caution": "#b08800"}  # fmt: skip
# First Okabe and Ito's eight colour-blind safe colours, with the ink colour for their black, which dark mode changes.
# Each further group of eight has another marker shape.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "var(--ink)",
           "#C1121F", "#7B2CBF", "#6A994E", "#8B4513", "#FF5DA2", "#00B4B4", "#A0A000", "#9D7BD8",
           "#3A5FCD", "#FF9F80", "#5FD068", "#B08968", "#C77DFF", "#4D908E", "#F4A6C0", "#808080",
           "#1B3A8C", "#FFC857", "#2F7D32", "#A4457A", "#8FD3FF", "#7A2E0E", "#C5E17A", "#5C5C8A")  # fmt: skip
EIGHT = 8
# Corners, rotation and inner radius of the markers of classes 0 to 7 (circles), 8 to 15 (squares), 16 to 23
# (triangles) and 24 to 31 (crosses).
SHAPES = ((0, 0.0, 1.0), (4, 0.5, 1.0), (3, 0.0, 1.0), (8, 0.0, 0.5))


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """An element: `data_i` becomes data-i, `class_` class; everything that is not Markup is escaped."""
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    pairs = [Markup(' {}="{}"').format(k, round(v, 2) if isinstance(v, float) else v) for k, v in named.items()]
    return Markup("<{0}{1}>{2}</{0}>").format(name, Markup("").join(pairs), Markup("").join(children))


def text(x: float, y: float, words: str, **attributes: object) -> Markup:
    return tag("text", words, **({"x": x, "y": y, "fill": "var(--soft)"} | attributes))


def drawing(width: int, height: int, *parts: Markup) -> Markup:
    return tag("svg", *parts, width=width, height=height, viewBox=f"0 0 {width} {height}", role="img",
               xmlns="http://www.w3.org/2000/svg", font_size=11, font_family="system-ui, sans-serif")  # fmt: skip


def write_svg(figure: Markup, file: Path) -> Path:
    """Write a standalone file with a white background and without variables, which some viewers don't support."""
    light = LIGHT | {"card": "#ffffff"}
    # Names and texts are escaped, so only our own attributes contain plain quotes.
    plain = re.sub(r'="var\(--(\w+)\)"', lambda found: f'="{light[found[1]]}"', figure)
    plain = plain.replace(">", '><rect width="100%" height="100%" fill="#ffffff"/>', 1)
    check_writable(file)
    # XML allows no control characters, not even escaped.
    write_text(file, re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", plain))
    return file


def path(points: Iterable[tuple[float, float]]) -> str:
    """Points as the value of an SVG attribute."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def polygon(x: float, y: float, radius: float, corners: int, turn: float = 0.0, inner: float = 1.0) -> str:
    """Corners of a regular polygon; with `inner` below 1 of a star."""
    around = ((radius * (inner if i % 2 else 1), math.tau * (i + turn) / corners) for i in range(corners))
    return path((x + r * math.sin(angle), y - r * math.cos(angle)) for r, angle in around)


def marker(k: int, x: float, y: float, **attributes: object) -> Markup:
    """The marker of a point of class k."""
    corners, turn, inner = SHAPES[k // EIGHT % len(SHAPES)]
    style = {"fill": COLOURS[k % len(COLOURS)], "fill_opacity": 0.65, "stroke": "var(--ink)", "stroke_width": 0.3}
    if not corners:
        return tag("circle", cx=x, cy=y, r=3.2, **style, **attributes)
    return tag("polygon", points=polygon(x, y, 4.5, corners, turn, inner), **style, **attributes)


def legend(marks: Sequence[tuple[Markup, str]], width: int, top: int) -> tuple[list[Markup], int]:
    """Markers (drawn around the origin) with their names in columns; and the y coordinate of their end."""
    longest = max((len(name) for _, name in marks), default=1)
    columns = max(1, min(4, width // (24 + 6 * longest)))
    parts = []
    for i, (mark, name) in enumerate(marks):
        x, y = 14 + (width - 8) * (i % columns) // columns, top + 10 + 15 * (i // columns)
        parts += [tag("g", mark, transform=f"translate({x} {y})"), text(x + 12, y + 4, name)]
    return parts, top + 15 * math.ceil(len(marks) / columns) + 5 * bool(marks)


class Series(NamedTuple):
    name: str  # in the legend; "" is left out
    points: Sequence[tuple[float, float]]
    style: Mapping[str, object]
    k: int | None = None  # class of the markers


def chart(
    series: Sequence[Series],
    x_name: str,
    y_name: str = "",
    width: int = 360,
    height: int = 220,
    span: tuple[float, float] | None = None,
) -> Markup:
    """Curves over a grid of round numbers, with axis labels and a legend.

    Args:
        span: minimum range of the vertical axis.
    """
    left, right = _span(point[0] for each in series for point in each.points)
    low, high = _span([point[1] for each in series for point in each.points] + list(span or ()))

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        return 44 + (width - 60) * (x - left) / (right - left), height - 34 - (height - 60) * (y - low) / (high - low)

    parts = [text(4, 12, y_name), text(width - 12, height - 4, x_name, text_anchor="end")]
    for value in _round_numbers(left, right):
        parts.append(text(to_pixels(value, low)[0], height - 19, f"{value:g}", text_anchor="middle"))
    for value in _round_numbers(low, high):
        y = to_pixels(left, value)[1]
        parts.append(tag("line", x1=44, x2=width - 16, y1=y, y2=y, stroke="var(--line)"))
        parts.append(text(38, y + 4, f"{value:g}", text_anchor="end"))
    marks = []
    for name, points, style, k in series:
        positions = [to_pixels(*point) for point in points if math.isfinite(point[1])]
        swatch = tag("polyline", points="-8,0 8,0", **style)
        parts += [tag("polyline", points=path(positions), **style)]
        parts += [marker(k, x, y) for x, y in positions if k is not None]
        marks += [(swatch if k is None else swatch + marker(k, 0, 0), name)] if name else []
    named, end = legend(marks, width, height)
    return drawing(width, end, *parts, *named)


def _span(values: Iterable[float]) -> tuple[float, float]:
    """The range of the finite values, at least of a minimum width."""
    finite = [float(value) for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    return (low, high) if high - low > 1e-6 * max(1.0, abs(high)) else (low - 0.5, high + 0.5)


def _round_numbers(low: float, high: float) -> list[float]:
    """Three to eight round numbers between two values."""
    power = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = next(power * times for times in (5, 2, 1) if power * times <= (high - low) / 3)
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
