"""`pouf review`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pouf.cli import _console as console
from pouf.cli._inputs import read_inputs
from pouf.cli._options import InferenceOptions, OutputOptions, RunFolder, TextColumn, grouped


@grouped
def review(
    run: RunFolder,
    place: InferenceOptions,
    output: OutputOptions,
    inputs: Annotated[
        Path | None, typer.Argument(metavar="[INPUT]", help="Images or texts.", show_default="the run's own")
    ] = None,
    n: Annotated[int, typer.Option("--n", help="How many labels to ask for.")] = 50,
    answers: Annotated[Path | None, typer.Option(help="The labels, as CSV or JSONL with id and label.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    text_column: TextColumn = None,
) -> None:
    """Pick the inputs most worth labelling; with --answers, say what the labels told."""
    from pouf.classifier import Classifier
    from pouf.inference import InferenceConfig
    from pouf.reporting.review_page import read_review, write_review
    from pouf.runs.folder import Run
    from pouf.validation.review import ask, conclude, read_answers

    console.calm_libraries()
    there = Run(run)
    if answers is not None:
        result = conclude(read_review(run), read_answers(answers, there.card["classes"]))
        if output.as_json:
            console.tell_json(result.to_json())
        elif not output.quiet:
            for name, estimate in (("zero-shot", result.zero_shot), ("adapted", result.adapted)):
                value, low, high = (100 * number for number in estimate)
                console.say(f"{name:10} {value:.1f} %, 95 % confidence interval {low:.1f} to {high:.1f}")
            console.say(f"From {result.answered} answers. {result.advice}")
            better = there.adapted if result.better == "adapted" else result.better
            if better is not None and better != there.verdict.advised:
                console.say(f"That is not what the run advises: pouf predict {run} INPUT --use {better}")
        return
    zero_shot, adapted = (
        Classifier.from_pretrained(run, use=use, device=place.place()) for use in ("zero-shot", there.adapted)
    )
    data = read_inputs(adapted, inputs, text_column, there)
    inference = InferenceConfig(workers=place.workers or 0, cache=place.features())
    questions, samples = ask(zero_shot, adapted, data, n, seed=seed, inference=inference)
    table, page = write_review(run, questions, samples, adapted.classes)
    if output.as_json:
        console.tell_json({"files": [str(table), str(page)]})
    elif not output.quiet:
        console.say(f"Fill in the labels in {table}, or click through {page}, which saves answers.csv. Then:")
        console.say(f"  pouf review {run} --answers {table}")
