"""A run as one HTML file that needs no network: what came of it, whether to trust it, and why."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jinja2 import Environment, select_autoescape
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Subset, Unlabelled
from pouf.encoding import Reading
from pouf.figures import COLOURS, Sides, embed, look, nearest, similarities
from pouf.runs import METRICS, RECIPE, SKIPPED, adapted_use, check_run, load_run, read_choice, read_manifest

POINTS = 500  # inputs that are drawn
CLASSES = 40  # with a row of their own
CHANGED = 30
THUMB = 48  # pixels

SIGNS = {
    "classes in use": ("effective_before", "effective_after"),
    "share of classes given to no input": ("unused_before", "unused_after"),
    "mean probability of the predicted class": ("confidence_before", "confidence_after"),
    "share of predictions that survive a small change of the input": ("stability_before", "stability_after"),
    "share of inputs on which both agree": (None, "agreement"),
    "share of predictions that moved to other classes": (None, "shift"),
}


class Predicted(NamedTuple):
    before: Tensor  # (n, k) probabilities
    after: Tensor


def write_report(
    run: str | Path,
    data: Unlabelled,
    labels: Sequence[int] | None = None,
    file: str | Path | None = None,
    reading: Reading | None = None,
) -> Path:
    """Write `run/report.html`: zero-shot against what training made of it, whether the run advises to use it or not.

    Args:
        data: what it was adapted to, or other inputs of the kind; at most 500 of them are drawn.
        labels: positions of their classes, where they are known: accuracies and a confusion matrix are added.
    """
    run = check_run(run)
    file = Path(file) if file is not None else run / "report.html"
    zero_shot, adapted = Classifier.load_zero_shot(run), load_run(run, adapted_use(run))
    chosen = list(range(len(data)))
    if len(chosen) > POINTS:
        chosen = sorted(np.random.default_rng(0).permutation(len(data))[:POINTS].tolist())
    reading = reading or Reading()
    sample = Subset(data, chosen)
    sides = look(zero_shot, adapted, sample, None, reading)
    predicted = Predicted(*(c.score(sides.inputs, reading).log_probabilities.exp() for c in (zero_shot, adapted)))
    evaluation = None
    if labels is not None:
        compared = {"zero-shot": zero_shot, "adapted (last step)": Classifier.load(run), "advised": load_run(run)}
        evaluation = _evaluation(compared, data, labels, reading)
    file.write_text(_page(run, sides, predicted, evaluation), encoding="utf-8")
    return file


def _page(run: Path, sides: Sides, predicted: Predicted, evaluation: dict[str, Any] | None) -> str:
    choice = read_choice(run)
    manifest = read_manifest(run)
    steps = [json.loads(line) for line in _lines(run / METRICS)]
    samples = [_sample(sides.inputs.read(i)) for i in range(len(sides.inputs))]
    names = _said(predicted, sides.classes)
    items = [
        {**sample, "name": sides.inputs.ids[i], "before": before, "after": after}
        for i, (sample, (before, after)) in enumerate(zip(samples, names, strict=True))
    ]
    environment = Environment(autoescape=select_autoescape(default=True, default_for_string=True))
    template = environment.from_string(
        (resources.files("pouf") / "templates" / "report.html").read_text(encoding="utf-8")
    )
    shares = [p.mean(0) for p in predicted]
    shown = shares[1].argsort(descending=True)[:CLASSES].tolist()
    return template.render(
        title=f"pouf: {run.resolve().name}",
        verdict=choice["verdict"] if choice else "Nothing was trained, so there was no step to choose between.",
        trusted=choice is None or choice["use"] != "zero-shot",
        alarms=choice["alarms"] if choice else [],
        facts=_facts(choice, manifest, predicted, steps),
        signs=_signs(choice),
        evaluation=evaluation,
        classes=sides.classes,
        curves=_curves(steps, choice),
        shares=[(sides.classes[k], *(float(p[k]) for p in shares)) for k in shown],
        highest=max(float(p.max()) for p in shares),
        more_classes=len(sides.classes) - len(shown),
        maps=_maps(sides, predicted),
        neighbours=[
            (sides.classes[k], *([_item(items[i]) for i in nearest(view, k)] for view in (sides.before, sides.after)))
            for k in shown
        ],
        histogram=_histogram(sides),
        changed=_changed(items, predicted),
        recipe=(run / RECIPE).read_text(encoding="utf-8") if (run / RECIPE).is_file() else "",
        manifest=json.dumps(manifest, indent=1, ensure_ascii=False),
        skipped=[f"{row['id']}: {row['reason']}" for row in map(json.loads, _lines(run / SKIPPED))],
        # Inside a script element only "</" could end it early.
        items=Markup(json.dumps(items, ensure_ascii=False).replace("<", "\\u003c")),
    )


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def _facts(
    choice: dict[str, Any] | None, manifest: dict[str, Any], predicted: Predicted, steps: list[dict[str, Any]]
) -> list[tuple[str, str]]:
    changed = (predicted.before.argmax(1) != predicted.after.argmax(1)).double().mean()
    facts = [("inputs", f"{manifest.get('data', {}).get('n', len(predicted.before)):,}")]
    if choice is not None:
        facts += [("used", choice["use"]), ("chosen step", str(choice["chosen"])), ("last step", str(choice["last"]))]
    facts += [("predictions changed", f"{_percent(changed)} %")]
    if steps:
        facts += [("time", f"{steps[-1]['seconds']:.0f} s")]
    return facts


def _signs(choice: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    if choice is None:
        return []
    signs = choice["signs"]
    return [
        (name, "" if before is None else f"{signs[before]:.2f}", f"{signs[after]:.2f}")
        for name, (before, after) in SIGNS.items()
    ]


def _said(predicted: Predicted, classes: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for before, after in zip(predicted.before, predicted.after, strict=True):
        said = [f"{classes[int(p.argmax())]} {100 * float(p.max()):.0f} %" for p in (before, after)]
        pairs.append((said[0], said[1]))
    return pairs


def _percent(share: Any) -> str:
    return f"{100 * float(share):.1f}"


def _sample(sample: Any) -> dict[str, str]:
    if isinstance(sample, Image.Image):
        return {"image": thumbnail(sample), "text": ""}
    if isinstance(sample, (str, tuple)):
        text = " / ".join(sample) if isinstance(sample, tuple) else sample
        return {"image": "", "text": text if len(text) <= 160 else text[:159] + "…"}
    return {"image": "", "text": ""}


def thumbnail(image: Image.Image, side: int = THUMB) -> str:
    """A small picture as a data address."""
    small = image.copy()
    small.thumbnail((side, side))
    stream = io.BytesIO()
    small.save(stream, "PNG" if max(small.size) <= 16 else "JPEG", quality=80)
    kind = "png" if max(small.size) <= 16 else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"


def _item(item: dict[str, str]) -> Markup:
    if item["image"]:
        return Markup('<img class="thumb" alt="" src="{}">').format(item["image"])
    return Markup('<span class="sample">{}</span>').format(item["text"] or item["name"])


def _changed(items: list[dict[str, str]], predicted: Predicted) -> list[tuple[Markup, str, str, str]]:
    """Inputs that went to another class, those first whose probabilities moved furthest."""
    moved = (predicted.before - predicted.after).abs().sum(1)
    other = predicted.before.argmax(1) != predicted.after.argmax(1)
    order = [i for i in moved.argsort(descending=True).tolist() if other[i]][:CHANGED]
    shown = [items[i] for i in order]
    return [
        (_item(item), item["name"] if item["image"] or item["text"] else "", item["before"], item["after"])
        for item in shown
    ]


def _evaluation(
    compared: dict[str, Classifier], data: Unlabelled, labels: Sequence[int], reading: Reading
) -> dict[str, Any]:
    """Accuracies, and the confusion matrix of the last of them."""
    rows = []
    for name, classifier in compared.items():
        scored = classifier.score(data, reading)
        truth = torch.tensor([labels[i] for i in scored.indices])
        guess = scored.log_probabilities.argmax(1)
        right = int((guess == truth).sum())
        low, high = wilson(right, len(truth))
        rows.append((name, _percent(right / len(truth)), _percent(low), _percent(high)))
    k = len(classifier.classes)
    confusion = None
    if k <= CLASSES:
        counts = torch.bincount(truth * k + guess, minlength=k * k).view(k, k).tolist()
        confusion = list(zip(classifier.classes, counts, strict=True))
    return {"n": len(truth), "rows": rows, "confusion": confusion}


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The interval of a share by Wilson's score, 95 % by default."""
    if n == 0:
        return 0.0, 1.0
    p = right / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def _curves(steps: list[dict[str, Any]], choice: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not steps:
        return []
    chosen = choice["chosen"] if choice else None
    series = {
        "loss": [(s["step"], s["loss"]) for s in steps],
        "classes in use": [(s["step"], s["effective_classes"]) for s in steps],
    }
    if choice:
        series["agreement with the snapshots of the second half"] = [
            (s["step"], s["agreement"]) for s in choice["snapshots"]
        ]
    return [{"name": name, "svg": _line(points, chosen)} for name, points in series.items()]


def _line(points: list[tuple[int, float]], mark: int | None) -> Markup:
    width, height, left, bottom = 320, 170, 44, 22
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys), max(ys)
    spread = (high - low) or 1.0
    last = max(xs) or 1

    def at(x: float, y: float) -> str:
        across = left + (width - left - 8) * x / last
        return f"{across:.1f},{8 + (height - bottom - 8) * (1 - (y - low) / spread):.1f}"

    path = " ".join(at(x, y) for x, y in points)
    parts = [f'<polyline points="{path}" fill="none" stroke="var(--after)" stroke-width="2"/>']
    for value in (low, high):
        parts.append(f'<text x="2" y="{float(at(0, value).split(",")[1]) + 4:.1f}">{value:.3g}</text>')
    parts.append(f'<text x="{left}" y="{height - 5}">0</text>')
    parts.append(f'<text x="{width - 8}" y="{height - 5}" text-anchor="end">step {last}</text>')
    if mark is not None:
        across = at(mark, low).split(",")[0]
        ends = f'x1="{across}" x2="{across}" y1="8" y2="{height - bottom}"'
        parts.append(f'<line {ends} stroke="var(--bad)" stroke-dasharray="4 3"/>')
    return _svg(width, height, parts)


