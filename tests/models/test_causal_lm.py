"""Causal language models: the word after the text, at the last position, as the model itself would score it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import REVIEWS, train
from peft import PeftModel
from small_models import CAUSAL_LMS, causal_lm
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from pouf import Classifier, InputError, Recipe, Texts
from pouf.tuners import tune

TEMPLATE = "{text} It was [MASK]"
WORDS = {"bad": ["terrible", "bad"], "good": "great"}
QUICK = Recipe(steps=3, batch_size=8, augment="none", snapshots=0).with_settings(
    {"optimisation.lr": 1e-2, "optimisation.name": "adamw", "tuner.context": "it was"}
)


@pytest.fixture(scope="module", params=CAUSAL_LMS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return causal_lm(tmp_path_factory.mktemp("causal") / request.param, request.param)


def open_model(model: Path, template: str = TEMPLATE, **more: Any) -> Classifier:
    return Classifier.from_pretrained(model, WORDS, [template], **more)


def test_logits_are_those_of_the_next_word(model: Path) -> None:
    """One text after another, without padding, through the model as transformers has it."""
    raw, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    words = [
        [tokenizer(f" {word}", add_special_tokens=False)["input_ids"][-1] for word in own]
        for own in (("terrible", "bad"), ("great",))
    ]
    expected = []
    for text in REVIEWS:
        with torch.no_grad():
            logits = raw(**tokenizer(f"{text} It was", return_tensors="pt")).logits[0, -1]
        expected.append(torch.stack([logits[own].mean() for own in words]))
    assert torch.allclose(open_model(model).predict_log_proba(REVIEWS), torch.stack(expected).log_softmax(1), atol=1e-5)


def test_padding_and_company_change_nothing(model: Path) -> None:
    classifier = open_model(model)
    together = classifier.predict_proba(REVIEWS)
    alone = torch.stack([classifier.predict_proba(text) for text in REVIEWS])
    assert torch.allclose(together, alone, atol=1e-5)


def test_what_stands_after_the_gap_can_not_be_seen(model: Path) -> None:
    assert torch.equal(open_model(model, "{text} It was [MASK].").predict_proba(REVIEWS),
                       open_model(model).predict_proba(REVIEWS))  # fmt: skip
    for template in ("It was [MASK] {text}", "{text} It was [MASK] for us", "[MASK] {text}"):
        with pytest.raises(InputError, match="continues after"):
            open_model(model, template)


def test_a_long_text_loses_its_end_and_the_template_stays(model: Path) -> None:
    classifier = open_model(model, max_length=12)
    assert classifier.backbone.prepare(["food " * 50, "food"])["input_ids"].shape[1] <= 12
    tokenizer = classifier.backbone.tokenizer
    (ids,) = classifier.backbone.prepare(["food " * 50])["input_ids"].tolist()
    assert tokenizer.decode(ids).count("food") >= 5 and tokenizer.decode(ids).endswith("t was")


@pytest.mark.parametrize("tune", ["lora", "prompt", "prototypes", "layernorm", "full"])
def test_every_tuner_trains_saves_and_comes_back(model: Path, tmp_path: Path, tune: str) -> None:
    classifier = open_model(model)
    assert classifier.kind == "causal"
    before = classifier.predict_log_proba(REVIEWS)
    train(classifier, Texts(REVIEWS), QUICK.with_settings({"tuner.name": tune}))
    after = classifier.predict_log_proba(REVIEWS)
    assert not torch.allclose(after, before, atol=1e-4)
    classifier.save_pretrained(tmp_path)
    assert torch.equal(Classifier.from_pretrained(tmp_path).predict_log_proba(REVIEWS), after)
    assert torch.equal(Classifier.from_pretrained(tmp_path, use="zero-shot").predict_log_proba(REVIEWS), before)
    if tune == "lora":
        opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(tmp_path))
        other = open_model(model)
        other.backbone.model = opened.base_model.model.eval()
        assert torch.allclose(other.predict_log_proba(REVIEWS), after, atol=1e-5)
    if tune == "full":
        pipeline("text-generation", model=str(tmp_path))(REVIEWS[0], max_new_tokens=2)


def test_the_prompt_leaves_the_model_alone_and_changes_every_text(model: Path) -> None:
    classifier = open_model(model)
    weights = classifier.backbone.weights_digest()
    features = classifier.features(REVIEWS)
    tuner = tune(classifier, QUICK.with_settings({"tuner.name": "prompt"}).tuner)
    assert list(tuner.parameters) == ["backbone.input_prompt"]
    assert ((classifier.features(REVIEWS) - features).abs().amax(1) > 1e-4).all()
    classifier.backbone.input_prompt = None
    assert classifier.backbone.weights_digest() == weights


def test_lora_is_the_default_and_full_tuning_the_exception(model: Path) -> None:
    assert Recipe.default("causal").tuner.name == "lora"
    classifier = open_model(model)
    result = classifier.adapt(REVIEWS, settings={"steps": 2, "snapshots": 0})
    classifier = result.classifier
    assert classifier.postprocessor is not None, "a preference for one word whatever the text is taken away"
    assert result.recipe.tuner.name == "lora" and 0 < result.trainable < 0.5 * result.total


def test_methods_with_demonstrations_are_not_for_it(model: Path) -> None:
    with pytest.raises(InputError, match="'in-context' is for texts with a \\[MASK\\] template"):
        open_model(model).adapt(REVIEWS, method="in-context")


def test_without_a_template_with_a_gap_it_is_told_what_is_needed(model: Path) -> None:
    with pytest.raises(InputError, match=r"needs a template with \[MASK\]"):
        Classifier.from_pretrained(model, ["bad", "good"])
