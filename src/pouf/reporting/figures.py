"""The paper's figures from any run: t-SNE, nearest neighbours of prototypes, histograms of similarity, lambda."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from pouf.base import BaseClassifier
from pouf.data.base import Subset, Unlabelled
from pouf.inference import InferenceConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart by everyone.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
BEFORE, AFTER = "#999999", "#0072B2"
MOST = 2000  # points in a picture
CLASSES = 12  # with pictures of their neighbours


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


def look(
    zero_shot: BaseClassifier,
    adapted: BaseClassifier,
    data: Unlabelled,
    labels: Sequence[int] | None = None,
    inference: InferenceConfig | None = None,
    most: int = MOST,
) -> Comparison:
    """Features and prototypes before and after, of at most 2,000 inputs at random."""
    chosen = list(range(len(data)))
    if len(chosen) > most:
        chosen = sorted(np.random.default_rng(0).permutation(len(data))[:most].tolist())
    sample = Subset(data, chosen)
    views = []
    for classifier in (zero_shot, adapted):
        encoded = classifier.encode(sample, inference or InferenceConfig())
        said = classifier.log_probabilities(encoded).exp()
        true = None if labels is None else torch.tensor([labels[chosen[i]] for i in encoded.indices])
        with torch.no_grad():
            prototypes = F.normalize(classifier.prototypes().float(), dim=1).cpu()
        labels_shown = said.argmax(1) if true is None else true
        views.append(View(F.normalize(encoded.features.float(), dim=1), prototypes, labels_shown, said))
    readable = [i for i in range(len(sample)) if i not in sample.skipped]
    before, after = views
    return Comparison(before, after, Subset(sample, readable), adapted.classes, labels is not None)


def embed(view: View) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """t-SNE of features and prototypes together: (n, 2) and (k, 2); the same for the same view.

    Features and prototypes of dual encoders lie in two separate cones: both are centred, each by its own mean, as
    otherwise the picture would show the cones and nothing else.
    """
    from sklearn.manifold import TSNE

    both = torch.cat([view.features - view.features.mean(0), view.prototypes - view.prototypes.mean(0)])
    points = F.normalize(both, dim=1).numpy()
    perplexity = min(30.0, max(2.0, (len(points) - 1) / 4))
    placed = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(points)
    return placed[: len(view.features)], placed[len(view.features) :]


def tsne(comparison: Comparison) -> Figure:
    """Features and prototypes before and after, coloured by class."""
    figure, axes = _figure(1, 2, (11, 5.5))
    for axis, view, title in zip(axes, comparison[:2], ("zero-shot", "adapted"), strict=True):
        points, prototypes = embed(view)
        colours = [COLOURS[int(label) % len(COLOURS)] for label in view.labels]
        axis.scatter(*points.T, s=9, c=colours, alpha=0.6, linewidths=0)
        shades = [COLOURS[k % len(COLOURS)] for k in range(len(prototypes))]
        axis.scatter(*prototypes.T, s=130, c=shades, marker="*", edgecolors="black", linewidths=0.8)
        if len(comparison.classes) <= 40:
            for name, (x, y) in zip(comparison.classes, prototypes, strict=True):
                axis.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
        axis.set_title(f"{title}: features, and prototypes as stars", fontsize=10)
        axis.set_xticks([])
        axis.set_yticks([])
    return figure


def nearest(view: View, k: int, count: int = 5) -> list[int]:
    """The inputs nearest to a prototype, the nearest first."""
    return (view.features @ view.prototypes[k]).topk(min(count, len(view.features))).indices.tolist()


def neighbours(comparison: Comparison) -> Figure:
    """The five inputs nearest to each prototype, before (left) and after (right); classes that changed most first."""
    changed = [
        len({*nearest(comparison.before, k)} ^ {*nearest(comparison.after, k)}) for k in range(len(comparison.classes))
    ]
    shown = sorted(range(len(comparison.classes)), key=lambda k: -changed[k])[:CLASSES]
    figure, axes = _figure(len(shown), 11, (11, 1.15 * len(shown) + 0.5))
    for row, k in zip(np.atleast_2d(axes), shown, strict=True):
        for axis in row:
            axis.axis("off")
        row[5].text(0.5, 0.5, "→", ha="center", va="center", fontsize=14)
        row[0].set_title(f"{comparison.classes[k]}: zero-shot", fontsize=8, loc="left")
        row[6].set_title("adapted", fontsize=8, loc="left")
        for view, first in ((comparison.before, 0), (comparison.after, 6)):
            for axis, place in zip(row[first : first + 5], nearest(view, k), strict=False):
                right = not comparison.labelled or int(view.labels[place]) == k
                _show(axis, comparison.inputs.read(place), right)
    return figure


def _show(axis: Any, sample: Any, right: bool) -> None:
    if isinstance(sample, Image.Image):
        axis.imshow(sample)
    else:
        text = " / ".join(sample) if isinstance(sample, tuple) else str(sample)
        axis.text(0.5, 0.5, textwrap.fill(textwrap.shorten(text, 60), 15), ha="center", va="center", fontsize=5)
    if not right:  # not by colour alone
        axis.text(0.98, 0.02, "✗", transform=axis.transAxes, ha="right", va="bottom", color="#D55E00", fontsize=12)


def similarities(view: View) -> Tensor:
    """Cosine of each feature with the prototype of its class: (n,)."""
    return (view.features * view.prototypes[view.labels]).sum(1)


def histogram(comparison: Comparison) -> Figure:
    """Cosine similarity of features with the right prototype (the predicted one where no labels are known)."""
    figure, axes = _figure(1, 1, (6, 4))
    before, after = similarities(comparison.before).numpy(), similarities(comparison.after).numpy()
    bins = np.linspace(min(before.min(), after.min()), max(before.max(), after.max()), 50)
    axes.hist(before, bins, color=BEFORE, alpha=0.6, label=f"zero-shot, mean {before.mean():.3f}")
    axes.hist(after, bins, histtype="step", linewidth=2, color=AFTER, label=f"adapted, mean {after.mean():.3f}")
    axes.set_xlabel(f"cosine similarity with the {'right' if comparison.labelled else 'predicted'} class's prototype")
    axes.set_ylabel("inputs")
    axes.legend(frameon=False)
    return figure


def lambda_sweep(
    values: Sequence[float], ours: Mapping[str, Sequence[float]], papers: Sequence[float] | None
) -> Figure:
    """Accuracy in % against lambda; the paper's own beside it where the setting is the same."""
    figure, axes = _figure(1, 1, (6, 4))
    for (name, accuracies), colour, marker in zip(ours.items(), COLOURS, "osD^v<>p", strict=False):
        axes.plot(values, accuracies, marker=marker, color=colour, label=name)
    if papers is not None:
        axes.plot(values, papers, linestyle="--", color="black", label="paper, chosen by labels")
    axes.set_xlabel("lambda")
    axes.set_ylabel("accuracy in %")
    axes.legend(frameon=False)
    return figure


def write(figure: Figure, folder: Path, name: str) -> list[Path]:
    """PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for file in files:
        # Without the date, the same figure is the same file.
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


FIGURES: dict[str, Callable[[Comparison], Figure]] = {"tsne": tsne, "neighbours": neighbours, "similarity": histogram}


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    # Without pyplot: no window, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns)
