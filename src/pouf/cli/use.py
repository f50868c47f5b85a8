"""`pouf predict` and `pouf evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pouf.cli.options import (
    Cache,
    Device,
    Json,
    LabelColumn,
    NoCache,
    Quiet,
    TextColumn,
    UseOption,
    Workers,
    cache_of,
    columns_of,
    device_of,
    use_of,
)
from pouf.terminal import bar, calm_libraries, out, show_evaluation, tell_skipped


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    inputs: Annotated[Path, typer.Argument(metavar="INPUT", help="Folder of images, one image, or file of texts.")],
    out_file: Annotated[Path, typer.Option("--out", help="File to write, .csv or .jsonl.")] = Path("predictions.csv"),
    use: UseOption = "auto",
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
    from pouf.data.texts import Texts
    from pouf.distributed import join
    from pouf.encoding import Reading
    from pouf.predictions import prediction_rows, writer_for
    from pouf.runs import load_run

    calm_libraries()
    write = writer_for(out_file)
    classifier = load_run(run, use_of(use)).to(device_of(device))
    is_text = classifier.backbone.modality == "text"
    columns = columns_of(text_column, classifier.columns)
    data = Texts.from_file(inputs, columns) if is_text else classifier.unlabelled(inputs)
    world = join(classifier.backbone.device)
    with bar("predicting", len(world.share(range(len(data)))), quiet or as_json or not world.is_first) as advance:
        encoded = classifier.encode(data, Reading(batch_size, workers or 0, cache_of(cache, no_cache), advance, world))
    if not world.is_first:
        return
    out_file.parent.mkdir(parents=True, exist_ok=True)
    write(out_file, prediction_rows(classifier.classes, data, classifier.score_features(encoded)))
    facts = {"n": len(encoded.indices), "skipped": len(data.skipped), "predictions": str(out_file)}
    if as_json:
        typer.echo(json.dumps(facts | {"unreadable": [data.ids[i] for i in sorted(data.skipped)]}))
    elif not quiet:
        tell_skipped(data, None)
        out.print(f"{facts['n']:,} predictions in {out_file}")


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
    """Compare zero-shot, label-free calibration, the last step and what the run advises, on labelled data."""
    from pouf.classifier import Classifier
    from pouf.data.labelled import read_labelled
    from pouf.distributed import join
    from pouf.encoding import Reading
    from pouf.evaluation import evaluate as compare
    from pouf.runs import check_run, load_run, read_choice

    calm_libraries()
    adapted = Classifier.load(check_run(run)).to(device_of(device))
    columns = columns_of(text_column, adapted.columns)
    data = read_labelled(labelled, adapted.classes, adapted.backbone.modality, columns, label_column)
    zero_shot = Classifier.load_zero_shot(run).to(device_of(device))
    world = join(adapted.backbone.device)
    reading = Reading(batch_size, workers or 0, cache_of(cache, no_cache), world=world)
    chosen = load_run(run).to(device_of(device)) if read_choice(run) is not None else None
    result = compare(zero_shot, adapted, data, reading, chosen)
    if not world.is_first:
        return
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    elif not quiet:
        tell_skipped(data.inputs, None)
        show_evaluation(result, f"{result.n:,} labelled {adapted.backbone.modality}s in {labelled}")
