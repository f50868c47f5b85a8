"""`pouf evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pouf.cli import _console as console
from pouf.cli._inputs import load_run, read_labels
from pouf.cli._options import InferenceOptions, LabelColumn, OutputOptions, RunFolder, TextColumn, grouped
from pouf.cli._progress import progress


@grouped
def evaluate(
    run: RunFolder,
    labelled: Annotated[
        Path,
        typer.Argument(
            metavar="LABELLED", help="Folder with one sub-folder of images per class, or a file with labels."
        ),
    ],
    place: InferenceOptions,
    output: OutputOptions,
    batch_size: Annotated[int, typer.Option(help="Samples encoded at once.", min=1)] = 64,
    text_column: TextColumn = None,
    label_column: LabelColumn = "label",
    confusion: Annotated[
        bool, typer.Option("--confusion", help="Show which classes are mistaken for which by what the run advises.")
    ] = False,
) -> None:
    """Compare zero-shot, label-free prior correction, the last step and what the run advises, on labelled data.

    Recall per class for all four, precision and F1 for what the run advises; accuracies with 95 % confidence
    intervals, and macro-F1.
    """
    from pouf.inference.encode import InferenceConfig
    from pouf.parallel.process_group import together
    from pouf.runs.folder import Run
    from pouf.training.callbacks import Callbacks
    from pouf.validation.evaluation import compare

    console.calm_libraries()
    zero_shot, last, advised = load_run(run, place, "zero-shot", "last", "advised")
    data = read_labels(advised, labelled, text_column, label_column, Run(run))
    inference = InferenceConfig(batch_size, place.workers or 0, place.features())
    with together(advised.device) as group, progress(output.hidden or not group.is_main) as shown:
        result = compare(zero_shot, last, advised, data, Callbacks([shown]).watching(inference, "encoding"))
    if group.is_main and output.as_json:
        console.tell_json(result.to_json() | ({"confusion": result.confusion} if confusion else {}))
    elif group.is_main and not output.quiet:
        console.show_skipped([data.inputs], None)
        console.show_evaluation(result, f"{result.n:,} labelled {advised.backbone.modality}s in {labelled}")
        if confusion:
            console.show_confusion(result)
