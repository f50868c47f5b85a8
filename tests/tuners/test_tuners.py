"""What each tuner trains, counted, and what it leaves alone, bit by bit."""

from pathlib import Path

import pytest
import torch
from helpers import REVIEWS, encoded_samples, train
from small_models import clip, masked_lm, sentence_encoder, siglip
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel

from pouf import Classifier, Images, InputError, Output, Recipe, Vectors
from pouf.models.load import embedded_folder
from pouf.models.vision import DualEncoder
from pouf.recipe import TunerSettings
from pouf.training.estimate import TIMED
from pouf.tuners import TUNERS, describe_trainable, tune

CLASSES = ["cat", "dog", "back_pack"]


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def base_patch16() -> DualEncoder:
    """The shapes of CLIP ViT-B/16, with random weights."""
    config = CLIPConfig(text_config={"vocab_size": 49408}, vision_config={"patch_size": 16}, projection_dim=512)
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    with torch.device("meta"):  # shapes only: half a gigabyte of numbers would add nothing
        model = CLIPModel(config)
    return DualEncoder(model.to_empty(device="cpu"), tokenizer, CLIPImageProcessor())


def test_full_tuning_of_vit_b16_trains_149_620_737_parameters(base_patch16: DualEncoder) -> None:
    tuner = tune(Classifier(base_patch16, CLASSES), TunerSettings(name="full"))
    assert tuner.trainable == 149_620_737


def test_prompt_tuning_of_vit_b16_trains_2_049_parameters(base_patch16: DualEncoder) -> None:
    classifier = Classifier(base_patch16, CLASSES)
    tuner = tune(classifier, TunerSettings(name="prompt"))
    total = sum(p.numel() for p in classifier.parameters())
    assert (tuner.trainable, total) == (2_049, 149_622_785)
    assert describe_trainable(tuner.trainable, total) == "trainable 2,049 of 149,622,785 (0.00137 %)"


def test_class_specific_contexts_of_vit_b16_are_one_for_each_class(base_patch16: DualEncoder) -> None:
    tuner = tune(Classifier(base_patch16, CLASSES), TunerSettings(name="prompt", class_specific=True))
    assert tuner.trainable == 3 * 2_048 + 1


def test_layernorm_tuning_of_vit_b16_trains_gains_and_biases_only(base_patch16: DualEncoder) -> None:
    tuner = tune(Classifier(base_patch16, CLASSES), TunerSettings(name="layernorm"))
    # 12 layers with two norms in each tower, one more after the text tower, two around the image tower.
    assert tuner.trainable == 2 * (25 * 512 + 26 * 768)


def test_the_soft_prompt_starts_as_its_words(clip_folder: Path) -> None:
    """Before the first step the prototypes are those of the template 'a photo of a {}.'."""
    words = Classifier.from_pretrained(clip_folder, CLASSES, ["a photo of a {}."]).prototypes()
    soft = Classifier.from_pretrained(clip_folder, CLASSES)
    tune(soft, TunerSettings(name="prompt"))
    assert torch.allclose(soft.prototypes(), words, atol=1e-6)


@pytest.mark.parametrize(
    ("position", "template"),
    [("end", "a photo of a {} ."), ("middle", "a photo {} of a ."), ("front", "{} a photo of a .")],
)
@pytest.mark.parametrize("class_specific", [False, True])
@pytest.mark.parametrize("build", [clip, siglip])
def test_the_class_name_stands_where_it_is_told_to(
    tmp_path: Path, build: object, position: str, template: str, class_specific: bool
) -> None:
    folder, names = build(tmp_path), ["cat", "dog", "sea"]
    words = Classifier.from_pretrained(folder, names, [template]).prototypes()
    soft = Classifier.from_pretrained(folder, names)
    tune(soft, TunerSettings(name="prompt", position=position, class_specific=class_specific))
    assert torch.allclose(soft.prototypes(), words, atol=1e-5)


