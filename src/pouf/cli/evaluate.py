"""`pouf evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pouf.cli import _console as console
from pouf.cli._inputs import read_labels
from pouf.cli._options import InferenceOptions, LabelColumn, OutputOptions, RunFolder, TextColumn, grouped


@grouped
def evaluate(
    run: RunFolder,
    labelled: Annotated[Path, typer.Argument(help="Images in a sub-folder for each class, or a file with labels.")],
    place: InferenceOptions,
    output: OutputOptions,
    batch_size: Annotated[int, typer.Option(help="Samples encoded at once.", min=1)] = 64,
    text_column: TextColumn = None,
    label_column: LabelColumn = "label",
) -> None:
    """Compare zero-shot, label-free prior correction, the last step and what the run advises, on labelled data."""
    from pouf.classifier import Classifier
    from pouf.distributed import join
    from pouf.inference import InferenceConfig
    from pouf.validation.evaluation import compare

    console.calm_libraries()
    states = ("zero_shot", "last", "advised")
    zero_shot, last, advised = (
        Classifier.from_pretrained(run, use=state.replace("_", "-"), device=place.place())  # type: ignore[arg-type]
        for state in states
    )
    data = read_labels(advised, labelled, text_column, label_column)
    world = join(advised.device)
    inference = InferenceConfig(batch_size, place.workers or 0, place.features(), world=world)
    result = compare(zero_shot, last, advised, data, inference)
    if world.is_first and output.as_json:
        console.tell_json(result.to_json())
    elif world.is_first and not output.quiet:
        console.show_skipped([data.inputs], None)
        console.show_evaluation(result, f"{result.n:,} labelled {advised.backbone.modality}s in {labelled}")
