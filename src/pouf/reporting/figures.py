"""The paper's figures for any run: t-SNE, nearest neighbours, similarities, lambda; for the report and as files."""

from __future__ import annotations

import math
import textwrap
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Subset, Unlabelled
from pouf.errors import Unreadable
from pouf.inference.encode import InferenceConfig
from pouf.reporting.pages import (
    COLOURS,
    EIGHT,
    Series,
    as_text,
    chart,
    drawing,
    legend,
    marker,
    polygon,
    shorten,
    tag,
    text,
    thumbnail,
)

CLASSES = len(COLOURS)  # more classes share colours, and get no row of their own
MAX_STARS = 100  # prototypes in a map
MAP_SIDE = 400  # pixels
MAX_STARS_PER_LABEL = 3
HALO = {"paint_order": "stroke", "stroke": "var(--card)", "stroke_width": 3, "stroke_linejoin": "round"}


class FeatureView(NamedTuple):
    """Features and predictions of a classifier for some inputs."""

    features: Tensor  # (n, d), each of length 1
    prototypes: Tensor  # (k, d), each of length 1
    labels: Tensor  # (n,), the true classes if known, else the predicted ones
    probabilities: Tensor  # (n, k)


class Comparison(NamedTuple):
    """The same inputs before and after adaptation."""

    before: FeatureView
    after: FeatureView
    inputs: Unlabelled  # of both views, in their order
    classes: Sequence[str]
    labelled: bool

    def changed(self) -> list[bool]:
        """Whether the predicted class of each input changed."""
        return (self.before.probabilities.argmax(1) != self.after.probabilities.argmax(1)).tolist()

    def sample(self, i: int) -> Any:
        """An input for display; None if it can't be read any more."""
        try:
            return self.inputs.show(i, 128)
        except Unreadable:
            return None


def compare_features(
    zero_shot: Callable[[], Classifier],
    adapted: Callable[[], Classifier],
    data: Unlabelled,
    labels: Sequence[int] | None = None,
    inference: InferenceConfig | None = None,
    max_inputs: int = 2000,
) -> Comparison:
    """Features and prototypes before and after, of a random sample of inputs.

    Args:
        zero_shot, adapted: return the classifiers; the second is called when the first is no longer in use.
    """
    chosen = list(range(len(data)))
    if len(chosen) > max_inputs:
        chosen = sorted(np.random.default_rng(0).permutation(len(data))[:max_inputs].tolist())
    sample = Subset(data, chosen)
    views = []
    for load in (zero_shot, adapted):
        classifier = load()
        with torch.no_grad():
            encoded = classifier.encode(sample, inference or InferenceConfig())
            probabilities = classifier.log_probabilities(encoded).exp()
            prototypes = F.normalize(classifier.prototypes().float(), dim=1).cpu()
        if labels is None:
            classes = probabilities.argmax(1)
        else:
            classes = torch.tensor([labels[chosen[i]] for i in encoded.indices])
        views.append(FeatureView(F.normalize(encoded.features.float(), dim=1), prototypes, classes, probabilities))
    readable = [i for i in range(len(sample)) if i not in sample.skipped]
    before, after = views
    return Comparison(before, after, Subset(sample, readable), classifier.classes, labels is not None)


def stars(view: FeatureView) -> list[int]:
    """The classes with drawn prototypes: all, or the 100 with the most inputs."""
    k = len(view.prototypes)
    counts = torch.bincount(view.labels, minlength=k)
    return sorted(counts.argsort(descending=True, stable=True)[:MAX_STARS].tolist())


def embed(view: FeatureView, centred: bool = False) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """One t-SNE of features and prototypes together, paper fig. 1: (n, 2) and (k, 2); the same for the same view.

    Of more than 100 prototypes only those of `stars` are embedded: more are illegible and slow.

    Features and prototypes of dual encoders lie in two separate cones, as the map then shows. With both centred by
    their own means, the map shows which features lie near which prototype.
    """
    from sklearn.manifold import TSNE

    parts = (view.features, view.prototypes[stars(view)])
    points = F.normalize(torch.cat([part - part.mean(0) if centred else part for part in parts]), dim=1).numpy()
    if np.ptp(points, axis=0).max() < 1e-6:  # all points are equal: t-SNE would divide by zero
        return np.zeros((len(view.features), 2), np.float32), np.zeros((len(parts[1]), 2), np.float32)
    perplexity = min(30.0, max(2.0, (len(points) - 1) / 4))
    placed = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(points)
    return placed[: len(view.features)], placed[len(view.features) :]


