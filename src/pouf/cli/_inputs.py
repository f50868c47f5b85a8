"""What the options describe: data, a classifier for them, and the inputs of a run."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pouf.cli._options import (
    DataOptions,
    InferenceOptions,
    ModelOptions,
    SpeedOptions,
    TrainingOptions,
    settings_of,
)
from pouf.errors import InputError, one_of
from pouf.recipe import PRESETS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pouf.classifier import Classifier
    from pouf.cli._progress import Shown
    from pouf.data.base import Unlabelled
    from pouf.data.labelled import Labelled, Shots
    from pouf.options import KeepNames
    from pouf.runs.folder import Run
    from pouf.training.callbacks import Callback


T = TypeVar("T")


def load_run(run: Path, place: InferenceOptions, *uses: str) -> list[Classifier]:
    """States of a run, in the order asked for."""
    from pouf.classifier import Classifier
    from pouf.parallel.fsdp import shard_classifier, wait_for_shards
    from pouf.parallel.process_group import launched_sharding, started_processes

    def load(use: str) -> Classifier:
        classifier = Classifier.from_pretrained(run, use=use, trust_model=place.trust_model)  # type: ignore[arg-type]
        if not (launched_sharding() and started_processes() > 1):
            return classifier.to(place.place())
        wait_for_shards(classifier.backbone, place.place())
        shard_classifier(classifier)
        return classifier

    return [load(use) for use in uses]


class Task(NamedTuple):
    classifier: Classifier
    data: Unlabelled | None
    shots: Shots | None


def check_options(source: DataOptions, model: ModelOptions, training: TrainingOptions) -> None:
    """What can be said before anything is read."""
    from pouf.training.methods import METHODS

    if training.steps is not None and training.steps < 1:
        raise InputError(f"--steps must be above 0, not {training.steps}; to train nothing, use --method zero-shot")
    if one_of("method", model.method, METHODS).needs_shots and source.shots is None:
        raise InputError(f"--method {model.method} learns from labelled examples: give --shots")


def read_task(
    source: DataOptions, model: ModelOptions, place: InferenceOptions, shown: Shown, shard: bool = False
) -> Task:
    """The classifier as it is before training, and what it is to learn from.

    Args:
        shard: the weights will be sharded over several processes.
    """
    from pouf.classifier import Classifier
    from pouf.data.class_names import ClassSet, read_classes
    from pouf.data.labelled import read_shots
    from pouf.models.base import check_modality
    from pouf.models.cloze import make_cloze, read_words
    from pouf.models.load import DEFAULT_MODELS
    from pouf.models.prompts import read_templates
    from pouf.parallel.fsdp import wait_for_shards
    from pouf.parallel.process_group import started_processes

    source = _with_kind(source)
    shown.on_phase(f"reading {source.images or source.texts or source.features or source.shots or 'data'}")
    classes = read_classes(source.classes) if source.classes is not None else None
    templates = read_templates(model.template) if model.template else None
    words = read_words(model.words) if model.words is not None else None
    cloze = make_cloze(classes or ClassSet(()), templates, words, model.max_length)
    columns = columns_of(source.text_column, cloze.columns if cloze is not None else ("text",))
    if model.max_length is not None and cloze is None:
        raise InputError("--max-length is for a --template with [MASK]: other models have their own")
    if model.temperature is not None and not 0 < model.temperature < float("inf"):
        raise InputError(
            f"--temperature must be a number above 0, not {model.temperature:g}; leave it out for the model's own"
        )
    data = _read_data(source, columns)
    if (source.features is not None) != (source.prototypes is not None):
        raise InputError("--features and --prototypes belong together: give both, or a --model and data")
    if source.prototypes is not None:
        unused = {"--model": model.model, "--revision": model.revision, "--template": model.template, "--words": words}
        if given := [name for name, value in unused.items() if value]:
            raise InputError(f"--prototypes stand for a model and its prompts: leave out {', '.join(given)}")
        classifier = Classifier.from_vectors(source.prototypes, classes and classes.as_given())
    elif classes is None:
        raise InputError("no classes: give --classes, as cat,dog")
    else:
        pictures = source.images is not None or (data is None and source.shots is not None and source.shots.is_dir())
        kind = "cloze" if cloze is not None else "image" if pictures else "text"
        name = model.model or DEFAULT_MODELS[kind]
        if model.model is None:
            shown.say(f"no --model given: {name}")
        shown.on_phase(f"loading {name}")
        classifier = Classifier.from_pretrained(
            name, classes.as_given(), templates, words=words, max_length=model.max_length,
            revision=model.revision, trust_model=place.trust_model,
        )  # fmt: skip
    if data is not None:
        check_modality(classifier.backbone, data.modality)
    if shard and started_processes() > 1:
        wait_for_shards(classifier.backbone, place.place())
    else:
        classifier.to(place.place())
    shots = None
    if source.shots is not None:
        modality = classifier.backbone.modality
        shots = read_shots(source.shots, classifier.classes, modality, columns, source.label_column)
    task = Task(classifier, data, shots)
    shown.introduce(task)
    return task


def _with_kind(source: DataOptions) -> DataOptions:
    """DATA as what it is: images in a folder or an archive, vectors in arrays, texts in any other file."""
    from pouf.data.images import EXTENSIONS
    from pouf.data.remote import as_url

    if source.data is None:
        return source
    if source.images or source.texts or source.features:
        raise InputError("give DATA alone, or say what it is with --images, --texts or --features, and not both")
    file, suffix = str(source.data), source.data.suffix.lower()
    if source.prototypes is not None or suffix in (".npy", ".npz", ".safetensors"):
        return replace(source, data=None, features=file)
    folder = source.data.is_dir() or (as_url(source.data) is not None and not suffix)
    if folder or suffix in (".tar", *EXTENSIONS):
        return replace(source, data=None, images=source.data)
    return replace(source, data=None, texts=source.data)


def adapt_arguments(
    task: Task, model: ModelOptions, training: TrainingOptions, speed: SpeedOptions, place: InferenceOptions
) -> dict[str, Any]:
    """What the options say to `adapt` and `search` alike."""
    return {
        "method": model.method,
        "recipe": _recipe(training),
        "max_minutes": training.max_minutes,
        "settings": settings_of(training, speed, place, model),
        "shots": task.shots,
        "demonstrations": model.demonstrations,
        "prior": _proportions(model.prior),
        "refine": model.refine,
        "cache": place.features(),
    }


def names_to_keep(names: str | None, data: Path | None) -> KeepNames | None:
    from pouf.options import KeepNames

    if names is None and data is not None:
        raise InputError("inputs of other names, and no names: give the names that are to be kept as well")
    return KeepNames(names, data) if names is not None else None


def trackers(names: Sequence[str] | None, out_dir: Path, quiet: bool) -> list[Callback]:
    """Who is told of a run outside of it."""
    from pouf.integrations.trackers import Tracking

    if quiet:
        os.environ.setdefault("WANDB_SILENT", "true")
    return [Tracking(names, name=out_dir.resolve().name, folder=out_dir / "tensorboard")] if names else []


def _recipe(training: TrainingOptions) -> str | None:
    if training.preset is not None:
        one_of("preset", training.preset, PRESETS)
    given = {"--preset": training.preset, "--recipe": training.recipe, "--max-minutes": training.max_minutes}
    named = [option for option, value in given.items() if value is not None]
    if len(named) > 1:
        raise InputError(f"give one of {' and '.join(named)}, and not both: each chooses a recipe")
    return training.preset or training.recipe


def _read_data(source: DataOptions, columns: Sequence[str]) -> Unlabelled | None:
    from pouf.data.images import Images
    from pouf.data.texts import Texts
    from pouf.data.vectors import Vectors

    given = [each for each in (source.images, source.texts, source.features) if each is not None]
    if len(given) > 1:
        raise InputError("give one of --images DIR, --texts FILE and --features FILE, and not several")
    if not given and source.shots is None:
        raise InputError("nothing to learn from: give a folder of images, a file of texts or a file of vectors")
    ids = source.id_column.split(",") if source.id_column else []
    if source.features is not None:
        return Vectors.from_file(source.features, ids)
    if source.images is not None:
        return Images.from_folder(source.images)
    return Texts.from_file(source.texts, columns, ids) if source.texts is not None else None


def columns_of(given: str | None, usual: Sequence[str]) -> tuple[str, ...]:
    """The columns that make a sample: as many as the template or the model reads."""
    if given is None:
        return tuple(usual)
    columns = tuple(given.split(","))
    if len(columns) != len(usual):
        expected = "one column" if len(usual) == 1 else "two columns, as question,answer"
        raise InputError(f"--text-column {given!r} names {len(columns)} columns, expected {expected}")
    return columns


def read_inputs(
    classifier: Classifier, inputs: Path | None, text_column: str | None, run: Run, id_column: str | None = None
) -> Unlabelled:
    """Images, texts or vectors, as the classifier reads them; without any, those of the run, by the same ids."""
    from pouf.data.inputs import as_data

    given = Path(run.source()) if inputs is None else inputs
    ids = id_column.split(",") if id_column else run.id_columns() if inputs is None else ()
    return _by_columns(
        lambda columns: as_data(given, classifier.backbone.modality, columns, ids).data, classifier, text_column, run
    )


def read_labels(classifier: Classifier, inputs: Path, text_column: str | None, label_column: str, run: Run) -> Labelled:
    from pouf.data.labelled import read_labelled

    modality = classifier.backbone.modality
    return _by_columns(
        lambda columns: read_labelled(inputs, classifier.classes, modality, columns, label_column),
        classifier, text_column, run,
    )  # fmt: skip


def labelled_or_not(
    classifier: Classifier, inputs: Path | None, labelled: bool, text_column: str | None, label_column: str, run: Run
) -> tuple[Unlabelled, list[int] | None]:
    """Inputs, and their labels where they are said to have them."""
    if not labelled:
        return read_inputs(classifier, inputs, text_column, run), None
    if inputs is None:
        raise InputError("--labelled is about INPUT: name the folder or the file with labels")
    return read_labels(classifier, inputs, text_column, label_column, run)


def _by_columns(read: Callable[[Sequence[str]], T], classifier: Classifier, text_column: str | None, run: Run) -> T:
    """With the columns that were named, or those of the run's own data, or the usual ones."""
    known = run.columns()
    if text_column is None and known is not None and known != classifier.columns:
        try:
            return read(known)
        except InputError as error:
            with suppress(InputError):
                return read(classifier.columns)
            raise error
    return read(columns_of(text_column, classifier.columns))


def _proportions(text: str | None) -> str | list[float] | None:
    """`uniform`, `estimated` and `paper` as they are, `0.7,0.3` as numbers."""
    if text is None or not any(character.isdigit() for character in text):
        return text
    try:
        return [float(value) for value in text.split(",")]
    except ValueError:
        raise InputError(
            f"--prior {text!r}: expected 'uniform', 'estimated', 'paper', or one number for each class as 0.7,0.3"
        ) from None
