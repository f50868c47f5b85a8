"""The paper's figures of any run, drawn for the report and for files: t-SNE, neighbours, similarities, lambda."""

from __future__ import annotations

import math
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from pouf.base import BaseClassifier
from pouf.data.base import Subset, Unlabelled, Unreadable
from pouf.inference import InferenceConfig
from pouf.reporting.pages import as_text, shorten, thumbnail
from pouf.reporting.svg import COLOURS, SHAPES, Series, chart, drawing, legend, marker, polygon, tag, text

CLASSES = len(COLOURS) * len(SHAPES)  # that are named, and have a row of their own
SIDE = 400  # of a map
HALO = {"paint_order": "stroke", "stroke": "var(--card)", "stroke_width": 3, "stroke_linejoin": "round"}


class View(NamedTuple):
    """A classifier's view of the same inputs."""

    features: Tensor  # (n, d), each of length 1
    prototypes: Tensor  # (k, d), each of length 1
    labels: Tensor  # (n,), the true classes where they are known, else what the classifier says
    probabilities: Tensor  # (n, k)


class Comparison(NamedTuple):
    before: View
    after: View
    inputs: Unlabelled  # those that both views are of, in their order
    classes: Sequence[str]
    labelled: bool

    def sample(self, i: int) -> Any:
        """An input; None if it could be read before, but can't be any more."""
        try:
            return self.inputs.read(i)
        except Unreadable:
            return None


def look(
    zero_shot: AbstractContextManager[BaseClassifier],
    adapted: AbstractContextManager[BaseClassifier],
    data: Unlabelled,
    labels: Sequence[int] | None = None,
    inference: InferenceConfig | None = None,
    most: int = 2000,
) -> Comparison:
    """Features and prototypes before and after, of at most 2,000 inputs at random.

    Args:
        zero_shot, adapted: the classifier before and after, each while its context is open: they may be the same one.
    """
    chosen = list(range(len(data)))
    if len(chosen) > most:
        chosen = sorted(np.random.default_rng(0).permutation(len(data))[:most].tolist())
    sample = Subset(data, chosen)
    views = []
    for state in (zero_shot, adapted):
        with state as classifier, torch.no_grad():
            encoded = classifier.encode(sample, inference or InferenceConfig())
            said = classifier.log_probabilities(encoded).exp()
            prototypes = F.normalize(classifier.prototypes().float(), dim=1).cpu()
        shown = said.argmax(1) if labels is None else torch.tensor([labels[chosen[i]] for i in encoded.indices])
        views.append(View(F.normalize(encoded.features.float(), dim=1), prototypes, shown, said))
    readable = [i for i in range(len(sample)) if i not in sample.skipped]
    before, after = views
    return Comparison(before, after, Subset(sample, readable), classifier.classes, labels is not None)


def embed(view: View, centred: bool = False) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """One t-SNE of features and prototypes together, paper fig. 1: (n, 2) and (k, 2); the same for the same view.

    Features and prototypes of dual encoders lie in two separate cones, and the picture shows that they do. Centred,
    each by their own mean, they share one place, and the picture shows which features are on which prototype's side.
    """
    from sklearn.manifold import TSNE

    parts = (view.features, view.prototypes)
    points = F.normalize(torch.cat([part - part.mean(0) if centred else part for part in parts]), dim=1).numpy()
    perplexity = min(30.0, max(2.0, (len(points) - 1) / 4))
    placed = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(points)
    return placed[: len(view.features)], placed[len(view.features) :]


def nearest(view: View, k: int, count: int = 5) -> list[int]:
    """The inputs nearest to a prototype, the nearest first."""
    return (view.features @ view.prototypes[k]).topk(min(count, len(view.features))).indices.tolist()


def similarities(view: View) -> Tensor:
    """Cosine of each feature with the prototype of its class: (n,)."""
    return (view.features * view.prototypes[view.labels]).sum(1)


def paper_figures(comparison: Comparison, centred: bool = False) -> dict[str, Markup]:
    """The files of `pouf figures`, by name."""
    left, right = (tsne(view, comparison.classes, centred) for view in comparison[:2])
    height = int(left.split('"')[3])  # of <svg width="" height="">
    about = ", each centred by their own mean" if centred else ""
    titles = [text(x, 14, name + about) for x, name in ((8, "zero-shot"), (SIDE + 24, "adapted"))]
    maps = [tag("g", part, transform=f"translate({x} 18)") for x, part in ((0, left), (SIDE + 16, right))]
    both = drawing(2 * SIDE + 16, height + 18, *titles, *maps)
    return {"tsne": both, "neighbours": neighbours(comparison), "similarity": histogram(comparison)}


def tsne(view: View, classes: Sequence[str], centred: bool = False) -> Markup:
    """Inputs as points, prototypes as stars, where one t-SNE of both puts them; colour and shape are the class."""
    both = np.concatenate(embed(view, centred))  # (n + k, 2)
    low, high = both.min(0), both.max(0)
    # The same scale up and across: distances can be compared.
    placed = SIDE / 2 + (SIDE - 24) / max(float((high - low).max()), 1e-6) * (both - (low + high) / 2)
    n, labels = len(view.features), view.labels.tolist()
    parts = [marker(labels[i], x, y, class_="p", data_i=i) for i, (x, y) in enumerate(placed[:n].tolist())]
    for k, (x, y) in enumerate(placed[n:].tolist()):
        star = {"points": polygon(x, y, 9, 10, inner=0.42), "fill": COLOURS[k % len(COLOURS)], "stroke": "var(--ink)"}
        parts.append(tag("polygon", tag("title", classes[k]), class_="star", **star))
    if len(classes) > CLASSES:
        return drawing(SIDE, SIDE, *parts)
    names = [shorten(name, 26) for name in classes]
    named, end = legend([(marker(k, 0, 0), name) for k, name in enumerate(names)], SIDE, SIDE)
    return drawing(SIDE, end, *parts, *_labels(placed[n:].tolist(), names), *named)


