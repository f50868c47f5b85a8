"""A smaller model that learns from a run: what it predicts of unlabelled data is the teacher."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pouf.classifier import Classifier
from pouf.data.base import Subset, Unlabelled
from pouf.data.class_names import ClassSet
from pouf.data.labels import Teacher
from pouf.errors import InputError
from pouf.inference.cache import FeatureCache
from pouf.inference.encode import InferenceConfig
from pouf.options import Output
from pouf.runs.folder import update_manifest
from pouf.training import teachers
from pouf.training.adaptation import Adaptation
from pouf.validation.diagnostics import share

HELD_OUT = 0.2  # share of the inputs without answers for the student
TIMED = 256  # inputs of these, at most, that both predict


class Side(NamedTuple):
    """What one of the two costs."""

    seconds: float  # per input
    parameters: int


class Distilled(NamedTuple):
    """The student's run, and how it compares with its teacher."""

    result: Adaptation
    agreement: float  # with the teacher, on inputs without its answers
    before: float  # the same of the student's zero-shot
    held_back: int
    teacher: Side
    student: Side

    def to_json(self) -> dict[str, Any]:
        facts = self._asdict() | {"teacher": self.teacher._asdict(), "student": self.student._asdict()}
        return {name: value for name, value in facts.items() if name != "result"}


def distil(
    teacher: Classifier,
    model: str | Path,
    data: Unlabelled,
    output: Output,
    *,
    cache: FeatureCache | None = None,
    trust_model: bool = False,
    **options: Any,
) -> Distilled:
    """Adapt a model to the data with a teacher's predictions, each counting for as much as the teacher is sure of it.

    Args:
        teacher: of a run; its classes, templates and words are those of the student too.
        model: name or folder of the student.
        options: as of `Classifier.adapt`.
    """
    if data.streamed or len(data) < 10:
        raise InputError("a student learns from at least 10 inputs that can be read again")
    classes = ClassSet(teacher.classes, teacher.descriptions).as_given()
    student = Classifier.from_pretrained(model, classes, teachers.templates_of(teacher), trust_model=trust_model)
    if teacher.backbone.windows and student.backbone.supports_windows:
        student.backbone.use_windows()
    student.to(teacher.device)
    answers = teachers.read(teacher, student, data, InferenceConfig(cache=cache))
    rows = [index for index in data.content_order() if answers.answered[index]]
    drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    held_out = sorted(rows[int(i)] for i in drawn[: max(2, int(HELD_OUT * len(rows)))])
    given = answers.probabilities.clone()
    given[held_out] = 0.0
    result = student.adapt(data, teacher=Teacher(given, answers.source), output=output, cache=cache, **options)
    wanted = answers.probabilities[held_out].argmax(1)
    zero_shot, found = (each.infer(Subset(data, held_out)) for each in (student, result.classifier))
    agreement, before = (share(each.log_probabilities.argmax(1) == wanted) for each in (found, zero_shot))
    timed = Subset(data, held_out[:TIMED])
    sides = _side(teacher, timed), _side(result.classifier, timed)
    distilled = Distilled(result, agreement, before, len(held_out), *sides)
    update_manifest(output.folder, distilled=distilled.to_json())
    return distilled


def _side(classifier: Classifier, data: Unlabelled) -> Side:
    classifier.infer(Subset(data, [0]))  # the first one is slower than all that follow
    start = time.perf_counter()
    classifier.infer(data)
    seconds = (time.perf_counter() - start) / len(data)
    return Side(seconds, sum(parameter.numel() for parameter in classifier.parameters()))
