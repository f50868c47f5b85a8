"""`pouf bench`: the paper's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pouf.cli import _console as console
from pouf.cli._options import OutputOptions, grouped, parse_settings, split_numbers
from pouf.cli._progress import grid_progress
from pouf.errors import InputError

bench = typer.Typer(no_args_is_help=True, help="The paper's tables, on your data or on small stand-ins.")


@bench.command("list")
def list_tables() -> None:
    """The tables, with their tasks and methods."""
    from pouf.bench.tables import TABLES

    for name, table in TABLES.items():
        also = f"\n  and      {' '.join(table.extra)}" if table.extra else ""
        console.print_out(f"{name}  {table.about}\n  tasks    {' '.join(table.tasks)}{also}")
        console.print_out(f"  methods  {' '.join(table.methods)}\n  seeds    {' '.join(map(str, table.seeds))}")


@bench.command("make-data")
def make_data(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write to.")]) -> None:
    """Small stand-ins in the layouts of the paper's data, to try every command offline."""
    from pouf.bench.standins import LM, make_data

    console.silence_libraries()
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"folder {str(folder)!r} is not empty: choose another, or remove it")
    make_data(folder)
    # With the paper's number of steps, even small stand-ins would take a day.
    console.print_out(f"Stand-ins are in {folder}. Try, each a few minutes:")
    console.print_out(f"  pouf bench run images --data {folder} --model pouf/tiny-clip --set steps=60 --seeds 0")
    console.print_out(f"  pouf bench run language --data {folder} --model {folder / LM} --set steps=4 --seeds 42")


@bench.command("run")
@grouped()
def compute_table(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Name of a table: see pouf bench list.")],
    data: Annotated[Path, typer.Option(help="Folder that holds the data sets.")],
    model: Annotated[str, typer.Option(help="Hub name or local folder.")],
    output: OutputOptions,
    tasks: Annotated[str | None, typer.Option(help="Only these tasks, e.g. office31:webcam,RTE.")] = None,
    methods: Annotated[str | None, typer.Option(help="Only these methods, e.g. zero-shot,pouf-full.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, e.g. 0,1,2.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Change the recipes, e.g. steps=50 or optimisation.lr=1e-3.")
    ] = None,
    unlabelled: Annotated[
        str,
        typer.Option(
            help="Texts to adapt to: kshot, the paper's 16 per class for each seed, or train, the training set."
        ),
    ] = "kshot",
    limit: Annotated[
        int,
        typer.Option(help="Maximum test texts per language task, drawn once and the same for all rows; 0 takes all."),
    ] = 0,
    text_column: Annotated[
        str | None,
        typer.Option(
            help="Column of texts in the files of language tasks; two, as a,b, for pairs.",
            show_default="the usual names",
        ),
    ] = None,
    label_column: Annotated[
        str | None, typer.Option(help="Column of labels there.", show_default="the usual names")
    ] = None,
    grid: Annotated[
        str,
        typer.Option(
            help="paper: fine-tuning and LM-BFF as the best on D_dev of batch sizes 2, 4, 8 and rates 1e-5, 2e-5, 5e-5."
        ),
    ] = "",
    demo_filter: Annotated[
        str,
        typer.Option(
            help="A sentence encoder: LM-BFF's demonstrations come from the half of each class most like the text."
        ),
    ] = "",
    jobs: Annotated[int, typer.Option(help="Cells to run in parallel.", min=1)] = 1,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue in a folder that holds results of this table with other settings."),
    ] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the results; a run there is continued.")] = Path(
        "pouf-bench"
    ),
) -> None:
    """Compute a table. Cells that are finished are never computed again; those that failed are.

    An interrupted run continues where it stopped. A folder with results of other settings is refused, unless
    --resume says that they belong together.
    """
    from pouf.bench.run import run_table
    from pouf.bench.tables import Setting

    console.silence_libraries()
    setting = Setting(
        str(data), model, parse_settings(settings or []), limit=limit, unlabelled=unlabelled,
        text_columns=tuple(_names(text_column) or ()), label_column=label_column or "",
        grid=grid, demo_filter=demo_filter,
    )  # fmt: skip
    numbers = tuple(split_numbers("--seeds", seeds, "whole numbers as 0,1,2", int))
    with grid_progress(output.hidden) as (start, advance):
        run = run_table(
            table, setting, out_dir, tasks=_names(tasks), methods=_names(methods), seeds=numbers, jobs=jobs,
            resume=resume, on_cell=advance, on_start=start,
        )  # fmt: skip
    facts = {"cells": len(run.results), "failed": len(run.failed), "files": [str(f) for f in run.files]}
    if output.as_json:
        console.print_json(facts | {"rows": [row._asdict() for row in run.rows]})
    elif not output.quiet:
        console.print_out(run.files[0].read_text(encoding="utf-8"))
        console.print_out(f"In {', '.join(map(str, run.files))}; {facts['failed']} of {facts['cells']} cells failed")
    if run.failed and len(run.failed) == len(run.results):
        raise InputError(f"no cell could be computed; the first: {run.failed[0].error}")


def _names(text: str | None) -> list[str] | None:
    return [name.strip() for name in text.split(",")] if text is not None else None
