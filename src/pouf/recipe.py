"""All settings of a run, validated in one place for Python, TOML and the command line.

The defaults are defined here only: the paper's for full tuning of CLIP on Office-31 (SGD with momentum .9, learning
rate 5e-7, 5,000 steps of 96 images, lambda .3) with details from its published code: Nesterov momentum, weight decay
1e-3, random resized crops and flips. `Recipe.default(kind)` is used when no recipe is given.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from pouf.errors import InputError, did_you_mean, one_of
from pouf.files import read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Kinds of classifiers: "cloze" is a masked language model with a template and label words, "causal" a causal one.
Kind = Literal["image", "text", "cloze", "causal", "vector"]
# Preset -> kind -> recipe: from minutes on a laptop to the paper's settings, which need a GPU.
PRESETS: dict[str, dict[Kind, str]] = {
    "fast": {"image": "features", "text": "texts-fast", "cloze": "masked-fast", "causal": "causal-fast",
             "vector": "features-fast"},
    "light": {"image": "images-prompt", "text": "texts-upper", "cloze": "masked-upper", "causal": "causal-lora",
              "vector": "features"},
    "balanced": {"image": "images-prompt", "text": "texts", "cloze": "masked", "causal": "causal-lora",
                 "vector": "features"},
    "paper": {"image": "office31-full", "text": "masked-paper", "cloze": "masked-paper", "causal": "masked-paper",
              "vector": "features-paper"},
}  # fmt: skip
DEFAULT_PRESETS: dict[Kind, str] = {
    "image": "fast", "text": "balanced", "cloze": "balanced", "causal": "balanced", "vector": "balanced",
}  # fmt: skip
DEFAULTS: dict[Kind, str] = {kind: PRESETS[preset][kind] for kind, preset in DEFAULT_PRESETS.items()}

SAVE_EVERY = "compute.save_every"  # the only setting without effect on the result of a run

Count = Annotated[int, Field(ge=0, lt=2**62)]
Positive = Annotated[int, Field(gt=0, lt=2**62)]
Weight = Annotated[float, Field(ge=0)]


class Settings(BaseModel):
    """A part of a recipe. A wrong name, type or value is one `InputError` with the nearest right name."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True, defer_build=True
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _WrongSetting(type(self), error) from None


class _WrongSetting(InputError):
    """Reports the first invalid setting by its dotted name."""

    path: list[str]
    problem: str

    def __init__(self, part: type[Settings], error: ValidationError) -> None:
        first = error.errors()[0]
        inner = first.get("ctx", {}).get("error")
        path = [str(step) for step in first["loc"]]
        if isinstance(inner, _WrongSetting):  # from a nested part, with its message
            path, self.problem = [*path, *inner.path], inner.problem
        elif first["type"] == "extra_forbidden":
            owner = _part(part, path[:-1])
            known = [*owner, *(name.split(".")[-1] for name in _names() if owner is Recipe.model_fields)]
            self.problem = f"unknown setting, choose from {', '.join(owner)}{did_you_mean(path[-1], known)}"
        elif first["type"] == "literal_error":
            self.problem = f"{first['input']!r} is not one of {first['ctx']['expected'].replace(' or ', ', ')}"
        else:
            words = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
            self.problem = f"{words}, not {first['input']!r}" if path else words
        self.path = path
        super().__init__(f"{'.'.join(path)}: {self.problem}" if path else self.problem)


def _part(settings: type[Settings], path: list[str]) -> Mapping[str, Any]:
    for name in path:
        settings = settings.model_fields[name].annotation  # type: ignore[assignment]
    return settings.model_fields


class ObjectiveSettings(Settings):
    """L = transport * L_transport - information * I(X; Y) + entropy * mean H(p) + labels * L_labels
    + teacher * L_teacher."""

    transport: Weight = Field(default=1.0, description="Weight of the transport loss.")
    information: Weight = Field(default=0.3, description="Weight of the mutual information, the paper's lambda.")
    entropy: Weight = Field(default=0.0, description="Weight of the mean entropy of the predictions.")
    labels: Weight = Field(default=0.0, description="Weight of the loss on labelled shots, if given.")
    teacher: Weight = Field(
        default=0.0, description="Weight of the divergence from a teacher's predictions; 0 takes 3 if there is one."
    )
    label_loss: Literal["kl", "mse"] = Field(
        default="kl", description="Loss on shots; kl is cross-entropy for hard labels."
    )
    cost: Literal["cosine", "exponential"] = Field(default="cosine", description="Cost of the transport.")
    plan: Literal["conditional", "exact", "sinkhorn"] = Field(
        default="conditional", description="Transport plan; exact and sinkhorn are optimal transport."
    )
    regularisation: Weight = Field(
        default=0.0, description="Entropic regularisation of Sinkhorn's plan; 0 takes the temperature."
    )
    prior: Literal["uniform", "estimated", "paper"] = Field(
        default="uniform",
        description="Class proportions if none are known. With paper these, and known ones too, enter the transport "
        "loss only, as in the paper's appendix; otherwise known ones are the target of the mutual information.",
    )

    def weights(self) -> dict[str, float]:
        """The terms with a weight above 0, and their weights."""
        named = {name: getattr(self, name) for name in ("transport", "information", "entropy", "labels", "teacher")}
        return {name: weight for name, weight in named.items() if weight}

    @property
    def needs_unlabelled(self) -> bool:
        """Whether any term needs unlabelled data."""
        return bool(self.weights().keys() - {"labels", "teacher"})