def _labels(stars: Sequence[Sequence[float]], names: Sequence[str]) -> list[Markup]:
    """Names beside their stars. One that would lie on another star or name is left to the legend and the title."""
    taken = [(x, y, 7.0) for x, y in stars]  # middle, and half of the width
    parts = []
    for (x, y), name in zip(stars, names, strict=True):
        if sum(math.hypot(x - a, y - b) < 10 for a, b in stars) > 1:
            continue  # of stars in one place, no name tells which
        half = 3.0 * len(name)
        for across, down in ((x + 11 + half, y), (x - 11 - half, y), (x, y - 15), (x, y + 15)):
            free = all(abs(across - a) > half + b or abs(down - d) > 12 for a, d, b in taken)
            if free and half <= across <= SIDE - half and 8 <= down <= SIDE - 8:
                taken.append((across, down, half))
                parts.append(text(across, down + 4, name, text_anchor="middle", **HALO | {"fill": "var(--ink)"}))
                break
    return parts


def neighbours(comparison: Comparison) -> Markup:
    """The five inputs nearest to each prototype, before (left) and after (right); classes that changed most first."""
    near = [[nearest(view, k) for view in comparison[:2]] for k in range(len(comparison.classes))]
    shown = sorted(range(len(near)), key=lambda k: -len({*near[k][0]} ^ {*near[k][1]}))[:CLASSES]
    parts, bottom = [text(8, 16, "zero-shot"), text(220, 16, "adapted")], 22
    for k in shown:
        name = shorten(comparison.classes[k], 60)
        parts.append(text(8, bottom + 12, name, fill="var(--ink)", font_weight="bold"))
        top = bottom + 18
        for left, places in zip((8, 220), near[k], strict=True):
            x, y = left, top
            for i in places:
                cell, width, height = _cell(comparison.sample(i), comparison.inputs.ids[i])
                if comparison.labelled and int(comparison.after.labels[i]) != k:  # not by colour alone
                    cell += text(0, 11, "✗", **HALO | {"fill": "var(--bad)", "font_size": 13})
                parts.append(tag("svg", cell, data_i=i, x=x, y=y, width=width, height=height))
                bottom = max(bottom, y + height)
                x, y = (x + width, y) if x + width < left + 200 else (left, y + height)
    return drawing(428, bottom + 4, *parts)


def _cell(sample: object, name: str) -> tuple[Markup, int, int]:
    """A picture, or the beginning of a text; with the width and height it takes."""
    if isinstance(sample, Image.Image):
        return tag("image", href=thumbnail(sample, 72), width=36, height=36, image_rendering="pixelated"), 40, 40
    words = (as_text(sample) or name)[:200]
    length = 16 if any(unicodedata.east_asian_width(letter) in "WF" for letter in words) else 32
    lines = textwrap.wrap(words, length) or [name]
    lines[1:] = [shorten(" ".join(lines[1:]), length)] if lines[1:] else []
    return Markup("").join(text(12, 10 + 13 * i, line) for i, line in enumerate(lines)), 200, 13 * len(lines) + 4


def histogram(comparison: Comparison) -> Markup:
    """Cosine similarity of features with the right prototype (the predicted one where no labels are known)."""
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


def line(points: Sequence[tuple[float, float]], mark: float | None = None) -> Markup:
    """A curve over the steps of a run, and the step that was chosen."""
    ys = [y for _, y in points if math.isfinite(y)] or [0.0]
    series = [Series("", points, _stroke("var(--after)")), Series("", [(0, ys[0])], {})]  # from step 0 on
    if mark is not None:
        series.append(Series("", [(mark, min(ys)), (mark, max(ys))], _stroke("var(--bad)", "4 3")))
    return chart(series, "step", width=320, height=180)


def lambda_sweep(
    values: Sequence[float], ours: Mapping[str, Sequence[float]], papers: Sequence[float] | None
) -> Markup:
    """Accuracy in % against lambda, a curve a task; the paper's own, dashed, where the setting is the same."""
    series = []
    for i, (name, accuracies) in enumerate(ours.items()):
        k = i + len(COLOURS) * i  # another colour and another shape
        series.append(Series(name, list(zip(values, accuracies, strict=True)), _stroke(COLOURS[k % len(COLOURS)]), k))
    if papers is not None:
        paper = list(zip(values, papers, strict=True))
        series.append(Series("paper, chosen by labels", paper, _stroke("var(--ink)", "5 3")))
    return chart(series, "lambda", "accuracy in %")


def _stroke(colour: str, dashes: str = "none") -> dict[str, object]:
    return {"fill": "none", "stroke": colour, "stroke_width": 2, "stroke_dasharray": dashes}
