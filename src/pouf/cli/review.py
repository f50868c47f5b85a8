"""`pouf review`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pouf.cli._console import calm_libraries, out
from pouf.cli._options import Cache, Device, Json, NoCache, Quiet, TextColumn, cache_of, device_of
from pouf.cli.report import inputs_of


def review(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    inputs: Annotated[
        Path | None, typer.Argument(metavar="[INPUT]", help="Images or texts.", show_default="the run's own")
    ] = None,
    n: Annotated[int, typer.Option("--n", help="How many labels to ask for.")] = 50,
    answers: Annotated[Path | None, typer.Option(help="The labels, as CSV or JSONL with id and label.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    cache: Cache = None,
    no_cache: NoCache = False,
    text_column: TextColumn = None,
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Ask for the labels that would tell most; with --answers, say what they told."""
    from pouf.classifier import Classifier
    from pouf.inference import InferenceConfig
    from pouf.runs.folder import advised_use, check_run
    from pouf.saving import read_card
    from pouf.validation.review import ask, conclude, read_answers

    calm_libraries()
    check_run(run)
    if answers is not None:
        verdict = conclude(run, read_answers(answers, read_card(run)["classes"]))
        if as_json:
            told = verdict._asdict()
            told |= {"zero_shot": verdict.zero_shot._asdict(), "adapted": verdict.adapted._asdict()}
            typer.echo(json.dumps(told))
        elif not quiet:
            for name, estimate in (("zero-shot", verdict.zero_shot), ("adapted", verdict.adapted)):
                value, low, high = (100 * number for number in estimate)
                out.print(f"{name:10} {value:.1f} %, between {low:.1f} and {high:.1f}")
            out.print(f"From {verdict.answered} answers. {verdict.advice}", soft_wrap=True)
            if verdict.better is not None and verdict.better != advised_use(run):
                out.print(
                    f"That is not what the run advises: pouf predict {run} INPUT --use {verdict.better}", markup=False
                )
        return
    data = inputs_of(run, Classifier.load(run), inputs, text_column)
    inference = InferenceConfig(cache=cache_of(cache, no_cache))
    files = ask(run, data, n, seed=seed, inference=inference, device=device_of(device))
    if as_json:
        typer.echo(json.dumps({"files": [str(file) for file in files]}))
    elif not quiet:
        out.print(f"Fill in the labels in {files[0]}, or click through {files[1]}. Then:", markup=False, soft_wrap=True)
        out.print(f"  pouf review {run} --answers answers.csv", markup=False, soft_wrap=True)
