"""From whatever knows more to soft labels of the inputs: files, arrays, classifiers, runs and models by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled, Unreadable
from pouf.data.class_names import ClassSet, same_name
from pouf.data.teacher import Teacher, is_file_of_answers, read_teacher
from pouf.errors import InputError, nearest
from pouf.inference.encode import InferenceConfig
from pouf.models.cross_encoder import CrossEncoder
from pouf.models.load import load_cross_encoder
from pouf.models.prompts import class_texts, fill
from pouf.postprocess.refinement import trust_in_equal_shares
from pouf.postprocess.sinkhorn import relaxed_offsets
from pouf.saving import is_saved

logger = logging.getLogger(__name__)


def read(
    given: Any,
    classifier: Classifier,
    data: Unlabelled | None,
    inference: InferenceConfig,
    prior: Tensor | None = None,
) -> Teacher:
    """The answers of a teacher to the data, corrected by their mean unless that was done before.

    Args:
        given: a file, a matrix (n, k), a `Classifier`, a `CrossEncoder`, or the name of a run or a model; a `Teacher`
            is taken as it is.
        classifier: the student, whose classes they are of.
        prior: (k,), known shares of the classes.
    """
    if data is None or data.streamed:
        raise InputError("a teacher answers unlabelled data that can be read again: give some, and no stream")
    if isinstance(given, Teacher):
        if given.probabilities.shape != (len(data), len(classifier.classes)):
            raise InputError(f"teacher: answers {tuple(given.probabilities.shape)} for {len(data)} inputs")
        return given
    if isinstance(given, (str, Path)):
        if is_file_of_answers(given):
            return corrected(read_teacher(given, classifier.classes, data), prior)
        given = load(given, classifier).to(classifier.device)
    if isinstance(given, CrossEncoder):
        return corrected(_scored(given, classifier, data), prior)
    if isinstance(given, Classifier):
        found = _predicted(given, classifier, data, inference)
        return found if given.adapted and prior is None else corrected(found, prior)
    return corrected(Teacher.from_rows(given, data, classifier.classes), prior)


def load(name: str | Path, student: Classifier, trust_model: bool = False) -> Classifier | CrossEncoder:
    """A run; or a model, which is asked about the student's classes as the student is."""
    if is_saved(name):
        return Classifier.from_pretrained(name, trust_model=trust_model)
    scorer = load_cross_encoder(name, trust_model=trust_model)
    if scorer is not None:
        return scorer
    classes = ClassSet(student.classes, student.descriptions).as_given()
    return Classifier.from_pretrained(name, classes, _templates(student), trust_model=trust_model)


def _templates(student: Classifier) -> tuple[str, ...] | None:
    """Of prompts; those of a language model have a gap, and are for such models alone."""
    return None if student.backbone.kind in ("cloze", "causal", "vector") else student.templates


def _predicted(teacher: Classifier, student: Classifier, data: Unlabelled, inference: InferenceConfig) -> Teacher:
    if teacher.backbone.modality != data.modality:
        raise InputError(f"the teacher reads {teacher.backbone.modality}s, the inputs are {data.modality}s")
    there = [same_name(name) for name in teacher.classes]
    for name in student.classes:
        if same_name(name) not in there:
            raise InputError(f"the teacher knows no class {name!r}{nearest(name, teacher.classes)}")
    found = teacher.infer(data, inference)
    columns = [there.index(same_name(name)) for name in student.classes]
    rows = found.log_probabilities[:, columns].log_softmax(1).exp()
    return _placed(rows, found.indices, data, teacher.model or "the teacher")


def _scored(teacher: CrossEncoder, student: Classifier, data: Unlabelled) -> Teacher:
    if data.modality != "text":
        raise InputError(f"{teacher.name!r} reads texts, the inputs are {data.modality}s")
    texts: dict[int, str] = {}
    for place in range(len(data)):
        try:
            sample = data.read(place)
        except Unreadable:
            continue
        if not isinstance(sample, str):
            raise InputError(f"{teacher.name!r} reads one text beside the class, the inputs are pairs")
        texts[place] = sample
    own = class_texts(ClassSet(student.classes, student.descriptions))
    prompts = [[prompt for text in each for prompt in fill(_templates(student) or ("{}",), text)] for each in own]
    rows = teacher.log_probabilities(list(texts.values()), prompts).exp()
    return _placed(rows, list(texts), data, teacher.name)


def _placed(rows: Tensor, places: list[int], data: Unlabelled, source: str) -> Teacher:
    probabilities = torch.zeros(len(data), rows.shape[1])
    probabilities[places] = rows.float().cpu()
    return Teacher(probabilities, source)


def corrected(teacher: Teacher, prior: Tensor | None) -> Teacher:
    """Without what the teacher says of every input alike, as far as its classes may be evened.

    Known shares are trusted wholly. Two classes keep the teacher's shares where nobody knows better: a bias and a skew
    look the same.
    """
    rows, k = teacher.answered, teacher.probabilities.shape[1]
    if prior is None and k == 2:
        return teacher
    logs = teacher.probabilities[rows].clamp_min(1e-6).log()
    trust = 1.0 if prior is not None else trust_in_equal_shares(teacher.probabilities[rows].mean(0))
    probabilities = torch.zeros_like(teacher.probabilities)
    probabilities[rows] = (logs + relaxed_offsets(logs, prior, trust)).softmax(1)
    return teacher._replace(probabilities=probabilities)
