"""A run as one HTML file that needs no network: what came of it, whether to trust it, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from PIL import Image

from pouf.base import BaseClassifier
from pouf.data.base import Unlabelled, Unreadable
from pouf.inference import InferenceConfig
from pouf.reporting.figures import COLOURS, Comparison, embed, look, nearest, similarities
from pouf.reporting.pages import as_text, render, script_data, thumbnail
from pouf.runs.folder import RECIPE, SKIPPED, Run
from pouf.training.adaptation import Adaptation
from pouf.validation.verdict import Verdict

POINTS = 500  # inputs that are drawn
CLASSES = 40  # with a row of their own
CHANGED = 30
PAIRS = 12  # of classes that are taken for each other
THUMB = 48  # pixels
OPINIONS = {
    "agreement with the second half of the run, which chooses": "agreement",
    "second opinion: density of neighbourhoods": "neighbourhood",
    "second opinion: agreement with a clustering": "clustering",
}
DIAGNOSTICS = {
    "classes in use": ("effective_before", "effective_after"),
    "share of classes given to no input": ("unused_before", "unused_after"),
    "mean probability of the predicted class": ("confidence_before", "confidence_after"),
    "share of predictions that survive a small change of the input": ("stability_before", "stability_after"),
    "share of inputs on which both agree": (None, "agreement"),
    "share of predictions that moved to other classes": (None, "shift"),
    "agreement of the run's last two thirds with its end, beyond chance": (None, "convergence"),
}


def write_report(
    run: str | Path,
    data: Unlabelled,
    labels: Sequence[int] | None = None,
    file: str | Path | None = None,
    inference: InferenceConfig | None = None,
    device: str | torch.device | None = None,
    result: Adaptation | None = None,
) -> Path:
    """Write `run/report.html`: zero-shot against what training made of it, whether the run advises to use it or not.

    Args:
        data: what it was adapted to, or other inputs of the kind; at most 500 of them are drawn.
        labels: positions of their classes, where they are known: accuracies and a confusion matrix are added.
        result: the run itself, where it has just come to its end; else its classifiers are loaded.
    """
    there = Run(run)
    file = Path(file) if file is not None else there.folder / "report.html"
    zero_shot, adapted = (
        BaseClassifier.from_pretrained(run, use=use, device=device) for use in ("zero-shot", there.adapted)
    )
    inference = inference or InferenceConfig()
    comparison = look(zero_shot, adapted, data, inference=inference, most=POINTS)
    evaluation = None
    if labels is not None:
        others = {"last step": "last", "advised": "advised"}
        compared = {name: BaseClassifier.from_pretrained(run, use=use, device=device) for name, use in others.items()}  # type: ignore[arg-type]
        evaluation = _evaluation({"zero-shot": zero_shot, **compared}, data, labels, inference)
    file.write_text(_page(there, comparison, len(data), evaluation), encoding="utf-8")
    return file


def _page(run: Run, comparison: Comparison, n: int, evaluation: dict[str, Any] | None) -> str:
    verdict, steps = run.verdict, run.steps()
    items = [_item(comparison, i) for i in range(len(comparison.inputs))]
    shares = [view.probabilities.mean(0) for view in comparison[:2]]
    shown = shares[1].argsort(descending=True)[:CLASSES].tolist()
    return render(
        "report.html",
        title=f"pouf: {run.folder.resolve().name}",
        verdict=verdict.message,
        trusted=verdict.trusted,
        judged=verdict.diagnostics is not None,
        alarms=verdict.alarms,
        facts=_facts(verdict, n, comparison, steps),
        diagnostics=_diagnostics(verdict),
        evaluation=evaluation,
        classes=comparison.classes,
        curves=_curves(steps, verdict),
        shares=[(comparison.classes[k], *(float(p[k]) for p in shares)) for k in shown],
        highest=max(float(p.max()) for p in shares),
        more_classes=len(comparison.classes) - len(shown),
        maps=_maps(comparison),
        neighbours=[
            (comparison.classes[k], *([_shown(items[i]) for i in nearest(view, k)] for view in comparison[:2]))
            for k in shown
        ],
        histogram=_histogram(comparison),
        changed=_changed(items, comparison),
        recipe="\n".join(run.lines(RECIPE)),
        manifest=json.dumps(run.manifest, indent=1, ensure_ascii=False),
        skipped=[f"{row['id']}: {row['reason']}" for row in map(json.loads, run.lines(SKIPPED))],
        items=script_data(items),
    )


def _facts(verdict: Verdict, n: int, comparison: Comparison, steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    changed = (comparison.before.probabilities.argmax(1) != comparison.after.probabilities.argmax(1)).double().mean()
    facts = [("inputs", f"{n:,}")]
    if verdict.chosen is not None:
        facts += [("used", verdict.advised), ("chosen step", str(verdict.chosen)), ("last step", str(verdict.last))]
    facts += [("predictions changed", f"{_percent(changed)} %")]
    if steps:
        facts += [("time", f"{steps[-1]['seconds']:.0f} s")]
    return facts


def _diagnostics(verdict: Verdict) -> list[tuple[str, str, str]]:
    seen = verdict.diagnostics
    if seen is None:
        return []
    return [
        (name, "" if before is None else f"{getattr(seen, before):.2f}", f"{getattr(seen, after):.2f}")
        for name, (before, after) in DIAGNOSTICS.items()
    ]


def _percent(share: Any) -> str:
    return f"{100 * float(share):.1f}"


def _item(comparison: Comparison, i: int) -> dict[str, str]:
    """An input with what was said of it."""
    sample = _read(comparison.inputs, i)
    text = as_text(sample)
    before, after = (
        f"{comparison.classes[int(p.argmax())]} {100 * float(p.max()):.0f} %"
        for p in (view.probabilities[i] for view in comparison[:2])
    )
    return {
        "image": thumbnail(sample, THUMB) if isinstance(sample, Image.Image) else "",
        "text": text if len(text) <= 160 else text[:159] + "…",
        "name": comparison.inputs.ids[i],
        "before": before,
        "after": after,
    }


def _read(inputs: Unlabelled, i: int) -> Any:
    try:
        return inputs.read(i)
    except Unreadable:  # it could be read before
        return None


def _shown(item: dict[str, str]) -> Markup:
    if item["image"]:
        return Markup('<img class="thumb" alt="" src="{}">').format(item["image"])
    return Markup('<span class="sample">{}</span>').format(item["text"] or item["name"])


def _changed(items: list[dict[str, str]], comparison: Comparison) -> list[tuple[Markup, str, str, str]]:
    """Inputs that went to another class, those first whose probabilities moved furthest."""
    before, after = (view.probabilities for view in comparison[:2])
    other = before.argmax(1) != after.argmax(1)
    order = [i for i in (before - after).abs().sum(1).argsort(descending=True).tolist() if other[i]][:CHANGED]
    return [
        (_shown(item), item["name"] if item["image"] or item["text"] else "", item["before"], item["after"])
        for item in (items[i] for i in order)
    ]


def _evaluation(
    compared: dict[str, BaseClassifier], data: Unlabelled, labels: Sequence[int], inference: InferenceConfig
) -> dict[str, Any]:
    """Accuracies, and the confusion matrix of the last of them."""
    rows = []
    for name, classifier in compared.items():
        scored = classifier.infer(data, inference)
        truth = torch.tensor([labels[i] for i in scored.indices])
        guess = scored.log_probabilities.argmax(1)
        right = int((guess == truth).sum())
        low, high = wilson(right, len(truth))
        rows.append((name, _percent(right / len(truth)), _percent(low), _percent(high)))
    k = len(classifier.classes)
    counts = torch.bincount(truth * k + guess, minlength=k * k).view(k, k)
    names, confusion = classifier.classes, None
    if k <= CLASSES:
        confusion = list(zip(names, counts.tolist(), strict=True))
    wrong = counts.clone().fill_diagonal_(0).flatten()
    places = wrong.argsort(descending=True, stable=True)[:PAIRS].tolist()
    pairs = [(names[place // k], names[place % k], int(wrong[place])) for place in places if wrong[place]]
    return {"n": len(truth), "rows": rows, "confusion": confusion, "pairs": pairs}


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share, by Wilson's score."""
    from scipy.stats import binomtest

    if n == 0:
        return 0.0, 1.0
    interval = binomtest(right, n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def _curves(steps: list[dict[str, Any]], verdict: Verdict) -> list[dict[str, Any]]:
    if not steps:
        return []
    series = {
        "loss": [(s["step"], s["loss"]) for s in steps],
        "classes in use": [(s["step"], s["effective_classes"]) for s in steps],
    }
    for name, field in OPINIONS.items():
        series |= {name: [(s.step, getattr(s, field)) for s in verdict.snapshots]} if verdict.snapshots else {}
    return [{"name": name, "svg": _line(points, verdict.chosen)} for name, points in series.items()]


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


def _maps(comparison: Comparison) -> list[dict[str, Any]]:
    drawn = []
    for name, view in zip(("zero-shot", "adapted"), comparison[:2], strict=True):
        points, prototypes = embed(view)
        both = np.concatenate([points, prototypes])
        low, size = both.min(0), np.ptp(both, axis=0).clip(1e-6)
        labels = view.probabilities.argmax(1).tolist()
        parts = []
        for i, (point, label) in enumerate(zip(points, labels, strict=True)):
            x, y = 10 + 380 * (point - low) / size
            parts.append(f'<circle class="p" data-i="{i}" cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{_colour(label)}"/>')
        for k, point in enumerate(prototypes):
            x, y = 10 + 380 * (point - low) / size
            parts.append(
                f'<path d="{_star(x, y)}" fill="{_colour(k)}" stroke="var(--ink)" stroke-width="1">'
                + str(Markup("<title>{}</title></path>").format(comparison.classes[k]))
            )
            if len(prototypes) <= CLASSES:
                side, anchor = (9, "start") if x < 300 else (-9, "end")
                text = Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>')
                parts.append(str(text.format(f"{x + side:.1f}", f"{y + 4:.1f}", anchor, comparison.classes[k])))
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


def _histogram(comparison: Comparison) -> Markup:
    before, after = (similarities(view).numpy() for view in (comparison.before, comparison.after))
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
