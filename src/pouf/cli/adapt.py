"""`pouf adapt`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pouf.cli._console import calm_libraries, out, tell_skipped, tell_trust, training_progress
from pouf.cli._inputs import build_classifier, check_together, read_data, read_prompt_spec
from pouf.cli._options import (
    BatchSize,
    Cache,
    ClassNames,
    DataOption,
    Device,
    FeaturesFile,
    ImagesFolder,
    Json,
    LabelColumn,
    MaxLength,
    MethodOption,
    Model,
    NoCache,
    OutputOption,
    PrototypesFile,
    Quiet,
    RecipeName,
    ReportOption,
    Seed,
    SpeedOption,
    Steps,
    Temperature,
    Templates,
    TextColumn,
    TextsFile,
    TrainingOption,
    Tuner,
    Words,
    Workers,
    cache_of,
    columns_of,
    device_of,
    one_of,
)
from pouf.cli._outcome import tell_files, use_run
from pouf.errors import InputError


def adapt(
    classes: ClassNames = None,
    images: ImagesFolder = None,
    texts: TextsFile = None,
    features: FeaturesFile = None,
    prototypes: PrototypesFile = None,
    shots: Annotated[
        Path | None, DataOption(help="A few labelled examples to learn from as well: a file, or a folder of images.")
    ] = None,
    text_column: TextColumn = None,
    label_column: LabelColumn = "label",
    model: Model = None,
    template: Templates = None,
    words: Words = None,
    max_length: MaxLength = None,
    demonstrations: Annotated[
        bool, MethodOption("--demonstrations", help="Show a shot of each class beside every text, as LM-BFF does.")
    ] = False,
    method: Annotated[
        str, MethodOption(help="pouf, or what it is compared with: tent, upl, calibration, …; `list` tells of all.")
    ] = "pouf",
    prior: Annotated[
        str | None,
        MethodOption(help="Shares of the classes: estimated, or known ones as 0.7,0.3.", show_default="uniform"),
    ] = None,
    refine: Annotated[
        bool | None, MethodOption("--refine/--no-refine", help="A last pass over all predictions together.")
    ] = None,
    temperature: Temperature = None,
    recipe: RecipeName = None,
    tune: Tuner = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    lr: Annotated[float | None, TrainingOption(help="Learning rate.")] = None,
    optimizer: Annotated[str | None, TrainingOption(help="sgd or adamw.")] = None,
    lambda_: Annotated[float | None, TrainingOption("--lambda", help="Weight of the mutual information.")] = None,
    augment: Annotated[str | None, TrainingOption(help="crop-flip or none, for images.")] = None,
    views: Annotated[
        int | None, TrainingOption(help="Crops of each image to compute once, where its encoder is not trained.")
    ] = None,
    seed: Seed = None,
    chunk: Annotated[
        int | None, SpeedOption(help="Samples encoded at once: any batch size in the memory of a chunk.")
    ] = None,
    precision: Annotated[str | None, SpeedOption(help="fp32 or bf16.")] = None,
    compile_: Annotated[bool | None, SpeedOption("--compile", help="Compile the encoder with torch.compile.")] = None,
    checkpointing: Annotated[
        bool | None, SpeedOption("--checkpointing", help="Less memory, more time: recompute activations.")
    ] = None,
    workers: Workers = None,
    cache: Cache = None,
    no_cache: NoCache = False,
    device: Device = "auto",
    out_dir: Annotated[Path, OutputOption("--out", help="Folder of the run.")] = Path("pouf-run"),
    report: ReportOption = True,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Adapt a model to unlabelled images or texts, given the names of the classes."""
    from pouf.data.shots import read_shots
    from pouf.inference import InferenceConfig
    from pouf.losses.objective import needs_unlabelled
    from pouf.runs.folder import SKIPPED, adapt_run, advised_use, check_new, read_choice, read_verdict
    from pouf.training.methods import METHODS

    calm_libraries()
    if method == "list":
        for known, entry in METHODS.items():
            out.print(f"{known:12} {entry.about}{' (needs --shots)' if entry.needs_shots else ''}")
        return
    chosen = one_of("--method", method, METHODS)
    names, templates, label_words, cloze = read_prompt_spec(classes, template, words, max_length)
    kind, data = read_data(images, texts, features, shots, cloze, text_column)
    check_together(kind, model, names, prototypes, max_length, cloze)
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
    classifier = build_classifier(
        chosen, kind, model, names, templates, label_words, max_length, prototypes, settled.seed
    )
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
    if not speaks:
        return
    inputs = [i for i in (data, labelled.inputs if labelled is not None else None) if i is not None]
    last = result.history[-1] if result.history else None
    choice, (verdict, trusted) = read_choice(out_dir), read_verdict(out_dir)
    facts = {
        "run": str(out_dir), "method": method, "n": sum(map(len, inputs)),
        "skipped": sum(len(each.skipped) for each in inputs), "steps": len(result.history),
        "loss": last.loss if last else None, "effective_classes": last.effective_classes if last else None,
        "verdict": verdict, "use": advised_use(out_dir), "chosen": choice["chosen"] if choice else None,
        "alarms": [alarm["name"] for alarm in choice["alarms"]] if choice else [],
        "seconds": round(last.seconds, 1) if last else 0.0, "trainable": result.trainable, "total": result.total,
    }  # fmt: skip
    tell_trust(verdict, trusted, quiet or as_json)
    if report and data is not None:
        inference = InferenceConfig(settled.compute.chunk or 64, settled.compute.workers, cache_of(cache, no_cache))
        facts |= use_run(out_dir, data, inference, classifier.backbone.device)
    if as_json:
        typer.echo(json.dumps(facts))
    elif not quiet:
        for each in inputs:
            tell_skipped(each, out_dir / SKIPPED)
        told = "Nothing was trained"
        if last:
            told = (
                f"{last.step:,} steps in {last.seconds:.0f} s, loss {last.loss:.3f}, "
                f"{last.effective_classes:.1f} of {len(classifier.classes)} classes in use"
            )
        out.print(f"{told}.", markup=False, soft_wrap=True)
        tell_files(facts)
        out.print(
            f"Next:\n  pouf predict {out_dir} {inputs[0].source}\n  pouf review {out_dir}", markup=False, soft_wrap=True
        )


def _proportions(text: str) -> list[float]:
    try:
        return [float(value) for value in text.split(",")]
    except ValueError:
        raise InputError(f"--prior {text!r}: expected 'estimated', or one number for each class as 0.7,0.3") from None
