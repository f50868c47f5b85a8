"""`pouf adapt`, `pouf search` and `pouf demo`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer

from pouf.cli import _console as console
from pouf.cli._options import (
    OutputOption,
    OutputOptions,
    RunOptions,
    TrainingOption,
    grouped,
    proportions,
    split_numbers,
)
from pouf.cli._progress import ProgressReporter, progress
from pouf.errors import InputError, one_of
from pouf.recipe import PRESETS

if TYPE_CHECKING:
    from pouf.classifier import Classifier
    from pouf.data.base import Modality, Unlabelled
    from pouf.data.class_names import ClassSet
    from pouf.data.labels import Shots
    from pouf.training.search import Search

COMMON = (
    "data", "classes", "text_column", "shots", "answers", "model", "template", "prior", "preset", "max_minutes", "out",
    "resume", "overwrite",
)  # fmt: skip


class AdaptInputs(NamedTuple):
    """The zero-shot classifier and the training data of `adapt` and `search`."""

    classifier: Classifier
    data: Unlabelled | None
    shots: Shots | None
    teacher: Any = None


@grouped(*COMMON)
def adapt(
    options: RunOptions,
    plan: Annotated[bool, OutputOption("--plan", help="Show what would be done, and train nothing.")] = False,
) -> None:
    """Adapt a model to unlabelled images or texts, given the names of the classes.

    \b
    pouf adapt photos/ --classes "cat,dog,sea lion"
    pouf adapt reviews.csv --text-column review --classes classes.toml
    """

    def call(inputs: AdaptInputs, reporter: ProgressReporter, arguments: dict[str, Any]) -> Any:
        from pouf.options import AdaptOptions
        from pouf.training.plan import make_plan

        if not plan:
            return inputs.classifier.adapt(inputs.data, **arguments)
        return make_plan(inputs.classifier, inputs.data, AdaptOptions(**arguments), cache=arguments["cache"])

    def show(result: Any, inputs: AdaptInputs, output: OutputOptions) -> None:
        if plan:
            console.show_result(result.to_json(), str(result), output)
        else:
            console.show_adaptation(result, inputs, output)

    _run(options, call, show, writes=not plan)


@grouped(*COMMON, "lrs", "lambdas")
def search(
    options: RunOptions,
    lrs: Annotated[
        str | None, TrainingOption(help="Learning rates to try.", show_default="⅓×, 1× and 3× the recipe's rate")
    ] = None,
    lambdas: Annotated[str | None, TrainingOption(help="Weights of the mutual information to try.")] = None,
) -> None:
    """Try a few learning rates (and lambdas), and choose among all their steps without labels."""
    named = {"optimisation.lr": ("--lrs", lrs), "objective.information": ("--lambdas", lambdas)}
    values = {name: split_numbers(*given, "numbers as 1e-3,3e-3") for name, given in named.items()}
    grid = {name: tried for name, tried in values.items() if tried}

    def call(inputs: AdaptInputs, reporter: ProgressReporter, arguments: dict[str, Any]) -> Search:
        def on_trial(settings: dict[str, Any]) -> None:
            reporter.say(console.format_settings(settings))

        return inputs.classifier.search(inputs.data, grid or None, on_trial=on_trial, **arguments)

    _run(options, call, console.show_search)


def _run(
    options: RunOptions,
    call: Callable[[AdaptInputs, ProgressReporter, dict[str, Any]], Any],
    show: Callable[[Any, AdaptInputs, OutputOptions], None],
    writes: bool = True,
) -> None:
    """Read the inputs, call the library, print the result."""
    from pouf.integrations.trackers import Tracking
    from pouf.options import KeepNames, Output
    from pouf.runs.run_folder import check_new
    from pouf.training.methods import METHODS

    if options.method == "list":
        for known, entry in METHODS.items():
            console.print_out(f"{known:16} {entry.about}{' (needs --shots)' if entry.needs_shots else ''}")
        return
    _check_options(options)
    if writes and console.is_main():
        check_new(options.out, options.resume, options.overwrite)
    callbacks: list[Any] = []
    if options.quiet:
        os.environ.setdefault("WANDB_SILENT", "true")
    if options.tracker:
        callbacks = [Tracking(options.tracker, name=options.out.resolve().name, folder=options.out / "tensorboard")]
    with progress(options.hidden) as reporter:
        inputs = _read_inputs(options, reporter)
        arguments = {
            "method": options.method, "recipe": options.preset or options.recipe, "max_minutes": options.max_minutes,
            "settings": options.changes(), "shots": inputs.shots, "teacher": inputs.teacher,
            "second_features": options.second_features, "demonstrations": options.demonstrations,
            "prior": proportions(options.prior), "refine": options.refine, "cache": options.features_cache(),
            "output": Output(options.out, options.resume, options.overwrite, options.report),
            "keep": KeepNames(options.keep_classes, options.keep_data) if options.keep_classes is not None else None,
            "callbacks": [reporter, *callbacks], "command": sys.argv,
        }  # fmt: skip
        result = call(inputs, reporter, arguments)
    if console.is_main():
        show(result, inputs, options)


def _check_options(options: RunOptions) -> None:
    """Raise an error for contradicting options, before any file is read."""
    from pouf.training.methods import METHODS

    def exclusive(hint: str, **values: Any) -> None:
        named = ["--" + name.replace("_", "-") for name, value in values.items() if value is not None]
        if len(named) > 1:
            raise InputError(f"give only one of {' and '.join(named)}, not both: {hint}")

    exclusive("add the answers to the shots", shots=options.shots, answers=options.answers)
    exclusive("each chooses a recipe", preset=options.preset, recipe=options.recipe, max_minutes=options.max_minutes)
    exclusive("one kind of data", images=options.images, texts=options.texts, features=options.features)
    learns = options.shots is not None or options.answers is not None
    if one_of("method", options.method, METHODS).needs_shots and not learns:
        raise InputError(f"--method {options.method} learns from labelled examples: give --shots")
    if options.preset is not None:
        one_of("preset", options.preset, PRESETS)
    if options.keep_classes is None and options.keep_data is not None:
        raise InputError("--keep-data without --keep-classes: give the names of its classes as well")


def _read_inputs(options: RunOptions, reporter: ProgressReporter) -> AdaptInputs:
    """Read the zero-shot classifier and the training data."""
    from pouf.data.class_names import ClassSet, read_classes
    from pouf.data.inputs import split_columns
    from pouf.data.labels import is_file_of_answers, read_shots
    from pouf.models.base import check_modality
    from pouf.models.templates import make_cloze, read_templates, read_words
    from pouf.parallel.fsdp import set_shard_device
    from pouf.parallel.process_group import launched_sharding, started_processes
    from pouf.training.teachers import load
    from pouf.validation.review import answered_shots

    options = _assign_data(options)
    reporter.on_phase(f"reading {options.images or options.texts or options.features or options.shots or 'data'}")
    classes = read_classes(options.classes) if options.classes is not None else None
    templates = read_templates(options.template) if options.template else None
    words = read_words(options.words) if options.words is not None else None
    cloze = make_cloze(classes or ClassSet(()), templates, words, options.max_length)
    if options.max_length is not None and cloze is None:
        raise InputError("--max-length is for a --template with [MASK]: other models have their own")
    columns = split_columns(options.text_column, cloze.columns if cloze is not None else ("text",))
    data = _read_data(options, columns)
    only_shots = data is None and options.shots is not None and options.shots.is_dir()
    kind = "cloze" if cloze is not None else "image" if options.images is not None or only_shots else "text"
    classifier = _classifier(options, kind, classes, templates, words, reporter)
    if data is not None:
        check_modality(classifier.backbone, data.modality)
    sharded = options.changes().get("compute.shard", False) or launched_sharding()
    if sharded and started_processes() > 1:
        set_shard_device(classifier.backbone, options.resolve_device())
    else:
        classifier.to(options.resolve_device())
    shots, teacher = None, cast(Any, options.teacher)
    if options.answers is not None and data is not None:
        shots = answered_shots(data, options.answers, classifier.classes)
    elif options.shots is not None:
        modality = classifier.backbone.modality
        shots = read_shots(options.shots, classifier.classes, modality, columns, options.label_column)
    if teacher is not None and not is_file_of_answers(teacher):
        reporter.on_phase(f"loading the teacher {teacher}")
        teacher = load(teacher, classifier, options.trust_model).to(options.resolve_device())
    inputs = AdaptInputs(classifier, data, shots, teacher)
    reporter.introduce(inputs)
    return inputs


def _classifier(
    options: RunOptions,
    kind: str,
    classes: ClassSet | None,
    templates: Sequence[str] | None,
    words: Sequence[Any] | None,
    reporter: ProgressReporter,
) -> Classifier:
    from pouf.classifier import Classifier
    from pouf.models.load import DEFAULT_MODELS

    if (options.features is not None) != (options.prototypes is not None):
        raise InputError("--features and --prototypes belong together: give both, or a --model and data")
    if options.prototypes is not None:
        if given := [name for name in ("model", "revision", "template", "words") if getattr(options, name)]:
            raise InputError(f"--prototypes stand for a model and its prompts: leave out --{', --'.join(given)}")
        return Classifier.from_vectors(options.prototypes, classes and classes.as_given())
    if classes is None:
        raise InputError("no classes: give --classes, as cat,dog")
    name = options.model or DEFAULT_MODELS[kind]
    if options.model is None:
        reporter.say(f"no --model given: {name}")
    reporter.on_phase(f"loading {name}")
    return Classifier.from_pretrained(
        name, classes.as_given(), templates, words=words, max_length=options.max_length, windows=options.windows,
        revision=options.revision, trust_model=options.trust_model,
    )  # fmt: skip


def _assign_data(options: RunOptions) -> RunOptions:
    """The options with DATA assigned to its kind: images in a folder or an archive, vectors in arrays, else texts."""
    from pouf.data.contents import as_url
    from pouf.data.images import EXTENSIONS

    if options.data is None:
        return options
    if options.images or options.texts or options.features:
        raise InputError("give either DATA or one of --images, --texts and --features")
    file, suffix = str(options.data), options.data.suffix.lower()
    if options.prototypes is not None or suffix in (".npy", ".npz", ".safetensors"):
        return replace(options, data=None, features=file)
    folder = options.data.is_dir() or (as_url(options.data) is not None and not suffix)
    if folder or suffix in (".tar", *EXTENSIONS):
        return replace(options, data=None, images=options.data)
    return replace(options, data=None, texts=options.data)


def _read_data(options: RunOptions, columns: Sequence[str]) -> Unlabelled | None:
    from pouf.data.inputs import normalise

    sources: dict[Modality, Path | str | None]
    sources = {"image": options.images, "text": options.texts, "vector": options.features}
    if options.shots is None and not any(source is not None for source in sources.values()):
        raise InputError("nothing to learn from: give a folder of images, a file of texts or a file of vectors")
    ids = options.id_column.split(",") if options.id_column else []
    given = ((modality, source) for modality, source in sources.items() if source is not None)
    return next((normalise(source, modality, columns, ids).data for modality, source in given), None)


@grouped()
def demo(
    output: OutputOptions,
    tune: Annotated[str, typer.Option(help="What to train: full or prompt.")] = "full",
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    out: Annotated[Path, OutputOption(help="Folder of the run.")] = Path("pouf-demo"),
) -> None:
    """Teach a model that knows printed characters to read handwriting, offline, in under a minute."""
    from pouf.demo import demo as run_demo
    from pouf.recipe import Recipe
    from pouf.runs.run_folder import check_new

    check_new(out)
    recipe = Recipe.load(one_of("--tune", tune, {"full": "demo", "prompt": "demo-prompt"})).with_settings(seed=seed)
    with progress(output.hidden) as reporter:
        result = run_demo(out, recipe, command=sys.argv, callbacks=[reporter])
    verdict, report = result.adaptation.verdict, result.adaptation.files["report"]
    console.show_verdict(verdict, output.hidden)
    if output.as_json:
        facts = {"seconds": round(result.seconds, 1), "run": str(out), "report": str(report)}
        console.print_json(result.evaluation.to_json() | facts | {"verdict": verdict.message})
    elif not output.quiet:
        title = f"{result.evaluation.n:,} handwritten digits, {tune} tuning, seed {seed}"
        console.show_evaluation(result.evaluation, title)
        console.print_out(f"{result.seconds:.0f} s. The run is in {out}, the images in {result.images}. Try:")
        console.print_out(f"  the report in a browser: {report}")
        console.print_out(f"  pouf evaluate {out} {result.images}\n  pouf predict {out} your-own-digits/")