def test_each_class_has_its_own_gradient_where_contexts_are_class_specific(clip_folder: Path) -> None:
    classifier = Classifier.from_pretrained(clip_folder, CLASSES)
    tuner = tune(classifier, TunerSettings(name="prompt", class_specific=True))
    classifier.prototypes()[1].sum().backward()
    gradient = tuner.parameters["prompt.vectors"].grad
    assert gradient.abs().sum((1, 2)).gt(0).tolist() == [False, True, False]


@pytest.mark.parametrize("name", sorted(TUNERS.keys() - {"map", "upper"}))
def test_a_tuner_changes_its_own_parameters_and_no_other(clip_folder: Path, name: str, pictures: list) -> None:
    classifier = Classifier.from_pretrained(clip_folder, CLASSES)
    recipe = Recipe(steps=3, batch_size=6, augment="none").with_settings(
        **{"tuner.name": name, "optimisation.lr": 1e-2, "optimisation.weight_decay": 0.1}
    )
    tuner = tune(classifier, recipe.tuner)
    before = {name: p.detach().clone() for name, p in classifier.named_parameters()}
    train(classifier, Images(pictures), recipe)
    changed = {name for name, p in classifier.named_parameters() if not torch.equal(p, before[name])}
    assert changed <= tuner.parameters.keys()
    # A bias of the keys shifts all attention scores of a query alike: its gradient is 0, whatever is tuned.
    unmoved = {name for name in tuner.parameters.keys() - changed if "k_proj.bias" not in name}
    assert unmoved == set()


@pytest.mark.parametrize("name", sorted(TUNERS.keys() - {"map", "upper"}))
def test_a_tuner_says_truly_which_sides_it_touches(clip_folder: Path, name: str, pictures: list) -> None:
    classifier = Classifier.from_pretrained(clip_folder, CLASSES)
    tuner = tune(classifier, TunerSettings(name=name))
    features, prototypes = classifier.features(pictures), classifier.prototypes().detach()
    with torch.no_grad():
        for parameter in tuner.parameters.values():
            parameter.mul_(1.1).add_(0.01)
    assert torch.equal(classifier.features(pictures), features) is not tuner.touches_inputs
    assert torch.equal(classifier.prototypes().detach(), prototypes) is not tuner.touches_prompts


def prototypes_recipe(steps: int = 4) -> Recipe:
    return Recipe.load("features").with_settings({"steps": steps, "min_class_usage": 0.0, "optimisation.lr": 0.05})


def test_prototypes_of_a_model_learn_what_those_of_its_vectors_learn(clip_folder: Path, pictures: list) -> None:
    model = Classifier.from_pretrained(clip_folder, CLASSES)
    temperature = 1 / model.backbone.logit_scale.exp().item()
    vectors = Classifier.from_vectors(model.prototypes().detach(), CLASSES, temperature)
    features, before = model.features(pictures), model.predict_proba(pictures)
    train(model, Images(pictures), prototypes_recipe())
    train(vectors, Vectors(features), prototypes_recipe())
    assert torch.allclose(model.prototypes(), vectors.prototypes(), atol=1e-4)
    assert torch.allclose(model.predict_proba(pictures), vectors.predict_proba(features), atol=1e-3)
    assert not torch.allclose(model.predict_proba(pictures), before, atol=1e-2), "they moved"


