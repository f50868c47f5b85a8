"""The questions of a review as a CSV table and as an HTML page."""

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
from pouf.files import read_json, write_json, write_text
from pouf.reporting.html import update_verdict
from pouf.reporting.pages import as_text, render, script_data, thumbnail
from pouf.runs.folder import Run
from pouf.runs.names import REVIEW, VERDICT
from pouf.validation.review import NO_CLASS, Review, ReviewQuestion, ReviewResult, read_answers

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
    write_text(run / PAGE, _page(run, review.questions, samples, classes))
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


def _page(run: Path, questions: Sequence[ReviewQuestion], samples: Sequence[Any], classes: Sequence[str]) -> str:
    # Without the predictions, which would bias the reader.
    items = [
        {
            "id": question.id,
            "text": as_text(sample),
            "image": thumbnail(sample, 256) if isinstance(sample, Image.Image) else "",
        }
        for question, sample in zip(questions, samples, strict=True)
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
