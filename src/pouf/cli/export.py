"""`pouf export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pouf.cli import _console as console
from pouf.cli._inputs import load_run, read_inputs
from pouf.cli._options import InferenceOptions, OutputOptions, RunFolder, TextColumn, UseOption, grouped
from pouf.errors import InputError


@grouped
def export(
    run: RunFolder,
    place: InferenceOptions,
    output: OutputOptions,
    inputs: Annotated[
        Path | None,
        typer.Argument(
            metavar="INPUT", help="Inputs to compare the outputs on.", show_default="the run's own, if there"
        ),
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write classifier and encoders as ONNX files.")] = False,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="Write the whole model as transformers opens it, with LoRA or LayerNorms merged in."
        ),
    ] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Also write a classifier with an 8-bit encoder.")] = False,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Folder to write into.", show_default="RUN/onnx or RUN/merged")
    ] = None,
    use: UseOption = "advised",
    text_column: TextColumn = None,
) -> None:
    """Write a classifier as ONNX, with its outputs compared to torch's, or as a model that transformers opens."""
    from pouf.integrations.onnx import export_onnx
    from pouf.runs.folder import Run

    console.calm_libraries()
    if onnx == merge:
        raise InputError("export to what? Give --onnx or --merge")
    there = Run(run)
    (classifier,) = load_run(run, place, use)
    if merge:
        folder = out_dir or run / "merged"
        classifier.save_pretrained(folder, merge=True)
        if output.as_json:
            console.tell_json({"folder": str(folder)})
        elif not output.quiet:
            console.say(f"the whole model in {folder}, which transformers opens")
        return
    try:
        examples = read_inputs(classifier, inputs, text_column, there)
    except InputError:
        if inputs is not None:
            raise
        examples = None  # the data of the run have gone
    found = export_onnx(classifier, out_dir or run / "onnx", examples, int8=int8)
    if output.as_json:
        console.tell_json(found._asdict() | {"folder": str(found.folder)})
    elif not output.quiet:
        of = "your inputs" if inputs else "inputs of the run" if examples is not None else "made-up inputs"
        console.say(f"{', '.join(found.files.values())} and preprocessing.json in {found.folder}")
        console.say(f"On {of}, probabilities differ from torch's by {found.difference:.1g} at most")
        if found.int8_agreement is not None:
            console.say(f"In int8, {100 * found.int8_agreement:.0f} % of them get the same class: evaluate it on more")
