"""A run as one HTML file that needs no network: what came of it, whether to trust it, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.inference import InferenceConfig
from pouf.reporting.figures import CLASSES, Comparison, histogram, line, look, neighbours, tsne
from pouf.reporting.pages import as_text, render, script_data, shorten, thumbnail
from pouf.reporting.svg import LIGHT
from pouf.runs.folder import (
    METRICS,
    RECIPE,
    SKIPPED,
    adapted_use,
    check_run,
    load_run,
    read_choice,
    read_manifest,
    read_verdict,
)

POINTS = 500  # inputs that are drawn
CHANGED = 30
PAIRS = 12  # of classes that are taken for each other
THUMB = 48  # pixels
OPINIONS = {
    "agreement with the second half of the run, which chooses": "agreement",
    "second opinion: density of neighbourhoods": "neighbourhood",
    "second opinion: agreement with a clustering": "clustering",
}
SIGNS = {
    "classes in use": ("effective_before", "effective_after"),
    "share of classes given to no input": ("unused_before", "unused_after"),
    "mean probability of the predicted class": ("confidence_before", "confidence_after"),
    "share of predictions that survive a small change of the input": ("stability_before", "stability_after"),
    "share of inputs on which both agree": (None, "agreement"),
    "share of predictions that moved to other classes": (None, "shift"),
    "agreement of the run's last two thirds with its end, beyond chance": (None, "settled"),
}


def write_report(
    run: str | Path,
    data: Unlabelled,
    labels: Sequence[int] | None = None,
    file: str | Path | None = None,
    inference: InferenceConfig | None = None,
    device: str | torch.device = "cpu",
) -> Path:
    """Write `run/report.html`: zero-shot against what training made of it, whether the run advises to use it or not.

    Args:
        data: what it was adapted to, or other inputs of the kind; at most 500 of them are drawn.
        labels: positions of their classes, where they are known: accuracies and a confusion matrix are added.
    """
    run = check_run(run)
    file = Path(file) if file is not None else run / "report.html"
    zero_shot, adapted = (load_run(run, use).to(device) for use in ("zero-shot", adapted_use(run)))
    inference = inference or InferenceConfig()
    comparison = look(zero_shot, adapted, data, labels, inference, POINTS)
    evaluation = None
    if labels is not None:
        others = {"adapted (last step)": load_run(run, "last"), "advised": load_run(run)}
        compared = {"zero-shot": zero_shot, **{name: other.to(device) for name, other in others.items()}}
        evaluation = _evaluation(compared, data, labels, inference)
    file.write_text(_page(run, comparison, len(data), evaluation), encoding="utf-8")
    return file


def _page(run: Path, comparison: Comparison, n: int, evaluation: dict[str, Any] | None) -> str:
    choice, manifest = read_choice(run), read_manifest(run)
    verdict, trusted = read_verdict(run)
    steps = [json.loads(line) for line in _lines(run / METRICS)]
    items = [_item(comparison, i) for i in range(len(comparison.inputs))]
    before, after = comparison[:2]
    shares = [view.probabilities.mean(0) for view in (before, after)]
    shown = shares[1].argsort(descending=True)[:CLASSES].tolist()
    return render(
        "report.html",
        title=f"pouf: {run.resolve().name}",
        verdict=verdict,
        trusted=trusted,
        judged=choice is not None,
        alarms=choice["alarms"] if choice else [],
        facts=_facts(choice, n, comparison, steps),
        diagnostics=_signs(choice),
        evaluation=evaluation,
        classes=comparison.classes,
        curves=_curves(steps, choice),
        shares=[(comparison.classes[k], *(float(p[k]) for p in shares)) for k in shown],
        highest=max(float(p.max()) for p in shares),
        more_classes=len(comparison.classes) - len(shown),
        labelled=comparison.labelled,
        maps=[("zero-shot", tsne(before, comparison.classes)), ("adapted", tsne(after, comparison.classes))],
        neighbours=neighbours(comparison),
        histogram=histogram(comparison),
        changed=_changed(items, comparison),
        recipe=(run / RECIPE).read_text(encoding="utf-8") if (run / RECIPE).is_file() else "",
        manifest=json.dumps(manifest, indent=1, ensure_ascii=False),
        skipped=[f"{row['id']}: {row['reason']}" for row in map(json.loads, _lines(run / SKIPPED))],
        items=script_data(items),
        light=LIGHT,
    )


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def _facts(
    choice: dict[str, Any] | None, n: int, comparison: Comparison, steps: list[dict[str, Any]]
) -> list[tuple[str, str]]:
    changed = (comparison.before.probabilities.argmax(1) != comparison.after.probabilities.argmax(1)).double().mean()
    facts = [("inputs", f"{n:,}")]
    if choice is not None:
        facts += [("used", choice["use"]), ("chosen step", str(choice["chosen"])), ("last step", str(choice["last"]))]
    facts += [("predictions changed", f"{_percent(changed)} %")]
    if steps:
        facts += [("time", f"{steps[-1]['seconds']:.0f} s")]
    return facts


def _signs(choice: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    if choice is None:
        return []
    diagnostics = choice["signs"] | {"settled": choice["settled"]}
    return [
        (name, "" if before is None else f"{diagnostics[before]:.2f}", f"{diagnostics[after]:.2f}")
        for name, (before, after) in SIGNS.items()
    ]


def _percent(share: Any) -> str:
    return f"{100 * float(share):.1f}"


def _item(comparison: Comparison, i: int) -> dict[str, str]:
    """An input with what was said of it."""
    sample = comparison.sample(i)
    before, after = (
        f"{comparison.classes[int(p.argmax())]} {100 * float(p.max()):.0f} %"
        for p in (view.probabilities[i] for view in comparison[:2])
    )
    return {
        "image": thumbnail(sample, THUMB) if isinstance(sample, Image.Image) else "",
        "text": shorten(as_text(sample), 160),
        "name": comparison.inputs.ids[i],
        "before": before,
        "after": after,
    }


def _changed(items: list[dict[str, str]], comparison: Comparison) -> list[dict[str, str]]:
    """Inputs that went to another class, those first whose probabilities moved furthest."""
    before, after = (view.probabilities for view in comparison[:2])
    other = before.argmax(1) != after.argmax(1)
    order = (before - after).abs().sum(1).argsort(descending=True).tolist()
    return [items[i] for i in order if other[i]][:CHANGED]


def _evaluation(
    compared: dict[str, Classifier], data: Unlabelled, labels: Sequence[int], inference: InferenceConfig
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


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The interval of a share by Wilson's score, 95 % by default."""
    if n == 0:
        return 0.0, 1.0
    p = right / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def _curves(steps: list[dict[str, Any]], choice: dict[str, Any] | None) -> list[tuple[str, str]]:
    if not steps:
        return []
    chosen = choice["chosen"] if choice else None
    series = {
        "loss": [(s["step"], s["loss"]) for s in steps],
        "classes in use": [(s["step"], s["effective_classes"]) for s in steps],
    }
    for name, field in OPINIONS.items():
        series |= {name: [(s["step"], s[field]) for s in choice["snapshots"]]} if choice else {}
    return [(name, line(points, chosen)) for name, points in series.items()]
