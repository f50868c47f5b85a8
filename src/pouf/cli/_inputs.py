"""What the options describe: data, a classifier for them, and the inputs of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pouf.cli._options import (
    DataOptions,
    InferenceOptions,
    ModelOptions,
    SpeedOptions,
    TrainingOptions,
    settings_of,
)
from pouf.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pouf.classifier import Classifier
    from pouf.data.base import Unlabelled
    from pouf.data.labelled import Labelled, Shots
    from pouf.runs.folder import Run


class Task(NamedTuple):
    classifier: Classifier
    data: Unlabelled | None
    shots: Shots | None


def read_task(source: DataOptions, model: ModelOptions, place: InferenceOptions) -> Task:
    """The classifier as it is before training, and what it is to learn from."""
    from pouf.classifier import Classifier
    from pouf.data.class_names import read_classes
    from pouf.data.labelled import read_shots
    from pouf.models.cloze import make_cloze, read_words
    from pouf.models.prompts import read_templates

    names = read_classes(source.classes) if source.classes is not None else None
    templates = read_templates(model.template) if model.template else None
    words = read_words(model.words) if model.words is not None else None
    cloze = make_cloze(names or (), templates, words, model.max_length)
    columns = columns_of(source.text_column, cloze.columns if cloze is not None else ("text",))
    if model.max_length is not None and cloze is None:
        raise InputError("--max-length is for a --template with [MASK]: other models have their own")
    if model.temperature is not None and not model.temperature > 0:
        raise InputError(f"--temperature must be above 0, not {model.temperature:g}; leave it out for the model's own")
    data = _read_data(source, columns)
    if (source.features is not None) != (source.prototypes is not None):
        raise InputError("--features and --prototypes belong together: give both, or a --model and data")
    if source.prototypes is not None:
        classifier = Classifier.from_vectors(source.prototypes, names)
    elif model.model is None:
        raise InputError("no model: give --model, as openai/clip-vit-base-patch16")
    elif names is None:
        raise InputError("no classes: give --classes, as cat,dog")
    else:
        classifier = Classifier.from_pretrained(
            model.model, names, templates, words=words, max_length=model.max_length, revision=model.revision
        )
    classifier.to(place.place())
    shots = None
    if source.shots is not None:
        modality = classifier.backbone.modality
        shots = read_shots(source.shots, classifier.classes, modality, columns, source.label_column)
    return Task(classifier, data, shots)


def adapt_arguments(
    task: Task, model: ModelOptions, training: TrainingOptions, speed: SpeedOptions, place: InferenceOptions
) -> dict[str, Any]:
    """What the options say to `adapt` and `search` alike."""
    return {
        "method": model.method,
        "recipe": training.recipe,
        "settings": settings_of(training, speed, place, model),
        "shots": task.shots,
        "demonstrations": model.demonstrations,
        "prior": _proportions(model.prior),
        "refine": model.refine,
        "cache": place.features(),
    }


def _read_data(source: DataOptions, columns: Sequence[str]) -> Unlabelled | None:
    from pouf.data.images import Images
    from pouf.data.texts import Texts
    from pouf.data.vectors import Vectors

    given = [each for each in (source.images, source.texts, source.features) if each is not None]
    if len(given) > 1:
        raise InputError("give one of --images DIR, --texts FILE and --features FILE, and not several")
    if not given and source.shots is None:
        raise InputError("nothing to learn from: give --images DIR, --texts FILE or --features FILE")
    if source.features is not None:
        return Vectors.from_file(source.features)
    if source.images is not None:
        return Images.from_folder(source.images)
    return Texts.from_file(source.texts, columns) if source.texts is not None else None


def columns_of(given: str | None, usual: Sequence[str]) -> tuple[str, ...]:
    """The columns that make a sample: as many as the template or the model reads."""
    if given is None:
        return tuple(usual)
    columns = tuple(given.split(","))
    if len(columns) != len(usual):
        expected = "one column" if len(usual) == 1 else "two columns, as question,answer"
        raise InputError(f"--text-column {given!r} names {len(columns)} columns, expected {expected}")
    return columns


def read_inputs(classifier: Classifier, inputs: Path | None, text_column: str | None, run: Run) -> Unlabelled:
    """Images, texts or vectors, as the classifier reads them; without any, those of the run."""
    from pouf.data.inputs import as_data

    if inputs is None:
        source, columns = run.source()
        inputs, text_column = Path(source), text_column or columns
    return as_data(inputs, classifier.backbone.modality, columns_of(text_column, classifier.columns)).data


def read_labels(classifier: Classifier, inputs: Path, text_column: str | None, label_column: str) -> Labelled:
    from pouf.data.labelled import read_labelled

    columns = columns_of(text_column, classifier.columns)
    return read_labelled(inputs, classifier.classes, classifier.backbone.modality, columns, label_column)


def _proportions(text: str | None) -> str | list[float] | None:
    """`estimated` and `paper` as they are, `0.7,0.3` as numbers."""
    if text is None or not any(character.isdigit() for character in text):
        return text
    try:
        return [float(value) for value in text.split(",")]
    except ValueError:
        raise InputError(
            f"--prior {text!r}: expected 'estimated', 'paper', or one number for each class as 0.7,0.3"
        ) from None
