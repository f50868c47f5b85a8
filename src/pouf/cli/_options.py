"""Options of the commands, in groups. Options for settings are made from the recipe's fields."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from pouf.errors import InputError
from pouf.recipe import setting

if TYPE_CHECKING:
    from pouf.classifier import Classifier
    from pouf.inference.cache import FeatureCache

PANELS = (None, "Data", "Model and method", "Training", "Speed and memory", "Output")  # groups of --help, in order
DataOption, ModelOption, TrainingOption, SpeedOption, OutputOption = (
    partial(typer.Option, rich_help_panel=panel) for panel in PANELS[1:]
)

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
TextColumn = Annotated[str | None, DataOption(help="Column of the texts; a,b for pairs.", show_default="text")]
IdColumn = Annotated[
    str | None, DataOption(help="Columns that name the inputs, as id or id,text.", show_default="row numbers")
]
LabelColumn = Annotated[str, DataOption(help="Column of the labels in text files.")]
OwnInputs = Annotated[
    Path | None, typer.Argument(metavar="INPUT", help="Images, texts or vectors.", show_default="the run's own")
]
BatchSize = Annotated[int, typer.Option(help="Samples encoded at once.", min=1)]
UseOption = Annotated[
    str, typer.Option("--use", help="advised, zero-shot, adapted, or a step: last, chosen.", metavar="WHICH")
]
Overwrite = Annotated[bool, OutputOption("--overwrite", help="Replace what is in --out, if this succeeds.")]

# Settings of the recipe that have their own option; `--set` changes the others.
TRAINING_SETTINGS = {
    "tune": "tuner.name", "steps": "steps", "batch-size": "batch_size", "lr": "optimisation.lr",
    "optimizer": "optimisation.name", "lambda": "objective.information", "augment": "augment", "views": "views",
    "temperature": "temperature", "seed": "seed",
}  # fmt: skip
SPEED_SETTINGS = {
    "chunk": "compute.chunk", "precision": "compute.precision", "shard": "compute.shard",
    "compile": "compute.compile", "checkpointing": "compute.checkpointing", "workers": "compute.workers",
    "save-every": "compute.save_every",
}  # fmt: skip
_VARIABLES = {name: "set_" + name.replace(".", "_") for name in (*TRAINING_SETTINGS.values(), *SPEED_SETTINGS.values())}


def _setting_option(panel: Callable[..., Any], name: str, dotted: str) -> tuple[str, Any, None]:
    """The option of a setting, with type and help of the recipe's field; its default None leaves it to the recipe."""
    kind: Any = setting(dotted).annotation
    about = str(setting(dotted).description)
    if choices := get_args(kind):
        kind, about = str, f"{about.rstrip('.')}: {', '.join(choices[:-1])} or {choices[-1]}."
    return _VARIABLES[dotted], Annotated[kind | None, panel(f"--{name}", help=about)], None


_Settings: Any = make_dataclass(
    "_Settings",
    [
        _setting_option(panel, name, dotted)
        for panel, table in ((TrainingOption, TRAINING_SETTINGS), (SpeedOption, SPEED_SETTINGS))
        for name, dotted in table.items()
    ],
)


@dataclass
class OutputOptions:
    quiet: Annotated[bool, OutputOption("--quiet", "-q", help="Only errors, alarms, cautions, skipped inputs.")] = False
    as_json: Annotated[bool, OutputOption("--json", help="One JSON object on standard output, and nothing else.")] = (
        False
    )

    @property
    def hidden(self) -> bool:
        return self.quiet or self.as_json


@dataclass
class DeviceOptions(OutputOptions):
    """Device, feature cache and trust."""

    cache: Annotated[
        Path | None, SpeedOption(help="Folder of cached features.", show_default="$POUF_CACHE or ~/.cache/pouf")
    ] = None
    no_cache: Annotated[bool, SpeedOption("--no-cache", help="Neither read nor write the feature cache.")] = False
    device: Annotated[str, SpeedOption(help="cpu, cuda or mps; auto takes the fastest available.")] = "auto"
    trust_model: Annotated[
        bool, ModelOption("--trust-model", help="Load pickled weights, run the model's own code: it can do anything.")
    ] = False

    def features_cache(self) -> FeatureCache | None:
        from pouf.inference.cache import FeatureCache

        return None if self.no_cache else FeatureCache(self.cache)

    def load(self, run: Path, *uses: str) -> list[Classifier]:
        """States of a run, on the device."""
        from pouf.runs.folder import load_classifiers

        return load_classifiers(run, *uses, device=self.resolve_device(), trust_model=self.trust_model)

    def resolve_device(self) -> str:
        """The device by its full name, for example cuda:1."""
        import torch

        if self.device in ("auto", "cuda") and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
            return f"cuda:{os.environ['LOCAL_RANK']}"
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        try:
            torch.zeros(1, device=self.device)
        except (RuntimeError, AssertionError) as error:
            # For unknown names, torch lists twenty rare devices.
            why = "" if "device string" in str(error) else f" ({str(error).splitlines()[0]})"
            raise InputError(f"can't use device {self.device!r}{why}: give cpu, cuda or mps") from None
        return self.device


