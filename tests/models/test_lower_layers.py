"""Texts go through the lower layers once, and everything is as if they went through each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import REVIEWS, TEXTS, same, train, weights
from small_models import MASKED_LMS, masked_lm, sentence_encoder
from torch import Tensor

from pouf import Classifier, InputError, Recipe, Texts
from pouf.models.lower_layers import LowerLayers, find_layers, using
from pouf.models.templates import MASK
from pouf.tuners import tune
from pouf.tuners.weights import lower_layers

WORDS = ["bad", "good"]
UPPER = {"tuner.name": "upper"}


def cloze(folder: Path) -> Classifier:
    return Classifier.from_pretrained(folder, WORDS, [f"{{text}} it was {MASK}."], words=WORDS)


def encoded(classifier: Classifier, texts: list[str]) -> Tensor:
    backbone = classifier.backbone
    return backbone.encode_inputs(backbone.prepare(texts))


class Passes:
    """Counts the texts that go through a layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.texts = 0
        linear = next(module for module in layer.modules() if isinstance(module, torch.nn.Linear))
        linear.register_forward_pre_hook(self._count)

    def __deepcopy__(self, memo: dict[int, Any]) -> Passes:
        return self  # texts of copies count too

    def _count(self, linear: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        self.texts += len(given[0])


@pytest.mark.parametrize("lower", [1, 2])
@pytest.mark.parametrize("kind", sorted(set(MASKED_LMS) - {"albert"}))
def test_the_parts_of_a_model_are_the_whole(tmp_path: Path, kind: str, lower: int) -> None:
    classifier = cloze(masked_lm(tmp_path, kind, layers=3))
    transformer = classifier.backbone.model.base_model
    whole = encoded(classifier, TEXTS)
    whole.sum().backward()
    upper = list(find_layers(transformer)[lower:].parameters())
    expected = [parameter.grad.clone() for parameter in upper if parameter.grad is not None]
    classifier.zero_grad()
    with using(LowerLayers(transformer, lower)):
        for _ in range(2):  # computed, and looked up
            parts = encoded(classifier, TEXTS)
            torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)
    parts.sum().backward()
    gradients = [parameter.grad for parameter in upper if parameter.grad is not None]
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-3)
    assert all(parameter.grad is None for parameter in find_layers(transformer)[:lower].parameters())


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_inputs_and_prompts_of_a_sentence_encoder_are_the_same_in_parts(tmp_path: Path, kind: str) -> None:
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path, kind), ["cat", "dog"])
    features, prototypes = encoded(classifier, TEXTS), classifier.prototypes()
    lower = lower_layers(classifier.backbone, Recipe.load("texts-upper").tuner)
    lowest = Passes(find_layers(classifier.backbone.model.base_model)[0])  # of prompts too, which a copy reads
    with using(lower):
        for _ in range(2):
            torch.testing.assert_close(encoded(classifier, TEXTS), features)
            torch.testing.assert_close(classifier.copy().prototypes(), prototypes)
    assert lowest.texts == len(TEXTS) + len(classifier.classes)


def test_what_a_text_gives_depends_on_no_other_text(tmp_path: Path) -> None:
    classifier = cloze(masked_lm(tmp_path, "bert"))
    transformer = classifier.backbone.model.base_model
    first, second = LowerLayers(transformer, 1), LowerLayers(transformer, 1, memory=0)
    with torch.no_grad(), using(first):
        encoded(classifier, TEXTS[:2])
        encoded(classifier, TEXTS[::-1])
        remembered = encoded(classifier, TEXTS)
    with torch.no_grad(), using(second):
        assert torch.equal(encoded(classifier, TEXTS), remembered)
    _, *lengths = [len(output) for output in first.outputs.values()]  # after that of the probe
    assert sorted(lengths) == sorted(classifier.backbone.prepare(TEXTS)["attention_mask"].sum(1).tolist())
    assert not second.outputs


