"""Pages of a run that work offline: report.html with verdict and evidence, review.html with questions."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from PIL import Image

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.class_names import Taxonomy
from pouf.data.tables import header, read_table
from pouf.errors import InputError, plural
from pouf.files import read_json, write_json, write_text
from pouf.inference.encode import InferenceConfig, Predictions
from pouf.recipe import Recipe
from pouf.reporting.figures import CLASSES, Comparison, both_maps, compare_features, histogram, line, nearest_inputs
from pouf.reporting.pages import LIGHT, as_text, render, script_data, shorten, thumbnail
from pouf.runs.folder import RECIPE, REPORT, REVIEW, VERDICT, Run
from pouf.saving import Use
from pouf.training.adaptation import Adaptation
from pouf.validation.evaluation import wilson
from pouf.validation.review import NO_CLASS, Review, ReviewQuestion, ReviewResult, read_answers
from pouf.validation.rules import rows_of
from pouf.validation.verdict import Verdict

MAX_POINTS = 500  # inputs in a figure
MAX_CHANGED_SHOWN = 30
MAX_PAIRS_SHOWN = 12  # pairs of confused classes
THUMBNAIL_SIDE = 48  # pixels
BEGIN, END = "<!--verdict-->", "<!--/verdict-->"  # around the part that a review updates
TUNED = {
    "full": "all weights", "upper": "the upper layers", "prompt": "a soft prompt", "layernorm": "the LayerNorm weights",
    "lora": "low-rank matrices (LoRA)",
    "prototypes": "the class prototypes", "map": "a linear map of the vectors",
}  # fmt: skip
SIDES = ("zero-shot", "adapted")
HIGHER_IS_BETTER = "↑ higher is better"


def write_report(
    run: str | Path,
    data: Unlabelled,
    labels: Sequence[int] | None = None,
    file: str | Path | None = None,
    inference: InferenceConfig | None = None,
    device: str | torch.device | None = None,
    result: Adaptation | None = None,
    trust_model: bool = False,
    comparison: Comparison | None = None,
) -> Path:
    """Write `run/report.html`, which compares zero-shot with the adapted classifier.

    Args:
        data: the training data, or other inputs of the same kind; at most 500 of them are displayed.
        labels: class indices of the data, if known, for accuracies and a confusion matrix.
        result: the run, if it has just finished; by default its classifiers are loaded.
        trust_model: as in `Classifier.from_pretrained`.
        comparison: from `compare_before_and_after`, if it was computed by several processes.
    """
    folder, inference = Run(run), inference or InferenceConfig()

    def classifier_of(use: Use) -> Classifier:
        if result is not None and result.checkpoints is not None:
            return result.at(use)
        return Classifier.from_pretrained(run, use=use, device=device, trust_model=trust_model)

    if comparison is None:
        sides = partial(classifier_of, "zero-shot"), partial(classifier_of, folder.adapted)
        comparison = compare_features(*sides, data, labels, inference, MAX_POINTS)
    compared: dict[str, Use] = {"zero-shot": "zero-shot", "last step": "last", "advised": "advised"}
    evaluation = None
    if labels is not None:
        guesses = {name: classifier_of(use).infer(data, inference) for name, use in compared.items()}
        evaluation = _evaluation(guesses, labels, comparison.classes)
    file = Path(file) if file is not None else folder.folder / REPORT
    write_text(file, _report_page(folder, comparison, len(data), evaluation))
    return file


def compare_before_and_after(result: Adaptation, data: Unlabelled, inference: InferenceConfig) -> Comparison | None:
    """The comparison for the report of a finished run, computed by all its processes; None without checkpoints."""
    if result.checkpoints is None:
        return None
    return compare_features(
        partial(result.at, "zero-shot"), partial(result.at, result.verdict.adapted), data, None, inference, MAX_POINTS
    )


def update_verdict(run: Path) -> None:
    """Replace the verdict in the report of a run, if there is a report."""
    file = run / REPORT
    if file.is_file():
        head, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
        _, end, tail = rest.partition(END)
        if end:
            write_text(file, head + begin + render("verdict.html", verdict=Run(run).verdict) + end + tail)


def _report_page(run: Run, comparison: Comparison, n: int, evaluation: dict[str, Any] | None) -> str:
    verdict, steps, names = run.verdict, run.steps(), comparison.classes
    items = [_item(comparison, i) for i in range(len(comparison.inputs))]
    before, after = comparison[:2]
    maps = list(zip(SIDES, both_maps(comparison), strict=True))
    return render(
        "report.html",
        title=f"pouf: {run.name}",
        about=_about(run, comparison, n, steps),
        verdict_block=Markup(BEGIN + render("verdict.html", verdict=verdict) + END),
        verdict=verdict,
        diagnostics=rows_of(verdict.diagnostics),
        facts=_facts(verdict, n, comparison, steps, run.manifest.get("drift")),
        evaluation=evaluation,
        classes=names,
        sorted_classes=sorted(enumerate(names), key=lambda each: (each[1].casefold(), each[1])),
        curves=_curves(steps, verdict, len(names)),
        shares=_shares(comparison),
        groups=_groups(comparison),
        more_classes=max(0, len(names) - CLASSES),
        absent=run.manifest.get("absent", []),
        labelled=comparison.labelled,
        maps=maps,
        coloured=len(names) <= CLASSES,
        neighbours=_neighbours(comparison, items),
        pictures=any(item["image"] for item in items),
        listed=any(item["text"] for item in items),
        histogram=histogram(comparison),
        changed=_changed(items, comparison),
        recipe="\n".join(run.lines(RECIPE)),
        manifest=json.dumps(run.manifest, indent=1, ensure_ascii=False),
        skipped=[f"{row['id']}: {row['reason']}" for row in run.skipped()],
        items=script_data(items),
        page_data=script_data({
            "classes": list(names),
            "sides": [view.labels.tolist() for view in (before, after)],
            "changed": comparison.changed(),
        }),
        light=LIGHT,
    )  # fmt: skip


def _about(run: Run, comparison: Comparison, n: int, steps: list[dict[str, Any]]) -> str:
    """Model, data, classes, template and changed weights in one sentence."""
    card, manifest = run.card, run.manifest
    source = Path(str((manifest.get("data") or manifest.get("shots") or {}).get("source", "")))
    model = "No model" if card.model is None else "/".join(Path(card.model).parts[-2:])  # the end of a local path
    inputs = plural(n, comparison.inputs.modality) + (f" from {source.name}" if source.is_absolute() else "")
    templates = () if card.vectors else card.templates
    more = f" and {len(templates) - 1} more" if len(templates) > 1 else ""
    text = f"{model}, {inputs}, {len(card.classes)} classes"
    text += f" in “{shorten(templates[0], 80)}”{more}" if templates else ""
    if card.words is not None:
        text += f" with the words {shorten(', '.join('/'.join(words) for words in card.words), 60)}"
    method = manifest.get("method", "pouf")
    if not steps:
        return f"{text}; {method} changed no weight." if manifest else f"{text}; not adapted yet."
    recipe = Recipe.load(run.files / RECIPE)
    trainable, total = manifest.get("trainable"), manifest.get("total")
    size = ""
    if trainable and total:
        size = f" ({trainable:,} parameters)" if trainable == total else f" ({trainable:,} of {total:,} parameters)"
    corrected = ", then corrected predictions" if recipe.postprocess != "none" else ""
    length = f"{plural(len(steps), 'step')} of {plural(min(recipe.batch_size, n), 'sample')}"
    changed = f"{method} changed {TUNED[recipe.tuner.name]}{size} in {length}"
    return f"{text}; {changed}{corrected}."


def _shares(comparison: Comparison) -> list[dict[str, Any]]:
    """Mean probabilities before and after, the largest first; of many classes, those with the largest change."""
    before, after = (view.probabilities.mean(0) for view in comparison[:2])
    many = len(comparison.classes) > CLASSES
    order = ((after - before).abs() if many else after).argsort(descending=True)[:CLASSES].tolist()
    widest = float(torch.stack([before, after])[:, order].max())
    return [
        {"name": comparison.classes[k], "before": _percent(before[k]), "after": _percent(after[k]),
         "widths": [100 * float(share[k]) / widest for share in (before, after)]}
        for k in order
    ]  # fmt: skip


def _groups(comparison: Comparison) -> list[tuple[str, str, str]]:
    """If class names are paths: summed shares of the classes below each ancestor, before and after."""
    taxonomy = Taxonomy.from_names(comparison.classes)
    if taxonomy is None:
        return []
    before, after = (taxonomy.sums(view.probabilities).mean(0).tolist() for view in comparison[:2])
    return [(name, _percent(b), _percent(a)) for name, b, a in zip(taxonomy.members, before, after, strict=True)]


def _neighbours(comparison: Comparison, items: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Inputs nearest to each prototype; if labels are known, wrong ones are marked."""

    def side(k: int, indices: Sequence[int]) -> list[dict[str, Any]]:
        labels = comparison.after.labels
        return [items[i] | {"i": i, "wrong": comparison.labelled and int(labels[i]) != k} for i in indices]

    return [
        {"name": comparison.classes[k], "sides": dict(zip(SIDES, (side(k, indices) for indices in both), strict=True))}
        for k, *both in nearest_inputs(comparison)
    ]


