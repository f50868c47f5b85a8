"""What each tuner trains, counted, and what it leaves alone, bit by bit."""

from pathlib import Path

import pytest
import torch
from helpers import train
from small_models import clip, siglip
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel

from pouf import Classifier, Images, InputError, Recipe
from pouf.models.dual_encoder import DualEncoder
from pouf.models.load import embedded_folder
from pouf.recipe import TunerSettings
from pouf.tuners import TUNERS, describe

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
    tuner = Classifier(base_patch16, CLASSES).tune(TunerSettings(name="full"))
    assert tuner.trainable == 149_620_737


def test_prompt_tuning_of_vit_b16_trains_2_049_parameters(base_patch16: DualEncoder) -> None:
    classifier = Classifier(base_patch16, CLASSES)
    tuner = classifier.tune(TunerSettings(name="prompt"))
    total = sum(p.numel() for p in classifier.parameters())
    assert (tuner.trainable, total) == (2_049, 149_622_785)
    assert describe(tuner.trainable, total) == "trainable 2,049 of 149,622,785 (0.00137 %)"


def test_class_specific_contexts_of_vit_b16_are_one_for_each_class(base_patch16: DualEncoder) -> None:
    tuner = Classifier(base_patch16, CLASSES).tune(TunerSettings(name="prompt", class_specific=True))
    assert tuner.trainable == 3 * 2_048 + 1


def test_layernorm_tuning_of_vit_b16_trains_gains_and_biases_only(base_patch16: DualEncoder) -> None:
    tuner = Classifier(base_patch16, CLASSES).tune(TunerSettings(name="layernorm"))
    # 12 layers with two norms in each tower, one more after the text tower, two around the image tower.
    assert tuner.trainable == 2 * (25 * 512 + 26 * 768)


def test_the_soft_prompt_starts_as_its_words(clip_folder: Path) -> None:
    """Before the first step the prototypes are those of the template 'a photo of a {}.'."""
    words = Classifier.from_pretrained(clip_folder, CLASSES, ["a photo of a {}."]).prototypes()
    soft = Classifier.from_pretrained(clip_folder, CLASSES)
    soft.tune(TunerSettings(name="prompt"))
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
    soft.tune(TunerSettings(name="prompt", position=position, class_specific=class_specific))
    assert torch.allclose(soft.prototypes(), words, atol=1e-5)


def test_each_class_has_its_own_gradient_where_contexts_are_class_specific(clip_folder: Path) -> None:
    classifier = Classifier.from_pretrained(clip_folder, CLASSES)
    tuner = classifier.tune(TunerSettings(name="prompt", class_specific=True))
    classifier.prototypes()[1].sum().backward()
    gradient = tuner.parameters["prompt.vectors"].grad
    assert gradient.abs().sum((1, 2)).gt(0).tolist() == [False, True, False]


@pytest.mark.parametrize("tune", sorted(TUNERS.keys() - {"prototypes", "map"}))
def test_a_tuner_changes_its_own_parameters_and_no_other(clip_folder: Path, tune: str, pictures: list) -> None:
    classifier = Classifier.from_pretrained(clip_folder, CLASSES)
    recipe = Recipe(steps=3, batch_size=6, augment="none").with_settings(
        **{"tuner.name": tune, "optimisation.lr": 1e-2, "optimisation.weight_decay": 0.1}
    )
    tuner = classifier.tune(recipe.tuner)
    before = {name: p.detach().clone() for name, p in classifier.named_parameters()}
    train(classifier, Images(pictures), recipe)
    changed = {name for name, p in classifier.named_parameters() if not torch.equal(p, before[name])}
    assert changed <= tuner.parameters.keys()
    # A bias of the keys shifts all attention scores of a query alike: its gradient is 0, whatever is tuned.
    unmoved = {name for name in tuner.parameters.keys() - changed if "k_proj.bias" not in name}
    assert unmoved == set()


@pytest.mark.parametrize("tune", sorted(TUNERS.keys() - {"prototypes", "map"}))
def test_a_tuner_says_truly_which_sides_it_touches(clip_folder: Path, tune: str, pictures: list) -> None:
    classifier = Classifier.from_pretrained(clip_folder, CLASSES)
    tuner = classifier.tune(TunerSettings(name=tune))
    features, prototypes = classifier.features(pictures), classifier.prototypes().detach()
    with torch.no_grad():
        for parameter in tuner.parameters.values():
            parameter.mul_(1.1).add_(0.01)
    assert torch.equal(classifier.features(pictures), features) is not tuner.touches_inputs
    assert torch.equal(classifier.prototypes().detach(), prototypes) is not tuner.touches_prompts


def test_a_classifier_is_tuned_one_way_only(clip_folder: Path) -> None:
    classifier = Classifier.from_pretrained(clip_folder, CLASSES)
    classifier.tune(TunerSettings(name="layernorm"))
    with pytest.raises(InputError, match="tuned with 'layernorm' already"):
        classifier.tune(TunerSettings(name="full"))


def test_an_empty_context_is_refused(clip_folder: Path) -> None:
    with pytest.raises(InputError, match="context of prompt tuning is empty"):
        Classifier.from_pretrained(clip_folder, CLASSES).tune(TunerSettings(name="prompt", context=" "))


def test_a_class_name_too_long_for_the_model_is_refused(clip_folder: Path) -> None:
    with pytest.raises(InputError, match="too long for the model's 77 tokens"):
        Classifier.from_pretrained(clip_folder, ["cat", "dog " * 80]).tune(TunerSettings(name="prompt"))


def test_the_tensors_of_a_prompt_move_with_the_classifier(clip_folder: Path) -> None:
    classifier = Classifier.from_pretrained(clip_folder, CLASSES)
    classifier.tune(TunerSettings(name="prompt"))
    moved = classifier.to("meta")
    assert {buffer.device.type for buffer in moved.prompt.buffers()} == {"meta"}
    assert {name for name, _ in moved.prompt.named_buffers()} >= {"positions", "token_input_ids"}
