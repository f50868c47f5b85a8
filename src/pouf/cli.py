"""The command line. Thin: each command reads its options, calls one public function and shows what came of it.

Results go to standard output, everything else to standard error. Heavy imports wait until a command needs them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from pouf.errors import Diverged, InputError
from pouf.terminal import bar, calm_libraries, fail, out, show_evaluation, tell_skipped, training_progress

if TYPE_CHECKING:
    from pouf.data.base import Modality, Unlabelled
    from pouf.data.cache import FeatureCache

app = typer.Typer(
    name="pouf",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no tables; errors only.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, and nothing else there.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps; auto takes the fastest there is.")]
TextColumn = Annotated[
    str | None,
    typer.Option(help="Column of the texts in CSV, JSONL and Parquet files; a,b for pairs.", show_default="text"),
]
Workers = Annotated[int | None, typer.Option(help="Processes that read and decode ahead.", show_default="0")]
Cache = Annotated[
    Path | None,
    typer.Option(help="Folder where features are kept and found again.", show_default="$POUF_CACHE or ~/.cache/pouf"),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Keep no features and look for none.")]
LabelColumn = Annotated[str, typer.Option(help="Column of the labels in text files.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from pouf import __version__

        typer.echo(f"pouf {__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Turn a zero-shot model into a better classifier for your data, without a single label."""