@dataclass
class InferenceOptions(DeviceOptions):
    """How inputs are encoded."""

    workers: Annotated[int, SpeedOption(help="Processes that read and decode inputs in advance.", min=0, max=1024)] = 0


@dataclass
class RunOptions(DeviceOptions, _Settings):  # type: ignore[misc]
    """Options of `adapt` and `search`: data, classes, model, method, training and output."""

    data: Annotated[
        Path | None, typer.Argument(metavar="DATA", help="Folder of images, or file of texts or vectors.")
    ] = None
    classes: Annotated[str | None, DataOption(help="a,b,c, or a file of names or descriptions.")] = None
    images: Annotated[Path | None, DataOption(help="Like DATA, but always read as a folder of images.")] = None
    texts: Annotated[Path | None, DataOption(help="Like DATA, but always read as a file of texts.")] = None
    features: Annotated[str | None, DataOption(help="Vectors instead of a model and data: npy, npz, safetensors …")] = (
        None
    )
    prototypes: Annotated[str | None, DataOption(help="One vector per class, for --features.")] = None
    shots: Annotated[Path | None, DataOption(help="A few labelled examples: file or folder.")] = None
    answers: Annotated[
        list[Path] | None, DataOption(help="The answers of pouf review, as labelled examples; may be repeated.")
    ] = None
    text_column: TextColumn = None
    label_column: LabelColumn = "label"
    id_column: IdColumn = None
    keep_classes: Annotated[
        str | None, DataOption(help="Measure the drift on other names: a,b,c, a file, or words for ordinary words.")
    ] = None
    keep_data: Annotated[
        Path | None, DataOption(help="Labelled inputs of the --keep-classes.", show_default="inputs of the task")
    ] = None
    model: Annotated[
        str | None, ModelOption(help="Hub name or local folder.", show_default="one for the kind of data")
    ] = None
    revision: Annotated[str | None, ModelOption(help="Revision of the model on the hub.")] = None
    template: Annotated[
        list[str] | None,
        ModelOption(help="Sentence with {} for the class, or with {text} and [MASK]; repeatable, or a file."),
    ] = None
    words: Annotated[
        str | None, ModelOption(help="Words for [MASK], one per class or several, as terrible,great or bad|awful,good.")
    ] = None
    max_length: Annotated[int | None, ModelOption(help="Maximum tokens, text plus template.")] = None
    windows: Annotated[bool, ModelOption("--windows", help="Read long texts in windows, instead of cutting them.")] = (
        False
    )
    method: Annotated[str, ModelOption(help="pouf, or a baseline: --method list shows all.")] = "pouf"
    demonstrations: Annotated[
        bool, ModelOption("--demonstrations", help="Put one shot per class after every text, as LM-BFF does.")
    ] = False
    teacher: Annotated[
        str | None, ModelOption(help="Soft labels: a file of answers, a run, or a model.", metavar="FILE|MODEL")
    ] = None
    second_features: Annotated[
        str | None, ModelOption(help="Features of a second encoder: a file, or a model.", metavar="FILE|MODEL")
    ] = None
    prior: Annotated[str | None, ModelOption(help="uniform, estimated, paper, or shares: 0.7,0.3.")] = None
    refine: Annotated[
        bool | None, ModelOption("--refine/--no-refine", help="Refine all predictions jointly after training.")
    ] = None
    preset: Annotated[
        str | None,
        TrainingOption(
            help="fast, light, balanced or paper (needs a GPU).", show_default="fast for images, else balanced"
        ),
    ] = None
    max_minutes: Annotated[float | None, TrainingOption(help="Most thorough preset that fits in this time.")] = None
    recipe: Annotated[str | None, TrainingOption(help="Name of a recipe, or a TOML file.")] = None
    settings: Annotated[
        list[str] | None,
        TrainingOption("--set", help="Any other setting of the recipe, as optimisation.momentum=0.8; repeatable."),
    ] = None
    out: Annotated[Path, OutputOption(help="Folder of the run.")] = Path("pouf-run")
    resume: Annotated[bool, OutputOption("--resume", help="Continue the run in --out, or start it.")] = False
    overwrite: Overwrite = False
    report: Annotated[
        bool, OutputOption("--report/--no-report", help="Write predictions and a report into the run as well.")
    ] = True
    tracker: Annotated[
        list[str] | None,
        OutputOption(help="Log to tensorboard (in its folder of the run), wandb, mlflow or trackio; repeatable."),
    ] = None

    def changes(self) -> dict[str, Any]:
        """Changes to the recipe by dotted name, from the options of settings and `--set`."""
        values = {name: getattr(self, variable) for name, variable in _VARIABLES.items()}
        return {name: value for name, value in values.items() if value is not None} | parse_settings(self.settings)


