"""Predict, save and load: the same numbers before and after, in as few bytes as the tuner allows."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import train
from hub_server import environment_for
from PIL import Image
from transformers import CLIPModel

from pouf import EMBEDDED, Classifier, Images, InputError, Recipe
from pouf.demo import DIGITS
from pouf.models.load import embedded_folder
from pouf.tuners import TUNERS

SHORT = Recipe.load("demo").with_settings(steps=2, batch_size=12)


def tuned(tune: str, pictures: list[Image.Image], **settings: object) -> Classifier:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    train(classifier, Images(pictures), SHORT.with_settings(**{"tuner.name": tune}, **settings))
    return classifier


def test_features_and_prototypes_have_length_one(tiny: Classifier, pictures: list[Image.Image]) -> None:
    features, prototypes = tiny.features(pictures), tiny.prototypes()
    assert features.shape == (12, 64) and prototypes.shape == (10, 64)
    assert torch.allclose(features.norm(dim=1), torch.ones(12)) and torch.allclose(
        prototypes.norm(dim=1), torch.ones(10)
    )


def test_probabilities_are_the_softmax_of_cosine_over_temperature(tiny: Classifier, pictures: list) -> None:
    sim = tiny.features(pictures) @ tiny.prototypes().detach().T
    expected = torch.softmax(sim * tiny.backbone.model.logit_scale.exp().item(), 1)
    assert torch.allclose(tiny.predict_proba(pictures), expected, atol=1e-6)
    assert tiny.predict(pictures) == [DIGITS[i] for i in expected.argmax(1)]


def test_batch_size_changes_nothing(tiny: Classifier, pictures: list[Image.Image]) -> None:
    assert torch.allclose(tiny.predict_proba(pictures, batch_size=5), tiny.predict_proba(pictures), atol=1e-6)


def test_inputs_may_be_a_folder_paths_or_images(tiny: Classifier, pictures: list, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i:02d}.png" for i in range(12)]
    for path, picture in zip(paths, pictures, strict=True):
        picture.save(path)
    expected = tiny.predict_proba(pictures)
    for inputs in (tmp_path, str(tmp_path), paths, [str(path) for path in paths], Images.from_folder(tmp_path)):
        assert torch.equal(tiny.predict_proba(inputs), expected)


@pytest.mark.parametrize("tune", sorted(TUNERS.keys() - {"prototypes", "map", "upper"}))
def test_a_saved_classifier_predicts_the_same_after_loading(tune: str, pictures: list, tmp_path: Path) -> None:
    classifier = tuned(tune, pictures, temperature=0.07)
    classifier.save_pretrained(tmp_path)
    loaded = Classifier.from_pretrained(tmp_path)
    assert torch.equal(loaded.predict_proba(pictures), classifier.predict_proba(pictures))
    assert torch.equal(loaded.prototypes(), classifier.prototypes())
    assert (loaded.classes, loaded.templates, loaded.tuner_settings) == (
        classifier.classes,
        classifier.templates,
        classifier.tuner_settings,
    )
    zero_shot = Classifier.from_pretrained(tmp_path, use="zero-shot")
    assert zero_shot.predict(pictures) == Classifier.from_pretrained(EMBEDDED, DIGITS).predict(pictures)


@pytest.mark.parametrize(("tune", "limit"), [("prompt", 8_000), ("layernorm", 40_000)])
def test_a_run_that_keeps_its_base_holds_kilobytes(tune: str, limit: int, pictures: list, tmp_path: Path) -> None:
    tuned(tune, pictures).save_pretrained(tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*")) < limit
    assert (embedded_folder() / "model.safetensors").stat().st_size > 1_000_000


def test_a_fully_tuned_run_is_a_normal_transformers_folder(pictures: list, tmp_path: Path) -> None:
    classifier = tuned("full", pictures)
    classifier.save_pretrained(tmp_path)
    model = CLIPModel.from_pretrained(tmp_path)
    ours = classifier.backbone.model.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in model.state_dict().items())
    again = Classifier.from_pretrained(tmp_path, DIGITS)
    assert torch.equal(again.predict_proba(pictures), classifier.predict_proba(pictures))


def test_a_classifier_can_be_saved_before_it_is_tuned(tiny: Classifier, pictures: list, tmp_path: Path) -> None:
    tiny.save_pretrained(tmp_path)
    assert torch.equal(Classifier.from_pretrained(tmp_path).predict_proba(pictures), tiny.predict_proba(pictures))


def test_other_weights_than_the_runs_are_refused(pictures: list, tmp_path: Path) -> None:
    tuned("prompt", pictures).save_pretrained(tmp_path)
    card = json.loads((tmp_path / "pouf.json").read_text())
    card["tuner"]["name"] = "layernorm"
    (tmp_path / "pouf.json").write_text(json.dumps(card))
    with pytest.raises(InputError, match="do not fit the base model"):
        Classifier.from_pretrained(tmp_path)


def test_loading_what_is_no_classifier_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not a finished run: expected pouf.json"):
        Classifier.from_pretrained(tmp_path)


@pytest.mark.parametrize(("version", "words"), [(99, "format 99, this pouf reads up to 3: update"), (1, "early pouf")])
def test_a_folder_of_another_format_is_refused(tiny: Classifier, tmp_path: Path, version: int, words: str) -> None:
    tiny.save_pretrained(tmp_path)
    card = json.loads((tmp_path / "pouf.json").read_text())
    (tmp_path / "pouf.json").write_text(json.dumps(card | {"format": version}))
    with pytest.raises(InputError, match=words):
        Classifier.from_pretrained(tmp_path)
    (tmp_path / "pouf.json").write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        Classifier.from_pretrained(tmp_path)


def test_a_saved_run_finds_the_same_revision_again(hub: Any, tmp_path: Path) -> None:
    shutil.copytree(embedded_folder(), tmp_path / "hub" / "me" / "clip")
    code = """
import shutil, sys
from pouf import Classifier
Classifier.from_pretrained("me/clip", ["cat", "dog"], revision="abc123").save_pretrained(sys.argv[1])
shutil.rmtree(sys.argv[2])
assert Classifier.from_pretrained(sys.argv[1]).revision == "abc123"
"""
    home = tmp_path / "home"
    command = [sys.executable, "-c", code, str(tmp_path / "run"), str(home)]
    said = subprocess.run(command, env=environment_for(hub, home), capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    paths = [path for _, path in hub.asked]
    assert any("/abc123" in path for path in paths) and not any("/main" in path for path in paths)


def test_the_embedded_model_is_small_and_in_clips_own_format() -> None:
    assert sum(file.stat().st_size for file in embedded_folder().iterdir()) < 4_000_000
    model = CLIPModel.from_pretrained(embedded_folder())
    assert sum(parameter.numel() for parameter in model.parameters()) < 700_000