def test_numbers_of_half_precision_are_not_taken_for_others(tmp_path: Path) -> None:
    classifier = cloze(masked_lm(tmp_path, "bert"))
    exact = encoded(classifier, TEXTS)
    with using(LowerLayers(classifier.backbone.model.base_model, 1)):
        with torch.autocast("cpu", torch.bfloat16):
            half = encoded(classifier, TEXTS)
        again = encoded(classifier, TEXTS)
    torch.testing.assert_close(again, exact)
    assert not torch.allclose(half.float(), exact, rtol=1e-4, atol=1e-4)


def test_dropout_goes_through_every_layer_each_time(tmp_path: Path) -> None:
    classifier = cloze(masked_lm(tmp_path, "bert"))
    lowest = Passes(find_layers(classifier.backbone.model.base_model)[0])
    with using(LowerLayers(classifier.backbone.model.base_model, 1)):
        before = lowest.texts
        classifier.train()
        encoded(classifier, TEXTS)
        encoded(classifier, TEXTS)
    assert lowest.texts == before + 2 * len(TEXTS)


@pytest.mark.parametrize("settings", [{}, {"compute.chunk": 3}, {"compute.checkpointing": True}])
def test_a_run_tunes_the_upper_layers_alone_and_reads_each_text_below_once(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    settings = {"keep_shares_max_classes": 0, "steps": 6, "batch_size": 5, **settings}
    recipe = Recipe.load("masked-upper").with_settings(settings)

    def run(change: dict[str, Any]) -> tuple[Classifier, list[float], Passes]:
        classifier = cloze(masked_lm(tmp_path / f"{len(change)}", "roberta", layers=3))
        lowest = Passes(find_layers(classifier.backbone.model.base_model)[0])
        result = train(classifier, Texts(REVIEWS), recipe.with_settings(change))
        return classifier, [step.loss for step in result.history], lowest

    before = weights(cloze(masked_lm(tmp_path / "before", "roberta", layers=3)))
    classifier, losses, passes = run({})
    for name, weight in weights(classifier).items():
        tuned = "layer.2." in name or ("lm_head" in name and "decoder" not in name)
        assert torch.equal(weight, before[name]) is not tuned or "key.bias" in name, name
    assert passes.texts <= 2 * len(REVIEWS) + 2, "each text, each that is perturbed, and what the parts are tried on"
    assert losses == run({})[1]


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_third_of_the_layers_is_tuned_or_as_many_as_the_settings_say(tmp_path: Path, layers: int) -> None:
    classifier = cloze(masked_lm(tmp_path, "bert", layers=3))
    tuner = tune(classifier, Recipe.load("masked-upper").with_settings({"tuner.layers": layers}).tuner)
    stack = {int(name.split("layer.")[1].split(".")[0]) for name in tuner.parameters if "layer." in name}
    assert stack == ({2} if layers < 2 else {1, 2})
    assert not any("embeddings" in name for name in tuner.parameters)
    assert any("predictions.transform" in name for name in tuner.parameters)


def test_what_has_no_upper_layers_is_refused_with_what_to_tune(tmp_path: Path) -> None:
    shared = cloze(masked_lm(tmp_path / "albert", "albert"))
    with pytest.raises(InputError, match="tune 'full' or 'lora'"):
        tune(shared, Recipe.load("masked-upper").tuner)
    whole = cloze(masked_lm(tmp_path / "bert", "bert"))
    with pytest.raises(InputError, match=r"tuner.layers is 2, of 2 layers .* 'full'"):
        tune(whole, Recipe.load("masked-upper").with_settings({"tuner.layers": 2}).tuner)


def test_a_run_leaves_nothing_behind(tmp_path: Path) -> None:
    classifier = cloze(masked_lm(tmp_path, "bert"))
    recipe = Recipe.load("masked-upper").with_settings(steps=2, batch_size=4)
    result = classifier.adapt(Texts(REVIEWS), recipe=recipe)
    lowest = Passes(find_layers(result.classifier.backbone.model.base_model)[0])
    for _ in range(2):
        encoded(result.classifier, TEXTS)
    assert lowest.texts == 2 * len(TEXTS)
    assert same(weights(result.at("zero-shot")), weights(classifier))