class TunerSettings(Settings):
    """What is trained."""

    name: Literal["full", "upper", "prompt", "layernorm", "lora", "prototypes", "map"] = Field(
        default="full", description="What to train."
    )
    layers: Count = Field(default=0, description="Upper: how many of the last layers to train; 0 takes a third.")
    context: str = Field(
        default="a photo of a", description="Prompt: words whose embeddings the context vectors start from."
    )
    position: Literal["end", "middle", "front"] = Field(default="end", description="Prompt: place of the class name.")
    class_specific: bool = Field(default=False, description="Prompt: one context per class instead of one for all.")
    rank: Positive = Field(default=8, description="LoRA: rank of each update.")
    alpha: Annotated[float, Field(gt=0)] = Field(default=16.0, description="LoRA: updates are scaled by alpha / rank.")
    target_modules: list[str] = Field(
        default=[], description="LoRA: names of the layers; none takes queries and values of the attention."
    )


class Optimisation(Settings):
    """Optimiser and schedule."""

    name: Literal["sgd", "adamw"] = Field(default="sgd", description="Optimizer.")
    lr: Annotated[float, Field(gt=0)] = Field(default=5e-7, description="Learning rate.")
    schedule: Literal["paper", "linear", "cosine", "constant"] = Field(
        default="paper", description="Schedule of the learning rate."
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="Momentum of SGD.")
    nesterov: bool = Field(default=True, description="Nesterov's momentum.")
    weight_decay: Weight = Field(default=1e-3, description="Weight decay.")
    clip: Weight = Field(default=0.0, description="Largest gradient norm; 0 does not clip.")
    gamma: Weight = Field(default=2e-4, description="gamma of the paper's schedule: lr (1 + gamma step)^-alpha.")
    alpha: Weight = Field(default=0.75, description="alpha of the paper's schedule.")
    temperature_lr: Weight = Field(
        default=0.0, description="Learning rate of the temperature, if it is trained; 0 takes lr."
    )
    dropout: bool = Field(default=False, description="Train with the model's own dropout.")


class Compute(Settings):
    """How it is computed. These settings change the result only by rounding and by the random units of dropout."""

    chunk: Count = Field(
        default=0,
        description="Samples encoded at once, in two passes: any batch size then fits into the memory of one chunk; 0 "
        "encodes the whole batch at once.",
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="Number format of the encoders; losses are in fp32."
    )
    shard: bool = Field(
        default=False,
        description="With several processes: split the weights among them (FSDP2) instead of copying them.",
    )
    compile: bool = Field(default=False, description="Compile the encoder of inputs with torch.compile.")
    checkpointing: bool = Field(default=False, description="Recompute activations: less memory, more time.")
    workers: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0, description="Processes that read and decode inputs in advance."
    )
    save_every: Weight = Field(
        default=60.0, description="Seconds between two saves of the state that a run resumes from."
    )


