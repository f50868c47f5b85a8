"""`pouf evaluate`, `report`, `review`, `figures` and `names`."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pouf.cli import _console as console
from pouf.cli._options import (
    BatchSize,
    DataOption,
    IdColumn,
    InferenceOptions,
    LabelColumn,
    ModelOption,
    OwnInputs,
    RunFolder,
    TextColumn,
    grouped,
)
from pouf.cli._progress import encoding
from pouf.errors import InputError, plural

if TYPE_CHECKING:
    from pouf.classifier import Classifier
    from pouf.data.base import Modality


LabelledOption = Annotated[bool, typer.Option("--labelled", help="INPUT has labels, as for pouf evaluate.")]


@grouped("run", "labelled", "text_column", "label_column", "confusion", "as_json")
def evaluate(
    run: RunFolder,
    labelled: Annotated[
        Path, typer.Argument(metavar="LABELLED", help="Folder with a folder of images per class, or a labelled file.")
    ],
    options: InferenceOptions,
    batch_size: BatchSize = 64,
    text_column: TextColumn = None,
    label_column: LabelColumn = "label",
    confusion: Annotated[bool, typer.Option("--confusion", help="Show which classes are mistaken for which.")] = False,
) -> None:
    """Compare zero-shot, label-free prior correction, the last step and what the run advises, on labelled data.

    Recall per class for all four, precision and F1 for what the run advises; accuracies with 95 % confidence
    intervals, and macro-F1.
    """
    from pouf.parallel.process_group import together
    from pouf.runs.folder import Run, read_labels
    from pouf.validation.evaluation import compare

    zero_shot, last, advised = options.load(run, "zero-shot", "last", "advised")
    data = read_labels(Run(run), advised, labelled, text_column, label_column)
    with together(advised.device) as group, encoding(options, batch_size) as inference:
        result = compare(zero_shot, last, advised, data, inference)
    if group.is_main and options.as_json:
        console.print_json(result.to_json() | ({"confusion": result.confusion} if confusion else {}))
    elif group.is_main and not options.quiet:
        console.show_unreadable(result.skipped, result.n)
        console.show_evaluation(result, f"{result.n:,} labelled {advised.backbone.modality}s in {labelled}")
        if confusion:
            console.show_confusion(result)


@grouped("run", "inputs", "labelled", "out", "text_column")
def report(
    run: RunFolder,
    options: InferenceOptions,
    inputs: OwnInputs = None,
    labelled: LabelledOption = False,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="RUN/report.html")] = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = "label",
) -> None:
    """One HTML file about a run: whether to trust it, and why."""
    from pouf.files import check_writable
    from pouf.reporting.html import write_report
    from pouf.runs.folder import Run, read_labelled_or_not

    check_writable(out or run / "report.html")
    (classifier,) = options.load(run, "advised")
    data, labels = read_labelled_or_not(Run(run), classifier, inputs, labelled, text_column, label_column)
    with encoding(options) as inference:
        file = write_report(
            run, data, labels, out, inference, device=options.resolve_device(), trust_model=options.trust_model
        )
    console.show_result({"report": str(file)}, f"The report is in {file}", options)


@grouped("run", "inputs", "n", "answers", "text_column")
def review(
    run: RunFolder,
    options: InferenceOptions,
    inputs: OwnInputs = None,
    n: Annotated[int, typer.Option("--n", help="How many labels to ask for.")] = 50,
    answers: Annotated[Path | None, typer.Option(help="The labels: a table with the columns id and label.")] = None,
    unsure: Annotated[
        int, typer.Option(help="More questions, about what the model is least sure of: to learn from alone.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    text_column: TextColumn = None,
    id_column: IdColumn = None,
) -> None:
    """Choose the inputs most worth labelling; with --answers, evaluate the run by the labels."""
    from pouf.reporting.html import write_review
    from pouf.runs.folder import Run, read_inputs
    from pouf.validation.review import read_answers, sample_questions

    if answers is not None:
        _score_answers(run, answers, options)
        return
    folder = Run(run)
    zero_shot, adapted = options.load(run, "zero-shot", "adapted")
    data = read_inputs(folder, adapted, inputs, text_column, id_column)
    known = set[str]()
    for file in _answers_of(folder.manifest.get("command") or []):
        if file.is_file():
            known |= read_answers(file, adapted.classes, data.id_columns).keys()
        else:
            console.print_err(f"{file} is not there any more: its answers may be asked for again")
    with encoding(options) as inference:
        questions, samples = sample_questions(
            zero_shot, adapted, data, n, unsure=unsure, answered=known, seed=seed, inference=inference
        )
    table, page = write_review(run, questions, samples, adapted.classes)
    console.show_result({"files": [str(table), str(page)]}, _how_to_answer(run, table, page, len(questions.questions)),
                        options)  # fmt: skip


def _how_to_answer(run: Path, table: Path, page: Path, n: int) -> str:
    from pouf.validation.review import NO_CLASS

    command = f"  pouf review {shlex.quote(str(run))} --answers"
    return (
        f"Answer {plural(n, 'question')} in a browser: {page}\n"
        f"Save the answers there; then, with the path of the file that your browser saved:\n{command} answers.csv\n"
        f"Or fill in the labels of {table} ({NO_CLASS!r} is an answer); then:\n{command} {shlex.quote(str(table))}"
    )


def _score_answers(run: Path, answers: Path, options: InferenceOptions) -> None:
    from pouf.errors import InputError
    from pouf.reporting.html import PAGE, read_review, record
    from pouf.runs.folder import Run
    from pouf.validation.review import NO_CLASS, read_answers, score_answers

    folder = Run(run)
    classes = folder.card.classes
    questions, labels = read_review(run), read_answers(answers, classes, folder.id_columns())
    if not labels:
        raise InputError(
            f"no label is filled in yet in {str(answers)!r}: put the name of a class or {NO_CLASS!r} into the column "
            f"label, or answer in {str(run / PAGE)!r} and give the file that it saves"
        )
    result = score_answers(questions, labels, classes)
    record(run, result)
    lines = [
        f"{name:10} {100 * value:.1f} %, 95 % confidence interval {100 * low:.1f} to {100 * high:.1f}"
        for name, (value, low, high) in (("zero-shot", result.zero_shot), ("adapted", result.adapted))
    ]
    none = f", {result.none_of_these} of them {NO_CLASS!r}" if result.none_of_these else ""
    lines.append(f"From {plural(result.answered, 'answer')}{none}. {result.advice}")
    lines.append(f"The verdict and the report in {run} now say so.")
    advised = "zero-shot" if folder.verdict.advised == "zero-shot" else "adapted"
    if result.better not in (None, advised):
        lines.append(f"The run advises otherwise: pouf predict {run} INPUT --use {result.better}")
    if command := _with_answers(folder.manifest.get("command") or [], run, answers):
        lines.append(f"To learn from the answers as well:\n  {command}")
    console.show_result(result.to_json(), "\n".join(lines), options)


def _answers_of(command: list[str]) -> list[Path]:
    """The files that a command learned answers from."""
    named = [Path(file) for option, file in pairwise(command) if option == "--answers"]
    return named + [Path(word.removeprefix("--answers=")) for word in command if word.startswith("--answers=")]


def _with_answers(command: list[str], run: Path, answers: Path) -> str:
    """The command of the run, with these answers too and another output folder; empty for a run from Python."""
    if command[1:2] != ["adapt"]:
        return ""
    words = list(command[1:])
    while "--out" in words:
        del words[words.index("--out") : words.index("--out") + 2]
    dropped = ("--resume", "--overwrite", "--quiet", "-q", "--json")
    words = [word for word in words if word not in dropped and not word.startswith("--out=")]
    own = [] if answers in _answers_of(command) else ["--answers", str(answers)]
    return shlex.join(["pouf", *words, *own, "--out", f"{run}-with-answers"])


@grouped("run", "inputs", "labelled", "classes", "only", "out")
def figures(
    run: RunFolder,
    options: InferenceOptions,
    inputs: OwnInputs = None,
    labelled: LabelledOption = False,
    centred: Annotated[bool, typer.Option("--centred", help="t-SNE of inputs and prototypes centred apart.")] = False,
    classes: Annotated[
        str | None,
        typer.Option(help="Classes of the nearest neighbours, as mug,pen.", show_default="those that changed most"),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Some of the figures: tsne,neighbours,similarity.", show_default="all")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the pictures.")] = Path("figures"),
    text_column: TextColumn = None,
    label_column: LabelColumn = "label",
) -> None:
    """The paper's pictures of a run: t-SNE, nearest neighbours of prototypes, similarities; SVG."""
    from pouf.data.class_names import find_class
    from pouf.errors import one_of
    from pouf.files import check_writable
    from pouf.reporting.figures import FIGURES, compare_features, paper_figures
    from pouf.reporting.pages import write_svg
    from pouf.runs.folder import Run, read_labelled_or_not

    check_writable(out / "figure.svg")
    folder = Run(run)
    wanted = [
        one_of("figure", name.strip(), {n: n for n in FIGURES}) for name in (only or ",".join(FIGURES)).split(",")
    ]
    zero_shot, adapted = options.load(run, "zero-shot", "adapted")
    chosen = [find_class(name, adapted.classes) for name in classes.split(",")] if classes else []
    data, labels = read_labelled_or_not(folder, adapted, inputs, labelled, text_column, label_column)
    with encoding(options) as inference:
        comparison = compare_features(lambda: zero_shot, lambda: adapted, data, labels, inference)
    drawn = paper_figures(comparison, centred, chosen, wanted)
    files = [str(write_svg(figure, out / f"{name}.svg")) for name, figure in drawn.items()]
    console.show_result({"files": files}, "\n".join(files), options)


