"""Masked language models of every architecture we know, against transformers' own."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import TEXTS, train
from small_models import MASKED_LMS, masked_lm, sentence_encoder
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertForMaskedLM, FNetConfig, FNetForMaskedLM

from pouf import Classifier, InputError, Recipe, Texts
from pouf.inference.encode import InferenceConfig
from pouf.models.masked_lm import HEADS, MaskedLM
from pouf.tuners import tune

TEMPLATE = "{text} it was [MASK]."
CLASSES, WORDS = ["negative", "positive"], ["terrible", "great"]
RECIPE = Recipe.load("masked").with_settings(steps=4, batch_size=4, **{"optimisation.lr": 1e-2})


def classifier_of(folder: Path, **settings) -> Classifier:
    return Classifier.from_pretrained(folder, CLASSES, [TEMPLATE], words=WORDS, **settings)


def logits_of(classifier: Classifier, texts: list[str]) -> torch.Tensor:
    with torch.no_grad():
        features = classifier.encode(Texts(texts)).features
        return classifier.backbone.scores(features, classifier.prototypes()).logits


def librarys_logits(model: torch.nn.Module, tokenizer, text: str, words: list[str]) -> torch.Tensor:
    """transformers' own model on one text without padding, at the mask, for words with a space before them."""
    tokens = tokenizer(text.replace("[MASK]", tokenizer.mask_token), return_tensors="pt")
    with torch.no_grad():
        logits = model(**tokens).logits[0]
    is_mask = tokens["input_ids"][0] == tokenizer.mask_token_id
    ids = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in words]
    assert is_mask.sum() == 1 and all(len(i) == 1 for i in ids)
    return logits[is_mask][0, [i[0] for i in ids]]