def nearest_to_prototype(view: FeatureView, k: int, count: int = 5) -> list[int]:
    """Indices of the inputs nearest to a prototype, nearest first."""
    return (view.features @ view.prototypes[k]).topk(min(count, len(view.features))).indices.tolist()


def similarities(view: FeatureView) -> Tensor:
    """Cosine of each feature and the prototype of its class: (n,)."""
    return (view.features * view.prototypes[view.labels]).sum(1)


FIGURES = ("tsne", "neighbours", "similarity")


def paper_figures(
    comparison: Comparison, centred: bool = False, classes: Sequence[int] = (), only: Sequence[str] = FIGURES
) -> dict[str, Markup]:
    """The figures of `pouf figures` by name.

    Args:
        classes: of the figure of neighbours, in this order; by default those that changed most.
        only: names of some of the figures.
    """
    draw: dict[str, Callable[[], Markup]] = {
        "tsne": lambda: _side_by_side(comparison, centred),
        "neighbours": lambda: neighbours(comparison, classes),
        "similarity": lambda: histogram(comparison),
    }
    return {name: draw[name]() for name in FIGURES if name in only}


def _side_by_side(comparison: Comparison, centred: bool) -> Markup:
    """The t-SNE maps before and after, side by side."""
    maps = both_maps(comparison, centred)
    height = int(maps[0].split('"')[3])  # of <svg width="" height="">
    about = ", each centred by their own mean" if centred else ""
    parts = []
    for left, name, part in zip((0, MAP_SIDE + 16), ("zero-shot", "adapted"), maps, strict=True):
        parts += [text(left + 8, 14, name + about), tag("g", part, transform=f"translate({left} 18)")]
    return drawing(2 * MAP_SIDE + 16, height + 18, *parts)


def both_maps(comparison: Comparison, centred: bool = False) -> list[Markup]:
    """The t-SNE maps before and after, with the same height."""
    positions = [np.concatenate(embed(view, centred)) for view in comparison[:2]]
    height = max(_scale_and_height(both)[1] for both in positions)
    return [
        tsne(view, comparison.classes, centred, comparison.changed(), both, height)
        for view, both in zip(comparison[:2], positions, strict=True)
    ]


