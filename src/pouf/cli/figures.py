"""`pouf figures`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pouf.cli import _console as console
from pouf.cli._inputs import labelled_or_not, load_run
from pouf.cli._options import InferenceOptions, LabelColumn, OutputOptions, RunFolder, TextColumn, grouped
from pouf.cli._progress import encoding


@grouped
def figures(
    run: RunFolder,
    place: InferenceOptions,
    output: OutputOptions,
    inputs: Annotated[
        Path | None,
        typer.Argument(
            metavar="INPUT",
            help="Images, texts or vectors; with labels, if --labelled.",
            show_default="the run's own",
        ),
    ] = None,
    labelled: Annotated[bool, typer.Option("--labelled", help="INPUT has labels, as for pouf evaluate.")] = False,
    centred: Annotated[
        bool, typer.Option("--centred", help="t-SNE of inputs and prototypes each centred by their own mean.")
    ] = False,
    classes: Annotated[
        str | None,
        typer.Option(
            help="Classes in the figure of nearest neighbours, e.g. Speaker,Puncher.",
            show_default="those that changed most",
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Some of the figures: tsne,neighbours,similarity.", show_default="all")
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the pictures.")] = Path("figures"),
    text_column: TextColumn = None,
    label_column: LabelColumn = "label",
) -> None:
    """The paper's pictures of a run: t-SNE, nearest neighbours of prototypes, similarities; SVG."""
    from pouf.data.class_names import find_class
    from pouf.errors import one_of
    from pouf.files import check_writable
    from pouf.reporting.figures import FIGURES, look, paper_figures
    from pouf.reporting.svg import write
    from pouf.runs.folder import Run

    console.calm_libraries()
    check_writable(out_dir / "figure.svg")
    there = Run(run)
    wanted = [
        one_of("figure", name.strip(), {n: n for n in FIGURES}) for name in (only or ",".join(FIGURES)).split(",")
    ]
    zero_shot, adapted = load_run(run, place, "zero-shot", there.adapted)
    chosen = [find_class(name, adapted.classes) for name in classes.split(",")] if classes else []
    data, labels = labelled_or_not(adapted, inputs, labelled, text_column, label_column, there)
    with encoding(place, output) as inference:
        comparison = look(lambda: zero_shot, lambda: adapted, data, labels, inference)
    drawn = paper_figures(comparison, centred, chosen, wanted)
    files = [write(figure, out_dir / f"{name}.svg") for name, figure in drawn.items()]
    if output.as_json:
        console.tell_json({"files": [str(file) for file in files]})
    elif not output.quiet:
        console.say("\n".join(map(str, files)))
