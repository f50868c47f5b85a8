"""`pouf adapt`, `pouf search` and `pouf demo`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pouf.cli import _console as console
from pouf.cli._inputs import AdaptInputs, adapt_arguments, check_options, read_adapt_inputs, split_numbers, trackers
from pouf.cli._options import OutputOption, OutputOptions, RunOptions, TrainingOption, grouped
from pouf.cli._progress import ProgressReporter, progress
from pouf.errors import one_of

if TYPE_CHECKING:
    from pouf.training.search import Search


COMMON = (
    "data", "classes", "text_column", "shots", "answers", "model", "template", "prior", "preset", "max_minutes", "out",
    "resume", "overwrite",
)  # fmt: skip


@grouped(*COMMON)
def adapt(
    options: RunOptions,
    plan: Annotated[bool, OutputOption("--plan", help="Show what would be done, and train nothing.")] = False,
) -> None:
    """Adapt a model to unlabelled images or texts, given the names of the classes.

    \b
    pouf adapt photos/ --classes "cat,dog,sea lion"
    pouf adapt reviews.csv --text-column review --classes classes.toml
    """

    def call(inputs: AdaptInputs, reporter: ProgressReporter, arguments: dict[str, Any]) -> Any:
        return inputs.classifier.adapt(inputs.data, **arguments)

    def make(inputs: AdaptInputs, reporter: ProgressReporter, arguments: dict[str, Any]) -> Any:
        from pouf.options import AdaptOptions
        from pouf.training.plan import make_plan

        return make_plan(inputs.classifier, inputs.data, AdaptOptions(**arguments), cache=arguments["cache"])

    if plan:
        _run(options, make, console.show_plan, writes=False)
    else:
        _run(options, call, console.show_adaptation)


@grouped(*COMMON, "lrs", "lambdas")
def search(
    options: RunOptions,
    lrs: Annotated[
        str | None,
        TrainingOption(help="Learning rates to try, e.g. 1e-3,3e-3.", show_default="⅓×, 1× and 3× the recipe's rate"),
    ] = None,
    lambdas: Annotated[str | None, TrainingOption(help="Weights of the mutual information to try.")] = None,
) -> None:
    """Try a few learning rates (and lambdas), and choose among all their steps without labels."""
    named = {"optimisation.lr": ("--lrs", lrs), "objective.information": ("--lambdas", lambdas)}
    values = {name: split_numbers(*given, "numbers as 1e-3,3e-3") for name, given in named.items()}
    grid = {name: tried for name, tried in values.items() if tried}

    def call(inputs: AdaptInputs, reporter: ProgressReporter, arguments: dict[str, Any]) -> Search:
        def on_trial(settings: dict[str, Any]) -> None:
            reporter.say(console.format_settings(settings))

        return inputs.classifier.search(inputs.data, grid or None, on_trial=on_trial, **arguments)

    _run(options, call, console.show_search)


def _run(
    options: RunOptions,
    call: Callable[[AdaptInputs, ProgressReporter, dict[str, Any]], Any],
    show: Callable[[Any, AdaptInputs, OutputOptions], None],
    writes: bool = True,
) -> None:
    """Read the inputs, call the library, print the result."""
    from pouf.parallel.process_group import launched_sharding
    from pouf.runs.run_folder import check_new

    console.silence_libraries()
    if options.method == "list":
        console.show_methods()
        return
    check_options(options)
    if writes and console.is_main():
        check_new(options.out, options.resume, options.overwrite)
    callbacks = trackers(options)
    with progress(options.hidden) as reporter:
        inputs = read_adapt_inputs(
            options, reporter, shard=options.changes.get("compute.shard", False) or launched_sharding()
        )
        result = call(inputs, reporter, {**adapt_arguments(inputs, options), "callbacks": [reporter, *callbacks]})
    if console.is_main():
        show(result, inputs, options)


@grouped()
def demo(
    output: OutputOptions,
    tune: Annotated[str, typer.Option(help="What to train: full or prompt.")] = "full",
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    out: Annotated[Path, OutputOption(help="Folder of the run.")] = Path("pouf-demo"),
) -> None:
    """Teach a model that knows printed characters to read handwriting, offline, in under a minute."""
    from pouf.demo import demo as run_demo
    from pouf.recipe import Recipe
    from pouf.runs.run_folder import check_new

    console.silence_libraries()
    check_new(out)
    recipe = Recipe.load(one_of("--tune", tune, {"full": "demo", "prompt": "demo-prompt"})).with_settings(seed=seed)
    with progress(output.hidden) as reporter:
        result = run_demo(out, recipe, command=sys.argv, callbacks=[reporter])
    verdict, report = result.adaptation.verdict, result.adaptation.files["report"]
    console.show_verdict(verdict, output.hidden)
    if output.as_json:
        facts = {"seconds": round(result.seconds, 1), "run": str(out), "report": str(report)}
        console.print_json(result.evaluation.to_json() | facts | {"verdict": verdict.message})
    elif not output.quiet:
        title = f"{result.evaluation.n:,} handwritten digits, {tune} tuning, seed {seed}"
        console.show_evaluation(result.evaluation, title)
        console.print_out(f"{result.seconds:.0f} s. The run is in {out}, the images in {result.images}. Try:")
        console.print_out(f"  the report in a browser: {report}")
        console.print_out(f"  pouf evaluate {out} {result.images}\n  pouf predict {out} your-own-digits/")
