"""`pouf adapt`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pouf.cli.options import (
    Cache,
    Device,
    Json,
    LabelColumn,
    NoCache,
    Quiet,
    TextColumn,
    Workers,
    cache_of,
    columns_of,
    device_of,
)
from pouf.errors import InputError
from pouf.terminal import calm_libraries, out, tell_skipped, training_progress

if TYPE_CHECKING:
    from pouf.data.base import Modality, Unlabelled


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
    columns = columns_of(text_column, cloze.columns if cloze is not None else ("text",))
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
    classifier.to(device_of(device))
    if labelled is not None and demonstrations:
        classifier.demonstrations = Demonstrations.from_shots(labelled, seed=settled.seed)
    speaks = os.environ.get("RANK", "0") == "0"  # of several processes the first
    with training_progress(settled.steps, quiet or as_json or not speaks) as (say, step):
        given = [f"{len(data):,} unlabelled {modality}s"] if data is not None else []
        given += [f"{len(labelled.inputs):,} labelled shots"] if labelled is not None else []
        say(f"{', '.join(given)}, {len(names)} classes, recipe {name}")
        result = adapt_run(
            classifier, data, settled, out_dir, shots=labelled, cache=cache_of(cache, no_cache), command=sys.argv,
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
