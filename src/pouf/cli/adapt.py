"""`pouf adapt`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
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
    one_of,
)
from pouf.errors import InputError
from pouf.terminal import calm_libraries, out, tell_skipped, training_progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pouf.classifier import Classifier
    from pouf.cloze import Cloze
    from pouf.data.base import Unlabelled
    from pouf.methods import Kind, Method


def adapt(
    classes: Annotated[str | None, typer.Option(help="Names as a,b,c, or a file with one a line.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Hub name or local folder, as openai/clip-vit-base-patch16.")
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of unlabelled images.")] = None,
    texts: Annotated[Path | None, typer.Option(help="CSV, JSONL, Parquet or text file of unlabelled texts.")] = None,
    features: Annotated[
        str | None, typer.Option(help="Vectors instead of a model and data: npy, npz, safetensors, Parquet.")
    ] = None,
    prototypes: Annotated[str | None, typer.Option(help="One vector a class, for --features.")] = None,
    method: Annotated[
        str, typer.Option(help="pouf, or what it is compared with: tent, upl, calibration, …; `list` tells of all.")
    ] = "pouf",
    prior: Annotated[
        str | None,
        typer.Option(help="Shares of the classes: estimated, or known ones as 0.7,0.3.", show_default="uniform"),
    ] = None,
    refine: Annotated[
        bool | None, typer.Option("--refine/--no-refine", help="A last pass over all predictions together.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="T of the model.", show_default="its own; 0.01 for --features")
    ] = None,
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
    from pouf.cloze import make_cloze, read_words
    from pouf.data.shots import read_shots
    from pouf.methods import METHODS
    from pouf.objectives.terms import needs_unlabelled
    from pouf.prompts import read_classes, read_templates
    from pouf.runs import adapt_run, check_new, judge

    calm_libraries()
    if method == "list":
        for known, entry in METHODS.items():
            out.print(f"{known:12} {entry.about}{' (needs --shots)' if entry.needs_shots else ''}")
        return
    chosen = one_of("--method", method, METHODS)
    names = read_classes(classes) if classes is not None else None
    templates = read_templates(template) if template else None
    label_words = read_words(words) if words is not None else None
    cloze = make_cloze(names or (), templates, label_words, max_length)
    kind, data = _data(images, texts, features, shots, cloze, text_column)
    _check_together(kind, model, names, prototypes, max_length, cloze)
    assert names is not None or kind == "vector"
    settings = {
        "tuning.name": tune, "steps": steps, "batch_size": batch_size, "optimisation.lr": lr, "seed": seed,
        "optimisation.name": optimizer, "objective.information": lambda_, "augment": augment, "views": views,
        "compute.chunk": chunk, "compute.precision": precision, "compute.compile": compile_,
        "compute.checkpointing": checkpointing, "compute.workers": workers, "temperature": temperature,
        "adjust": None if refine is None else "refinement" if refine else "none",
        "objective.prior": "estimated" if prior == "estimated" else None,
    }  # fmt: skip
    settled = chosen.recipe(kind, recipe).with_settings(
        **{key: value for key, value in settings.items() if value is not None}
    )
    if steps == 0:
        raise InputError("steps must be above 0; to train nothing, use --method zero-shot")
    if os.environ.get("RANK", "0") == "0":
        check_new(out_dir)
    classifier = _classifier(chosen, kind, model, names, templates, label_words, max_length, prototypes, settled.seed)
    classifier.to(device_of(device))
    modality = classifier.backbone.modality
    columns = columns_of(text_column, cloze.columns if cloze is not None else ("text",))
    labelled = read_shots(shots, classifier.classes, modality, columns, label_column) if shots is not None else None
    chosen.check(method, kind, labelled)
    if labelled is not None and settled.steps and settled.objective.labels == 0:
        settled = settled.with_settings(**{"objective.labels": 1.0})
    if demonstrations:
        if labelled is None or cloze is None:
            raise InputError("--demonstrations are shots in a template: give --shots and a --template with [MASK]")
        chosen = replace(chosen, demonstrations="after")
    chosen.equip(classifier, labelled, settled.seed)
    if prior is not None and prior != "estimated":
        classifier.set_prior(_proportions(prior))
    if chosen.needs_shots and not needs_unlabelled(settled.objective):
        data = None
    speaks = os.environ.get("RANK", "0") == "0"  # of several processes the first
    with training_progress(settled.steps, quiet or as_json or not speaks) as (say, step):
        given = [f"{len(data):,} unlabelled {modality}s"] if data is not None else []
        given += [f"{len(labelled.inputs):,} labelled shots"] if labelled is not None else []
        say(f"{', '.join(given)}, {len(classifier.classes)} classes, method {method}")
        result = adapt_run(
            classifier, data, settled, out_dir, shots=labelled, cache=cache_of(cache, no_cache), command=sys.argv,
            on_start=say, on_step=step,
        )  # fmt: skip
    inputs = [i for i in (data, labelled.inputs if labelled is not None else None) if i is not None]
    last = result.history[-1] if result.history else None
    trust = judge(result)
    facts = {
        "run": str(out_dir), "method": method, "n": sum(map(len, inputs)),
        "skipped": sum(len(each.skipped) for each in inputs), "steps": len(result.history),
        "loss": last.loss if last else None, "effective_classes": last.effective_classes if last else None,
        "use": trust.use if trust else "last", "chosen": trust.chosen if trust else None,
        "alarms": [alarm.name for alarm in trust.alarms] if trust else [],
        "seconds": round(last.seconds, 1) if last else 0.0, "trainable": result.trainable, "total": result.total,
    }  # fmt: skip
    if as_json and speaks:
        typer.echo(json.dumps(facts))
    elif not quiet and speaks:
        for each in inputs:
            tell_skipped(each, out_dir / "skipped.jsonl")
        told = "Nothing was trained"
        if last:
            told = (
                f"{last.step:,} steps in {last.seconds:.0f} s, loss {last.loss:.3f}, "
                f"{last.effective_classes:.1f} of {len(classifier.classes)} classes in use"
            )
        if trust is not None:
            out.print(trust.words(), style="bold red" if trust.alarms else None, markup=False, soft_wrap=True)
        out.print(f"{told}. The run is in {out_dir}. Next:\n  pouf predict {out_dir} {inputs[0].source}")


def _data(
    images: Path | None,
    texts: Path | None,
    features: str | None,
    shots: Path | None,
    cloze: Cloze | None,
    text_column: str | None,
) -> tuple[Kind, Unlabelled | None]:
    """What is to be adapted to, and the kind of model for it."""
    from pouf.data.images import Images
    from pouf.data.texts import Texts
    from pouf.data.vectors import Vectors

    given = [each for each in (images, texts, features) if each is not None]
    if len(given) > 1:
        raise InputError("give one of --images DIR, --texts FILE and --features FILE, and not several")
    if not given and shots is None:
        raise InputError("nothing to learn from: give --images DIR, --texts FILE or --features FILE")
    if features is not None:
        return "vector", Vectors.from_file(features)
    if images is not None:
        return "image", Images.from_folder(images)
    columns = columns_of(text_column, cloze.columns if cloze is not None else ("text",))
    kind: Kind = "cloze" if cloze is not None else "text"
    if texts is not None:
        return kind, Texts.from_file(texts, columns)
    return ("image" if shots is not None and shots.is_dir() else kind), None


def _check_together(
    kind: Kind,
    model: str | None,
    names: Sequence[str] | None,
    prototypes: str | None,
    max_length: int | None,
    cloze: Cloze | None,
) -> None:
    if (kind == "vector") != (prototypes is not None):
        raise InputError("--features and --prototypes belong together: give both, or a --model and data")
    if kind != "vector" and model is None:
        raise InputError("no model: give --model, as openai/clip-vit-base-patch16")
    if kind != "vector" and names is None:
        raise InputError("no classes: give --classes, as cat,dog")
    if max_length is not None and cloze is None:
        raise InputError("--max-length is for a --template with [MASK]: other models have their own")


def _classifier(
    method: Method,
    kind: Kind,
    model: str | None,
    names: Sequence[str] | None,
    templates: Sequence[str] | None,
    words: Sequence[Sequence[str]] | None,
    max_length: int | None,
    prototypes: str | None,
    seed: int,
) -> Classifier:
    from pouf.classifier import Classifier

    if kind == "vector":
        return Classifier.from_vectors(prototypes or "", names)
    assert model is not None and names is not None
    if method.fresh_head:
        return Classifier.with_fresh_head(model, names, seed)
    return Classifier.from_pretrained(model, names, templates, words=words, max_length=max_length)


def _proportions(text: str) -> list[float]:
    try:
        return [float(value) for value in text.split(",")]
    except ValueError:
        raise InputError(f"--prior {text!r}: expected 'estimated', or one number for each class as 0.7,0.3") from None
