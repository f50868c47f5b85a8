"""Recipes: TOML there and back, the paper's settings by name, and errors that name the setting."""

from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pouf import METHODS, InputError, Recipe
from pouf.data.views import AUGMENTATIONS
from pouf.losses import COSTS
from pouf.losses.objective import LABEL_LOSSES
from pouf.postprocess import POSTPROCESSORS
from pouf.recipe import (
    DEFAULTS,
    PRESETS,
    Compute,
    Kind,
    ObjectiveSettings,
    Optimisation,
    Settings,
    TunerSettings,
    recipe_names,
)
from pouf.training.model import OPTIMIZERS, SCHEDULES
from pouf.tuners import TUNERS


@pytest.mark.parametrize("name", recipe_names())
def test_every_named_recipe_loads_and_survives_toml(name: str) -> None:
    recipe = Recipe.load(name)
    assert Recipe.from_toml(recipe.to_toml()) == recipe


def values(part: type[Settings]) -> st.SearchStrategy[Any]:
    """Any settings of a part that its types allow."""
    fields = {}
    for name, field in part.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Settings):
            fields[name] = values(kind)
        elif kind == list[str]:
            fields[name] = st.lists(st.text())
        elif get_args(kind):
            fields[name] = st.sampled_from(get_args(kind))
        elif kind is bool:
            fields[name] = st.booleans()
        elif kind is str:
            fields[name] = st.text()
        elif kind is int:
            fields[name] = st.integers(1, 1024 if name == "workers" else 2**62 - 1)
        else:
            is_share = name in ("keep_shares_lr_factor", "momentum", "min_class_usage", "weight_pull")
            fields[name] = st.floats(1e-300, 0.999 if is_share else 1e300)
    return st.fixed_dictionaries(fields)


@settings(max_examples=200, deadline=None)
@given(values(Recipe))
def test_every_recipe_that_can_be_made_is_read_back_as_it_was(table: dict[str, Any]) -> None:
    recipe = Recipe(**table)
    assert Recipe.from_toml(recipe.to_toml().encode().decode()) == recipe


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["steps", "seed", "optimisation.lr", "tuner.name", "tuner.context", "objective", "compute.chunk"]),
    st.one_of(st.none(), st.floats(), st.text(max_size=3), st.booleans(), st.lists(st.integers(), max_size=2)),
)
def test_a_value_of_another_kind_is_taken_whole_or_refused(name: str, value: Any) -> None:
    try:
        recipe = Recipe().with_settings({name: value})
    except InputError as error:
        assert str(error).startswith(name)
    else:
        assert Recipe.from_toml(recipe.to_toml()) == recipe


def test_the_papers_settings_are_there() -> None:
    assert {"office31-full", "office31-prompt", "office-home-full", "domainnet-full"} <= set(recipe_names())
    full, prompt = Recipe.load("office31-full"), Recipe.load("office31-prompt")
    assert (full.steps, full.batch_size, full.objective.information) == (5000, 96, 0.3)
    assert (full.optimisation.lr, prompt.optimisation.lr) == (5e-7, 1e-3)
    assert Recipe.load("office-home-prompt").optimisation.lr == 5e-7
    assert Recipe.load("domainnet-full").batch_size == Recipe.load("domainnet-prompt").batch_size == 16
    assert (prompt.tuner.name, prompt.tuner.context) == ("prompt", "a photo of a")
    assert full.augment == "crop-flip"
    assert (full.optimisation.momentum, full.optimisation.nesterov, full.optimisation.weight_decay) == (0.9, True, 1e-3)


def test_the_default_recipe_is_the_papers() -> None:
    assert Recipe() == Recipe.load("office31-full") == Recipe.preset("paper", "image")


@pytest.mark.parametrize("kind", sorted(DEFAULTS))
def test_presets_become_dearer_and_one_of_them_is_the_default(kind: Kind) -> None:
    fast, light, balanced, paper = (Recipe.preset(name, kind) for name in PRESETS)
    assert Recipe.default(kind) in (fast, light, balanced)
    assert fast.tuner.name == "prototypes" and fast.augment == "none", "every input is encoded once"
    assert paper.steps > max(fast.steps, light.steps, balanced.steps)
    assert (paper.objective.prior, paper.postprocess, paper.min_class_usage) == ("uniform", "none", 0), (
        "nothing of ours"
    )
    assert METHODS["pouf"].recipe(kind, "fast") == fast == Recipe.load("fast", kind=kind)
    with pytest.raises(InputError, match=r"unknown preset 'fats'.*Did you mean 'fast'"):
        Recipe.preset("fats", kind)
    with pytest.raises(InputError, match=r"no recipe 'fats'.*Did you mean 'fast'"):
        METHODS["pouf"].recipe(kind, "fats")


def test_each_kind_has_a_default_of_its_own() -> None:
    assert {kind: Recipe.default(kind) for kind in DEFAULTS} == {k: Recipe.load(n) for k, n in DEFAULTS.items()}
    assert Recipe.default("text").optimisation.name == "adamw" and Recipe.default("vector").tuner.name == "prototypes"


