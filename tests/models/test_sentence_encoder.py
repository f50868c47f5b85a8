"""Sentence encoders as sentence-transformers saves them, on both sides."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import train
from small_models import clip, masked_lm, sentence_encoder
from transformers import AutoModel, AutoTokenizer, T5Config, T5Model, ViTConfig, ViTModel

from pouf import Classifier, InputError, Recipe, Texts
from pouf.models import load_backbone

TEXTS = ["a good film", "the sea is about a cat, a dog and many books", "who", "how many"]


def reference(folder: Path, texts: list[str], pooling: str) -> torch.Tensor:
    """One text at a time, so that there is no padding to get wrong."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        hidden = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]
    pool = {"mean_tokens": lambda h: h.mean(0), "max_tokens": lambda h: h.amax(0), "cls_token": lambda h: h[0]}[pooling]
    return F.normalize(torch.stack([pool(h) for h in hidden]), dim=1)


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
@pytest.mark.parametrize("pooling", ["mean_tokens", "max_tokens", "cls_token"])
def test_features_and_prototypes_are_pooled_without_the_padding(tmp_path: Path, kind: str, pooling: str) -> None:
    folder = sentence_encoder(tmp_path, kind, pooling)
    classifier = Classifier.from_pretrained(folder, ["good", "bad"], ["it is a {} book , about the sea"])
    prompts = [f"it is a {name} book , about the sea" for name in ("good", "bad")]
    assert torch.allclose(classifier.features(TEXTS), reference(folder, TEXTS, pooling), atol=1e-5)
    assert torch.allclose(classifier.prototypes(), reference(folder, prompts, pooling), atol=1e-5)


def test_both_sides_are_one_model_and_both_are_trained(tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path), ["good", "bad"], ["a {} film"])
    before = classifier.features(TEXTS), classifier.prototypes().detach()
    recipe = Recipe.load("texts").with_settings(steps=3, **{"optimisation.lr": 1e-3})
    train(classifier, Texts(TEXTS), recipe)
    assert not torch.equal(classifier.features(TEXTS), before[0])
    assert not torch.equal(classifier.prototypes().detach(), before[1])


def test_the_temperature_is_a_setting_and_not_a_weight(tmp_path: Path) -> None:
    backbone = load_backbone(sentence_encoder(tmp_path))
    assert backbone.logit_scale.exp().item() == pytest.approx(10)
    assert "logit_scale" not in backbone.state_dict()


@pytest.mark.parametrize("recipe", ["texts", "texts-upper"])
def test_a_tuned_encoder_is_saved_in_the_same_layout(tmp_path: Path, recipe: str) -> None:
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path / "base"), ["good", "bad"])
    train(classifier, Texts(TEXTS), Recipe.load(recipe).with_settings(steps=2, temperature=0.05))
    classifier.save_pretrained(tmp_path / "tuned")
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "model.safetensors"):
        assert (tmp_path / "tuned" / name).is_file(), name
    again = Classifier.from_pretrained(tmp_path / "tuned")
    assert torch.equal(again.predict_proba(TEXTS), classifier.predict_proba(TEXTS))
    assert again.backbone.logit_scale.exp().item() == pytest.approx(20)


def test_texts_are_cut_to_the_encoders_length(tmp_path: Path) -> None:
    backbone = load_backbone(sentence_encoder(tmp_path))
    assert backbone.prepare(["cat " * 100])["input_ids"].shape == (1, 32)


def test_an_encoder_without_the_extra_files_is_mean_pooled(tmp_path: Path) -> None:
    folder = sentence_encoder(tmp_path)
    for extra in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        (folder / extra).unlink()
    classifier = Classifier.from_pretrained(folder, ["good", "bad"])
    assert torch.allclose(classifier.features(TEXTS), reference(folder, TEXTS, "mean_tokens"), atol=1e-5)


def test_a_pooling_that_is_named_and_not_there_is_an_error_and_one_elsewhere_is_found(tmp_path: Path) -> None:
    folder = sentence_encoder(tmp_path, pooling="cls_token")
    modules = (folder / "modules.json").read_text()
    (folder / "modules.json").write_text(modules.replace("1_Pooling", "2_Pooling"))
    with pytest.raises(InputError, match=r"2_Pooling/config.json', which modules.json names, is missing"):
        Classifier.from_pretrained(folder, ["good", "bad"])
    (folder / "1_Pooling").rename(folder / "2_Pooling")
    classifier = Classifier.from_pretrained(folder, ["good", "bad"])
    assert torch.allclose(classifier.features(TEXTS), reference(folder, TEXTS, "cls_token"), atol=1e-5)
    (folder / "2_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": false}')
    with pytest.raises(InputError, match="pools by nothing"):
        Classifier.from_pretrained(folder, ["good", "bad"])


def test_a_dense_layer_after_the_pooling_is_refused(tmp_path: Path) -> None:
    folder = sentence_encoder(tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InputError, match="Dense"):
        load_backbone(folder)


def test_models_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    T5Model(T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="'t5'"):
        load_backbone(tmp_path)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    config = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16)
    ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"can't load model|'vit'"):
        load_backbone(tmp_path)


def test_texts_for_an_image_model_are_refused(tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(clip(tmp_path), ["cat", "dog"])
    with pytest.raises(InputError, match="reads images, but the data are texts"):
        classifier.adapt(Texts(TEXTS))


def test_a_masked_language_model_without_a_mask_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    masked_lm(tmp_path / "lm", "bert")
    Classifier.from_pretrained(tmp_path / "lm", ["good", "bad"])
    assert "is a masked language model, and without a template with [MASK] it is used as a sentence" in caplog.text
    caplog.clear()
    Classifier.from_pretrained(sentence_encoder(tmp_path / "encoder"), ["good", "bad"])
    assert not caplog.text


def test_loading_shows_no_bars_of_other_libraries(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Classifier.from_pretrained(sentence_encoder(tmp_path), ["good", "bad"])
    assert "Loading weights" not in capfd.readouterr().err