MIN_AGREEMENT = 0.75  # with two classes 0.25 lower, as in the verdict


@grouped()
def names(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Folder of images, or file of texts.")],
    options: InferenceOptions,
    classes: Annotated[
        list[str], DataOption(help="Names or descriptions, or a file of them; repeat it for each wording.")
    ],
    template: Annotated[
        list[str] | None, ModelOption(help="Sentence with {} for the name; repeat it to compare several.")
    ] = None,
    model: Annotated[str | None, ModelOption(help="Name or folder of the model.")] = None,
    text_column: TextColumn = None,
) -> None:
    """Compare wordings of the classes on inputs without labels: which of them does the model understand?"""
    from pouf.classifier import Classifier
    from pouf.data.class_names import read_classes
    from pouf.data.inputs import normalise, split_columns
    from pouf.inference.cache import InMemoryFeatureCache
    from pouf.models.load import DEFAULT_MODELS
    from pouf.validation.names import judge_wording

    if any("[MASK]" in each for each in template or []):
        raise InputError("pouf names compares names in sentences: give templates with {}, and none with [MASK]")
    kind: Modality = "image" if data.is_dir() or data.suffix == ".tar" else "text"
    inputs = normalise(data, kind, split_columns(text_column, ("text",))).data
    classifier: Classifier | None = None
    rows: list[dict[str, Any]] = []
    with encoding(options) as inference:
        inference = replace(inference, cache=inference.cache or InMemoryFeatureCache())
        for given, sentence in product(classes, (*(template or ()),) or (None,)):
            read = read_classes(given)
            wording = read.as_given(), None if sentence is None else [sentence]
            if classifier is None:
                name = model or DEFAULT_MODELS[kind]
                classifier = Classifier.from_pretrained(name, *wording, trust_model=options.trust_model)
                classifier.to(options.resolve_device())
            found = judge_wording(Classifier(classifier.backbone, *wording), inputs, inference)
            rows.append({"classes": given, "count": len(read.names), "template": sentence, **found._asdict()})
    rows.sort(key=lambda row: -row["agreement"])
    console.show_result({"wordings": rows}, _comparison(rows), options)


def _comparison(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        where = f" in {row['template']!r}" if row["template"] else ""
        near = f", nearer than {row['nearness']:.0%} of ordinary words" if row["nearness"] is not None else ""
        pairs = ", ".join(f"{one}/{other}" for one, other in row["confused"])
        lines.append(
            f"{row['classes']}{where}: agreement {row['agreement']:.2f}, mean confidence {row['confidence']:.0%}{near}"
            f"; hardest to tell apart: {pairs}"
        )
    best = rows[0]
    if best["agreement"] < MIN_AGREEMENT - 0.25 * (best["count"] == 2):
        lines.append("The model is unsure what any of these mean here: describe each class in a few words.")
    elif len(rows) > 1:
        lines.append(f"Best: {best['classes']}" + (f" in {best['template']!r}" if best["template"] else ""))
    return "\n".join(lines)