def test_a_recipe_is_read_from_a_file_and_what_it_leaves_out_is_as_in_its_base(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('steps = 7\n[optimisation]\nlr = 1\nname = "adamw"\n')
    recipe = Recipe.load(file)
    assert (recipe.steps, recipe.optimisation.lr, recipe.optimisation.name) == (7, 1.0, "adamw")
    assert recipe.batch_size == Recipe().batch_size
    assert Recipe.load(file, Recipe.default("vector")).batch_size == 4096
    file.write_bytes("steps = 7 # \xe4".encode("latin-1"))
    with pytest.raises(InputError, match="is not UTF-8"):
        Recipe.load(file)


def test_settings_are_changed_in_a_copy() -> None:
    recipe = Recipe()
    changed = recipe.with_settings({"tuner.name": "prompt", "tuner.position": "front"}, steps=3)
    assert (changed.steps, changed.tuner.name, changed.tuner.position) == (3, "prompt", "front")
    assert recipe == Recipe()
    assert recipe.with_settings(objective=ObjectiveSettings(labels=2)).objective.labels == 2
    with pytest.raises(ValueError, match="frozen"):
        recipe.steps = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("stepz = 3", "recipe: stepz: unknown setting, choose from steps.*Did you mean 'steps'"),
        ("[tuner]\nname = 'lots'", "tuner.name: 'lots' is not one of 'full', 'upper', 'prompt', 'layernorm'"),
        ("[optimisation]\nlrr = 1.0", "optimisation.lrr: unknown setting.*Did you mean 'lr'"),
        ("steps = 'many'", "steps: should be a valid integer, not 'many'"),
        ("steps = 2.5", "steps: should be a valid integer, not 2.5"),
        ("steps = true", "steps: should be a valid integer"),
        ("steps = -1", "steps: should be greater than or equal to 0, not -1"),
        ("seed = 9223372036854775808", "seed: should be less than"),
        ("[optimisation]\nlr = -1.0", "optimisation.lr: should be greater than 0"),
        ("[optimisation]\nlr = inf", "optimisation.lr: should be a finite number"),
        ("[optimisation]\nmomentum = 5", "optimisation.momentum: should be less than 1"),
        ("[objective]\ninformation = -0.1", "objective.information: should be greater than or equal to 0"),
        ("[objective]\ntransport = 0\ninformation = 0", "nothing to learn"),
        ("objective = 3", "objective: should be a valid dictionary"),
        ("[steps]\na = 1", "steps is one value and has no parts"),
        ("[nothing]\na = 1", "nothing: unknown setting"),
        ("steps = ", "not valid TOML"),
    ],
)
def test_a_wrong_recipe_is_one_clear_error(toml: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Recipe.from_toml(toml)


def test_an_empty_table_changes_nothing_where_it_is_a_part_and_is_an_error_elsewhere() -> None:
    base = Recipe(steps=7).with_settings({"tuner.name": "lora"})
    assert Recipe.from_toml("[tuner]\n[compute]\n", base=base) == base
    for toml in ("[tunr]\n", "[tuner.nme]\n", "[steps]\n", "[tuner.name]\n", "steps = {}\n"):
        with pytest.raises(InputError, match=r"recipe: .*(tunr|nme|steps|name)"):
            Recipe.from_toml(toml, base=base)


def test_settings_are_checked_wherever_they_are_made() -> None:
    with pytest.raises(InputError, match="name: 'magic' is not one of 'sgd', 'adamw'"):
        Optimisation(name="magic")
    with pytest.raises(InputError, match=r"compute.chunk: should be a valid integer, not 1.5"):
        Recipe(compute={"chunk": 1.5})
    with pytest.raises(InputError, match="chunk"):
        Compute(chunk=-1)


def test_an_unknown_recipe_names_those_there_are() -> None:
    with pytest.raises(InputError, match=r"no recipe 'office32-full': .*Did you mean 'office31-full'"):
        Recipe.load("office32-full")


@pytest.mark.parametrize(
    ("part", "setting", "registry"),
    [
        (ObjectiveSettings, "cost", COSTS),
        (ObjectiveSettings, "label_loss", LABEL_LOSSES),
        (Optimisation, "name", OPTIMIZERS),
        (Optimisation, "schedule", SCHEDULES),
        (TunerSettings, "name", TUNERS),
        (Recipe, "augment", AUGMENTATIONS),
        (Recipe, "postprocess", {"none": None, **POSTPROCESSORS}),
    ],
)
def test_a_setting_allows_just_what_its_registry_holds(part: type[Settings], setting: str, registry: dict) -> None:
    assert set(get_args(part.model_fields[setting].annotation)) == set(registry)


def test_the_last_word_of_a_setting_is_enough_where_only_one_has_it() -> None:
    recipe = Recipe().with_settings(lr=0.25, chunk=8, steps=3)
    assert (recipe.optimisation.lr, recipe.compute.chunk, recipe.steps) == (0.25, 8, 3)
    for name in ("alpha", "name"):  # of two parts
        with pytest.raises(InputError, match=f"{name}: unknown setting"):
            Recipe().with_settings({name: 1.0})
    with pytest.raises(InputError, match="Did you mean 'momentum'"):
        Recipe().with_settings(momentun=0.5)
