"""`pouf predict`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pouf.cli import _console as console
from pouf.cli._inputs import proportions
from pouf.cli._options import (
    DataOption,
    IdColumn,
    InferenceOptions,
    OutputOption,
    RunFolder,
    TextColumn,
    UseOption,
    grouped,
    path,
)
from pouf.cli._progress import encoding
from pouf.errors import InputError

FILE = Path("predictions.csv")


@grouped("run", "inputs", "text", "text_column", "id_column", "out", "overwrite", "abstain", "unknown", "probabilities",
         "as_json")  # fmt: skip
def predict(
    run: RunFolder,
    options: InferenceOptions,
    inputs: Annotated[
        str | None,
        typer.Argument(metavar="INPUT", help="Folder of images, file of texts or vectors; one image, one text, or -."),
    ] = None,
    text: Annotated[list[str] | None, DataOption(help="A text to classify; repeatable.")] = None,
    out: Annotated[
        Path | None, OutputOption(help="Write .csv, .jsonl or .parquet.", show_default=f"{FILE} for many inputs")
    ] = None,
    overwrite: Annotated[bool, OutputOption("--overwrite", help="Replace the file that --out names.")] = False,
    use: UseOption = "advised",
    prior: Annotated[
        str | None, OutputOption(help="Shares of the classes in the input: uniform, or one per class as 0.7,0.3.")
    ] = None,
    abstain: Annotated[
        float | None,
        OutputOption(help="Mark unreliable predictions, so that at most this share of the rest is wrong, as 0.05."),
    ] = None,
    unknown: Annotated[bool, OutputOption("--unknown", help="Call inputs far from all classes `unknown`.")] = False,
    probabilities: Annotated[
        bool, OutputOption("--probabilities", help="Add every class, one column p_NAME each.")
    ] = False,
    safe_csv: Annotated[
        bool, OutputOption("--safe-csv", help="Put ' before names that a spreadsheet would run as formulas.")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Samples encoded at once.", min=1)] = 64,
    text_column: TextColumn = None,
    id_column: IdColumn = None,
) -> None:
    """Classify images, texts or vectors with an adapted model.

    \b
    pouf predict pouf-run more-photos/ --out predictions.csv
    pouf predict pouf-run "what a great film"
    """
    from pouf.runs import predict as library
    from pouf.runs.folder import Run
    from pouf.runs.predictions import check_place

    console.silence_libraries()
    samples, few = _samples(inputs, text)
    file = out if few or options.as_json else out or FILE
    if file is not None:
        check_place(file, overwrite)
    folder = Run(run)
    settings = library.PredictOptions(
        use, abstain, unknown, probabilities, safe_csv, overwrite, text_column, id_column, options.resolve_device(),
        options.trust_model, proportions(prior),
    )  # fmt: skip
    with encoding(options, batch_size) as inference:
        result = library.predict(folder, samples, file, settings, inference)
    if result.is_main:
        verdict = folder.verdict if use == "advised" else None
        console.show_predictions(result, verdict, folder, file, abstain, options)


def _samples(inputs: str | None, texts: list[str] | None) -> tuple[Path | list[str], bool]:
    """A path or texts, and whether predictions are printed: for one image, or texts on the command line."""
    from pouf.data.contents import as_url
    from pouf.data.images import EXTENSIONS

    if (inputs is None) == (not texts):
        raise InputError("give either INPUT or --text; - reads texts from standard input, one per line")
    if texts:
        return texts, True
    assert inputs is not None
    if inputs == "-":
        lines = [line for line in sys.stdin.read().splitlines() if line.strip()]
        if not lines:
            raise InputError("standard input is empty: give texts, one per line")
        return lines, True
    if _is_path(inputs):
        if inputs.strip() and as_url(inputs) is None and not os.path.lexists(inputs.split("::")[0]):
            raise InputError(f"no such file or folder: {inputs!r}; give a text of one word with --text")
        return path(inputs), inputs.lower().endswith(EXTENSIONS) and Path(inputs).is_file()
    return [inputs], True


def _is_path(text: str) -> bool:
    """Whether it is an existing path, or a single word with a slash or a file ending; other values are texts."""
    if len(text) < 1024 and Path(text).exists():
        return True
    return not text.strip() or (len(text.split()) == 1 and ("/" in text or Path(text).suffix != ""))
