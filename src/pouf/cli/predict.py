"""`pouf predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pouf.cli import _console as console
from pouf.cli._inputs import proportions
from pouf.cli._options import IdColumn, InferenceOptions, RunFolder, TextColumn, UseOption, grouped
from pouf.cli._progress import encoding


@grouped()
def predict(
    run: RunFolder,
    inputs: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Folder of images, one image, or a file of texts or vectors.")
    ],
    options: InferenceOptions,
    out: Annotated[Path, typer.Option(help="File to write: .csv, .jsonl or .parquet.")] = Path("predictions.csv"),
    use: UseOption = "advised",
    prior: Annotated[
        str | None,
        typer.Option(
            help="Shares of the classes in the input, which predictions then have: uniform, or one per class."
        ),
    ] = None,
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
    from pouf.runs import predict as library
    from pouf.runs.folder import Run
    from pouf.runs.predictions import check_place

    console.calm_libraries()
    check_place(out)
    folder = Run(run)
    chosen = library.PredictOptions(
        use,
        proportions(prior),
        abstain,
        unknown,
        probabilities,
        safe_csv,
        text_column,
        id_column,
        options.place(),
        options.trust_model,
    )
    with encoding(options, batch_size) as inference:
        found = library.predict(folder, inputs, out, chosen, inference)
    if found.is_main:
        verdict = folder.verdict if use == "advised" else None
        console.show_predictions(found, verdict, folder, out, abstain, options)
