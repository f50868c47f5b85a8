"""`pouf bench`: the paper's tables."""

from __future__ import annotations

from dataclasses import dataclass
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

    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"folder {str(folder)!r} is not empty: choose another, or remove it")
    make_data(folder)
    # With the paper's number of steps, even small stand-ins would take a day.
    console.print_out(f"Stand-ins are in {folder}. Try, each a few minutes:")
    console.print_out(f"  pouf bench run images --data {folder} --model pouf/tiny-clip --set steps=60 --seeds 0")
    console.print_out(f"  pouf bench run language --data {folder} --model {folder / LM} --set steps=4 --seeds 42")


@dataclass
class TableOptions(OutputOptions):
    tasks: Annotated[str | None, typer.Option(help="Only these tasks, as office31:webcam,RTE.")] = None
    methods: Annotated[str | None, typer.Option(help="Only these methods, as zero-shot,pouf-full.")] = None
    seeds: Annotated[str | None, typer.Option(help="Seeds, as 0,1,2.")] = None
    settings: Annotated[list[str] | None, typer.Option("--set", help="Change the recipes, as steps=50.")] = None
    unlabelled: Annotated[
        str, typer.Option(help="Texts to adapt to: kshot (the paper's 16 per class) or train, the training set.")
    ] = "kshot"
    limit: Annotated[int, typer.Option(help="Maximum test texts per task, the same in all rows; 0: all.")] = 0
    text_column: Annotated[
        str | None, typer.Option(help="Column of texts; a,b for pairs.", show_default="the usual names")
    ] = None
    label_column: Annotated[str | None, typer.Option(help="Column of labels.", show_default="the usual names")] = None
    grid: Annotated[
        str, typer.Option(help="paper: fine-tuning and LM-BFF with the batch size and rate that D_dev prefers.")
    ] = ""
    demo_filter: Annotated[
        str, typer.Option(help="A sentence encoder, for LM-BFF: demonstrations from the shots most like the text.")
    ] = ""
    jobs: Annotated[int, typer.Option(help="Cells to run in parallel.", min=1)] = 1
    resume: Annotated[bool, typer.Option("--resume", help="Continue in a folder with results of other settings.")] = (
        False
    )
    out: Annotated[Path, typer.Option(help="Folder of the results; a run there is continued.")] = Path("pouf-bench")


@bench.command("run")
@grouped()
def compute_table(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Name of a table: see pouf bench list.")],
    data: Annotated[Path, typer.Option(help="Folder that holds the data sets.")],
    model: Annotated[str, typer.Option(help="Hub name or local folder.")],
    options: TableOptions,
) -> None:
    """Compute a table. Cells that are finished are never computed again; those that failed are.

    An interrupted run continues where it stopped. A folder with results of other settings is refused, unless
    --resume says that they belong together.
    """
    from pouf.bench.run import run_table
    from pouf.bench.tables import Setting

    setting = Setting(
        str(data), model, parse_settings(options.settings), limit=options.limit, unlabelled=options.unlabelled,
        text_columns=tuple(_names(options.text_column) or ()), label_column=options.label_column or "",
        grid=options.grid, demo_filter=options.demo_filter,
    )  # fmt: skip
    seeds = tuple(split_numbers("--seeds", options.seeds, "whole numbers as 0,1,2", int))
    with grid_progress(options.hidden) as (start, advance):
        run = run_table(
            table, setting, options.out, tasks=_names(options.tasks), methods=_names(options.methods), seeds=seeds,
            jobs=options.jobs, resume=options.resume, on_cell=advance, on_start=start,
        )  # fmt: skip
    files, failed = ", ".join(map(str, run.files)), f"{len(run.failed)} of {len(run.results)} cells failed"
    facts = {"cells": len(run.results), "failed": len(run.failed), "files": [str(f) for f in run.files]}
    text = f"{run.files[0].read_text(encoding='utf-8')}\nIn {files}; {failed}"
    console.show_result(facts | {"rows": [row._asdict() for row in run.rows]}, text, options)
    if run.failed and len(run.failed) == len(run.results):
        raise InputError(f"no cell could be computed; the first: {run.failed[0].error}")


def _names(text: str | None) -> list[str] | None:
    return [name.strip() for name in text.split(",")] if text is not None else None
