"""`pouf predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pouf.cli import _console as console
from pouf.cli._inputs import load_run, read_inputs
from pouf.cli._options import IdColumn, InferenceOptions, OutputOptions, RunFolder, TextColumn, UseOption, grouped
from pouf.cli._progress import progress


@grouped
def predict(
    run: RunFolder,
    inputs: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Folder of images, one image, or a file of texts or vectors.")
    ],
    place: InferenceOptions,
    output: OutputOptions,
    out_file: Annotated[Path, typer.Option("--out", help="File to write: .csv, .jsonl or .parquet.")] = Path(
        "predictions.csv"
    ),
    use: UseOption = "advised",
    abstain: Annotated[
        float | None,
        typer.Option(help="Mark what is likely wrong, to keep the error rate of the rest below this, e.g. 0.05."),
    ] = None,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Predict `unknown` for inputs that are far from all prototypes.")
    ] = False,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Add the probability of every class, one column p_NAME each.")
    ] = False,
    safe_csv: Annotated[
        bool, typer.Option("--safe-csv", help="Put ' before names that a spreadsheet would take for formulas.")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Samples encoded at once.", min=1)] = 64,
    text_column: TextColumn = None,
    id_column: IdColumn = None,
) -> None:
    """Classify images or texts with an adapted model."""
    from dataclasses import replace

    from pouf.inference.cache import InMemoryFeatureCache
    from pouf.inference.encode import FeatureSet, InferenceConfig
    from pouf.parallel.process_group import alone, together
    from pouf.runs.folder import Run
    from pouf.runs.predictions import Extras, check_place, predict_share
    from pouf.training.callbacks import Callbacks
    from pouf.validation.names import absent_names
    from pouf.validation.selective import UNKNOWN, check_rate, out_of_distribution, unreliable

    console.calm_libraries()
    check_place(out_file)
    if abstain is not None:
        check_rate(abstain)
    there = Run(run)
    (classifier,) = load_run(run, place, use)
    data = read_inputs(classifier, inputs, text_column, there, id_column)
    said: dict[int, str] = {}
    flags: dict[str, set[int]] = {}
    more: dict[str, dict[int, float]] = {}

    def mark_strangers(encoded: FeatureSet) -> None:
        used = there.verdict.advised if use == "advised" else use
        with alone():  # processes need not have equally many blocks
            far = out_of_distribution(classifier, encoded, there.verdict.near.get(used))
        said.update(dict.fromkeys(far, UNKNOWN))

    with together(classifier.device) as group, progress(output.hidden or not group.is_main) as shown:
        group.check_equal(data.fingerprint(), "inputs")
        cache = place.features()
        if abstain is not None and cache is None:
            cache = InMemoryFeatureCache()  # what is looked at again need not be encoded again
        inference = InferenceConfig(batch_size, place.workers or 0, cache)
        inference = Callbacks([shown]).watching(inference, "encoding")
        if abstain is not None:
            (zero_shot,) = load_run(run, place, "zero-shot")
            own, quiet = classifier.encode_share(data, inference), replace(inference, on_batch=None, on_start=None)
            left_out, more["reliability"] = unreliable(classifier, zero_shot, data, own, abstain, quiet)
            flags["abstained"] = set(left_out)
        extras = Extras(said, flags, more, probabilities, safe_csv)
        seen = mark_strangers if unknown else lambda encoded: None
        share = predict_share(out_file, classifier, data, inference, extras, seen)
        counts = {name: len(where) for name, where in flags.items()} | ({"unknown": len(said)} if unknown else {})
        counts = {name: sum(group.gather_objects(count)) for name, count in counts.items()}
        absent = absent_names(classifier, share.sample)
    if not group.is_main:
        return
    facts: dict[str, Any] = {
        "n": share.n, "skipped": len(data.skipped), "used": use, "predictions": str(out_file),
        "absent": absent, **counts,
    }  # fmt: skip
    if use == "advised":
        facts |= {"used": there.verdict.advised, "verdict": there.verdict.message}
        console.show_verdict(there.verdict, quiet=True)
    if output.as_json:
        console.tell_json(
            facts | {"unreadable": [{"id": data.ids[i], "reason": data.skipped[i]} for i in sorted(data.skipped)]}
        )
    elif not output.quiet:
        console.show_skipped([data], None)
        console.show_absent(facts["absent"], len(classifier.classes))
        if unknown:
            console.say(f"{facts['unknown']:,} inputs marked unknown (threshold: 99th percentile of the distances "
                        "seen in training)")  # fmt: skip
        if abstain is not None:
            console.say(
                f"{facts['abstained']:,} are marked abstained, so that {100 * abstain:g} % of the rest should be "
                "wrong. That rests on how surely and steadily classes are predicted, by the model and by zero-shot, "
                "and on no label: check it with pouf review"
            )
        by = "zero-shot" if facts["used"] == "zero-shot" else f"the {facts['used']} step"
        if there.verdict.last == 0 and facts["used"] != "zero-shot":
            by = "zero-shot with corrected predictions"
        console.say(f"{facts['n']:,} predictions in {out_file}, by {by}")
