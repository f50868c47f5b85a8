"""`pouf figures`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pouf.cli._console import calm_libraries, out
from pouf.cli._options import (
    Cache,
    Device,
    Json,
    LabelColumn,
    NoCache,
    Quiet,
    TextColumn,
    cache_of,
    columns_of,
    device_of,
    read_inputs,
)


def figures(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    inputs: Annotated[Path, typer.Argument(metavar="INPUT", help="Images or texts; with labels, if --labelled.")],
    labelled: Annotated[bool, typer.Option("--labelled", help="INPUT has labels, as for pouf evaluate.")] = False,
    centred: Annotated[
        bool, typer.Option("--centred", help="t-SNE of inputs and prototypes each centred by their own mean.")
    ] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the pictures.")] = Path("figures"),
    cache: Cache = None,
    no_cache: NoCache = False,
    text_column: TextColumn = None,
    label_column: LabelColumn = "label",
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """The paper's pictures of a run: t-SNE, nearest neighbours of prototypes, similarities; SVG."""
    from pouf.classifier import Classifier
    from pouf.data.labelled import read_labelled
    from pouf.inference import InferenceConfig
    from pouf.reporting.figures import look, paper_figures
    from pouf.reporting.svg import write
    from pouf.runs.folder import check_run

    calm_libraries()
    adapted = Classifier.load(check_run(run)).to(device_of(device))
    zero_shot = Classifier.load_zero_shot(run).to(device_of(device))
    labels = None
    if labelled:
        columns = columns_of(text_column, adapted.columns)
        data, labels = read_labelled(inputs, adapted.classes, adapted.backbone.modality, columns, label_column)
    else:
        data = read_inputs(adapted, inputs, text_column)
    comparison = look(zero_shot, adapted, data, labels, InferenceConfig(cache=cache_of(cache, no_cache)))
    files = [write(figure, out_dir / f"{name}.svg") for name, figure in paper_figures(comparison, centred).items()]
    if as_json:
        typer.echo(json.dumps({"files": [str(file) for file in files]}))
    elif not quiet:
        out.print("\n".join(map(str, files)), markup=False)
