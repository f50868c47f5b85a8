"""`pouf predict` and `pouf evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pouf.cli._console import bar, calm_libraries, out, show_evaluation, tell_skipped, tell_trust
from pouf.cli._options import (
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
    read_inputs,
    use_of,
)
from pouf.errors import InputError


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    inputs: Annotated[Path, typer.Argument(metavar="INPUT", help="Folder of images, one image, or file of texts.")],
    out_file: Annotated[Path, typer.Option("--out", help="File to write, .csv or .jsonl.")] = Path("predictions.csv"),
    use: UseOption = "auto",
    abstain: Annotated[
        float | None, typer.Option(help="Leave out what is likely wrong: the rate of errors to stay below, as 0.05.")
    ] = None,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Say `unknown` of inputs that are far from all prototypes.")
    ] = False,
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
    import torch

    from pouf.classifier import Classifier, Predictions
    from pouf.distributed import join
    from pouf.inference import InferenceConfig
    from pouf.runs.folder import advised_use, check_run, load_run, read_choice, read_verdict
    from pouf.runs.predictions import prediction_rows, writer_for
    from pouf.validation.selective import UNKNOWN, check_rate, kept_at, nearness, reliability

    calm_libraries()
    write = writer_for(out_file)
    if abstain is not None:
        check_rate(abstain)
    used, choice = advised_use(check_run(run), use_of(use)), read_choice(run)
    classifier = load_run(run, used).to(device_of(device))
    data = read_inputs(classifier, inputs, text_column)
    world = join(classifier.backbone.device)
    with bar("predicting", len(world.share(range(len(data)))), quiet or as_json or not world.is_first) as advance:
        encoded = classifier.encode(
            data, InferenceConfig(batch_size, workers or 0, cache_of(cache, no_cache), advance, world)
        )
    if not world.is_first:
        return
    replaced: dict[int, str] = {}
    more: dict[str, dict[int, float]] = {}
    if abstain is not None:
        predictions = Predictions(
            encoded.indices, torch.cat([block.log_probabilities for block in classifier.score_features(encoded)])
        )
        zero_shot = Classifier.load_zero_shot(run).to(device_of(device))
        estimated = reliability(classifier, zero_shot, data, predictions, InferenceConfig(batch_size, workers or 0))
        kept = kept_at(abstain, estimated)
        replaced |= {index: "" for index, stays in zip(encoded.indices, kept.tolist(), strict=True) if not stays}
        more["reliability"] = dict(zip(encoded.indices, estimated.tolist(), strict=True))
    if unknown:
        if choice is None:
            raise InputError("this run does not know how near inputs usually are: --unknown needs one that was trained")
        far = nearness(classifier, encoded) < choice["near"][used]
        replaced |= {index: UNKNOWN for index, is_far in zip(encoded.indices, far.tolist(), strict=True) if is_far}
    out_file.parent.mkdir(parents=True, exist_ok=True)
    rows = prediction_rows(classifier.classes, data, classifier.score_features(encoded), replaced, more)
    write(out_file, rows)
    facts: dict[str, Any] = {
        "n": len(encoded.indices), "skipped": len(data.skipped), "used": used, "predictions": str(out_file),
    }  # fmt: skip
    left_out = list(replaced.values())
    facts |= {"abstained": left_out.count("")} if abstain is not None else {}
    facts |= {"unknown": left_out.count(UNKNOWN)} if unknown else {}
    if use == "auto":
        verdict, trusted = read_verdict(run)
        facts |= {"verdict": verdict}
        tell_trust(verdict, trusted, quiet=True)
    if as_json:
        typer.echo(json.dumps(facts | {"unreadable": [data.ids[i] for i in sorted(data.skipped)]}))
    elif not quiet:
        tell_skipped(data, None)
        if unknown:
            out.print(f"{facts['unknown']:,} are farther from all prototypes than 99 of 100 inputs of the run: unknown")
        if abstain is not None:
            out.print(
                f"{facts['abstained']:,} are left out, so that {100 * abstain:g} % of the rest should be wrong. That "
                "rests on how surely and steadily classes are predicted, by the model and by zero-shot, and on no "
                "label: check it with pouf review"
            )
        out.print(
            f"{facts['n']:,} predictions in {out_file}, by {used if used == 'zero-shot' else f'the {used} step'}",
            soft_wrap=True,
        )


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
    from pouf.inference import InferenceConfig
    from pouf.runs.folder import check_run, load_run, read_choice
    from pouf.validation.evaluation import evaluate as compare

    calm_libraries()
    adapted = Classifier.load(check_run(run)).to(device_of(device))
    columns = columns_of(text_column, adapted.columns)
    data = read_labelled(labelled, adapted.classes, adapted.backbone.modality, columns, label_column)
    zero_shot = Classifier.load_zero_shot(run).to(device_of(device))
    world = join(adapted.backbone.device)
    inference = InferenceConfig(batch_size, workers or 0, cache_of(cache, no_cache), world=world)
    chosen = load_run(run).to(device_of(device)) if read_choice(run) is not None else None
    result = compare(zero_shot, adapted, data, inference, chosen)
    if not world.is_first:
        return
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    elif not quiet:
        tell_skipped(data.inputs, None)
        show_evaluation(result, f"{result.n:,} labelled {adapted.backbone.modality}s in {labelled}")
