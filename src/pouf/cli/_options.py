"""Options that several commands share, in groups, and what they stand for."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from pouf.errors import InputError

if TYPE_CHECKING:
    from pouf.inference.cache import FeatureCache

# Options in groups of --help.
DataOption = partial(typer.Option, rich_help_panel="Data")
ModelOption = partial(typer.Option, rich_help_panel="Model and method")
TrainingOption = partial(typer.Option, rich_help_panel="Training")
SpeedOption = partial(typer.Option, rich_help_panel="Speed and memory")
OutputOption = partial(typer.Option, rich_help_panel="Output")

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
TextColumn = Annotated[
    str | None,
    DataOption(help="Column of the texts in a table; a,b for pairs.", show_default="text"),
]
IdColumn = Annotated[
    str | None,
    DataOption(
        help="Columns that name the inputs, as id or id,text, instead of row numbers.",
        show_default="row numbers",
    ),
]
LabelColumn = Annotated[str, DataOption(help="Column of the labels in text files.")]
TrackerOption = Annotated[
    list[str] | None,
    OutputOption(
        help="Log steps and verdict to tensorboard (in its folder of the run), wandb, mlflow or trackio; repeatable."
    ),
]
UseOption = Annotated[
    str, typer.Option("--use", help="What the run advises, or its last or chosen step, or zero-shot.", metavar="WHICH")
]


@dataclass
class DataOptions:
    """What to adapt to."""

    data: Annotated[
        Path | None,
        typer.Argument(metavar="DATA", help="Folder of images, or a file of texts or vectors, without labels."),
    ] = None
    classes: Annotated[
        str | None,
        DataOption(help="Names as a,b,c, or a file: one name per line, or descriptions of each in CSV, JSON or TOML."),
    ] = None
    images: Annotated[Path | None, DataOption(help="Like DATA, but always read as a folder of images.")] = None
    texts: Annotated[
        Path | None, DataOption(help="Like DATA, but always read as texts: CSV, JSONL, JSON, Parquet, Excel, text.")
    ] = None
    features: Annotated[
        str | None, DataOption(help="Vectors instead of a model and data: npy, npz, safetensors, Parquet.")
    ] = None
    prototypes: Annotated[str | None, DataOption(help="One vector per class, for --features.")] = None
    shots: Annotated[
        Path | None, DataOption(help="A few labelled examples to learn from as well: a file, or a folder of images.")
    ] = None
    text_column: TextColumn = None
    label_column: LabelColumn = "label"
    id_column: IdColumn = None


@dataclass
class ModelOptions:
    """What to adapt, and how it is asked."""

    model: Annotated[
        str | None,
        ModelOption(
            help="Hub name or local folder.", show_default="a CLIP for images, a MiniLM for texts, RoBERTa for [MASK]"
        ),
    ] = None
    revision: Annotated[str | None, ModelOption(help="Revision of the model on the hub.")] = None
    template: Annotated[
        list[str] | None,
        ModelOption(
            help="Sentence with {} for the class; repeat for several, or give a file. For a masked language model, "
            "one with {text} and [MASK]."
        ),
    ] = None
    words: Annotated[
        str | None,
        ModelOption(
            help="Word for [MASK] of each class, e.g. terrible,great, or several per class, e.g. bad|awful,good."
        ),
    ] = None
    max_length: Annotated[int | None, ModelOption(help="Maximum tokens, text plus template.")] = None
    temperature: Annotated[
        float | None, ModelOption(help="Softmax temperature.", show_default="the model's; 0.01 for --features")
    ] = None
    method: Annotated[
        str, ModelOption(help="pouf, or a baseline to compare it with: run --method list to see them all.")
    ] = "pouf"
    demonstrations: Annotated[
        bool, ModelOption("--demonstrations", help="Show one shot per class beside every text, as LM-BFF does.")
    ] = False
    prior: Annotated[
        str | None,
        ModelOption(
            help="Class proportions: uniform, estimated, paper, or known ones, e.g. 0.7,0.3.",
            show_default="of the recipe",
        ),
    ] = None
    refine: Annotated[
        bool | None, ModelOption("--refine/--no-refine", help="Refine all predictions jointly after training.")
    ] = None


@dataclass
class TrainingOptions:
    """Settings of the recipe; `SETTINGS` says which."""

    preset: Annotated[
        str | None,
        TrainingOption(
            help="fast (every input is encoded once), balanced, or paper (full tuning of images needs a GPU).",
            show_default="fast for images, balanced for all else",
        ),
    ] = None
    max_minutes: Annotated[
        float | None, TrainingOption(help="Use the most thorough preset that is expected to finish in time.")
    ] = None
    recipe: Annotated[str | None, TrainingOption(help="Name of a recipe, or a TOML file.")] = None
    tune: Annotated[str | None, TrainingOption(help="What to train: full, prompt, layernorm, lora or prototypes.")] = (
        None
    )
    steps: Annotated[int | None, TrainingOption(help="Number of updates.")] = None
    batch_size: Annotated[int | None, TrainingOption(help="Samples per step; several times the number of classes.")] = (
        None
    )
    lr: Annotated[float | None, TrainingOption(help="Learning rate.")] = None
    optimizer: Annotated[str | None, TrainingOption(help="sgd or adamw.")] = None
    lambda_: Annotated[float | None, TrainingOption("--lambda", help="Weight of the mutual information.")] = None
    augment: Annotated[str | None, TrainingOption(help="crop-flip or none, for images.")] = None
    views: Annotated[
        int | None,
        TrainingOption(help="Random crops of each image to encode once, if the image encoder is not trained."),
    ] = None
    seed: Annotated[int | None, TrainingOption(help="Seed of everything random.")] = None


@dataclass
class SpeedOptions:
    """How training is computed."""

    chunk: Annotated[
        int | None, SpeedOption(help="Samples encoded at once: any batch size fits into the memory of one chunk.")
    ] = None
    precision: Annotated[str | None, SpeedOption(help="fp32, bf16 or fp16.")] = None
    shard: Annotated[
        bool | None,
        SpeedOption(
            "--shard", help="With several processes: split the weights among them (FSDP2) instead of copying them."
        ),
    ] = None
    compile_: Annotated[bool | None, SpeedOption("--compile", help="Compile the encoder with torch.compile.")] = None
    checkpointing: Annotated[
        bool | None, SpeedOption("--checkpointing", help="Less memory, more time: recompute activations.")
    ] = None
    save_every: Annotated[
        float | None, SpeedOption(help="Seconds between two saves for --resume.", show_default="60")
    ] = None


@dataclass
class InferenceOptions:
    """Where and how inputs are encoded."""

    workers: Annotated[
        int | None,
        SpeedOption(help="Processes that read and decode inputs in advance.", show_default="0", min=0, max=1024),
    ] = None
    cache: Annotated[
        Path | None,
        SpeedOption(
            help="Folder where features are kept and found again.", show_default="$POUF_CACHE or ~/.cache/pouf"
        ),
    ] = None
    no_cache: Annotated[bool, SpeedOption("--no-cache", help="Neither read nor write the feature cache.")] = False
    device: Annotated[str, SpeedOption(help="cpu, cuda or mps; auto takes the fastest there is.")] = "auto"
    trust_model: Annotated[
        bool,
        ModelOption(
            "--trust-model",
            help="Load pickled weights and run code that comes with the model. Either can do anything on this machine.",
        ),
    ] = False

    def features(self) -> FeatureCache | None:
        from pouf.inference.cache import FeatureCache

        return None if self.no_cache else FeatureCache(self.cache)

    def place(self) -> str:
        """The device by its full name."""
        import torch

        if self.device in ("auto", "cuda") and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
            return f"cuda:{os.environ['LOCAL_RANK']}"
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        try:
            torch.zeros(1, device=self.device)
        except (RuntimeError, AssertionError) as error:
            # Of a name that it does not know, torch lists twenty that hardly anybody has.
            why = "" if "device string" in str(error) else f" ({str(error).splitlines()[0]})"
            raise InputError(f"can't use device {self.device!r}{why}: give cpu, cuda or mps") from None
        return self.device


@dataclass
class FolderOptions:
    """What to do with a run that is there."""

    resume: Annotated[
        bool,
        OutputOption("--resume", help="Continue the run in --out from where it stopped; start it if there is none."),
    ] = False
    overwrite: Annotated[
        bool, OutputOption("--overwrite", help="Replace the run in --out once this one has succeeded.")
    ] = False


@dataclass
class OutputOptions:
    quiet: Annotated[bool, OutputOption("--quiet", "-q", help="Errors, alarms and cautions only.")] = False
    as_json: Annotated[
        bool, OutputOption("--json", help="One JSON object on standard output, and nothing else there.")
    ] = False

    @property
    def hidden(self) -> bool:
        return self.quiet or self.as_json


# Options that change the recipe -> the dotted name of the setting.
SETTINGS = {
    "tune": "tuner.name", "steps": "steps", "batch_size": "batch_size", "lr": "optimisation.lr", "seed": "seed",
    "optimizer": "optimisation.name", "lambda_": "objective.information", "augment": "augment", "views": "views",
    "chunk": "compute.chunk", "precision": "compute.precision", "compile_": "compute.compile",
    "checkpointing": "compute.checkpointing", "workers": "compute.workers", "temperature": "temperature",
    "save_every": "compute.save_every", "shard": "compute.shard",
}  # fmt: skip


def path(text: str | Path) -> Path:
    """A path that was written out: an empty one, as of a variable that is not set, would be the current folder."""
    if not str(text).strip():
        raise typer.BadParameter("it is empty: name a file or a folder; the current folder is .")
    return Path(text)


def settings_of(*groups: Any) -> dict[str, Any]:
    """What the options change in a recipe, by dotted name."""
    given = {name: value for group in groups for name, value in vars(group).items() if value is not None}
    return {setting: given[option] for option, setting in SETTINGS.items() if option in given}


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters may be groups: each field of a group becomes an option of its own."""
    hints: dict[str, Any] = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            of = get_type_hints(groups[name], include_extras=True)
            parameters += [
                inspect.Parameter(f.name, parameter.KEYWORD_ONLY, default=f.default, annotation=of[f.name])
                for f in fields(groups[name])
            ]
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
    for parameter in parameters:
        kind, *described = get_args(parameter.annotation)
        if kind in (Path, Path | None):
            described[0].parser = path

    @wraps(command)
    def run(**given: Any) -> None:
        whole = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        command(**whole, **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__
    return run
