"""LoRA: it starts as the identity, goes without a trace, is what peft opens, and merges into the weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_runner import pouf
from helpers import REVIEWS, train
from peft import PeftModel
from PIL import Image
from small_models import clip, masked_lm, sentence_encoder, siglip
from transformers import AutoModel, AutoModelForMaskedLM, CLIPConfig, CLIPModel

from pouf import Classifier, Images, InputError, Recipe, Texts
from pouf.data.base import Unlabelled
from pouf.files import file_digest
from pouf.recipe import TunerSettings
from pouf.tuners import tune
from pouf.tuners.weights import _adapter

LORA = Recipe(steps=3, batch_size=8, augment="none", snapshots=0).with_settings(
    {"tuner.name": "lora", "tuner.rank": 2, "optimisation.lr": 3e-2, "optimisation.name": "adamw"}
)
CLOZE = {"templates": ["{text} It was [MASK]."], "words": ["terrible", "great"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    clip(folder / "clip")
    sentence_encoder(folder / "sentence")
    masked_lm(folder / "masked", "roberta")
    return folder


def open_model(models: Path, kind: str) -> Classifier:
    return Classifier.from_pretrained(models / kind, ["bad", "good"], **(CLOZE if kind == "masked" else {}))


KINDS = ["clip", "sentence", "masked"]
AUTO = {"clip": AutoModel, "sentence": AutoModel, "masked": AutoModelForMaskedLM}


@pytest.fixture(scope="module")
def inputs() -> dict[str, Unlabelled]:
    noise = np.random.default_rng(0)
    pictures = [Image.fromarray(noise.integers(0, 256, (20, 20, 3), dtype=np.uint8)) for _ in range(12)]
    return {"clip": Images(pictures), "sentence": Texts(REVIEWS), "masked": Texts(REVIEWS)}


@pytest.fixture(scope="module")
def tuned(models: Path, inputs: dict[str, Unlabelled]) -> dict[str, Classifier]:
    """One of each kind, trained so far that its predictions are others."""
    return {kind: moved(open_model(models, kind), inputs[kind]) for kind in KINDS}


def moved(classifier: Classifier, data: Unlabelled) -> Classifier:
    train(classifier, data, LORA)
    return classifier


def test_lora_of_vit_b16_trains_queries_and_values_at_rank_8() -> None:
    config = CLIPConfig(text_config={"vocab_size": 100}, vision_config={"patch_size": 16}, projection_dim=512)
    with torch.device("meta"):
        model = CLIPModel(config)
    numbers = sum(p.numel() for p in _adapter(model, "", TunerSettings(name="lora")).parameters().values())
    assert numbers == 12 * 2 * 2 * 8 * (512 + 768) == 491_520


@pytest.mark.parametrize("kind", KINDS)
def test_lora_starts_as_the_identity_and_goes_without_a_trace(
    models: Path, inputs: dict[str, Unlabelled], kind: str
) -> None:
    classifier = open_model(models, kind)
    before, names = classifier.predict_log_proba(inputs[kind]), list(classifier.state_dict())
    fingerprint, tuned = classifier.backbone.fingerprint(), classifier.copy()
    tune(tuned, LORA.tuner)
    assert torch.equal(tuned.predict_log_proba(inputs[kind]), before)
    assert list(tuned.state_dict()) != names
    assert list(classifier.state_dict()) == names
    assert classifier.backbone.fingerprint() == fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_to_zero_shot_and_back(models: Path, inputs: dict[str, Unlabelled], kind: str) -> None:
    classifier = open_model(models, kind)
    before = classifier.predict_log_proba(inputs[kind])
    result = classifier.adapt(inputs[kind], recipe=LORA.with_settings(snapshots=2))
    classifier = result.at("last")
    last = classifier.predict_log_proba(inputs[kind])
    assert not torch.allclose(last, before, atol=1e-3)
    classifier = result.at("zero-shot")
    assert torch.equal(classifier.predict_log_proba(inputs[kind]), before)
    classifier = result.at("last")
    assert torch.equal(classifier.predict_log_proba(inputs[kind]), last)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_itself_is_left_alone(models: Path, tuned: dict[str, Classifier], kind: str) -> None:
    base = dict(open_model(models, kind).named_parameters())
    after = {name.replace(".base_layer.", "."): p for name, p in tuned[kind].named_parameters()}
    assert base.keys() < after.keys()
    assert all(torch.equal(parameter, after[name]) for name, parameter in base.items())
    assert all("lora_" in name for name in after.keys() - base.keys())


@pytest.mark.parametrize("kind", KINDS)
def test_saved_it_is_kilobytes_and_comes_back_to_the_bit(
    tuned: dict[str, Classifier], inputs: dict[str, Unlabelled], tmp_path: Path, kind: str
) -> None:
    tuned[kind].save_pretrained(tmp_path)
    files = {file.name for file in tmp_path.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "pouf.json"} <= files
    assert not {"model.safetensors", "weights.safetensors"} & files
    p = tuned[kind].predict_log_proba(inputs[kind])
    assert torch.equal(Classifier.from_pretrained(tmp_path).predict_log_proba(inputs[kind]), p)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_opens_what_was_saved(
    models: Path, tuned: dict[str, Classifier], inputs: dict[str, Unlabelled], tmp_path: Path, kind: str
) -> None:
    """The model of peft gives the features that ours gives, in the place of our own."""
    tuned[kind].save_pretrained(tmp_path)
    features = tuned[kind].features(inputs[kind])
    opened = PeftModel.from_pretrained(AUTO[kind].from_pretrained(models / kind), str(tmp_path))
    other = open_model(models, kind)
    other.backbone.model = opened.base_model.model.eval()
    assert torch.allclose(other.features(inputs[kind]), features, atol=1e-6)
    assert not torch.allclose(open_model(models, kind).features(inputs[kind]), features, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_it_is_a_normal_folder_of_transformers(
    tuned: dict[str, Classifier], inputs: dict[str, Unlabelled], tmp_path: Path, kind: str
) -> None:
    p, weights = tuned[kind].predict_proba(inputs[kind]), tuned[kind].backbone.weights_digest()
    tuned[kind].save_pretrained(tmp_path, merge=True)
    assert tuned[kind].backbone.weights_digest() == weights
    assert not any("lora" in name for name in AUTO[kind].from_pretrained(tmp_path).state_dict())
    assert not (tmp_path / "adapter_config.json").exists()
    opened = Classifier.from_pretrained(tmp_path)
    assert torch.allclose(opened.predict_proba(inputs[kind]), p, atol=1e-5)
    words = CLOZE if kind == "masked" else {}
    again = Classifier.from_pretrained(tmp_path, ["bad", "good"], **words)  # as a model like any other
    assert torch.allclose(again.predict_proba(inputs[kind]), p, atol=1e-5)


def test_layernorms_merge_and_a_soft_prompt_can_not(models: Path, tmp_path: Path) -> None:
    classifier = open_model(models, "clip")
    tune(classifier, TunerSettings(name="layernorm"))
    classifier.save_pretrained(tmp_path / "norms", merge=True)
    AutoModel.from_pretrained(tmp_path / "norms")
    classifier = open_model(models, "clip")
    tune(classifier, TunerSettings(name="prompt"))
    with pytest.raises(InputError, match="a soft prompt can't be merged"):
        classifier.save_pretrained(tmp_path / "prompt", merge=True)
    assert not (tmp_path / "prompt").exists()


@pytest.mark.parametrize(
    "kind", ["albert", "bert", "deberta", "deberta-v3", "distilbert", "electra", "modernbert", "mpnet", "xlm-roberta"]
)
def test_every_masked_lm_has_layers_for_it(tmp_path: Path, kind: str) -> None:
    classifier = Classifier.from_pretrained(masked_lm(tmp_path, kind), ["bad", "good"], **CLOZE)
    before = classifier.predict_log_proba(REVIEWS)
    moved(classifier, Texts(REVIEWS))
    assert not torch.allclose(classifier.predict_log_proba(REVIEWS), before, atol=1e-4)


def test_siglip_too_and_other_layers_by_name(tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(siglip(tmp_path), ["cat", "dog"])
    tuner = tune(classifier, TunerSettings(name="lora", rank=1, alpha=2.0, target_modules=["fc1", "mlp.fc2"]))
    assert {name.split(".")[-4] for name in tuner.parameters} == {"fc1", "fc2"}
    assert {"text_model", "vision_model"} == {name.split(".")[2] for name in tuner.parameters}
    # Of rank 1: 32 + 64 numbers for each of two layers, in 2 x 2 blocks and the pooling head.
    assert tuner.trainable == 2 * 5 * (32 + 64)


def test_layers_that_are_not_there_are_told_with_those_that_are(models: Path) -> None:
    classifier = open_model(models, "clip")
    with pytest.raises(InputError, match=r"no linear layer named w_qs.*k_proj, out_proj, q_proj"):
        tune(classifier, TunerSettings(name="lora", target_modules=["w_qs"]))


def test_without_peft_the_error_names_the_extra(models: Path, not_installed: Callable[[str], None]) -> None:
    not_installed("peft")
    with pytest.raises(InputError, match=r'needs peft: pip install "pouf\[lora\]"'):
        tune(open_model(models, "clip"), TunerSettings(name="lora"))


@pytest.mark.parametrize("damage", ["gone", "cut", "other model"])
def test_a_damaged_adapter_is_refused(models: Path, tuned: dict[str, Classifier], tmp_path: Path, damage: str) -> None:
    tuned["clip"].save_pretrained(tmp_path / "run")
    file, card = tmp_path / "run" / "adapter_model.safetensors", tmp_path / "run" / "pouf.json"
    if damage == "gone":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    else:
        tuned["sentence"].save_pretrained(tmp_path / "other")
        shutil.copy(tmp_path / "other" / file.name, file)
        content = json.loads(card.read_text())
        card.write_text(json.dumps(content | {"files": {file.name: file_digest(file)}}))
    words = {"gone": "is missing", "cut": "not as it was saved", "other model": "do not fit the base model"}[damage]
    with pytest.raises(InputError, match=words):
        Classifier.from_pretrained(tmp_path / "run")


def test_the_command_line_merges_a_run(tuned: dict[str, Classifier], tmp_path: Path) -> None:
    tuned["sentence"].save_pretrained(tmp_path / "run")
    result = pouf("export", "run", "--merge", cwd=tmp_path)
    assert "which transformers opens" in result.stdout + result.stderr
    opened = Classifier.from_pretrained(tmp_path / "run" / "merged", ["bad", "good"])
    assert torch.allclose(opened.features(REVIEWS), tuned["sentence"].features(REVIEWS), atol=1e-5)
    assert "--onnx or --merge" in pouf("export", "run", cwd=tmp_path, code=2).stderr
