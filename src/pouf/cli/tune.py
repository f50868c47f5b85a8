"""`pouf tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pouf.cli.options import Cache, Device, Json, NoCache, Quiet, TextColumn, cache_of, columns_of, device_of
from pouf.errors import InputError
from pouf.terminal import bar, calm_libraries, console, out


def tune(
    model: Annotated[str, typer.Option(help="Hub name or local folder.")],
    classes: Annotated[str, typer.Option(help="Names as a,b,c, or a file with one a line.")],
    images: Annotated[Path | None, typer.Option(help="Folder of unlabelled images.")] = None,
    texts: Annotated[Path | None, typer.Option(help="File of unlabelled texts.")] = None,
    template: Annotated[list[str] | None, typer.Option(help="Sentence with {}, or with {text} and [MASK].")] = None,
    words: Annotated[str | None, typer.Option(help="Word for [MASK] of each class.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Name of a recipe, or a TOML file.")] = None,
    lrs: Annotated[
        str | None, typer.Option(help="Learning rates to try, as 1e-3,3e-3.", show_default="a third, once, three times")
    ] = None,
    lambdas: Annotated[str | None, typer.Option(help="Weights of the mutual information to try.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of updates of each trial.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    cache: Cache = None,
    no_cache: NoCache = False,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the chosen classifier.")] = Path("pouf-tuned"),
    text_column: TextColumn = None,
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Try a few learning rates (and lambdas), and choose among all their steps without labels."""
    from pouf.classifier import Classifier
    from pouf.cloze import make_cloze, read_words
    from pouf.data.images import Images
    from pouf.data.texts import Texts
    from pouf.methods import USUAL
    from pouf.prompts import read_classes, read_templates
    from pouf.recipe import Recipe
    from pouf.runs import check_new
    from pouf.tuning import grid, write_tuning
    from pouf.tuning import tune as run_trials

    calm_libraries()
    check_new(out_dir)
    if (images is None) == (texts is None):
        raise InputError("give either --images DIR or --texts FILE")
    names = read_classes(classes)
    templates = read_templates(template) if template else None
    label_words = read_words(words) if words is not None else None
    cloze = make_cloze(names, templates, label_words, None)
    kind = USUAL["image" if images is not None else "text" if cloze is None else "cloze"]
    settled = Recipe.load(recipe or kind).with_settings(
        **{key: value for key, value in {"steps": steps, "seed": seed}.items() if value is not None}
    )
    rate = settled.optimisation.lr
    rates = _numbers("--lrs", lrs) or [rate / 3, rate, rate * 3]
    weights = _numbers("--lambdas", lambdas) or [settled.objective.information]
    settings = grid(**{"optimisation.lr": rates, "objective.information": weights})
    columns = columns_of(text_column, cloze.columns if cloze is not None else ("text",))
    data = Images.from_folder(images) if images is not None else Texts.from_file(texts or "", columns)

    def build() -> Classifier:
        classifier = Classifier.from_pretrained(model, names, templates, words=label_words)
        return classifier.to(device_of(device))

    with bar("trials", len(settings) * settled.steps, quiet or as_json) as advance:

        def started(changes: dict[str, Any]) -> Any:
            if not (quiet or as_json):
                console.print(", ".join(f"{name} {value:g}" for name, value in changes.items()), markup=False)
            return lambda step: advance(1)

        tuning, classifier = run_trials(
            build, data, settled, settings, cache=cache_of(cache, no_cache), on_trial=started
        )
    classifier.save(out_dir)
    write_tuning(tuning, out_dir)
    chosen = tuning.trials[tuning.best].settings if tuning.best is not None else None
    facts = {"out": str(out_dir), "settings": chosen, "step": tuning.step, "trials": len(settings)}
    if as_json:
        typer.echo(json.dumps(facts))
    elif not quiet:
        for trial in tuning.trials:
            if trial.why_not:
                told = ", ".join(f"{name} {value:g}" for name, value in trial.settings.items())
                out.print(f"not believed: {told}: {trial.why_not}", markup=False, soft_wrap=True)
        if chosen is None:
            out.print("An alarm speaks against every trial: zero-shot is kept. Try smaller learning rates.")
        else:
            told = ", ".join(f"{name} {value:g}" for name, value in chosen.items())
            out.print(f"Chosen without labels: {told}, step {tuning.step}. It is in {out_dir}.", soft_wrap=True)


def _numbers(option: str, text: str | None) -> list[float]:
    try:
        return [float(value) for value in text.split(",")] if text else []
    except ValueError:
        raise InputError(f"{option} {text!r}: expected numbers as 1e-3,3e-3") from None
