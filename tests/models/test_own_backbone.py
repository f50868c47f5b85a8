"""A user's own dual encoder, by the documented protocol and nothing else."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import train
from PIL import Image
from torch import Tensor, nn

from pouf import Backbone, Classifier, Images, InputError, Recipe


class ColourModel(Backbone):
    """Knows colours: the feature of an image is a linear map of its mean colour, that of a text a row of a table."""

    modality = "image"
    words = ("red", "green", "blue")

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.image = nn.Sequential(nn.Linear(3, 3, bias=False), nn.LayerNorm(3))
        self.table = nn.Embedding(3, 3)
        with torch.no_grad():
            self.image[0].weight.copy_(torch.eye(3))
            self.table.weight.copy_(torch.eye(3))

    def prepare(self, samples: Sequence[Image.Image]) -> dict[str, Tensor]:
        colours = np.stack([np.asarray(image, dtype=np.float32).mean((0, 1)) / 255 for image in samples])
        return {"colour": torch.from_numpy(colours)}

    def encode_inputs(self, batch: dict[str, Tensor]) -> Tensor:
        return self.image(batch["colour"])

    def encode_prompts(self, prompts: Sequence[str]) -> Tensor:
        rows = [next(i for i, word in enumerate(self.words) if word in prompt) for prompt in prompts]
        return self.table(torch.tensor(rows, device=self.device))


def colours() -> Images:
    noise = np.random.default_rng(0)
    pictures = []
    for i in range(30):
        pixels = noise.integers(0, 120, (4, 4, 3), dtype=np.uint8)
        pixels[..., i % 3] += 120
        pictures.append(Image.fromarray(pixels))
    return Images(pictures)


SETTINGS = Recipe(steps=20, batch_size=10, augment="none").with_settings(**{"optimisation.lr": 1e-2})


@pytest.mark.parametrize("tune", ["full", "layernorm"])
def test_a_backbone_of_ones_own_predicts_adapts_saves_and_loads(tmp_path: Path, tune: str) -> None:
    classifier = Classifier(ColourModel(), ColourModel.words, ["a {} picture"])
    assert classifier.predict(colours())[:3] == ["red", "green", "blue"]
    before = classifier.predict_proba(colours())
    train(classifier, colours(), SETTINGS.with_settings(**{"tuner.name": tune}))
    after = classifier.predict_proba(colours())
    assert not torch.equal(before, after)
    classifier.save_pretrained(tmp_path)
    assert torch.equal(Classifier.from_pretrained(tmp_path, backbone=ColourModel()).predict_proba(colours()), after)
    assert torch.equal(
        Classifier.from_pretrained(tmp_path, backbone=ColourModel(), use="zero-shot").predict_proba(colours()), before
    )


def test_loading_it_without_its_backbone_says_so(tmp_path: Path) -> None:
    Classifier(ColourModel(), ColourModel.words).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="backbone of your own"):
        Classifier.from_pretrained(tmp_path)


def test_what_it_lacks_for_other_options_is_said() -> None:
    classifier = Classifier(ColourModel(), ColourModel.words)
    with pytest.raises(InputError, match="text_side"):
        train(classifier, colours(), SETTINGS.with_settings(**{"tuner.name": "prompt"}))
    classifier = Classifier(ColourModel(), ColourModel.words)
    with pytest.raises(InputError, match="image_size"):
        train(classifier, colours(), SETTINGS.with_settings(augment="crop-flip"))


def test_the_documented_backbone_works_as_it_stands() -> None:
    example = textwrap.dedent(Backbone.__doc__.split("one per word:\n")[1].split("Vectors need no")[0])
    names = {"Backbone": Backbone, "Classifier": Classifier, "np": np, "torch": torch, "nn": nn}
    exec(example, names)
    classifier = names["classifier"]
    assert classifier.predict(colours())[:3] == ["red", "green", "blue"]
    train(classifier, colours(), SETTINGS)


def test_tensors_without_names_are_an_error_that_says_so() -> None:
    class Bare(ColourModel):
        def prepare(self, samples: Sequence[Image.Image]) -> Tensor:
            return super().prepare(samples)["colour"]

    with pytest.raises(InputError, match=r"prepare\(\) must return tensors by name"):
        Classifier(Bare(), ColourModel.words).predict(colours())
