"""Soft labels that are made before training: by files, arrays, classifiers, runs and models, or of sure predictions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Subset, Unlabelled
from pouf.data.class_names import ClassSet, normalise_name
from pouf.data.labels import Shots, Teacher, indices_by_id, is_file_of_answers, read_teacher
from pouf.data.vectors import FEATURE_KEYS, ID_KEYS, Vectors, read_arrays
from pouf.errors import InputError, Unreadable, did_you_mean
from pouf.inference.encode import FeatureSet, FeatureStore, InferenceConfig
from pouf.models.base import Scores
from pouf.models.load import load_cross_encoder, load_feature_encoder
from pouf.models.sequence_classifier import CrossEncoder
from pouf.models.templates import class_texts, fill
from pouf.parallel.process_group import processes
from pouf.postprocess.clusters import second_space, trust_in_equal_shares
from pouf.postprocess.shares import relaxed_offsets
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
        classifier: the student, with the same classes.
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


def second_opinion(
    given: Any,
    classifier: Classifier,
    data: Unlabelled | None,
    inference: InferenceConfig,
    prior: Tensor | None = None,
    teacher: Teacher | None = None,
) -> Teacher:
    """Zero-shot's predictions refined in the space of other features of the data.

    A teacher's answers stay as they are, and take part in it: inputs without one learn from those that are near.

    Args:
        given: features (n, d), a file of them, or the name of an encoder.
    """
    if data is None or data.streamed:
        raise InputError("second features are of unlabelled data that can be read again: give some, and no stream")
    first, second = classifier.encode(data.with_own_skipped(), inference), _second_features(given, classifier, data)
    both = sorted(set(first.indices) & set(second.indices))
    scores = classifier.scores(first.only(set(both)))
    logits, temperature = classifier.log_probabilities(first.only(set(both))), scores.temperature.cpu()
    if teacher is not None:
        answers = teacher.probabilities[both]
        logits = torch.where(answers.sum(1, keepdim=True) > 0, answers.clamp_min(1e-4).log(), logits)
        temperature = torch.zeros(())  # nothing to sharpen
    rows, weight = second_space(Scores(logits, logits, temperature), second.only(set(both)).features, prior)
    if teacher is not None:
        rows = torch.where(answers.sum(1, keepdim=True) > 0, answers, rows)
    logger.info("the second space has a weight of %.2f in the predictions that are learned from", weight)
    return _placed(rows, both, data, f"predictions refined in a second space, with a weight of {weight:.2f}")


def _second_features(given: Any, classifier: Classifier, data: Unlabelled) -> FeatureSet:
    if isinstance(given, (str, Path)) and not is_file_of_answers(given):
        backbone = load_feature_encoder(given).to(classifier.device)
        if backbone.modality != data.modality:
            raise InputError(f"second_features: {given} reads {backbone.modality}s, the inputs are {data.modality}s")
        return FeatureStore(backbone, InferenceConfig()).features(data.with_own_skipped())
    source, ids = "second_features", None
    if isinstance(given, (str, Path)):
        arrays = read_arrays(given)
        source, given, found = str(given), arrays.vectors(FEATURE_KEYS), arrays.first(ID_KEYS)
        ids = None if found is None else [str(name).strip() for name in found.tolist()]
    vectors = Vectors(given, source)
    indices = indices_by_id(ids, len(vectors), data, source)
    if len(indices) < len(data):
        missing = sorted(set(range(len(data))) - set(indices))[0]
        raise InputError(f"{source}: {len(indices)} rows for {len(data)} inputs: {data.ids[missing]!r} has none")
    order = torch.tensor(indices).argsort()
    known = [i for i in range(len(data)) if int(order[i]) not in vectors.skipped]
    return FeatureSet(known, vectors.tensor()[order[known]].float())


def load(name: str | Path, student: Classifier, trust_model: bool = False) -> Classifier | CrossEncoder:
    """A run, or a model with the student's classes and templates."""
    if is_saved(name):
        return Classifier.from_pretrained(name, trust_model=trust_model)
    scorer = load_cross_encoder(name, trust_model=trust_model)
    if scorer is not None:
        return scorer
    classes = ClassSet(student.classes, student.descriptions).as_given()
    return Classifier.from_pretrained(name, classes, templates_of(student), trust_model=trust_model)