def _scale_and_height(both: NDArray[np.float32]) -> tuple[float, int]:
    """One scale for both axes, so that distances can be compared, and the height that the points need."""
    across, up = (both.max(0) - both.min(0)).tolist()
    scale = (MAP_SIDE - 24) / max(across, up, 1e-6)
    return scale, max(MAP_SIDE // 2, 24 + math.ceil(scale * up))


def tsne(
    view: FeatureView,
    classes: Sequence[str],
    centred: bool = False,
    changed: Sequence[bool] | None = None,
    both: NDArray[np.float32] | None = None,
    height: int = 0,
) -> Markup:
    """A t-SNE map with inputs as points and prototypes as stars.

    Colour and shape show the class; with more classes than colours, whether the prediction changed.

    Args:
        both: (n + k, 2), the result of `embed`, if it was computed before.
        height: minimum height.
    """
    both = np.concatenate(embed(view, centred)) if both is None else both
    scale, least = _scale_and_height(both)
    height = max(height, least)
    placed = (np.array([MAP_SIDE, height]) / 2 + scale * (both - (both.min(0) + both.max(0)) / 2)).tolist()
    n, labels, few = len(view.features), view.labels.tolist(), len(classes) <= CLASSES
    changed = changed if changed is not None else [False] * n
    parts = [
        marker(labels[i], x, y, class_="p", data_i=i) if few else _point(changed[i], x, y, class_="p", data_i=i)
        for i, (x, y) in enumerate(placed[:n])
    ]
    for k, (x, y) in zip(stars(view), placed[n:], strict=True):
        fill = COLOURS[k] if few else "var(--card)"
        star: dict[str, object] = {"points": polygon(x, y, 9 if few else 5, 10, inner=0.42), "fill": fill}
        star |= {"stroke": "var(--ink)", "stroke_width": 1 if few else 0.6}
        parts.append(tag("polygon", tag("title", classes[k]), class_="star", data_k=k, **star))
    names = [shorten(name, 26) for name in classes]
    marks = [(marker(k, 0, 0), name) for k, name in enumerate(names)]
    if not few:
        marks = [(_point(True, 0, 0), "prediction changed"), (_point(False, 0, 0), "unchanged")]
    else:
        parts += _labels(placed[n:], names, placed[:n], height)
    named, end = legend(marks, MAP_SIDE, height)
    return drawing(MAP_SIDE, end, *parts, tag("g", *named, class_="legend"))


def _point(changed: bool, x: float, y: float, **attributes: object) -> Markup:
    colour, opacity, size = ("var(--after)", 0.85, 3.2) if changed else ("var(--before)", 0.45, 2.6)
    return tag("circle", cx=x, cy=y, r=size, fill=colour, fill_opacity=opacity, **attributes)


def _labels(
    stars: Sequence[Sequence[float]], names: Sequence[str], points: Sequence[Sequence[float]], height: int
) -> list[Markup]:
    """Names near their stars, not covering points, stars or other names. Names without space are only in the legend."""
    taken = [(x, y, 7.0) for x, y in stars]  # centre, and half of the width
    parts = []
    for group in _overlapping(stars):
        if len(group) > MAX_STARS_PER_LABEL:
            continue
        (x, y), name = stars[group[0]], shorten(", ".join(names[k] for k in group), 40)
        half = 3.0 * len(name) + 2
        for across, down in _positions_around(x, y, half):
            inside = half <= across <= MAP_SIDE - half and 8 <= down <= height - 8
            free = all(abs(across - a) > half + b or abs(down - d) > 12 for a, d, b in taken)
            if inside and free and all(abs(across - a) > half + 3 or abs(down - b) > 9 for a, b in points):
                taken.append((across, down, half))
                near = min(max(x, across - half), across + half)  # the nearest point of the name
                if math.hypot(near - x, down - y) > 20:
                    parts.append(tag("line", x1=x, y1=y, x2=near, y2=down, stroke="var(--soft)", stroke_width=0.7))
                parts.append(text(across, down + 4, name, text_anchor="middle", **HALO | {"fill": "var(--ink)"}))
                break
    return parts


def _overlapping(stars: Sequence[Sequence[float]]) -> list[list[int]]:
    """Groups of overlapping stars, which share a label, since single names would be ambiguous."""
    groups: list[list[int]] = []
    for i, (x, y) in enumerate(stars):
        near = [group for group in groups if any(math.hypot(x - stars[k][0], y - stars[k][1]) < 10 for k in group)]
        groups = [group for group in groups if group not in near] + [sorted(sum(near, [i]))]
    return groups


def _positions_around(x: float, y: float, half: float) -> Iterator[tuple[float, float]]:
    """Positions for a name around a star, nearest first."""
    for away in range(11, 90, 8):
        yield from ((x + away + half, y), (x - away - half, y))
        for turn in (0, 1, -1, 2, -2):
            sideways = turn * (half + away) / 2.5
            yield from ((x + sideways, y - away - 4), (x + sideways, y + away + 4))


def nearest_inputs(comparison: Comparison, classes: Sequence[int] = ()) -> list[tuple[int, list[int], list[int]]]:
    """Classes with the inputs nearest to their prototypes before and after; by default the most changed first."""
    before, after = comparison[:2]
    near = [
        (k, nearest_to_prototype(before, k), nearest_to_prototype(after, k))
        for k in classes or range(len(comparison.classes))
    ]
    if classes:
        return near
    return sorted(near, key=lambda row: -len({*row[1]} ^ {*row[2]}))[:CLASSES]


def neighbours(comparison: Comparison, classes: Sequence[int] = ()) -> Markup:
    """The five inputs nearest to each prototype before (left) and after (right), for the classes given, or those that
    changed most."""
    parts, bottom = [text(8, 16, "zero-shot"), text(220, 16, "adapted")], 22
    for k, *both in nearest_inputs(comparison, classes):
        name = shorten(comparison.classes[k], 60)
        parts.append(text(8, bottom + 12, name, fill="var(--ink)", font_weight="bold"))
        top = bottom + 18
        for left, indices in zip((8, 220), both, strict=True):
            x, y = left, top
            for i in indices:
                cell, width, height = _cell(comparison.sample(i), comparison.inputs.ids[i])
                if comparison.labelled and int(comparison.after.labels[i]) != k:  # not by colour alone
                    cell += text(0, 11, "✗", **HALO | {"fill": "var(--bad)", "font_size": 13})
                parts.append(tag("svg", cell, data_i=i, x=x, y=y, width=width, height=height))
                bottom = max(bottom, y + height)
                x, y = (x + width, y) if x + width < left + 200 else (left, y + height)
    return drawing(428, bottom + 4, *parts)


def _cell(sample: object, name: str) -> tuple[Markup, int, int]:
    """A picture or the beginning of a text, with its width and height."""
    if isinstance(sample, Image.Image):
        return tag("image", href=thumbnail(sample, 72), width=36, height=36, image_rendering="pixelated"), 40, 40
    words = (as_text(sample) or name)[:200]
    length = 16 if any(unicodedata.east_asian_width(letter) in "WF" for letter in words) else 32
    lines = textwrap.wrap(words, length) or [name]
    lines[1:] = [shorten(" ".join(lines[1:]), length)] if lines[1:] else []
    return Markup("").join(text(12, 10 + 13 * i, line) for i, line in enumerate(lines)), 200, 13 * len(lines) + 4


def histogram(comparison: Comparison) -> Markup:
    """Histogram of the cosine of features and the prototype of the true class (predicted class without labels)."""
    found = [similarities(view).double().numpy() for view in comparison[:2]]  # twice (n,)
    edges = np.histogram_bin_edges(np.concatenate(found), 40).tolist()
    styles = (_stroke("var(--before)") | {"fill": "var(--before)", "fill_opacity": 0.5}, _stroke("var(--after)"))
    series = []
    for name, values, style in zip(("zero-shot", "adapted"), found, styles, strict=True):
        counts = np.histogram(values, edges)[0].tolist()
        steps = [(edge, n) for i, n in enumerate(counts) for edge in edges[i : i + 2]]
        series.append(Series(f"{name}, mean {values.mean():.3f}", [(edges[0], 0), *steps, (edges[-1], 0)], style))
    about = f"cosine similarity with the {'right' if comparison.labelled else 'predicted'} class's prototype"
    return chart(series, about, "inputs")


def line(
    points: Sequence[tuple[float, float]],
    mark: float | None = None,
    span: tuple[float, float] | None = None,
    good: str = "",
) -> Markup:
    """A curve over the steps of a run, and the step that was chosen.

    Args:
        span: minimum range of the vertical axis, so that it does not zoom into noise; by default a tenth of the
            largest value.
        good: note on the direction, as "↑ higher is better".
    """
    ys = [y for _, y in points if math.isfinite(y)] or [0.0]
    room = 0.05 * max(map(abs, ys))
    low, high = span or ((min(ys) + max(ys)) / 2 - room, (min(ys) + max(ys)) / 2 + room)
    series = [Series("", points, _stroke("var(--after)")), Series("", [(0, ys[0])], {})]  # from step 0 on
    if mark is not None:
        ends = min(low, *ys), max(high, *ys)
        series.append(Series("", [(mark, end) for end in ends], _stroke("var(--bad)", "4 3")))
    return chart(series, "step", good, width=340, height=180, span=(low, high))


def lambda_sweep(
    values: Sequence[float], ours: Mapping[str, Sequence[float]], papers: Sequence[float] | None
) -> Markup:
    """Accuracy in % against lambda, one curve per task; the paper's curve, dashed, if the setting is the same."""
    series = []
    for i, (name, accuracies) in enumerate(ours.items()):
        k = i + EIGHT * i  # another colour and another shape
        series.append(Series(name, list(zip(values, accuracies, strict=True)), _stroke(COLOURS[k % len(COLOURS)]), k))
    if papers is not None:
        paper = list(zip(values, papers, strict=True))
        series.append(Series("paper, chosen by labels", paper, _stroke("var(--ink)", "5 3")))
    return chart(series, "lambda", "accuracy in %")


def _stroke(colour: str, dashes: str = "none") -> dict[str, object]:
    return {"fill": "none", "stroke": colour, "stroke_width": 2, "stroke_dasharray": dashes}
