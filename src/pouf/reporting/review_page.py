"""The questions of a review as a table to fill in, and as a page to click through."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from pouf.errors import InputError
from pouf.reporting.pages import as_text, render, script_data, thumbnail
from pouf.saving import write_json
from pouf.validation.review import Question, Review, read_answers

PLAN, TABLE, PAGE = "review.json", "review.csv", "review.html"


def write_review(run: Path, review: Review, samples: Sequence[Any], classes: Sequence[str]) -> tuple[Path, Path]:
    """`review.csv` and `review.html` in the run. Labels that stand in the table already stay."""
    write_json(run / PLAN, review.to_json())
    answered = read_answers(run / TABLE, classes) if (run / TABLE).is_file() else {}
    with (run / TABLE).open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["id", "text", "label"])
        for question, sample in zip(review.questions, samples, strict=True):
            writer.writerow([question.id, as_text(sample), answered.get(question.id, "")])
    (run / PAGE).write_text(_page(run, review.questions, samples, classes), encoding="utf-8")
    return run / TABLE, run / PAGE


def read_review(run: Path) -> Review:
    if not (run / PLAN).is_file():
        raise InputError(f"no review in {str(run)!r}: ask first")
    return Review.from_json(json.loads((run / PLAN).read_text(encoding="utf-8")))


def _page(run: Path, questions: Sequence[Question], samples: Sequence[Any], classes: Sequence[str]) -> str:
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
    return render("review.html", title=title, told=script_data({"key": key, "items": items, "classes": list(classes)}))