@pytest.mark.parametrize("kind", MASKED_LMS)
def test_label_logits_are_those_of_the_librarys_own_model(tmp_path: Path, kind: str) -> None:
    folder = masked_lm(tmp_path, kind)
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    expected = [librarys_logits(model, tokenizer, TEMPLATE.replace("{text}", text), WORDS) for text in TEXTS]
    assert torch.allclose(logits_of(classifier_of(folder), TEXTS), torch.stack(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", MASKED_LMS)
def test_the_decoder_is_tied_and_stays_so_when_everything_is_trained(tmp_path: Path, kind: str) -> None:
    classifier = classifier_of(masked_lm(tmp_path / "base", kind))
    train(classifier, Texts(TEXTS), RECIPE)
    backbone = classifier.backbone
    assert backbone.head.weight is backbone.model.get_input_embeddings().weight
    classifier.save_pretrained(tmp_path / "run")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "run")
    assert torch.equal(again.get_input_embeddings().weight, backbone.head.weight)
    assert torch.equal(
        Classifier.from_pretrained(tmp_path / "run").predict_proba(TEXTS), classifier.predict_proba(TEXTS)
    )


@pytest.mark.parametrize("kind", MASKED_LMS)
def test_soft_vectors_before_the_input_count_as_words_there(tmp_path: Path, kind: str) -> None:
    """Before training they are the embeddings of the context's words, so the result is that of writing the words."""
    folder = masked_lm(tmp_path, kind)
    classifier = classifier_of(folder)
    tune(classifier, RECIPE.with_settings(**{"tuner.name": "prompt", "tuner.context": " so very good"}).tuner)
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    words = tokenizer(" so very good", add_special_tokens=False)["input_ids"]
    label_ids = classifier.backbone.label_ids
    for text in TEXTS:
        filled = TEMPLATE.replace("{text}", text).replace("[MASK]", tokenizer.mask_token)
        ids = torch.tensor([[*words, *tokenizer(filled)["input_ids"]]])
        with torch.no_grad():
            expected = model(input_ids=ids).logits[ids == tokenizer.mask_token_id][0, label_ids]
        # Beside a longer text, so that there is padding to get wrong.
        ours = logits_of(classifier, [text, "we loved the film so very much and the food and the service and the book"])
        assert torch.allclose(ours[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", MASKED_LMS)
def test_prompt_tuning_leaves_the_language_model_as_it_was_bit_for_bit(tmp_path: Path, kind: str) -> None:
    classifier = classifier_of(masked_lm(tmp_path / "base", kind))
    before = {name: tensor.clone() for name, tensor in classifier.backbone.model.state_dict().items()}
    untuned = classifier.predict_proba(TEXTS)
    result = train(classifier, Texts(TEXTS), RECIPE.with_settings(**{"tuner.name": "prompt"}))
    after = classifier.backbone.model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.allclose(classifier.predict_proba(TEXTS), untuned, atol=1e-4)
    vectors = classifier.backbone.input_prompt
    assert (
        result.trainable
        == vectors.numel()
        == len(vectors) * classifier.backbone.model.get_input_embeddings().embedding_dim
    )
    classifier.save_pretrained(tmp_path / "run")
    assert torch.equal(
        Classifier.from_pretrained(tmp_path / "run").predict_proba(TEXTS), classifier.predict_proba(TEXTS)
    )
    assert sum(file.stat().st_size for file in (tmp_path / "run").iterdir()) < 10_000
    assert torch.equal(Classifier.from_pretrained(tmp_path / "run", use="zero-shot").predict_proba(TEXTS), untuned)


@pytest.mark.parametrize("kind", MASKED_LMS)
def test_layer_norms_alone_can_be_tuned(tmp_path: Path, kind: str) -> None:
    classifier = classifier_of(masked_lm(tmp_path, kind))
    before = {name: p.detach().clone() for name, p in classifier.named_parameters()}
    train(classifier, Texts(TEXTS), RECIPE.with_settings(**{"tuner.name": "layernorm"}))
    changed = {name for name, p in classifier.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("norm" in name.lower() for name in changed)
    assert any("base_model" not in name and ".encoder." not in name and ".layers." not in name for name in changed)


def test_the_head_sees_the_mask_and_the_label_words_alone(tmp_path: Path) -> None:
    """Neither (batch, length, width) through the head nor anything as wide as the vocabulary."""
    classifier = classifier_of(masked_lm(tmp_path, "bert"))
    lengths = []
    predictions = classifier.backbone.model.cls.predictions
    predictions.transform.register_forward_hook(lambda m, inputs, out: lengths.append(out.shape))
    predictions.decoder.register_forward_hook(lambda m, inputs, out: pytest.fail("the decoder ran"))
    classifier.predict_proba(TEXTS)
    assert lengths == [torch.Size([len(TEXTS), 32])]


def test_prototypes_are_looked_up_once_for_a_whole_evaluation(tmp_path: Path) -> None:
    classifier = classifier_of(masked_lm(tmp_path, "bert"))
    calls, prototypes = [], classifier.backbone.prototypes
    classifier.backbone.prototypes = lambda *given: calls.append(1) or prototypes(*given)
    classifier.infer(Texts(TEXTS * 10), InferenceConfig(4))
    assert len(calls) == 1


def test_similarity_is_the_cosine_without_the_bias(tmp_path: Path) -> None:
    classifier = classifier_of(masked_lm(tmp_path, "bert"))
    features = classifier.encode(Texts(TEXTS)).features
    rows = classifier.backbone.model.cls.predictions.decoder.weight[classifier.backbone.label_ids]
    scores = classifier.backbone.scores(features, classifier.prototypes())
    assert torch.allclose(scores.sim, F.cosine_similarity(features[:, None], rows[None], dim=2), atol=1e-6)
    assert scores.temperature.item() == pytest.approx(0.1)


def test_several_words_of_a_class_are_averaged(tmp_path: Path) -> None:
    folder = masked_lm(tmp_path, "roberta")
    several = Classifier.from_pretrained(
        folder, CLASSES, [TEMPLATE], words=[["terrible", "bad"], ["great", "good", "okay"]]
    )
    single = Classifier.from_pretrained(
        folder, ["a", "b", "c", "d", "e"], [TEMPLATE], words=["terrible", "bad", "great", "good", "okay"]
    )
    each = logits_of(single, TEXTS)
    expected = torch.stack([each[:, :2].mean(1), each[:, 2:].mean(1)], dim=1)
    assert torch.allclose(logits_of(several, TEXTS), expected, atol=1e-5)


def test_without_words_the_class_names_are_the_words(tmp_path: Path) -> None:
    folder = masked_lm(tmp_path, "bert")
    named = Classifier.from_pretrained(folder, ["terrible", "great"], [TEMPLATE])
    assert torch.equal(named.predict_proba(TEXTS), classifier_of(folder).predict_proba(TEXTS))


def test_every_known_architecture_is_tested() -> None:
    assert {model_type for model_type, *_ in MASKED_LMS.values()} == set(HEADS)


def test_an_unknown_architecture_is_refused_with_those_we_know(tmp_path: Path) -> None:
    config = FNetConfig(hidden_size=16, num_hidden_layers=1, intermediate_size=16, vocab_size=64)
    FNetForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"'fnet'.*albert, bert, camembert.*roberta"):
        classifier_of(tmp_path)


def test_a_checkpoint_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    """transformers would fill the head with random numbers and only warn."""
    with pytest.raises(InputError, match="no trained masked-LM head"):
        classifier_of(sentence_encoder(tmp_path))


@pytest.mark.parametrize("kind", ["deberta-new-head", "deberta-v3"])
def test_debertas_own_checkpoints_have_the_newer_head_unsaid(tmp_path: Path, kind: str) -> None:
    folder = masked_lm(tmp_path, kind)
    expected = logits_of(classifier_of(folder), TEXTS)
    config = json.loads((folder / "config.json").read_text())
    del config["legacy"]
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(classifier_of(folder), TEXTS), expected)


def test_a_decoder_that_came_loose_is_refused(tmp_path: Path) -> None:
    model = BertForMaskedLM.from_pretrained(masked_lm(tmp_path, "bert"))
    MaskedLM.check_model(model)
    decoder = model.cls.predictions.decoder
    decoder.weight = torch.nn.Parameter(decoder.weight.detach().clone())
    with pytest.raises(InputError, match="not tied to its input embeddings"):
        MaskedLM.check_model(model)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_tokenizers_habit_of_padding_does_not_matter(tmp_path: Path, side: str) -> None:
    classifier = classifier_of(masked_lm(tmp_path, "roberta"))
    expected = logits_of(classifier, TEXTS)
    classifier.backbone.tokenizer.padding_side = side
    assert torch.allclose(logits_of(classifier, TEXTS), expected, atol=1e-6)


def test_words_that_are_one_token_for_the_model_are_refused(tmp_path: Path) -> None:
    folder = masked_lm(tmp_path, "bert")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match="'Great' and 'great' are the same token"):
        Classifier.from_pretrained(folder, CLASSES, [TEMPLATE], words=["Great", "great"])


def test_a_single_text_for_a_template_of_pairs_is_refused(tmp_path: Path) -> None:
    pairs = Classifier.from_pretrained(
        masked_lm(tmp_path, "bert"), CLASSES, ["{text_a}? [MASK], {text_b}"], words=WORDS
    )
    with pytest.raises(InputError, match=r"a sample of 1 text for template .* reads text_a and text_b"):
        pairs.predict(["one text"])
    assert len(pairs.predict([("we loved it", "the film was good")])) == 1


def test_nothing_to_predict_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no inputs in the list"):
        classifier_of(masked_lm(tmp_path, "bert")).predict([])


def test_half_precision_checkpoints_are_read_as_fp32(tmp_path: Path) -> None:
    folder = masked_lm(tmp_path, "bert")
    BertForMaskedLM.from_pretrained(folder).half().save_pretrained(folder)
    assert {p.dtype for p in classifier_of(folder).parameters()} == {torch.float32}


def test_the_descriptions_of_a_class_are_its_words(tmp_path: Path) -> None:
    folder = masked_lm(tmp_path / "lm", "bert")
    described = Classifier.from_pretrained(folder, {"negative": ["terrible", "bad"], "positive": "great"}, TEMPLATE)
    worded = Classifier.from_pretrained(folder, CLASSES, TEMPLATE, words=[["terrible", "bad"], ["great"]])
    assert torch.equal(logits_of(described, TEXTS[:3]), logits_of(worded, TEXTS[:3]))
    described.save_pretrained(tmp_path / "saved")
    loaded = Classifier.from_pretrained(tmp_path / "saved")
    assert loaded.classes == tuple(CLASSES) and torch.equal(logits_of(loaded, TEXTS[:3]), logits_of(worded, TEXTS[:3]))
    with pytest.raises(InputError, match="label word 'a terrible film' is"):
        Classifier.from_pretrained(folder, {"negative": "a terrible film", "positive": "great"}, TEMPLATE)
