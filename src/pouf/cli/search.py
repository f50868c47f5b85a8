"""`pouf tune`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pouf.cli._console import bar, calm_libraries, console, out, tell_skipped, tell_trust
from pouf.cli._inputs import build_classifier, check_together, read_data, read_prompt_spec
from pouf.cli._options import (
    BatchSize,
    Cache,
    ClassNames,
    Device,
    FeaturesFile,
    ImagesFolder,
    Json,
    MaxLength,
    Model,
    NoCache,
    OutputOption,
    PrototypesFile,
    Quiet,
    RecipeName,
    ReportOption,
    Seed,
    Steps,
    Temperature,
    Templates,
    TextColumn,
    TextsFile,
    TrainingOption,
    Tuner,
    Words,
    cache_of,
    device_of,
)
from pouf.cli._outcome import tell_files, use_run
from pouf.errors import InputError

if TYPE_CHECKING:
    from pouf.classifier import Classifier


def tune(
    classes: ClassNames = None,
    images: ImagesFolder = None,
    texts: TextsFile = None,
    features: FeaturesFile = None,
    prototypes: PrototypesFile = None,
    text_column: TextColumn = None,
    model: Model = None,
    template: Templates = None,
    words: Words = None,
    max_length: MaxLength = None,
    temperature: Temperature = None,
    lrs: Annotated[
        str | None,
        TrainingOption(help="Learning rates to try, as 1e-3,3e-3.", show_default="a third, once, three times"),
    ] = None,
    lambdas: Annotated[str | None, TrainingOption(help="Weights of the mutual information to try, as 0.3,1.")] = None,
    recipe: RecipeName = None,
    tune: Tuner = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    cache: Cache = None,
    no_cache: NoCache = False,
    device: Device = "auto",
    out_dir: Annotated[Path, OutputOption("--out", help="Folder of the run.")] = Path("pouf-tuned"),
    report: ReportOption = True,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Try a few learning rates (and lambdas), and choose among all their steps without labels."""
    from pouf.inference import InferenceConfig
    from pouf.recipe import Recipe
    from pouf.runs.folder import SKIPPED, check_new
    from pouf.training.methods import USUAL
    from pouf.training.search import grid, tune_run

    calm_libraries()
    check_new(out_dir)
    names, templates, label_words, cloze = read_prompt_spec(classes, template, words, max_length)
    kind, data = read_data(images, texts, features, None, cloze, text_column)
    check_together(kind, model, names, prototypes, max_length, cloze)
    assert data is not None
    changes = {
        "tuning.name": tune, "steps": steps, "batch_size": batch_size, "seed": seed, "temperature": temperature,
    }  # fmt: skip
    settled = Recipe.load(recipe or USUAL[kind]).with_settings(
        **{key: value for key, value in changes.items() if value is not None}
    )
    rate = settled.optimisation.lr
    rates = _numbers("--lrs", lrs) or [rate / 3, rate, rate * 3]
    weights = _numbers("--lambdas", lambdas) or [settled.objective.information]
    settings = grid(**{"optimisation.lr": rates, "objective.information": weights})

    def build() -> Classifier:
        classifier = build_classifier(None, kind, model, names, templates, label_words, max_length, prototypes, 0)
        return classifier.to(device_of(device))

    with bar("trials", len(settings) * settled.steps, quiet or as_json) as advance:

        def started(changes: dict[str, Any]) -> Any:
            if not (quiet or as_json):
                console.print(_told(changes), markup=False)
            return lambda step: advance(1)

        tuning, trust = tune_run(
            build, data, settled, settings, out_dir, cache=cache_of(cache, no_cache), command=sys.argv, on_trial=started
        )
    if os.environ.get("RANK", "0") != "0":  # of several processes the first speaks
        return
    chosen = tuning.trials[tuning.best].settings if tuning.best is not None else None
    facts: dict[str, Any] = {
        "run": str(out_dir), "settings": chosen, "step": tuning.step, "trials": len(settings), "use": trust.use,
        "verdict": trust.words(), "alarms": [alarm.name for alarm in trust.alarms],
    }  # fmt: skip
    tell_trust(trust.words(), trust.use != "zero-shot", quiet or as_json)
    if report:
        facts |= use_run(out_dir, data, InferenceConfig(cache=cache_of(cache, no_cache)), device_of(device))
    if as_json:
        typer.echo(json.dumps(facts))
        return
    if not quiet:
        for trial in tuning.trials:
            if trial.why_not:
                out.print(f"not believed: {_told(trial.settings)}: {trial.why_not}", markup=False, soft_wrap=True)
        if chosen is not None:
            out.print(f"Chosen without labels: {_told(chosen)}.", markup=False, soft_wrap=True)
        tell_skipped(data, out_dir / SKIPPED)
        tell_files(facts)


def _told(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def _numbers(option: str, text: str | None) -> list[float]:
    try:
        return [float(value) for value in text.split(",")] if text else []
    except ValueError:
        raise InputError(f"{option} {text!r}: expected numbers as 1e-3,3e-3") from None
