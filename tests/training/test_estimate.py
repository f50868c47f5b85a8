"""The estimate before a run: what it counts, that it is near the truth, and that it changes nothing."""

import logging
import time
from pathlib import Path

import pytest
import torch
from helpers import REVIEWS, Steps, groups, same, weights
from PIL import Image
from small_models import masked_lm

from pouf import EMBEDDED, Classifier, FeatureCache, Images, InferenceConfig, InputError, Recipe
from pouf.data.base import Subset
from pouf.demo import DIGITS
from pouf.recipe import PRESETS
from pouf.training.estimate import Estimate, estimate, largest_preset, spoken


class Told(Steps):
    estimate: Estimate | None = None

    def on_estimate(self, estimate: Estimate) -> None:
        self.estimate = estimate


def test_an_estimate_reads_as_a_sentence() -> None:
    told = Estimate(850, 2000, 100, 0, "image")
    assert str(told) == "about 14 minutes: 2,000 images to encode, then 100 steps"
    assert str(Estimate(4 * 86400, 0, 5000, 96, "image")) == "about 4 days: 5,000 steps of 96 images"
    assert str(Estimate(3, 0, 30, 0, "vector")) == "less than a minute: 30 steps"
    assert [spoken(s) for s in (59, 61, 3500, 3700)] == [
        "less than a minute", "about 1 minute", "about 58 minutes", "about 1 hour",
    ]  # fmt: skip


def test_the_papers_preset_is_estimated_far_dearer_and_nothing_changes(few_digits: Path) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    data, before, random = Images.from_folder(few_digits), weights(classifier), torch.get_rng_state()
    fast, balanced, paper = (
        estimate(classifier, data, Recipe.preset(p, "image"), InferenceConfig()) for p in PRESETS if p != "light"
    )
    assert max(fast.seconds, balanced.seconds) < paper.seconds / 20
    assert (fast.encoded, fast.steps, fast.batch) == (len(data), 100, 0)
    assert (paper.steps, paper.batch) == (5000, 96)
    assert same(weights(classifier), before) and torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in classifier.parameters())
    assert classifier.tuner_settings is None and classifier.prompt is None


def test_an_estimate_is_near_the_truth(few_digits: Path) -> None:
    """Full tuning, where one batch tells all: not more than eight times off, on a machine that has other work."""
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    data, recipe = Images.from_folder(few_digits), Recipe.load("demo").with_settings(steps=12, snapshots=0)
    guess = estimate(classifier, data, recipe, InferenceConfig()).seconds
    start = time.perf_counter()
    classifier.adapt(data, recipe=recipe)
    took = time.perf_counter() - start
    assert took / 8 < guess < took * 8


def test_what_only_the_first_sample_waits_for_is_not_counted_for_each(few_digits: Path) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    data, recipe = Images.from_folder(few_digits), Recipe.load("demo").with_settings(steps=100)
    waited, prepare = [], classifier.backbone.prepare

    def prepared(*given: object) -> object:
        if not waited:
            waited.append(time.sleep(2))  # as long as processors take to load on a busy machine
        return prepare(*given)

    classifier.backbone.prepare = prepared  # type: ignore[method-assign]
    assert estimate(classifier, data, recipe, InferenceConfig()).seconds < 2 / 8 * 96 * 100 / 4 and waited


def test_what_is_kept_need_not_be_encoded(few_digits: Path, tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    data, inference = Images.from_folder(few_digits), InferenceConfig(cache=FeatureCache(tmp_path))
    fast = Recipe.preset("fast", "image")
    assert estimate(classifier, data, fast, inference).encoded == len(data)
    classifier.encode(Subset(data, range(0, len(data), 2)), inference)
    assert estimate(classifier, data, fast, inference).encoded == len(data) // 2
    classifier.encode(data, inference)
    assert estimate(classifier, data, fast, inference).encoded == 0


def test_a_masked_language_model_and_vectors_are_left_as_they_were(tmp_path: Path) -> None:
    lm = Classifier.from_pretrained(masked_lm(tmp_path / "lm", "bert"), ["bad", "good"], ["{text} [MASK]."])
    prompt = Recipe.default("cloze").with_settings({"tuner.name": "prompt"})
    assert estimate(lm, lm.data(REVIEWS), prompt, InferenceConfig()).batch == len(REVIEWS)
    assert lm.backbone.input_prompt is None
    before = weights(lm)
    assert estimate(lm, lm.data(REVIEWS), Recipe.load("masked-upper"), InferenceConfig()).batch == len(REVIEWS)
    assert same(weights(lm), before) and all(parameter.requires_grad for parameter in lm.parameters())
    features, prototypes = groups()
    bare = Classifier.from_vectors(prototypes, list("abcdef"))
    for tune in ("prototypes", "map"):
        recipe = Recipe.default("vector").with_settings({"tuner.name": tune})
        assert estimate(bare, bare.data(features), recipe, InferenceConfig()).steps == 100
    assert bare.backbone.map is None


def test_adapt_tells_its_estimate_and_takes_the_largest_preset_that_fits(
    pictures: list[Image.Image], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pouf")
    classifier, told = Classifier.from_pretrained(EMBEDDED, DIGITS), Told()
    settings = {"snapshots": 0, "min_class_usage": 0.0}
    recipes = [Recipe.preset(name, "image").with_settings(settings) for name in ("balanced", "paper")]
    times = [estimate(classifier, classifier.data(pictures), recipe, InferenceConfig()).seconds for recipe in recipes]
    between = (times[0] * times[1]) ** 0.5 / 60  # on any machine
    result = classifier.adapt(pictures, max_minutes=between, settings=settings, callbacks=[told])
    classifier = result.classifier
    assert result.recipe == recipes[0]
    assert "the preset balanced fits into" in caplog.text
    assert told.estimate is not None and told.estimate.encoded == len(pictures) and str(told.estimate) in caplog.text
    with pytest.raises(InputError, match=r"even the preset 'fast' needs more than the .* minutes allowed"):
        Classifier.from_pretrained(EMBEDDED, DIGITS).adapt(pictures, max_minutes=1e-6)
    for wrong, words in (({"recipe": "fast", "max_minutes": 3}, "give one of them"), ({"max_minutes": 0}, "above 0")):
        with pytest.raises(InputError, match=words):
            classifier.adapt(pictures, **wrong)


def test_the_largest_that_fits_is_taken() -> None:
    seconds = {"fast": 50.0, "light": 80.0, "balanced": 100.0, "paper": 1000.0}
    for minutes, expected in ((1, "fast"), (2, "balanced"), (60, "paper")):
        assert largest_preset(lambda name: Estimate(seconds[name], 1, 1, 0, "image"), minutes) == expected