def templates_of(student: Classifier) -> tuple[str, ...] | None:
    """Of prompts; those of a language model have a gap, and are for such models alone."""
    return None if student.backbone.kind in ("cloze", "causal", "vector") else student.templates


def _predicted(teacher: Classifier, student: Classifier, data: Unlabelled, inference: InferenceConfig) -> Teacher:
    if teacher.backbone.modality != data.modality:
        raise InputError(f"the teacher reads {teacher.backbone.modality}s, the inputs are {data.modality}s")
    there = [normalise_name(name) for name in teacher.classes]
    for name in student.classes:
        if normalise_name(name) not in there:
            raise InputError(f"the teacher knows no class {name!r}{did_you_mean(name, teacher.classes)}")
    found = teacher.infer(data, inference)
    columns = [there.index(normalise_name(name)) for name in student.classes]
    rows = found.log_probabilities[:, columns].log_softmax(1).exp()
    return _placed(rows, found.indices, data, teacher.model or "the teacher")


def _scored(teacher: CrossEncoder, student: Classifier, data: Unlabelled) -> Teacher:
    if data.modality != "text":
        raise InputError(f"{teacher.name!r} reads texts, the inputs are {data.modality}s")
    texts: dict[int, str] = {}
    for i in range(len(data)):
        try:
            sample = data.read(i)
        except Unreadable:
            continue
        if not isinstance(sample, str):
            raise InputError(f"{teacher.name!r} reads one text beside the class, the inputs are pairs")
        texts[i] = sample
    own = class_texts(ClassSet(student.classes, student.descriptions))
    prompts = [[prompt for text in each for prompt in fill(templates_of(student) or ("{}",), text)] for each in own]
    rows = teacher.log_probabilities(list(texts.values()), prompts).exp()
    return _placed(rows, list(texts), data, teacher.name)


def _placed(rows: Tensor, indices: list[int], data: Unlabelled, source: str) -> Teacher:
    probabilities = torch.zeros(len(data), rows.shape[1])
    probabilities[indices] = rows.float().cpu()
    return Teacher(probabilities, source)


def corrected(teacher: Teacher, prior: Tensor | None) -> Teacher:
    """Without what the teacher says of every input alike, as far as its classes may be evened.

    Known shares are trusted wholly. Two classes keep the teacher's shares if no others are known: a bias and a skew
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


def pseudo_labelled(
    classifier: Classifier, data: Unlabelled | None, shots: Shots | None, count: int, inference: InferenceConfig
) -> Shots:
    """UPL: each input goes to its most likely class; the `count` surest of each class are taken for labelled."""
    if data is None or shots is not None:
        raise InputError("pseudo-labels are made from unlabelled data alone: give data, and no labelled shots")
    found = list(classifier.score_blocks(classifier.store(inference).share(data)))
    parts = processes().gather_objects([(block.indices, *block.log_probabilities.max(1)) for block in found])
    indices, labels = surest([each for part in parts for each in part], count)
    return Shots(Subset(data, indices), F.one_hot(torch.tensor(labels), len(classifier.classes)).float())


def surest(blocks: Sequence[tuple[list[int], Tensor, Tensor]], count: int) -> tuple[list[int], list[int]]:
    """Indices and labels of so many predictions of each class, the surest first.

    Args:
        blocks: indices, log-probabilities (n,) of the predicted classes, and these (n,).
    """
    found: dict[int, list[tuple[float, int]]] = {}
    for indices, sureness, labels in blocks:
        for index, value, k in zip(indices, sureness.tolist(), labels.tolist(), strict=True):
            found.setdefault(k, []).append((-value, index))
    pairs = [(index, k) for k in sorted(found) for _, index in sorted(found[k])[:count]]
    return [index for index, _ in pairs], [k for _, k in pairs]
