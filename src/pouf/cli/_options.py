"""Options that several commands share, and what they stand for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from pouf.errors import InputError

if TYPE_CHECKING:
    from pouf.classifier import Classifier
    from pouf.data.base import Unlabelled
    from pouf.data.cache import FeatureCache
    from pouf.runs.folder import Use

# Options in groups of --help.
DataOption = partial(typer.Option, rich_help_panel="Data")
MethodOption = partial(typer.Option, rich_help_panel="Model and method")
TrainingOption = partial(typer.Option, rich_help_panel="Training")
SpeedOption = partial(typer.Option, rich_help_panel="Speed and memory")
OutputOption = partial(typer.Option, rich_help_panel="Output")

ClassNames = Annotated[str | None, DataOption(help="Names as a,b,c, or a file with one a line.")]
ImagesFolder = Annotated[Path | None, DataOption(help="Folder of unlabelled images.")]
TextsFile = Annotated[Path | None, DataOption(help="CSV, JSONL, Parquet or text file of unlabelled texts.")]
FeaturesFile = Annotated[
    str | None, DataOption(help="Vectors instead of a model and data: npy, npz, safetensors, Parquet.")
]
PrototypesFile = Annotated[str | None, DataOption(help="One vector a class, for --features.")]
Model = Annotated[str | None, MethodOption(help="Hub name or local folder, as openai/clip-vit-base-patch16.")]
Templates = Annotated[
    list[str] | None,
    MethodOption(
        help="Sentence with {} for the class; repeat for several, or give a file. For a masked language model, "
        "one with {text} and [MASK]."
    ),
]
Words = Annotated[
    str | None, MethodOption(help="Word for [MASK] of each class, as terrible,great; several as bad|awful,good.")
]
MaxLength = Annotated[int | None, MethodOption(help="Most tokens of a text in its template.")]
Temperature = Annotated[float | None, MethodOption(help="T of the model.", show_default="its own; 0.01 for --features")]
RecipeName = Annotated[str | None, TrainingOption(help="Name of a recipe, or a TOML file.")]
Tuner = Annotated[str | None, TrainingOption(help="full, prompt or layernorm.")]
Steps = Annotated[int | None, TrainingOption(help="Number of updates.")]
BatchSize = Annotated[int | None, TrainingOption(help="Samples a step; several times the number of classes.")]
Seed = Annotated[int | None, TrainingOption(help="Seed of everything random.")]
Quiet = Annotated[bool, OutputOption("--quiet", "-q", help="No progress, no tables; errors and alarms only.")]
Json = Annotated[bool, OutputOption("--json", help="One JSON object on standard output, and nothing else there.")]
ReportOption = Annotated[
    bool, OutputOption("--report/--no-report", help="Predictions and a report in the run as well.")
]
Device = Annotated[str, SpeedOption(help="cpu, cuda, mps; auto takes the fastest there is.")]
TextColumn = Annotated[
    str | None,
    DataOption(help="Column of the texts in CSV, JSONL and Parquet files; a,b for pairs.", show_default="text"),
]
Workers = Annotated[int | None, SpeedOption(help="Processes that read and decode ahead.", show_default="0")]
Cache = Annotated[
    Path | None,
    SpeedOption(help="Folder where features are kept and found again.", show_default="$POUF_CACHE or ~/.cache/pouf"),
]
NoCache = Annotated[bool, SpeedOption("--no-cache", help="Keep no features and look for none.")]
UseOption = Annotated[
    str, typer.Option("--use", help="auto takes what the run advises; or last, chosen, zero-shot.", metavar="WHICH")
]
LabelColumn = Annotated[str, DataOption(help="Column of the labels in text files.")]


T = TypeVar("T")


def one_of(option: str, value: str, choices: Mapping[str, T]) -> T:
    if value not in choices:
        raise InputError(f"unknown {option} {value!r}: choose one of {', '.join(choices)}")
    return choices[value]


def columns_of(given: str | None, usual: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that make a sample: as many as the template or the model reads."""
    if given is None:
        return usual
    columns = tuple(given.split(","))
    if len(columns) != len(usual):
        expected = "one column" if len(usual) == 1 else "two columns, as question,answer"
        raise InputError(f"--text-column {given!r} names {len(columns)} columns, expected {expected}")
    return columns


def read_inputs(classifier: Classifier, inputs: Path, text_column: str | None) -> Unlabelled:
    """Images, texts or vectors, as the classifier reads them."""
    from pouf.data.texts import Texts

    if classifier.backbone.modality == "text":
        return Texts.from_file(inputs, columns_of(text_column, classifier.columns))
    return classifier.unlabelled(inputs)


def cache_of(folder: Path | None, without: bool) -> FeatureCache | None:
    from pouf.data.cache import FeatureCache

    return None if without else FeatureCache(folder)


def device_of(name: str) -> str:
    import torch

    if name in ("auto", "cuda") and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        return f"cuda:{os.environ['LOCAL_RANK']}"
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"can't use device {name!r}: {str(error).splitlines()[0]}") from None
    return name


def use_of(text: str) -> Use | Literal["auto"]:
    if text in ("auto", "last", "chosen", "zero-shot"):
        return text  # type: ignore[return-value]
    raise InputError(f"unknown --use {text!r}: choose one of auto, last, chosen, zero-shot")
