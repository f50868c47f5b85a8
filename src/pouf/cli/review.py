"""`pouf review`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from pouf.cli import _console as console
from pouf.cli._inputs import load_run, read_inputs
from pouf.cli._options import IdColumn, InferenceOptions, OutputOptions, RunFolder, TextColumn, grouped
from pouf.cli._progress import encoding


@grouped
def review(
    run: RunFolder,
    place: InferenceOptions,
    output: OutputOptions,
    inputs: Annotated[
        Path | None, typer.Argument(metavar="INPUT", help="Images or texts.", show_default="the run's own")
    ] = None,
    n: Annotated[int, typer.Option("--n", help="How many labels to ask for.")] = 50,
    answers: Annotated[
        Path | None, typer.Option(help="The labels: CSV or JSONL with the columns id and label.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    text_column: TextColumn = None,
    id_column: IdColumn = None,
) -> None:
    """Pick the inputs most worth labelling; with --answers, say what the labels show."""
    from pouf.errors import InputError
    from pouf.reporting.review_page import PAGE, read_review, record, write_review
    from pouf.runs.folder import Run
    from pouf.validation.review import NONE, ask, read_answers, score_answers

    console.calm_libraries()
    there = Run(run)
    if answers is not None:
        classes = there.card.classes
        asked, given = read_review(run), read_answers(answers, classes, there.id_columns())
        if not given:
            raise InputError(
                f"no label is filled in yet in {str(answers)!r}: give each input you can answer the name of a class or "
                f"{NONE!r} in the column label, or click through {str(run / PAGE)!r} and give the file that it saves"
            )
        result = score_answers(asked, given, classes)
        record(run, result)
        if output.as_json:
            console.tell_json(result.to_json())
        elif not output.quiet:
            for name, estimate in (("zero-shot", result.zero_shot), ("adapted", result.adapted)):
                value, low, high = (100 * number for number in estimate)
                console.say(f"{name:10} {value:.1f} %, 95 % confidence interval {low:.1f} to {high:.1f}")
            none = f", {result.none_of_these} of them {NONE!r}" if result.none_of_these else ""
            console.say(f"From {result.answered} answers{none}. {result.advice}")
            console.say(f"The verdict and the report in {run} now say so.")
            better = there.adapted if result.better == "adapted" else result.better
            if better is not None and better != there.verdict.advised:
                console.say(f"That is not what the run advises: pouf predict {run} INPUT --use {better}")
        return
    zero_shot, adapted = load_run(run, place, "zero-shot", there.adapted)
    data = read_inputs(adapted, inputs, text_column, there, id_column)
    with encoding(place, output) as inference:
        questions, samples = ask(zero_shot, adapted, data, n, seed=seed, inference=inference)
    table, page = write_review(run, questions, samples, adapted.classes)
    if output.as_json:
        console.tell_json({"files": [str(table), str(page)]})
    elif not output.quiet:
        folder = shlex.quote(str(run))
        console.say(f"Answer the {len(questions.questions)} questions in a browser: {page}")
        console.say("Save the answers there; then, with the path of the file that your browser saved:")
        console.say(f"  pouf review {folder} --answers answers.csv")
        console.say(f"Or fill in the column label of {table} ({NONE!r} is an answer); then:")
        console.say(f"  pouf review {folder} --answers {shlex.quote(str(table))}")