def _facts(
    verdict: Verdict, n: int, comparison: Comparison, steps: list[dict[str, Any]], drift: dict[str, Any] | None
) -> list[tuple[str, str]]:
    facts = [("inputs", f"{n:,}"), ("classes", f"{len(comparison.classes):,}")]
    if verdict.chosen is not None:
        step = verdict.last if verdict.advised == "last" else verdict.chosen
        trained = f"step {step} of {verdict.last}" if verdict.last else "no training"
        facts += [("advised", "zero-shot" if verdict.advised == "zero-shot" else trained)]
    changed = comparison.changed()
    drawn = f" (of {len(changed):,})" if len(changed) < n else ""
    facts += [(f"predictions changed{drawn}", f"{_percent(np.mean(changed))} %")]
    if drift is not None:
        facts += [("predictions unchanged among other names", f"{_percent(drift['agreement'])} %")]
    return facts + ([("training time", f"{steps[-1]['seconds']:.0f} s")] if steps else [])


def _percent(share: Any) -> str:
    return f"{100 * float(share):.1f}"


def _item(comparison: Comparison, i: int) -> dict[str, str]:
    """An input and its predictions before and after."""
    sample = comparison.sample(i)
    before, after = (
        f"{comparison.classes[int(p.argmax())]} {100 * float(p.max()):.0f} %"
        for p in (view.probabilities[i] for view in comparison[:2])
    )
    return {
        "image": thumbnail(sample, THUMBNAIL_SIDE) if isinstance(sample, Image.Image) else "",
        "text": shorten(as_text(sample), 160),
        "name": comparison.inputs.ids[i],
        "before": before,
        "after": after,
    }


