"""The questions of a review as a table to fill in, and as a page to click through."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any

from PIL import Image

from pouf.data.tables import header, read_table
from pouf.errors import InputError, plural
from pouf.files import write_json, write_text
from pouf.reading import read_json
from pouf.reporting.html import update_verdict
from pouf.reporting.pages import as_text, render, script_data, thumbnail
from pouf.runs.folder import Run
from pouf.runs.names import REVIEW, VERDICT
from pouf.validation.review import NONE, Question, Review, ReviewResult, read_answers

TABLE, PAGE = "review.csv", "review.html"
KEYS = "123456789abcdefghijklmnopqrstuvwxyz"  # 0 is none of the classes


def write_review(run: Path, review: Review, samples: Sequence[Any], classes: Sequence[str]) -> tuple[Path, Path]:
    """`review.csv` and `review.html` in the run. A label that was given stays, whatever is asked now."""
    answered = read_answers(run / TABLE, classes) if (run / TABLE).is_file() else {}
    asked = {question.id for question in review.questions}
    kept = [question for question in _asked_before(run, review.counts) if question.id in answered.keys() - asked]
    texts = _texts(run / TABLE) if answered else {}
    table = io.StringIO(newline="")
    writer = csv.writer(table)
    writer.writerow(["id", "text", "label"])
    for question, sample in zip(review.questions, samples, strict=True):
        writer.writerow([question.id, as_text(sample), answered.get(question.id, "")])
    writer.writerows([id, texts.get(id, ""), label] for id, label in answered.items() if id not in asked)
    (run / REVIEW).parent.mkdir(exist_ok=True)
    write_json(run / REVIEW, review._replace(questions=[*review.questions, *kept]).to_json())
    write_text(run / TABLE, table.getvalue())
    write_text(run / PAGE, _page(run, review.questions, samples, classes))
    return run / TABLE, run / PAGE


def _texts(file: Path) -> dict[str, str]:
    """id -> text, of a table that may have come back from a person without its texts."""
    if "text" not in header(file, ("id", "text")):
        return {}
    table = read_table(file, "id", "text")
    return {str(id): str(text) for id, text in zip(table["id"], table["text"], strict=True)}


def _asked_before(run: Path, counts: dict[str, dict[str, int]]) -> list[Question]:
    """The questions of the review that is there, if it is of the same predictions: its answers count as well then."""
    if not (run / REVIEW).is_file():
        return []
    before = read_review(run)
    return before.questions if before.counts == counts else []


def read_review(run: Path) -> Review:
    if not (run / REVIEW).is_file():
        raise InputError(f"no review in {str(run)!r}: ask first")
    return read_json(run / REVIEW, Review, "ask again")


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
    many = len(classes) > len(KEYS)
    told = {"key": key, "items": items, "classes": _keyed(classes), "none": NONE, "many": many}
    return render(
        "review.html",
        title=f"pouf: {plural(len(items), 'question')} about {run.resolve().name}",
        command=f"pouf review {shlex.quote(str(run.resolve()))} --answers answers.csv",
        told=script_data(told),
        many=many,
        bare=not any(item["text"] or item["image"] for item in items),
    )


def _keyed(classes: Sequence[str]) -> list[dict[str, str]]:
    """Each class with the keys that answer it: one, in the order given; of many classes two, in alphabetical order."""
    length = next(length for length in count(1) if len(KEYS) ** length >= len(classes))
    names = classes if length == 1 else sorted(classes, key=lambda name: (name.casefold(), name))
    keys = map("".join, product(KEYS, repeat=length))
    return [{"name": name, "key": key} for name, key in zip(names, keys, strict=False)]


def record(run: Path, result: ReviewResult) -> None:
    """Put what the answers said into the run's verdict, and on top of its report where it has one."""
    there = Run(run)
    verdict = replace(there.verdict, review=result)
    (run / VERDICT).parent.mkdir(exist_ok=True)
    write_json(run / VERDICT, verdict.to_json())
    update_verdict(run)
