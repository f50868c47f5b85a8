"""`pouf demo`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pouf.cli._console import calm_libraries, out, show_evaluation, tell_trust, training_progress
from pouf.cli._options import Json, Quiet, one_of


def demo(
    tune: Annotated[str, typer.Option(help="What to train: full or prompt.")] = "full",
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the run.")] = Path("pouf-demo"),
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Teach a model that knows printed characters to read handwriting, offline, in under a minute."""
    from pouf.demo import demo as run_demo
    from pouf.recipe import Recipe
    from pouf.runs.folder import check_new, read_verdict

    calm_libraries()
    check_new(out_dir)
    recipe = Recipe.load(one_of("--tune", tune, {"full": "demo", "prompt": "demo-prompt"})).with_settings(seed=seed)
    with training_progress(recipe.steps, quiet or as_json) as (say, step):
        result = run_demo(out_dir, recipe, command=sys.argv, on_start=say, on_step=step)
    tell_trust(*read_verdict(out_dir), quiet or as_json)
    facts = result.evaluation.to_json() | {
        "seconds": round(result.seconds, 1), "run": str(result.run), "report": str(result.report),
        "verdict": read_verdict(out_dir)[0],
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(facts))
    elif not quiet:
        show_evaluation(result.evaluation, f"{result.evaluation.n:,} handwritten digits, {tune} tuning, seed {seed}")
        out.print(f"{result.seconds:.0f} s. The run is in {result.run}, the images in {result.images}. Try:")
        out.print(f"  the report in a browser: {result.report}")
        out.print(f"  pouf predict {result.run} {result.images}\n  pouf evaluate {result.run} {result.images}")