def _maps(sides: Sides, predicted: Predicted) -> list[dict[str, Any]]:
    drawn = []
    for name, view, probabilities in zip(("zero-shot", "adapted"), sides[:2], predicted, strict=True):
        points, prototypes = embed(view)
        both = np.concatenate([points, prototypes])
        low, size = both.min(0), np.ptp(both, axis=0).clip(1e-6)
        labels = probabilities.argmax(1).tolist()
        parts = []
        for i, (point, label) in enumerate(zip(points, labels, strict=True)):
            x, y = 10 + 380 * (point - low) / size
            parts.append(f'<circle class="p" data-i="{i}" cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{_colour(label)}"/>')
        for k, point in enumerate(prototypes):
            x, y = 10 + 380 * (point - low) / size
            parts.append(
                f'<path d="{_star(x, y)}" fill="{_colour(k)}" stroke="var(--ink)" stroke-width="1">'
                + str(Markup("<title>{}</title></path>").format(sides.classes[k]))
            )
            if len(prototypes) <= CLASSES:
                side, anchor = (9, "start") if x < 300 else (-9, "end")
                text = Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>')
                parts.append(str(text.format(f"{x + side:.1f}", f"{y + 4:.1f}", anchor, sides.classes[k])))
        drawn.append({"name": name, "svg": _svg(400, 400, parts)})
    return drawn