@pytest.mark.parametrize("kind", ["image", "text", "cloze"])
def test_tuned_prototypes_are_saved_in_kilobytes_and_predict_the_same(
    kind: str, clip_folder: Path, tmp_path: Path, pictures: list
) -> None:
    data: list = pictures if kind == "image" else REVIEWS
    if kind == "image":
        classifier = Classifier.from_pretrained(clip_folder, CLASSES)
    elif kind == "text":
        classifier = Classifier.from_pretrained(sentence_encoder(tmp_path / "model"), ["bad", "good"])
    else:
        classifier = Classifier.from_pretrained(masked_lm(tmp_path / "lm", "bert"), ["bad", "good"], ["{text} [MASK]."])
    zero_shot = classifier.predict_proba(data)
    result = classifier.adapt(data, recipe=prototypes_recipe(), output=Output(tmp_path / "run", report=False))
    classifier = result.at("last")
    tuned = classifier.predict_proba(data)
    assert not torch.allclose(tuned, zero_shot, atol=1e-3)
    loaded = Classifier.from_pretrained(tmp_path / "run", use="last")
    assert torch.equal(loaded.predict_proba(data), tuned)
    assert torch.equal(Classifier.from_pretrained(tmp_path / "run", use="zero-shot").predict_proba(data), zero_shot)
    size = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*.safetensors"))
    assert size < 20_000 and not list((tmp_path / "run").rglob("model.safetensors")), "the base model is not copied"
    classifier = result.at("zero-shot")
    assert torch.equal(classifier.predict_proba(data), zero_shot)


def test_every_input_is_encoded_once_where_prototypes_are_tuned(
    clip_folder: Path, tmp_path: Path, pictures: list
) -> None:
    """Training, alarms, refinement, predictions and report share it; alarms look at changed inputs as well."""
    classifier = Classifier.from_pretrained(clip_folder, CLASSES)
    rows = encoded_samples(classifier)
    classifier.adapt(Images(pictures), recipe=prototypes_recipe(), output=tmp_path / "run")
    assert [n for n in rows if n != TIMED] == [len(pictures)] * 2, "beside the few that are timed before the run"


def test_a_classifier_is_tuned_one_way_only(clip_folder: Path) -> None:
    classifier = Classifier.from_pretrained(clip_folder, CLASSES)
    tune(classifier, TunerSettings(name="layernorm"))
    with pytest.raises(InputError, match="tuned with 'layernorm' already"):
        tune(classifier, TunerSettings(name="full"))


def test_an_empty_context_is_refused(clip_folder: Path) -> None:
    with pytest.raises(InputError, match="context of prompt tuning is empty"):
        tune(Classifier.from_pretrained(clip_folder, CLASSES), TunerSettings(name="prompt", context=" "))


def test_a_class_name_too_long_for_the_model_is_refused(clip_folder: Path) -> None:
    with pytest.raises(InputError, match="too long for the model's 77 tokens"):
        tune(Classifier.from_pretrained(clip_folder, ["cat", "dog " * 80]), TunerSettings(name="prompt"))


def test_the_tensors_of_a_prompt_move_with_the_classifier(clip_folder: Path) -> None:
    classifier = Classifier.from_pretrained(clip_folder, CLASSES)
    tune(classifier, TunerSettings(name="prompt"))
    moved = classifier.to("meta")
    assert {buffer.device.type for buffer in moved.prompt.buffers()} == {"meta"}
    assert {name for name, _ in moved.prompt.named_buffers()} >= {"positions", "token_input_ids"}


@pytest.mark.parametrize("class_specific", [False, True])
def test_a_described_class_has_a_soft_prompt_for_each_description(clip_folder: Path, class_specific: bool) -> None:
    described = {"animal": ["cat", "dog"], "water": "sea"}
    words = Classifier.from_pretrained(clip_folder, described, ["a photo of a {}."]).prototypes()
    soft = Classifier.from_pretrained(clip_folder, described)
    tune(soft, TunerSettings(name="prompt", class_specific=class_specific))
    assert torch.allclose(soft.prototypes(), words, atol=1e-6)


@pytest.mark.parametrize("specific", [False, True])
def test_a_soft_prompt_encodes_the_rows_in_the_order_asked_for(clip_folder: Path, specific: bool) -> None:
    classifier = Classifier.from_pretrained(clip_folder, CLASSES)
    prompt = tune(classifier, TunerSettings(name="prompt", class_specific=specific)).prompt
    in_order = prompt.encode([0, 1, 2])
    for rows in ([2, 1, 0], [1, 1, 0], [2, 0]):
        assert torch.allclose(prompt.encode(rows), in_order[rows], atol=1e-6)