def path(text: str | Path) -> Path:
    """A path. An empty one, as from an unset shell variable, is an error: it would mean the current folder."""
    if not str(text).strip():
        raise typer.BadParameter("it is empty: name a file or a folder; the current folder is .")
    return Path(text)


def parse_settings(settings: Sequence[str] | None) -> dict[str, Any]:
    """`steps=50` as {"steps": 50}; values are JSON, or else strings."""
    changes: dict[str, Any] = {}
    for change in settings or ():
        name, equals, value = change.partition("=")
        if not equals:
            raise InputError(f"--set {change!r}: expected name=value, as steps=50")
        try:
            changes[name] = json.loads(value)
        except json.JSONDecodeError:
            changes[name] = value
    return changes


def split_numbers(option: str, text: str | None, example: str, kind: type = float) -> list[Any]:
    """`1e-3,3e-3` as numbers."""
    try:
        return [kind(value) for value in text.split(",")] if text else []
    except ValueError:
        raise InputError(f"{option} {text!r}: expected {example}") from None


def proportions(text: str | None) -> str | list[float] | None:
    """The value of --prior: a name unchanged, `0.7,0.3` as numbers."""
    if text is None or not any(character.isdigit() for character in text):
        return text
    return split_numbers("--prior", text, "'uniform', 'estimated', 'paper', or one number for each class as 0.7,0.3")


METAVARS = {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    """An option as typer expects it, with the metavar of its type; paths are checked by `path`."""
    kind, option = get_args(annotation)
    option = copy(option)
    plain = next((each for each in METAVARS if kind in (each, each | None, list[each] | None)), None)  # type: ignore[valid-type]
    if plain is Path:
        option.parser = path
    if option.metavar is None and plain is not None:
        option.metavar = METAVARS[plain]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def grouped(*common: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command with groups of options as parameters: each field of a group becomes an option.

    Args:
        common: names of the options that `--help` prints; `--help-all` prints all. Empty: `--help` prints all.
    """

    def expand(command: Callable[..., None]) -> Callable[..., None]:
        hints: dict[str, Any] = get_type_hints(command, include_extras=True)
        groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name in groups:
                own = get_type_hints(groups[name], include_extras=True)
                parameters += [_parameter(each.name, each.default, own[each.name]) for each in fields(groups[name])]
            else:
                parameters.append(_parameter(name, parameter.default, hints[name]))
        options = {parameter.name: get_args(parameter.annotation)[1] for parameter in parameters}
        parameters.sort(key=lambda parameter: PANELS.index(options[parameter.name].rich_help_panel))
        if common:
            panels = {name: option.rich_help_panel for name, option in options.items()}
            for name, option in options.items():
                option.hidden, option.rich_help_panel = name not in common, None
            parameters.append(_help_all(panels))

        @wraps(command)
        def run(**given: Any) -> None:
            from pouf.models.load import silence_libraries

            silence_libraries()
            given.pop("help_all", None)
            for name, group in groups.items():
                given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
            command(**given)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del run.__wrapped__
        return run

    return expand


def _help_all(panels: dict[str, str | None]) -> inspect.Parameter:
    """The option `--help-all`, which prints all options in their panels."""

    def print_all(context: typer.Context, wanted: bool) -> None:
        if wanted:
            for option in context.command.params:
                option.hidden = False  # type: ignore[attr-defined]
                option.rich_help_panel = panels.get(option.name or "")  # type: ignore[attr-defined]
            if text := context.get_help():
                typer.echo(text)
            raise typer.Exit

    option = typer.Option("--help-all", help="Show all options.", callback=print_all, is_eager=True, metavar="")
    return inspect.Parameter(
        "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )
