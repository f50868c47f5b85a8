"""Every setting of a run, as frozen dataclasses that read and write TOML. Each default exists once, here.

The defaults are the paper's for full tuning of CLIP on Office-31 (SGD with momentum .9, learning rate 5e-7, 5,000
steps of 96 images, lambda .3) with what only its published code tells: Nesterov momentum, weight decay 1e-3, random
resized crops and flips.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from pouf.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Objective:
    """L = transport * L_transport - information * I(X; Y) + entropy * mean H(p) + labels * L_labels."""

    transport: float = 1.0
    information: float = 0.3  # the paper's lambda
    entropy: float = 0.0
    labels: float = 0.0  # of labelled shots, where some are given; the target has none
    label_loss: Literal["kl", "mse"] = "kl"  # kl is cross-entropy for hard labels
    cost: Literal["cosine", "exponential"] = "cosine"
    plan: Literal["conditional", "exact", "sinkhorn"] = "conditional"  # the last two are optimal transport
    regularisation: float = 0.0  # of Sinkhorn's plan; 0 takes T
    prior: Literal["uniform", "estimated"] = "uniform"  # class proportions, unless the classifier was given some


@dataclass(frozen=True)
class Tuning:
    """What is trained."""

    name: Literal["full", "prompt", "layernorm", "prototypes", "map"] = "full"  # the last two for bare vectors
    context: str = "a photo of a"  # prompt tuning: the words whose embeddings the context vectors start from
    position: Literal["end", "middle", "front"] = "end"  # prompt tuning: where the class name stands
    class_specific: bool = False  # prompt tuning: one context for each class instead of one for all


@dataclass(frozen=True)
class Optimisation:
    """How it is trained."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 5e-7
    schedule: Literal["paper", "linear", "cosine", "constant"] = "paper"
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-3
    clip: float = 0.0  # largest gradient norm; 0 does not clip
    gamma: float = 2e-4  # the paper's schedule: lr (1 + gamma step)^-alpha
    alpha: float = 0.75


@dataclass(frozen=True)
class Compute:
    """How it is computed. Nothing here changes what is learned, but for rounding."""

    chunk: int = 0  # samples encoded at once, in two passes; 0 encodes a batch whole
    precision: Literal["fp32", "bf16"] = "fp32"  # of the encoders; losses are in fp32
    compile: bool = False  # the encoder of inputs, by torch.compile
    checkpointing: bool = False  # forget activations, compute them again: less memory, more time
    workers: int = 0  # processes that read and decode ahead


@dataclass(frozen=True)
class Recipe:
    """All settings of one adaptation."""

    steps: int = 5000  # 0 trains nothing: for what only adjusts predictions
    batch_size: int = 96
    seed: int = 0
    augment: Literal["crop-flip", "none"] = "crop-flip"  # images only: texts are never augmented
    views: int = 0  # images whose encoder is not trained: this many crops of each, computed once; 0 crops at each step
    snapshots: int = 10  # steps, beside zero-shot, among which one is chosen without labels; 0 chooses none
    temperature: float = 0.0  # 0 keeps the model's own
    pseudo_labels: int = 0  # learn from this many of the surest predictions of each class as if they were labels
    adjust: Literal["none", "calibration", "sinkhorn", "propagation", "refinement"] = (
        "none"  # of predictions, at the end
    )
    objective: Objective = field(default_factory=Objective)
    tuning: Tuning = field(default_factory=Tuning)
    optimisation: Optimisation = field(default_factory=Optimisation)
    compute: Compute = field(default_factory=Compute)

    def __post_init__(self) -> None:
        _check(self)

    def with_settings(self, **settings: Any) -> Recipe:
        """A copy with some settings changed; a dotted name reaches a part: `{"optimisation.lr": 1e-3}`."""
        flat = {name: value for name, value in settings.items() if "." not in name}
        nested: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            if "." in name:
                part, inner = name.split(".", 1)
                nested.setdefault(part, {})[inner] = value
        parts = {part: replace(getattr(self, part), **inner) for part, inner in nested.items()}
        return replace(self, **flat, **parts)

    def to_toml(self) -> str:
        return _to_toml(self)

    @classmethod
    def from_toml(cls, text: str, source: str = "recipe") -> Recipe:
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{source} is not valid TOML: {error}") from None
        return _from_table(cls, table, source)

    @classmethod
    def load(cls, name_or_file: str | Path) -> Recipe:
        """A recipe that comes with the package, by name, or any TOML file, by path."""
        named = _named()
        if str(name_or_file) in named:
            return cls.from_toml(named[str(name_or_file)], f"recipe {name_or_file!r}")
        if not os.path.isfile(name_or_file):
            raise InputError(
                f"no recipe {str(name_or_file)!r}: give a TOML file, or one of {', '.join(recipe_names())}"
            )
        return cls.from_toml(Path(name_or_file).read_text(encoding="utf-8"), str(name_or_file))


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(_named())


def _named() -> dict[str, str]:
    folder = resources.files("pouf") / "recipes"
    return {
        file.name.removesuffix(".toml"): file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if file.name.endswith(".toml")
    }


POSITIVE = ("batch_size", "optimisation.lr")
NOT_NEGATIVE = (
    "steps",
    "seed",
    "views",
    "snapshots",
    "pseudo_labels",
    "compute.chunk",
    "compute.workers",
    "temperature",
    "objective.transport",
    "objective.information",
    "objective.entropy",
    "objective.labels",
    "objective.regularisation",
    "optimisation.momentum",
    "optimisation.weight_decay",
    "optimisation.clip",
)


def _check(recipe: Recipe) -> None:
    values = dict(_flat(recipe))
    for name, (wanted, value) in values.items():
        if get_origin(wanted) is Literal and value not in get_args(wanted):
            raise InputError(f"unknown {name} {value!r}: choose one of {', '.join(get_args(wanted))}")
    for name in POSITIVE:
        if not values[name][1] > 0:
            raise InputError(f"{name} must be above 0, not {values[name][1]}")
    for name in NOT_NEGATIVE:
        if not values[name][1] >= 0:
            raise InputError(f"{name} must not be negative, but is {values[name][1]}")
    weights = recipe.objective
    if recipe.steps and weights.transport == weights.information == weights.entropy == weights.labels == 0:
        raise InputError("all terms of the objective weigh 0, so there is nothing to learn: give one a weight")


def _flat(part: Any, path: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Dotted name, and type and value, of every setting."""
    for name, wanted in get_type_hints(type(part)).items():
        value = getattr(part, name)
        if is_dataclass(wanted):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", (wanted, value)


T = TypeVar("T")


def _from_table(cls: type[T], table: dict[str, Any], source: str, path: str = "") -> T:
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{path}{key}"
        if key not in hints:
            raise InputError(f"{source} has an unknown setting {name!r}: choose from {', '.join(hints)}")
        wanted = hints[key]
        if is_dataclass(wanted):
            if not isinstance(value, dict):
                raise InputError(f"{source}: {name} must be a table [{name}], not {value!r}")
            values[key] = _from_table(cast(type[Any], wanted), value, source, f"{name}.")
            continue
        kind = str if get_origin(wanted) is Literal else wanted
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InputError(f"{source}: {name} must be {kind.__name__}, not {value!r}")
        values[key] = value
    return cls(**values)


def _to_toml(recipe: Recipe) -> str:
    table = asdict(recipe)
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]", *(f"{inner} = {json.dumps(v)}" for inner, v in value.items())]
    return "\n".join(lines) + "\n"
