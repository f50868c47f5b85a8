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
from pouf.runs import MANIFEST, METRICS, RECIPE, SKIPPED, check_run, load_run, read_choice

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
    """Write `run/report.html` about the classifier that the run advises to use, seen on these inputs.

    Args:
        data: what it was adapted to, or other inputs of the kind; at most 500 of them are drawn.
        labels: positions of their classes, where they are known: accuracies and a confusion matrix are added.
    """
    run = check_run(run)
    file = Path(file) if file is not None else run / "report.html"
    zero_shot, used = Classifier.load_zero_shot(run), load_run(run)
    chosen = list(range(len(data)))
    if len(chosen) > POINTS:
        chosen = sorted(np.random.default_rng(0).permutation(len(data))[:POINTS].tolist())
    reading = reading or Reading()
    sample = Subset(data, chosen)
    sides = look(zero_shot, used, sample, None, reading)
    predicted = Predicted(*(c.score(sides.inputs, reading).log_probabilities.exp() for c in (zero_shot, used)))
    evaluation = None
    if labels is not None:
        last = Classifier.load(run)
        evaluation = _evaluation(zero_shot, last, used, data, labels, reading)
    file.write_text(_page(run, sides, predicted, evaluation), encoding="utf-8")
    return file


def _page(run: Path, sides: Sides, predicted: Predicted, evaluation: dict[str, Any] | None) -> str:
    choice = read_choice(run)
    manifest = json.loads((run / MANIFEST).read_text(encoding="utf-8"))
    steps = [json.loads(line) for line in _lines(run / METRICS)]
    samples = [_sample(sides.inputs.read(i)) for i in range(len(sides.inputs))]
    names = _said(predicted, sides.classes)
    items = [
        {**sample, "name": sides.inputs.ids[i], "before": before, "after": after}
        for i, (sample, (before, after)) in enumerate(zip(samples, names, strict=True))
    ]
    alarms = choice["alarms"] if choice else []
    environment = Environment(autoescape=select_autoescape(default=True, default_for_string=True))
    template = environment.from_string(
        (resources.files("pouf") / "templates" / "report.html").read_text(encoding="utf-8")
    )
    shown = sorted(range(len(sides.classes)), key=lambda k: -float(predicted.after.mean(0)[k]))[:CLASSES]
    return template.render(
        title=f"pouf: {run.resolve().name}",
        verdict=_verdict(choice),
        alarms=alarms,
        facts=_facts(choice, manifest, predicted, steps),
        signs=_signs(choice),
        evaluation=evaluation,
        classes=sides.classes,
        curves=_curves(steps, choice),
        shares=[(sides.classes[k], *(_percent(p[:, k].mean()) for p in predicted)) for k in shown],
        more_classes=len(sides.classes) - len(shown),
        maps=_maps(sides, predicted),
        neighbours=[
            (sides.classes[k], *([_item(samples[i]) for i in nearest(view, k)] for view in (sides.before, sides.after)))
            for k in shown
        ],
        histogram=_histogram(sides),
        changed=_changed(samples, sides, predicted, names),
        recipe=(run / RECIPE).read_text(encoding="utf-8") if (run / RECIPE).is_file() else "",
        manifest=json.dumps(manifest, indent=1, ensure_ascii=False),
        skipped=[f"{row['id']}: {row['reason']}" for row in map(json.loads, _lines(run / SKIPPED))],
        # Inside a script element only "</" could end it early.
        items=Markup(json.dumps(items, ensure_ascii=False).replace("<", "\\u003c")),
    )


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def _verdict(choice: dict[str, Any] | None) -> str:
    if choice is None:
        return "Nothing was trained, so there was no step to choose and nothing to compare it with."
    if choice["use"] == "zero-shot":
        why = "; ".join(alarm["words"] for alarm in choice["alarms"]) or "no later step agreed with the others as well"
        return f"The adapted model should not be trusted, and zero-shot is used instead: {why}."
    return (
        f"Step {choice['chosen']} of {choice['last']} is used. It was chosen without labels, as the one that agrees "
        "best with all snapshots together, and no sign speaks against it."
    )


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


def _item(sample: dict[str, str]) -> Markup:
    if sample["image"]:
        return Markup('<img class="thumb" alt="" src="{}">').format(sample["image"])
    return Markup('<span class="sample">{}</span>').format(sample["text"])


def _changed(
    samples: list[dict[str, str]], sides: Sides, predicted: Predicted, names: list[tuple[str, str]]
) -> list[tuple[Markup, str, str, str]]:
    """Inputs that went to another class, those first whose probabilities moved furthest."""
    moved = (predicted.before - predicted.after).abs().sum(1)
    other = predicted.before.argmax(1) != predicted.after.argmax(1)
    order = [i for i in moved.argsort(descending=True).tolist() if other[i]][:CHANGED]
    return [(_item(samples[i]), sides.inputs.ids[i], *names[i]) for i in order]


def _evaluation(
    zero_shot: Classifier,
    last: Classifier,
    used: Classifier,
    data: Unlabelled,
    labels: Sequence[int],
    reading: Reading,
) -> dict[str, Any]:
    rows = []
    for name, classifier in (("zero-shot", zero_shot), ("last step", last), ("used", used)):
        scored = classifier.score(data, reading)
        truth = torch.tensor([labels[i] for i in scored.indices])
        guess = scored.log_probabilities.argmax(1)
        right = int((guess == truth).sum())
        low, high = wilson(right, len(truth))
        rows.append((name, _percent(right / len(truth)), _percent(low), _percent(high)))
    k = len(used.classes)
    confusion = None
    if k <= CLASSES:
        counts = torch.bincount(truth * k + guess, minlength=k * k).view(k, k).tolist()
        confusion = list(zip(used.classes, counts, strict=True))
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
        series["agreement with all snapshots"] = [(s["step"], s["agreement"]) for s in choice["snapshots"]]
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
    for name, view, probabilities in zip(("zero-shot", "used"), sides[:2], predicted, strict=True):
        points, prototypes = embed(view)
        both = np.concatenate([points, prototypes])
        low, size = both.min(0), np.ptp(both, axis=0).clip(1e-6)
        labels = probabilities.argmax(1).tolist()
        parts = []
        for i, (point, label) in enumerate(zip(points, labels, strict=True)):
            x, y = 10 + 380 * (point - low) / size
            colour = COLOURS[label % len(COLOURS)]
            parts.append(f'<circle class="p" data-i="{i}" cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>')
        for k, point in enumerate(prototypes):
            x, y = 10 + 380 * (point - low) / size
            colour = COLOURS[k % len(COLOURS)]
            parts.append(
                f'<path d="{_star(x, y)}" fill="{colour}" stroke="var(--ink)" stroke-width="1">'
                + str(Markup("<title>{}</title></path>").format(sides.classes[k]))
            )
            if len(prototypes) <= CLASSES:
                parts.append(str(Markup('<text x="{}" y="{}">{}</text>').format(
                    f"{min(x + 7, 340):.1f}", f"{y + 4:.1f}", sides.classes[k])))  # fmt: skip
        drawn.append({"name": name, "svg": _svg(400, 400, parts)})
    return drawn


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
