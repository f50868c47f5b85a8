"""`pouf predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pouf.cli import _console as console
from pouf.cli._inputs import read_inputs
from pouf.cli._options import InferenceOptions, OutputOptions, RunFolder, TextColumn, UseOption, grouped


@grouped
def predict(
    run: RunFolder,
    inputs: Annotated[Path, typer.Argument(metavar="INPUT", help="Folder of images, one image, or file of texts.")],
    place: InferenceOptions,
    output: OutputOptions,
    out_file: Annotated[Path, typer.Option("--out", help="File to write, .csv or .jsonl.")] = Path("predictions.csv"),
    use: UseOption = "advised",
    abstain: Annotated[
        float | None, typer.Option(help="Leave out what is likely wrong: the rate of errors to stay below, as 0.05.")
    ] = None,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Say `unknown` of inputs that are far from all prototypes.")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Samples encoded at once.", min=1)] = 64,
    text_column: TextColumn = None,
) -> None:
    """Classify images or texts with an adapted model."""
    from pouf.classifier import Classifier
    from pouf.distributed import join
    from pouf.inference import InferenceConfig
    from pouf.runs.folder import Run
    from pouf.runs.predictions import write_predictions, writer_for
    from pouf.validation.selective import UNKNOWN, check_rate, doubtful, strangers

    console.calm_libraries()
    writer_for(out_file)
    if abstain is not None:
        check_rate(abstain)
    there = Run(run)
    classifier = Classifier.from_pretrained(run, use=use, device=place.place())  # type: ignore[arg-type]
    data = read_inputs(classifier, inputs, text_column, there)
    world = join(classifier.device)
    hidden = output.hidden or not world.is_first
    with console.bar("predicting", len(world.share(range(len(data)))), hidden) as advance:
        inference = InferenceConfig(batch_size, place.workers or 0, place.features(), advance, world)
        encoded = classifier.encode(data, inference)
    if not world.is_first:
        return
    said: dict[int, str] = {}
    more: dict[str, dict[int, float]] = {}
    if abstain is not None:
        zero_shot = Classifier.from_pretrained(run, use="zero-shot", device=place.place())
        left_out, more["reliability"] = doubtful(classifier, zero_shot, data, encoded, abstain, inference.alone())
        said |= dict.fromkeys(left_out, "")
    if unknown:
        used = there.verdict.advised if use == "advised" else use
        said |= dict.fromkeys(strangers(classifier, encoded, there.verdict.near.get(used)), UNKNOWN)
    write_predictions(out_file, classifier.classes, data, classifier.score_blocks(encoded), said, more)
    facts: dict[str, Any] = {
        "n": len(encoded.indices), "skipped": len(data.skipped), "used": use, "predictions": str(out_file),
    }  # fmt: skip
    replaced = list(said.values())
    facts |= {"abstained": replaced.count("")} if abstain is not None else {}
    facts |= {"unknown": replaced.count(UNKNOWN)} if unknown else {}
    if use == "advised":
        facts |= {"used": there.verdict.advised, "verdict": there.verdict.message}
        console.show_verdict(there.verdict, quiet=True)
    if output.as_json:
        console.tell_json(facts | {"unreadable": [data.ids[i] for i in sorted(data.skipped)]})
    elif not output.quiet:
        console.show_skipped([data], None)
        if unknown:
            console.say(f"{facts['unknown']:,} inputs marked unknown (threshold: 99th percentile of the distances "
                        "seen in training)")  # fmt: skip
        if abstain is not None:
            console.say(
                f"{facts['abstained']:,} are left out, so that {100 * abstain:g} % of the rest should be wrong. That "
                "rests on how surely and steadily classes are predicted, by the model and by zero-shot, and on no "
                "label: check it with pouf review"
            )
        by = "zero-shot" if facts["used"] == "zero-shot" else f"the {facts['used']} step"
        console.say(f"{facts['n']:,} predictions in {out_file}, by {by}")