@app.command()
def demo(
    tune: Annotated[str, typer.Option(help="What to train: full or prompt.")] = "full",
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the run.")] = Path("pouf-demo"),
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Teach a model that knows printed characters to read handwriting, offline, in under a minute."""
    from pouf.demo import demo as run_demo
    from pouf.recipe import Recipe
    from pouf.runs import check_new

    calm_libraries()
    check_new(out_dir)
    recipe = Recipe.load(_one_of("--tune", tune, {"full": "demo", "prompt": "demo-prompt"})).with_settings(seed=seed)
    with training_progress(recipe.steps, quiet or as_json) as (say, step):
        result = run_demo(out_dir, recipe, command=sys.argv, on_start=say, on_step=step)
    facts = result.evaluation.to_json() | {"seconds": round(result.seconds, 1), "run": str(result.run)}
    if as_json:
        typer.echo(json.dumps(facts))
    elif not quiet:
        show_evaluation(result.evaluation, f"{result.evaluation.n:,} handwritten digits, {tune} tuning, seed {seed}")
        out.print(f"{result.seconds:.0f} s. The run is in {result.run}, the images in {result.images}. Try:")
        out.print(f"  pouf predict {result.run} {result.images}\n  pouf evaluate {result.run} {result.images}")


@app.command()
def adapt(
    model: Annotated[str, typer.Option(help="Hub name or local folder, as openai/clip-vit-base-patch16.")],
    classes: Annotated[str, typer.Option(help="Names as a,b,c, or a file with one a line.")],
    images: Annotated[Path | None, typer.Option(help="Folder of unlabelled images.")] = None,
    texts: Annotated[Path | None, typer.Option(help="CSV, JSONL, Parquet or text file of unlabelled texts.")] = None,
    template: Annotated[
        list[str] | None,
        typer.Option(
            help="Sentence with {} for the class; repeat for several, or give a file. For a masked language model, "
            "one with {text} and [MASK]."
        ),
    ] = None,
    words: Annotated[
        str | None, typer.Option(help="Word for [MASK] of each class, as terrible,great; several as bad|awful,good.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Most tokens of a text in its template.")] = None,
    shots: Annotated[
        Path | None, typer.Option(help="A few labelled examples to learn from as well: a file, or a folder of images.")
    ] = None,
    demonstrations: Annotated[
        bool, typer.Option("--demonstrations", help="Show a shot of each class beside every text, as LM-BFF does.")
    ] = False,
    recipe: Annotated[str | None, typer.Option(help="Name of a recipe, or a TOML file.")] = None,
    tune: Annotated[str | None, typer.Option(help="full, prompt or layernorm.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of updates.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples a step; several times the number of classes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or adamw.")] = None,
    lambda_: Annotated[float | None, typer.Option("--lambda", help="Weight of the mutual information.")] = None,
    augment: Annotated[str | None, typer.Option(help="crop-flip or none, for images.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    chunk: Annotated[
        int | None, typer.Option(help="Samples encoded at once: any batch size in the memory of a chunk.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16.")] = None,
    compile_: Annotated[bool | None, typer.Option("--compile", help="Compile the encoder with torch.compile.")] = None,
    checkpointing: Annotated[
        bool | None, typer.Option("--checkpointing", help="Less memory, more time: recompute activations.")
    ] = None,
    views: Annotated[
        int | None, typer.Option(help="Crops of each image to compute once, where its encoder is not trained.")
    ] = None,
    workers: Workers = None,
    cache: Cache = None,
    no_cache: NoCache = False,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the run.")] = Path("pouf-run"),
    text_column: TextColumn = None,
    label_column: LabelColumn = "label",
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Adapt a model to unlabelled images or texts, given the names of the classes."""
    from pouf.classifier import Classifier
    from pouf.cloze import make_cloze, read_words
    from pouf.data.images import Images
    from pouf.data.shots import read_shots
    from pouf.data.texts import Texts
    from pouf.demonstrations import Demonstrations
    from pouf.prompts import read_classes, read_templates
    from pouf.recipe import Recipe
    from pouf.runs import adapt_run, check_new

    calm_libraries()
    if images is not None and texts is not None:
        raise InputError("give either --images DIR or --texts FILE, and not both")
    if images is None and texts is None and shots is None:
        raise InputError("nothing to learn from: give --images DIR or --texts FILE")
    settings = {
        "tuning.name": tune, "steps": steps, "batch_size": batch_size, "optimisation.lr": lr, "seed": seed,
        "optimisation.name": optimizer, "objective.information": lambda_, "augment": augment, "views": views,
        "compute.chunk": chunk, "compute.precision": precision, "compute.compile": compile_,
        "compute.checkpointing": checkpointing, "compute.workers": workers,
    }  # fmt: skip
    names = read_classes(classes)
    templates = read_templates(template) if template else None
    label_words = read_words(words) if words is not None else None
    cloze = make_cloze(names, templates, label_words, max_length)
    if demonstrations and (shots is None or cloze is None):
        raise InputError("--demonstrations are shots shown in a template: give --shots and a --template with [MASK]")
    if max_length is not None and cloze is None:
        raise InputError("--max-length is for a --template with [MASK]: other models have their own")
    of_images = images is not None or (texts is None and shots is not None and shots.is_dir())
    name = recipe or ("images" if of_images else "texts" if cloze is None else "masked")
    settled = Recipe.load(name).with_settings(**{key: value for key, value in settings.items() if value is not None})
    columns = _columns(text_column, cloze.columns if cloze is not None else ("text",))
    data: Unlabelled | None = None
    if images is not None or texts is not None:
        data = Images.from_folder(images) if images is not None else Texts.from_file(texts or "", columns)
    modality: Modality = "image" if of_images else "text"
    labelled = read_shots(shots, names, modality, columns, label_column) if shots is not None else None
    if labelled is not None and settled.objective.labels == 0:
        settled = settled.with_settings(**{"objective.labels": 1.0})
    if os.environ.get("RANK", "0") == "0":
        check_new(out_dir)
    classifier = Classifier.from_pretrained(model, names, templates, words=label_words, max_length=max_length)
    classifier.to(_device(device))
    if labelled is not None and demonstrations:
        classifier.demonstrations = Demonstrations.from_shots(labelled, seed=settled.seed)
    speaks = os.environ.get("RANK", "0") == "0"  # of several processes the first
    with training_progress(settled.steps, quiet or as_json or not speaks) as (say, step):
        given = [f"{len(data):,} unlabelled {modality}s"] if data is not None else []
        given += [f"{len(labelled.inputs):,} labelled shots"] if labelled is not None else []
        say(f"{', '.join(given)}, {len(names)} classes, recipe {name}")
        result = adapt_run(
            classifier, data, settled, out_dir, shots=labelled, cache=_cache(cache, no_cache), command=sys.argv,
            on_start=say, on_step=step,
        )  # fmt: skip
    inputs = [i for i in (data, labelled.inputs if labelled is not None else None) if i is not None]
    last = result.history[-1]
    facts = {
        "run": str(out_dir), "n": sum(map(len, inputs)), "skipped": sum(len(each.skipped) for each in inputs),
        "steps": last.step, "loss": last.loss,
        "effective_classes": last.effective_classes, "seconds": round(last.seconds, 1),
        "trainable": result.trainable, "total": result.total,
    }  # fmt: skip
    if as_json and speaks:
        typer.echo(json.dumps(facts))
    elif not quiet and speaks:
        for each in inputs:
            tell_skipped(each, out_dir / "skipped.jsonl")
        out.print(
            f"{last.step:,} steps in {last.seconds:.0f} s, loss {last.loss:.3f}, "
            f"{last.effective_classes:.1f} of {len(names)} classes in use. The run is in {out_dir}. Next:"
        )
        out.print(f"  pouf predict {out_dir} {inputs[0].source}")


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    inputs: Annotated[Path, typer.Argument(metavar="INPUT", help="Folder of images, one image, or file of texts.")],
    out_file: Annotated[Path, typer.Option("--out", help="File to write, .csv or .jsonl.")] = Path("predictions.csv"),
    batch_size: Annotated[int, typer.Option(help="Samples encoded at once.")] = 64,
    workers: Workers = None,
    cache: Cache = None,
    no_cache: NoCache = False,
    text_column: TextColumn = None,
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Classify images or texts with an adapted model."""
    from pouf.classifier import Classifier
    from pouf.data.texts import Texts
    from pouf.predictions import prediction_rows, writer_for
    from pouf.runs import check_run

    calm_libraries()
    _alone("predict")
    write = writer_for(out_file)
    classifier = Classifier.load(check_run(run)).to(_device(device))
    is_text = classifier.backbone.modality == "text"
    columns = _columns(text_column, classifier.columns)
    data = Texts.from_file(inputs, columns) if is_text else classifier.unlabelled(inputs)
    with bar("predicting", len(data), quiet or as_json) as advance:
        kept = _cache(cache, no_cache)
        predictions = classifier.score(data, batch_size, advance, workers=workers or 0, cache=kept)
    out_file.parent.mkdir(parents=True, exist_ok=True)
    write(out_file, prediction_rows(classifier, data, predictions))
    facts = {"n": len(predictions.indices), "skipped": len(data.skipped), "predictions": str(out_file)}
    if as_json:
        typer.echo(json.dumps(facts | {"unreadable": [data.ids[i] for i in sorted(data.skipped)]}))
    elif not quiet:
        tell_skipped(data, None)
        out.print(f"{facts['n']:,} predictions in {out_file}")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    labelled: Annotated[Path, typer.Argument(help="Images in a sub-folder for each class, or a file with labels.")],
    batch_size: Annotated[int, typer.Option(help="Samples encoded at once.")] = 64,
    workers: Workers = None,
    cache: Cache = None,
    no_cache: NoCache = False,
    text_column: TextColumn = None,
    label_column: LabelColumn = "label",
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare zero-shot, label-free calibration and the adapted model (last step) on labelled data."""
    from pouf.classifier import Classifier
    from pouf.data.labelled import read_labelled
    from pouf.evaluation import evaluate as compare
    from pouf.runs import check_run

    calm_libraries()
    _alone("evaluate")
    adapted = Classifier.load(check_run(run)).to(_device(device))
    columns = _columns(text_column, adapted.columns)
    data = read_labelled(labelled, adapted.classes, adapted.backbone.modality, columns, label_column)
    zero_shot = Classifier.load_zero_shot(run).to(_device(device))
    result = compare(zero_shot, adapted, data, batch_size, workers=workers or 0, cache=_cache(cache, no_cache))
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    elif not quiet:
        tell_skipped(data.inputs, None)
        show_evaluation(result, f"{result.n:,} labelled {adapted.backbone.modality}s in {labelled}")


INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main() -> NoReturn:
    """Entry point: an error that the user can mend is one line and exit code 2, never a traceback."""
    try:
        code = app(standalone_mode=False) or 0
    except InputError as error:
        fail(str(error), 2)
    except Diverged as error:
        fail(str(error), 1)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if error.format_message():  # a usage error of the command line itself; without words where help was shown
            fail(error.format_message(), 2)
        code = 2
    if code == INTERRUPTED:
        fail("interrupted; what was learned so far is in the run folder", code)
    sys.exit(code)


def _one_of(option: str, value: str, choices: dict[str, str]) -> str:
    if value not in choices:
        raise InputError(f"unknown {option} {value!r}: choose one of {', '.join(choices)}")
    return choices[value]


def _columns(given: str | None, usual: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that make a sample: as many as the template or the model reads."""
    if given is None:
        return usual
    columns = tuple(given.split(","))
    if len(columns) != len(usual):
        expected = "one column" if len(usual) == 1 else "two columns, as question,answer"
        raise InputError(f"--text-column {given!r} names {len(columns)} columns, expected {expected}")
    return columns


def _alone(command: str) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            f"pouf {command} runs in one process: give each process a part of the data as a run of its own"
        )


def _cache(folder: Path | None, without: bool) -> FeatureCache | None:
    from pouf.data.cache import FeatureCache

    return None if without else FeatureCache(folder)


def _device(name: str) -> str:
    import torch

    if name in ("auto", "cuda") and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        return f"cuda:{os.environ['LOCAL_RANK']}"
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"can't use device {name!r}: {str(error).splitlines()[0]}") from None
    return name


if __name__ == "__main__":
    main()
