"""A run as one HTML file that needs no network: what came of it, whether to trust it, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from pouf.base import BaseClassifier, Predictions
from pouf.data.base import Unlabelled
from pouf.inference import InferenceConfig
from pouf.reporting.figures import CLASSES, Comparison, histogram, line, look, neighbours, tsne
from pouf.reporting.pages import as_text, render, script_data, shorten, thumbnail
from pouf.reporting.svg import LIGHT
from pouf.runs.folder import RECIPE, SKIPPED, Run
from pouf.saving import Use
from pouf.training.adaptation import Adaptation
from pouf.validation.verdict import Verdict

POINTS = 500  # inputs that are drawn
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
    there, inference = Run(run), inference or InferenceConfig()

    def at(use: Use) -> AbstractContextManager[BaseClassifier]:
        if result is not None and result.checkpoints is not None:
            return result.at(use)
        return nullcontext(BaseClassifier.from_pretrained(run, use=use, device=device))

    comparison = look(at("zero-shot"), at(there.adapted), data, labels, inference, POINTS)
    compared: dict[str, Use] = {"zero-shot": "zero-shot", "last step": "last", "advised": "advised"}
    guesses = {}
    for name, use in compared.items() if labels is not None else ():
        with at(use) as classifier:
            guesses[name] = classifier.infer(data, inference)
    evaluation = _evaluation(guesses, labels, comparison.classes) if labels is not None else None
    file = Path(file) if file is not None else there.folder / "report.html"
    file.write_text(_page(there, comparison, len(data), evaluation), encoding="utf-8")
    return file


def _page(run: Run, comparison: Comparison, n: int, evaluation: dict[str, Any] | None) -> str:
    verdict, steps = run.verdict, run.steps()
    items = [_item(comparison, i) for i in range(len(comparison.inputs))]
    before, after = comparison[:2]
    shares = [view.probabilities.mean(0) for view in (before, after)]
    shown = shares[1].argsort(descending=True)[:CLASSES].tolist()
    return render(
        "report.html",
        title=f"pouf: {run.folder.resolve().name}",
        verdict=verdict,
        diagnostics=_diagnostics(verdict),
        facts=_facts(verdict, n, comparison, steps),
        evaluation=evaluation,
        classes=comparison.classes,
        curves=_curves(steps, verdict),
        shares=[(comparison.classes[k], *(float(p[k]) for p in shares)) for k in shown],
        highest=max(float(p.max()) for p in shares),
        more_classes=len(comparison.classes) - len(shown),
        labelled=comparison.labelled,
        maps=[("zero-shot", tsne(before, comparison.classes)), ("adapted", tsne(after, comparison.classes))],
        neighbours=neighbours(comparison),
        histogram=histogram(comparison),
        changed=_changed(items, comparison),
        recipe="\n".join(run.lines(RECIPE)),
        manifest=json.dumps(run.manifest, indent=1, ensure_ascii=False),
        skipped=[f"{row['id']}: {row['reason']}" for row in map(json.loads, run.lines(SKIPPED))],
        items=script_data(items),
        light=LIGHT,
    )


def _facts(verdict: Verdict, n: int, comparison: Comparison, steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    changed = (comparison.before.probabilities.argmax(1) != comparison.after.probabilities.argmax(1)).double().mean()
    facts = [("inputs", f"{n:,}")]
    if verdict.chosen is not None:
        facts += [("used", verdict.advised), ("chosen step", str(verdict.chosen)), ("last step", str(verdict.last))]
    facts += [("predictions changed", f"{_percent(changed)} %")]
    return facts + ([("time", f"{steps[-1]['seconds']:.0f} s")] if steps else [])


def _diagnostics(verdict: Verdict) -> list[tuple[str, str, str]]:
    seen = verdict.diagnostics._asdict() if verdict.diagnostics is not None else {}
    return [
        (name, "" if before is None else f"{seen[before]:.2f}", f"{seen[after]:.2f}")
        for name, (before, after) in (DIAGNOSTICS.items() if seen else ())
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


def _evaluation(guesses: Mapping[str, Predictions], labels: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """Accuracies, and the confusion matrix of the last of them."""
    rows, k = [], len(names)
    for name, said in guesses.items():
        truth = torch.tensor([labels[i] for i in said.indices])
        guess = said.log_probabilities.argmax(1)
        right = int((guess == truth).sum())
        rows.append((name, *(_percent(share) for share in (right / len(truth), *wilson(right, len(truth))))))
    counts = torch.bincount(truth * k + guess, minlength=k * k).view(k, k)
    confusion = list(zip(names, counts.tolist(), strict=True)) if k <= CLASSES else None
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


def _curves(steps: list[dict[str, Any]], verdict: Verdict) -> list[tuple[str, str]]:
    if not steps:
        return []
    series = {
        "loss": [(s["step"], s["loss"]) for s in steps],
        "classes in use": [(s["step"], s["effective_classes"]) for s in steps],
    }
    for name, field in OPINIONS.items():
        series |= {name: [(s.step, getattr(s, field)) for s in verdict.snapshots]} if verdict.snapshots else {}
    return [(name, line(points, verdict.chosen)) for name, points in series.items()]