def _changed(items: list[dict[str, str]], comparison: Comparison) -> list[dict[str, str]]:
    """Inputs with a changed prediction, the largest change of probabilities first."""
    before, after = (view.probabilities for view in comparison[:2])
    other = before.argmax(1) != after.argmax(1)
    order = (before - after).abs().sum(1).argsort(descending=True).tolist()
    return [items[i] for i in order if other[i]][:MAX_CHANGED_SHOWN]


def _evaluation(guesses: Mapping[str, Predictions], labels: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """Accuracies, and the confusion matrix of the last classifier."""
    rows, k = [], len(names)
    for name, predictions in guesses.items():
        truth = torch.tensor([labels[i] for i in predictions.indices])
        guess = predictions.log_probabilities.argmax(1)
        right = int((guess == truth).sum())
        rows.append((name, *(_percent(share) for share in (right / len(truth), *wilson(right, len(truth))))))
    counts = torch.bincount(truth * k + guess, minlength=k * k).view(k, k)
    confusion = None
    if k <= CLASSES:  # with each count its share of the true class, for the shade
        rates = (counts / counts.sum(1, keepdim=True).clamp_min(1)).tolist()
        confusion = [
            (name, list(zip(*each, strict=True))) for name, *each in zip(names, counts.tolist(), rates, strict=True)
        ]
    wrong = counts.clone().fill_diagonal_(0).flatten()
    indices = wrong.argsort(descending=True, stable=True)[:MAX_PAIRS_SHOWN].tolist()
    pairs = [(names[index // k], names[index % k], int(wrong[index])) for index in indices if wrong[index]]
    return {"n": len(truth), "rows": rows, "confusion": confusion, "pairs": pairs}


def _curves(steps: list[dict[str, Any]], verdict: Verdict, k: int) -> list[tuple[str, str]]:
    """Captions and curves over the steps of a run."""
    if not steps:
        return []
    curves: list[tuple[str, list[tuple[float, float]], tuple[float, float] | None, str]] = [
        ("loss of each batch (it falls in bad runs too)", [(s["step"], s["loss"]) for s in steps], None, ""),
        ("classes predicted in each batch (near 1 is a collapse)",
         [(s["step"], s["effective_classes"]) for s in steps], (0, k), ""),
    ]  # fmt: skip
    most = math.log(max(3, verdict.diagnostics.inputs if verdict.diagnostics else 3) - 1)  # of an entropy
    for field, caption, top in (
        ("agreement", "agreement with the second half of the run: the highest is chosen", 1),
        ("neighbourhood", "second opinion: density of neighbourhoods", most),
        ("clustering", "second opinion: agreement with a clustering", 1),
    ):
        along = [(float(snapshot.step), getattr(snapshot, field)) for snapshot in verdict.snapshots]
        if along:
            curves.append((caption, along, (0.0, top), HIGHER_IS_BETTER))
    return [(caption, line(points, verdict.chosen, span, good)) for caption, points, span, good in curves]


TABLE, PAGE = "review.csv", "review.html"
KEYS = "123456789abcdefghijklmnopqrstuvwxyz"  # 0 is none of the classes


def write_review(run: Path, review: Review, samples: Sequence[Any], classes: Sequence[str]) -> tuple[Path, Path]:
    """Write `review.csv` and `review.html` into the run. Labels that were already given are preserved."""
    answered = read_answers(run / TABLE, classes) if (run / TABLE).is_file() else {}
    ids = {question.id for question in review.questions}
    earlier = [each for each in _earlier_questions(run, review.counts) if each.id in answered.keys() - ids]
    texts = _texts(run / TABLE) if answered else {}
    table = io.StringIO(newline="")
    writer = csv.writer(table)
    writer.writerow(["id", "text", "label"])
    for question, sample in zip(review.questions, samples, strict=True):
        writer.writerow([question.id, as_text(sample), answered.get(question.id, "")])
    writer.writerows([id, texts.get(id, ""), label] for id, label in answered.items() if id not in ids)
    (run / REVIEW).parent.mkdir(exist_ok=True)
    write_json(run / REVIEW, review._replace(questions=[*review.questions, *earlier]).to_json())
    write_text(run / TABLE, table.getvalue())
    write_text(run / PAGE, _review_page(run, review.questions, samples, classes))
    return run / TABLE, run / PAGE


def _texts(file: Path) -> dict[str, str]:
    """id -> text of a table; its text column may have been removed."""
    if "text" not in header(file, ("id", "text")):
        return {}
    table = read_table(file, "id", "text")
    return {str(id): str(text) for id, text in zip(table["id"], table["text"], strict=True)}


def _earlier_questions(run: Path, counts: dict[str, dict[str, int]]) -> list[ReviewQuestion]:
    """The questions of the existing review, if it is about the same predictions, so that its answers still count."""
    if not (run / REVIEW).is_file():
        return []
    before = read_review(run)
    return before.questions if before.counts == counts else []


def read_review(run: Path) -> Review:
    """The review in a run folder, or an error."""
    if not (run / REVIEW).is_file():
        raise InputError(f"no review in {str(run)!r}: create one first")
    return read_json(run / REVIEW, Review, "create the review again")


def _review_page(run: Path, questions: Sequence[ReviewQuestion], samples: Sequence[Any], classes: Sequence[str]) -> str:
    # Without the predictions, which would bias the reader.
    items = [
        {"id": question.id, "text": as_text(x), "image": thumbnail(x, 256) if isinstance(x, Image.Image) else ""}
        for question, x in zip(questions, samples, strict=True)
    ]
    # The key under which the browser stores the answers to these questions.
    key = hashlib.sha256(json.dumps([run.resolve().name, [q.id for q in questions]]).encode()).hexdigest()[:16]
    many = len(classes) > len(KEYS)
    page_data = {"key": key, "items": items, "classes": _class_keys(classes), "none": NO_CLASS, "many": many}
    return render(
        "review.html",
        title=f"pouf: {plural(len(items), 'question')} about {run.resolve().name}",
        command=f"pouf review {shlex.quote(str(run.resolve()))} --answers answers.csv",
        page_data=script_data(page_data),
        many=many,
        bare=not any(item["text"] or item["image"] for item in items),
    )


def _class_keys(classes: Sequence[str]) -> list[dict[str, str]]:
    """Each class with its keys: one key, in the given order; for many classes two keys, in alphabetical order."""
    length = next(length for length in count(1) if len(KEYS) ** length >= len(classes))
    names = classes if length == 1 else sorted(classes, key=lambda name: (name.casefold(), name))
    keys = map("".join, product(KEYS, repeat=length))
    return [{"name": name, "key": key} for name, key in zip(names, keys, strict=False)]


def record(run: Path, result: ReviewResult) -> None:
    """Write the result of a review into the run's verdict and its report, if there is one."""
    verdict = replace(Run(run).verdict, review=result)
    (run / VERDICT).parent.mkdir(exist_ok=True)
    write_json(run / VERDICT, verdict.to_json())
    update_verdict(run)
