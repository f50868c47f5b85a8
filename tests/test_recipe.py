"""Recipes: TOML there and back, the paper's settings by name, and errors that name the setting."""

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from pouf import InputError, Recipe
from pouf.data.augment import AUGMENTATIONS
from pouf.losses import COSTS
from pouf.recipe import Objective, Optimisation, Tuning, recipe_names
from pouf.training.optim import OPTIMIZERS, SCHEDULES
from pouf.tuners import TUNERS


@pytest.mark.parametrize("name", recipe_names())
def test_every_named_recipe_loads_and_survives_toml(name: str) -> None:
    recipe = Recipe.load(name)
    assert Recipe.from_toml(recipe.to_toml()) == recipe


def test_the_papers_settings_are_there() -> None:
    assert {"office31-full", "office31-prompt", "office-home-full", "domainnet-full"} <= set(recipe_names())
    full, prompt = Recipe.load("office31-full"), Recipe.load("office31-prompt")
    assert (full.steps, full.batch_size, full.objective.information) == (5000, 96, 0.3)
    assert (full.optimisation.lr, prompt.optimisation.lr) == (5e-7, 1e-3)
    assert Recipe.load("office-home-prompt").optimisation.lr == 5e-7
    assert Recipe.load("domainnet-full").batch_size == Recipe.load("domainnet-prompt").batch_size == 16
    assert (prompt.tuning.name, prompt.tuning.context) == ("prompt", "a photo of a")
    assert full.augment == "crop-flip"
    assert (full.optimisation.momentum, full.optimisation.nesterov, full.optimisation.weight_decay) == (0.9, True, 1e-3)


def test_the_default_recipe_is_the_papers() -> None:
    assert Recipe() == Recipe.load("office31-full") == Recipe.load("images")


def test_a_recipe_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('steps = 7\n[optimisation]\nlr = 1\nname = "adamw"\n')
    recipe = Recipe.load(file)
    assert (recipe.steps, recipe.optimisation.lr, recipe.optimisation.name) == (7, 1.0, "adamw")
    assert recipe.batch_size == Recipe().batch_size


def test_settings_are_changed_in_a_copy() -> None:
    recipe = Recipe()
    changed = recipe.with_settings(steps=3, **{"tuning.name": "prompt", "tuning.position": "front"})
    assert (changed.steps, changed.tuning.name, changed.tuning.position) == (3, "prompt", "front")
    assert recipe == Recipe()
    with pytest.raises(FrozenInstanceError):
        recipe.steps = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("stepz = 3", "unknown setting 'stepz': choose from steps"),
        ("[tuning]\nname = 'lots'", "unknown tuning.name 'lots': choose one of full, prompt, layernorm"),
        ("[optimisation]\nlrr = 1.0", "unknown setting 'optimisation.lrr'"),
        ("steps = 'many'", "steps must be int, not 'many'"),
        ("steps = -1", "steps must not be negative"),
        ("[optimisation]\nlr = -1.0", "optimisation.lr must be above 0"),
        ("[objective]\ninformation = -0.1", "objective.information must not be negative"),
        ("[objective]\ntransport = 0\ninformation = 0", "nothing to learn"),
        ("objective = 3", "must be a table"),
        ("steps = ", "not valid TOML"),
    ],
)
def test_a_wrong_recipe_is_a_clear_error(toml: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Recipe.from_toml(toml)


def test_an_unknown_recipe_names_those_there_are() -> None:
    with pytest.raises(InputError, match=r"no recipe 'office32': give a TOML file, or one of .*office31-full"):
        Recipe.load("office32")


@pytest.mark.parametrize(
    ("part", "setting", "registry"),
    [
        (Objective, "cost", COSTS),
        (Optimisation, "name", OPTIMIZERS),
        (Optimisation, "schedule", SCHEDULES),
        (Tuning, "name", TUNERS),
        (Recipe, "augment", AUGMENTATIONS),
    ],
)
def test_a_setting_allows_just_what_its_registry_holds(part: type, setting: str, registry: dict) -> None:
    assert set(get_args(get_type_hints(part)[setting])) == set(registry)
