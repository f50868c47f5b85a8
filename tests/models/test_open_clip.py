"""Models of open_clip: the adapter on a tiny model of the same interface, and the library itself where it is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from pouf import Classifier, InputError
from pouf.models.vision import OpenClip

NAMES = ["red", "green", "blue"]


class Visual(nn.Module):
    image_size = (8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 64, 16)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.linear(pixels.flatten(1))


class Tiny(nn.Module):
    """What open_clip's models offer: two encoders, a scale and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.words = Visual(), nn.EmbeddingBag(256, 16)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.logit_bias = nn.Parameter(torch.tensor(-3.0))

    def encode_image(self, pixels: Tensor) -> Tensor:
        return self.visual(pixels)

    def encode_text(self, tokens: Tensor) -> Tensor:
        return self.words(tokens)


def preprocess(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image.resize((8, 8)), np.float32) / 255).permute(2, 0, 1)


def tokenize(sentences: list[str]) -> Tensor:
    rows = torch.zeros(len(sentences), 32, dtype=torch.long)
    for row, sentence in zip(rows, sentences, strict=True):
        row[: len(sentence)] = torch.tensor(list(sentence.encode()))[:32]
    return rows


def pictures() -> list[Image.Image]:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
    return [Image.fromarray(each) for each in pixels]


def test_probabilities_are_those_of_the_models_own_formula() -> None:
    torch.manual_seed(0)
    model = Tiny()
    classifier = Classifier(OpenClip(model, preprocess, tokenize), NAMES, ["{}"])
    with torch.no_grad():
        image = F.normalize(model.encode_image(torch.stack([preprocess(each) for each in pictures()])), dim=1)
        text = F.normalize(model.encode_text(tokenize(NAMES)), dim=1)
        expected = (image @ text.T * model.logit_scale.exp() + model.logit_bias).softmax(1)
    assert torch.allclose(classifier.predict_proba(pictures()), expected, atol=1e-6)
    assert classifier.kind == "image" and classifier.backbone.image_size == 8


@pytest.mark.parametrize("tuner", ["full", "prototypes"])
def test_it_is_tuned_saved_and_loaded(tmp_path: Path, tuner: str) -> None:
    torch.manual_seed(0)
    backbone = OpenClip(Tiny(), preprocess, tokenize)
    classifier = Classifier(backbone, NAMES, ["{}"])
    result = classifier.adapt(pictures(), settings={"steps": 2, "snapshots": 1, "tuner.name": tuner})
    tuned = result.at("last")
    tuned.save_pretrained(tmp_path / "saved")
    torch.manual_seed(0)
    there = Classifier.from_pretrained(tmp_path / "saved", backbone=OpenClip(Tiny(), preprocess, tokenize))
    assert torch.equal(there.predict_proba(pictures()), tuned.predict_proba(pictures()))


def test_without_the_library_the_error_names_the_extra() -> None:
    try:
        import open_clip  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match=r"pouf\[open-clip\]"):
            Classifier.from_pretrained("open_clip:ViT-B-16/dfn2b", NAMES)
    with pytest.raises(InputError, match="reads images"):
        Classifier.from_pretrained("open_clip:ViT-B-16/dfn2b", NAMES, ["{text} [MASK]"])


def test_a_model_of_the_library_predicts_as_it_does_there(tmp_path: Path) -> None:
    library = pytest.importorskip("open_clip", reason="open_clip needs torchvision, which is not installed here")
    model, _, transform = library.create_model_and_transforms("RN50", precision="fp32")
    classifier = Classifier(OpenClip(model.eval(), transform, library.get_tokenizer("RN50")), NAMES)
    with torch.no_grad():
        image = F.normalize(model.encode_image(torch.stack([transform(each) for each in pictures()])), dim=1)
    assert torch.allclose(classifier.features(pictures()), image, atol=1e-5)
