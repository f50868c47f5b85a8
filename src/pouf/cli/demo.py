"""`pouf demo`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pouf.cli import _console as console
from pouf.cli._options import OutputOptions, grouped
from pouf.cli._progress import progress
from pouf.errors import one_of


@grouped
def demo(
    output: OutputOptions,
    tune: Annotated[str, typer.Option(help="What to train: full or prompt.")] = "full",
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the run.")] = Path("pouf-demo"),
) -> None:
    """Teach a model that knows printed characters to read handwriting, offline, in under a minute."""
    from pouf.demo import demo as run_demo
    from pouf.recipe import Recipe
    from pouf.runs.writer import check_new

    console.calm_libraries()
    check_new(out_dir)
    recipe = Recipe.load(one_of("--tune", tune, {"full": "demo", "prompt": "demo-prompt"})).with_settings(seed=seed)
    with progress(output.hidden) as shown:
        result = run_demo(out_dir, recipe, command=sys.argv, callbacks=[shown])
    verdict, report = result.adaptation.verdict, result.adaptation.files["report"]
    console.show_verdict(verdict, output.hidden)
    if output.as_json:
        facts = {"seconds": round(result.seconds, 1), "run": str(out_dir), "report": str(report)}
        console.tell_json(result.evaluation.to_json() | facts | {"verdict": verdict.message})
    elif not output.quiet:
        title = f"{result.evaluation.n:,} handwritten digits, {tune} tuning, seed {seed}"
        console.show_evaluation(result.evaluation, title)
        console.say(f"{result.seconds:.0f} s. The run is in {out_dir}, the images in {result.images}. Try:")
        console.say(f"  the report in a browser: {report}")
        console.say(f"  pouf evaluate {out_dir} {result.images}\n  pouf predict {out_dir} your-own-digits/")