def _colour(k: int) -> str:
    """Of a class; black would not be seen in the dark."""
    colour = COLOURS[k % len(COLOURS)]
    return "var(--ink)" if colour == "#000000" else colour


def _star(x: float, y: float, radius: float = 8.0) -> str:
    corners = []
    for i in range(10):
        r, angle = (radius if i % 2 == 0 else radius * 0.42), math.pi * (i / 5 - 0.5)
        corners.append(f"{x + r * math.cos(angle):.1f} {y + r * math.sin(angle):.1f}")
    return f"M{'L'.join(corners)}Z"


def _histogram(sides: Sides) -> Markup:
    before, after = (similarities(view).numpy() for view in (sides.before, sides.after))
    edges = np.linspace(min(before.min(), after.min()), max(before.max(), after.max()) + 1e-6, 31)
    counts = [np.histogram(values, edges)[0] for values in (before, after)]
    highest = max(int(count.max()) for count in counts) or 1
    parts = []
    for count, style in (
        (counts[0], 'fill="var(--before)" fill-opacity=".55"'),
        (counts[1], 'fill="none" stroke="var(--after)" stroke-width="2"'),
    ):
        for i, n in enumerate(count.tolist()):
            if n:
                height = 120 * n / highest
                parts.append(
                    f'<rect x="{8 + 20 * i}" y="{128 - height:.1f}" width="18" height="{height:.1f}" {style}/>'
                )
    parts.append(f'<text x="8" y="145">{edges[0]:.2f}</text>')
    parts.append(f'<text x="606" y="145" text-anchor="end">{edges[-1]:.2f}</text>')
    return _svg(616, 150, parts)


def _svg(width: int, height: int, parts: Sequence[str]) -> Markup:
    # Everything in the parts is a number, a name from here, or has been escaped.
    return Markup(f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>')