class Recipe(Settings):
    """All settings of one adaptation."""

    steps: Count = Field(default=5000, description="Number of updates; 0 only corrects predictions.")
    batch_size: Positive = Field(default=96, description="Samples per step; several times the number of classes.")
    batch_per_class: Count = Field(default=0, description="The batch holds at least this many samples per class.")
    seed: Count = Field(default=0, description="Seed of everything random.")
    augment: Literal["crop-flip", "none"] = Field(default="crop-flip", description="Random changes of images.")
    views: Count = Field(
        default=0,
        description="Random crops of each image that are encoded once, if the image encoder is not trained; 0 draws "
        "new crops in each step.",
    )
    snapshots: Count = Field(
        default=4, description="Steps, beside zero-shot, among which one is chosen without labels; 0 chooses none."
    )
    temperature: Weight = Field(default=0.0, description="Softmax temperature; 0 keeps the model's own.")
    min_class_usage: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0,
        description="If predictions use a smaller share of the classes, nothing is trained, and they are corrected as "
        "by few-classes; 0 always trains.",
    )
    keep_shares_max_classes: Count = Field(
        default=0,
        description="With at most this many classes, each keeps the share of the predictions that zero-shot gives it, "
        "unless shares are known: with few classes, a bias of the model looks like a skew of the data.",
    )
    find_bias: bool = Field(
        default=False,
        description="Two classes and a masked language model: keep the shares without the model's bias, if two "
        "estimates agree on one.",
    )
    keep_shares_lr_factor: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="Factor of the learning rate if zero-shot's shares are preserved: a higher one would overfit "
        "single texts.",
    )
    weight_pull: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0,
        description="After each step, move the weights by this share towards those before training: less drift on "
        "other names, but less learning.",
    )
    pseudo_labels: Count = Field(
        default=0, description="Learn from this many of the surest predictions of each class as if they were labels."
    )
    postprocess: Literal[
        "none", "prior-correction", "sinkhorn", "shares", "propagation", "refinement", "clusters",
        "em", "stata", "few-classes", "transclip", "zlap", "inmap",
    ] = Field(default="none", description="Correction of the predictions after training.")  # fmt: skip
    objective: ObjectiveSettings = ObjectiveSettings()
    tuner: TunerSettings = TunerSettings()
    optimisation: Optimisation = Optimisation()
    compute: Compute = Compute()

    def model_post_init(self, context: Any) -> None:
        if self.steps and not self.objective.weights():
            raise ValueError("all terms of the objective weigh 0, so there is nothing to learn: give one a weight")

    def with_settings(self, settings: Mapping[str, Any] | None = None, **named: Any) -> Recipe:
        """A copy with some settings changed.

            recipe.with_settings({"optimisation.lr": 1e-3, "steps": 50})
            recipe.with_settings(lr=1e-3, steps=50)

        A setting of a part has a dotted name; its last word is enough if it is unique.
        """
        table = self.model_dump(exclude_unset=True)  # only settings that were set explicitly
        for name, value in {**(settings or {}), **named}.items():
            *parts, last = full_name(name).split(".")
            changed, current = table, vars(self)
            for part in parts:
                changed, current = changed.setdefault(part, {}), current.get(part, {})
                if not isinstance(changed, dict) or not isinstance(current, (Settings, dict)):
                    raise InputError(f"{name}: {part} is one value and has no parts")
                current = dict(current)
            if value == {} and isinstance(current.get(last), Settings):
                continue  # a part without changes
            changed[last] = value.model_dump(exclude_unset=True) if isinstance(value, Settings) else value
        return Recipe(**table)

    def flat(self) -> dict[str, Any]:
        """Every setting by its dotted name."""
        return dict(_flat(self.model_dump()))

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump())

    @classmethod
    def from_toml(cls, text: str, source: str = "recipe", base: Recipe | None = None) -> Recipe:
        """The recipe of a TOML text; settings that it does not name are those of `base`, or the paper's."""
        try:
            return (base or cls()).with_settings(dict(_flat(tomllib.loads(text))))
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{source} is not valid TOML: {error}") from None
        except InputError as error:
            raise InputError(f"{source}: {error}") from None

    @classmethod
    def load(cls, name_or_file: str | Path, base: Recipe | None = None, kind: Kind | None = None) -> Recipe:
        """A recipe of the package by name, or of a TOML file by path.

        Args:
            base: for settings that a file does not name; recipes of the package are complete.
            kind: of the classifier; with it the name may be a preset, as "fast" or "paper".
        """
        if kind is not None and str(name_or_file) in PRESETS:
            return cls.preset(str(name_or_file), kind)
        named = _builtin_recipes()
        if str(name_or_file) in named:
            return cls.from_toml(named[str(name_or_file)], f"recipe {name_or_file!r}")
        if not os.path.isfile(name_or_file):
            known = [*(PRESETS if kind is not None else ()), *named]
            near = did_you_mean(str(name_or_file), known)
            raise InputError(f"no recipe {str(name_or_file)!r}: give a TOML file, or one of {', '.join(known)}{near}")
        return cls.from_toml(read_text(name_or_file), str(name_or_file), base)

    @classmethod
    def preset(cls, name: str, kind: Kind) -> Recipe:
        """The recipe of a preset for a kind of classifier: "fast", "light", "balanced" or "paper"."""
        return cls.load(one_of("preset", name, PRESETS)[kind])

    @classmethod
    def default(cls, kind: Kind) -> Recipe:
        """The default recipe for a kind of classifier."""
        return cls.preset(DEFAULT_PRESETS[kind], kind)


def full_name(name: str) -> str:
    """The dotted name of a setting by its last word, if that is unique: `optimisation.lr` for `lr`."""
    found = [known for known in _names() if known.endswith(f".{name}")]
    return found[0] if name not in Recipe.model_fields and len(found) == 1 else name


@cache
def _names() -> tuple[str, ...]:
    return tuple(Recipe().flat())


def setting(name: str) -> FieldInfo:
    """The field of a setting by its dotted name."""
    *parts, last = name.split(".")
    return _part(Recipe, parts)[last]  # type: ignore[no-any-return]


def is_builtin(name_or_file: str | Path) -> bool:
    """Whether this is a preset or a recipe of the package, not a user's file."""
    return str(name_or_file) in PRESETS or str(name_or_file) in _builtin_recipes()


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return list(_builtin_recipes())


def _builtin_recipes() -> dict[str, str]:
    folder = resources.files("pouf") / "recipes"
    return {
        file.name.removesuffix(".toml"): file.read_text(encoding="utf-8")
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".toml")
    }


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every setting."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
