"""Labels worth asking for: which inputs to look at, and what the answers tell."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from pouf.data.base import Unlabelled
from pouf.data.texts import read_rows
from pouf.errors import InputError
from pouf.inference import InferenceConfig
from pouf.models.prompts import same_name
from pouf.reporting.pages import as_text, render, script_data, thumbnail
from pouf.runs.folder import adapted_use, check_run, load_run

PLAN, CSV_FILE, PAGE = "review.json", "review.csv", "review.html"
DISAGREE, AGREE = "disagree", "agree"


class Question(NamedTuple):
    """An input to look at."""

    id: str
    stratum: str  # whether zero-shot and adapted agree on it
    zero_shot: str
    adapted: str


class Estimate(NamedTuple):
    """An accuracy with the interval that holds it in 95 of 100 reviews."""

    value: float
    low: float
    high: float


class ReviewResult(NamedTuple):
    answered: int
    zero_shot: Estimate
    adapted: Estimate
    adapted_wins: int  # of the answered inputs on which they disagree
    zero_shot_wins: int
    better: str | None  # what to use, as for `load_run`; None where the answers leave it open
    advice: str


def ask(
    run: str | Path,
    data: Unlabelled,
    n: int = 50,
    *,
    seed: int = 0,
    inference: InferenceConfig | None = None,
    device: str | torch.device = "cpu",
) -> tuple[Path, Path]:
    """Write `review.csv` and `review.html` into the run: n inputs, and room for their labels.

    Labels that are in `review.csv` already stay there, where they are asked for again.

    Where zero-shot and the adapted model agree, a label can't tell which is better; where they differ, each
    label does. Two thirds of the questions are drawn at random from the latter, the rest from the former, and the size
    of both groups is kept, so that the answers give accuracies of all inputs.
    """
    run = check_run(run)
    if n < 2:
        raise InputError(f"a review needs at least 2 questions, not {n}")
    zero_shot, adapted = (load_run(run, use).to(device) for use in ("zero-shot", adapted_use(run)))
    inference = inference or InferenceConfig()
    said = [classifier.infer(data, inference) for classifier in (zero_shot, adapted)]
    guesses = [each.log_probabilities.argmax(1) for each in said]
    indices = said[0].indices
    differs = (guesses[0] != guesses[1]).tolist()
    groups = {
        DISAGREE: [row for row, other in enumerate(differs) if other],
        AGREE: [row for row, other in enumerate(differs) if not other],
    }
    # Each group is shuffled as a whole: a larger n asks the same questions and more.
    shuffled = {group: random.Random(f"{seed} {group}").sample(rows, len(rows)) for group, rows in groups.items()}
    most = min(len(groups[DISAGREE]), max(round(n * 2 / 3), n - len(groups[AGREE])))
    chosen = [(DISAGREE, row) for row in shuffled[DISAGREE][:most]]
    chosen += [(AGREE, row) for row in shuffled[AGREE][: n - most]]
    random.Random(seed).shuffle(chosen)
    names = adapted.classes
    questions = [
        Question(data.ids[indices[row]], group, names[int(guesses[0][row])], names[int(guesses[1][row])])
        for group, row in chosen
    ]
    plan = {
        "sizes": {group: len(rows) for group, rows in groups.items()},
        "questions": [question._asdict() for question in questions],
    }
    (run / PLAN).write_text(json.dumps(plan, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    samples = [data.read(indices[row]) for _, row in chosen]
    answered = read_answers(run / CSV_FILE, names) if (run / CSV_FILE).is_file() else {}
    with (run / CSV_FILE).open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["id", "text", "label"])
        writer.writerows([q.id, as_text(s), answered.get(q.id, "")] for q, s in zip(questions, samples, strict=True))
    (run / PAGE).write_text(_page(run, questions, samples, names), encoding="utf-8")
    return run / CSV_FILE, run / PAGE


def _page(run: Path, questions: Sequence[Question], samples: Sequence[Any], names: Sequence[str]) -> str:
    # What the models said is not shown: it would lead the reader.
    items = [
        {
            "id": question.id,
            "text": as_text(sample),
            "image": thumbnail(sample, 256) if isinstance(sample, Image.Image) else "",
        }
        for question, sample in zip(questions, samples, strict=True)
    ]
    # Answers that the browser keeps belong to these questions alone.
    key = hashlib.sha256(json.dumps([run.resolve().name, [q.id for q in questions]]).encode()).hexdigest()[:16]
    title = f"pouf: {len(items)} questions about {run.resolve().name}"
    return render("review.html", title=title, told=script_data({"key": key, "items": items, "classes": list(names)}))


def read_answers(file: str | Path, classes: Sequence[str]) -> dict[str, str]:
    """id -> class, from a CSV or JSONL file with columns id and label; rows without a label are left out."""
    known = {same_name(name): name for name in classes}
    answers = {}
    for row in read_rows(file, "id", "label"):
        if "id" not in row:
            raise InputError(f"{str(file)!r}: a row without id; expected the columns id and label")
        label = str(row.get("label") or "").strip()
        if label and same_name(label) not in known:
            raise InputError(f"{str(file)!r}: label {label!r} of {row['id']} is no class: {', '.join(classes[:10])}")
        if label:
            answers[str(row["id"])] = known[same_name(label)]
    return answers


def conclude(run: str | Path, answers: dict[str, str]) -> ReviewResult:
    """What the answers say of zero-shot and of the adapted model."""
    file = check_run(run) / PLAN
    if not file.is_file():
        raise InputError(f"no review in {str(run)!r}: ask first, with pouf review {run}")
    plan = json.loads(file.read_text(encoding="utf-8"))
    questions = [Question(**question) for question in plan["questions"]]
    answered = [question for question in questions if question.id in answers]
    if not answered:
        raise InputError("none of the answers is about a question of this review: are they from another run?")
    estimates = {
        which: _stratified(
            {
                group: [getattr(q, which) == answers[q.id] for q in answered if q.stratum == group]
                for group in (DISAGREE, AGREE)
            },
            plan["sizes"],
        )
        for which in ("zero_shot", "adapted")
    }
    wins = {
        which: sum(getattr(q, which) == answers[q.id] for q in answered if q.stratum == DISAGREE)
        for which in ("adapted", "zero_shot")
    }
    better, advice = _advice(wins)
    if better == "adapted":
        better = adapted_use(run)
    return ReviewResult(
        len(answered), estimates["zero_shot"], estimates["adapted"], wins["adapted"], wins["zero_shot"], better, advice
    )


def _stratified(right: dict[str, list[bool]], sizes: dict[str, int]) -> Estimate:
    """The share over both groups, each weighed by its size. A group without answers may be anything from 0 to 1."""
    total = sum(sizes.values())
    value = low = high = variance = 0.0
    for group, size in sizes.items():
        weight, answers = size / total, right[group]
        if size and not answers:
            value, high = value + weight / 2, high + weight / 2
            low -= weight / 2
            continue
        if answers:
            # One success and one failure added: an interval of width 0 from a few equal answers would be a lie.
            share, n = sum(answers) / len(answers), len(answers)
            smoothed = (sum(answers) + 1) / (n + 2)
            value += weight * share
            left = 1 - n / size if size > n else 0.0  # nothing is uncertain once all are answered
            variance += weight**2 * smoothed * (1 - smoothed) / n * left
    half = 1.96 * math.sqrt(variance)
    return Estimate(value, max(0.0, value - half + low), min(1.0, value + half + high))


def _advice(wins: dict[str, int]) -> tuple[str | None, str]:
    """What is better and how that was found: by the sign test on the inputs where they disagree."""
    better, worse = wins["adapted"], wins["zero_shot"]
    n = better + worse
    if n == 0:
        return None, "The answers do not tell them apart: in none of them do they differ with one of them right."
    score = f"{max(better, worse)} to {min(better, worse)}"
    if better == worse:
        return None, f"They are even where they differ ({score}): more answers are needed."
    which, leader = ("adapted", "the adapted model") if better > worse else ("zero-shot", "zero-shot")
    p = 2 * sum(math.comb(n, i) for i in range(max(better, worse), n + 1)) / 2**n
    if p < 0.05:
        return which, f"Use {leader}: it is right {score} where they differ (sign test, p = {p:.2g})."
    start = leader[0].upper() + leader[1:]
    return None, f"{start} leads {score} where they differ, which may be chance: more answers are needed."
