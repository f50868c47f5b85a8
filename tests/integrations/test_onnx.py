"""Exported classifiers say under onnxruntime what torch says, on real inputs, in batches of any size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cli_runner import pouf
from helpers import REVIEWS, groups, train
from PIL import Image
from small_models import MASKED_LMS, causal_lm, clip, masked_lm, sentence_encoder, siglip

from pouf import Classifier, InputError, Output, Recipe, Texts
from pouf.data.images import Images
from pouf.demo import DIGITS
from pouf.integrations.onnx import export_onnx, run
from pouf.models.demonstrations import Demonstrations

onnxruntime = pytest.importorskip("onnxruntime")
CLOZE = {"templates": ["{text} It was [MASK]."], "words": ["terrible", "great"]}


def session(file: Path) -> Any:
    return onnxruntime.InferenceSession(str(file))


def description(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "preprocessing.json").read_text())


def check_batches(folder: Path, classifier: Classifier, samples: list[Any]) -> None:
    """Alone and together, in batches that were not traced."""
    opened = session(folder / "classifier.onnx")
    for some in (samples, samples[:1], samples[1:6]):
        probabilities, features = run(opened, classifier.backbone.prepare(some))
        assert np.abs(probabilities - classifier.predict_proba(some).numpy()).max() < 1e-4
        unit = F.normalize(torch.from_numpy(features), dim=1)
        assert (unit - classifier.features(some)).abs().max() < 1e-4


@pytest.fixture(scope="module")
def adapted_run(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model after some steps, with corrected predictions that ask neighbours."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    clf = Classifier.from_pretrained("pouf/tiny-clip", DIGITS)
    settings = {"steps": 6, "batch_size": 16, "postprocess": "propagation", "snapshots": 2}
    clf.adapt(few_digits, recipe="demo", settings=settings, output=Output(folder, report=False))
    return folder


def test_a_run_of_images_exported_on_the_command_line(adapted_run: Path, few_digits: Path, tmp_path: Path) -> None:
    output = pouf("export", adapted_run, "--onnx", "--int8", "--use", "last", cwd=tmp_path).stdout
    folder, clf = adapted_run / "onnx", Classifier.from_pretrained(adapted_run, use="last")
    assert "On inputs of the run" in output and clf.postprocessor is not None and clf.postprocessor.votes is not None
    pictures = sorted(few_digits.rglob("*.png"))
    check_batches(folder, clf, [Image.open(path).convert("RGB") for path in pictures[:20]])
    sentences = ["a photo of the digit zero.", "nine"]
    side = clf.backbone.text_side
    (vectors,) = run(session(folder / "text_encoder.onnx"), side.pad(side.all_token_ids(sentences)))
    wanted = clf.backbone.encode_prompts(sentences).detach()
    assert (F.normalize(torch.from_numpy(vectors)) - F.normalize(wanted)).abs().max() < 1e-4
    batch = clf.backbone.prepare([Image.open(path).convert("RGB") for path in pictures])
    whole, apart, small = (
        session(folder / f"{name}.onnx") for name in ("classifier", "image_encoder", "classifier.int8")
    )
    assert np.array_equal(run(apart, batch)[0], run(whole, batch)[1])
    agreement = (run(small, batch)[0].argmax(1) == run(whole, batch)[0].argmax(1)).mean()
    assert agreement > 0.9 and not np.array_equal(run(small, batch)[0], run(whole, batch)[0])
    sizes = {name: (folder / name).stat().st_size for name in ("classifier.onnx", "classifier.int8.onnx")}
    assert sizes["classifier.int8.onnx"] < 0.6 * sizes["classifier.onnx"]
    facts = description(folder)
    assert facts["classes"] == list(DIGITS) and facts["checked"]["real"] and facts["image_processor"]["size"]
    assert facts["inputs"] == [{"name": "pixel_values", "type": "tensor(float)", "shape": ["batch", 3, 32, 32]}]


def test_the_described_preprocessing_suffices_without_torch(adapted_run: Path, few_digits: Path) -> None:
    """A stranger reads preprocessing.json, and needs Pillow, numpy and onnxruntime."""
    folder = adapted_run / "onnx"
    processor = description(folder)["image_processor"]
    picture = sorted(few_digits.rglob("*.png"))[3]
    size = (processor["size"]["width"], processor["size"]["height"])
    pixels = np.asarray(Image.open(picture).convert("RGB").resize(size, processor["resample"]), np.float32)
    scaled = (pixels * processor["rescale_factor"] - processor["image_mean"]) / processor["image_std"]
    tensor = torch.from_numpy(scaled.transpose(2, 0, 1)[None].astype(np.float32))
    found = run(session(folder / "classifier.onnx"), {"pixel_values": tensor})[0]
    wanted = Classifier.from_pretrained(adapted_run, use="last").predict_proba([picture])
    assert np.abs(found - wanted.numpy()).max() < 2e-2, "Pillow's resize and the processor's differ by a grey level"
    assert found.argmax() == wanted.argmax()


def test_a_sentence_encoder(tmp_path: Path) -> None:
    clf = Classifier.from_pretrained(sentence_encoder(tmp_path / "model"), ["bad", "good"])
    train(clf, Texts(REVIEWS), Recipe.load("texts").with_settings(steps=2, batch_size=8))
    found = export_onnx(clf, tmp_path / "onnx", Texts(REVIEWS))
    check_batches(tmp_path / "onnx", clf, ["food", "the film is good and the book is bad " * 3, *REVIEWS])
    assert found.files == {"classifier": "classifier.onnx", "text_encoder": "text_encoder.onnx"}
    facts = description(tmp_path / "onnx")
    assert facts["tokenizer"]["max_length"] == 32 and (tmp_path / "onnx" / "tokenizer.json").is_file()
    assert facts["inputs"][0]["shape"] == ["batch", "length"]


def test_a_masked_language_model_with_a_soft_prompt(tmp_path: Path) -> None:
    clf = Classifier.from_pretrained(masked_lm(tmp_path / "model", "roberta"), ["negative", "positive"], **CLOZE)
    prompt = {"tuner.name": "prompt", "steps": 2, "batch_size": 8}
    train(clf, Texts(REVIEWS), Recipe.load("masked").with_settings(prompt))
    export_onnx(clf, tmp_path / "onnx", Texts(REVIEWS))
    check_batches(tmp_path / "onnx", clf, ["food", "the film was so very good and we loved the book", *REVIEWS])
    facts = description(tmp_path / "onnx")
    assert facts["template"] == "{text} It was [MASK]." and facts["words"] == [["terrible"], ["great"]]


@pytest.mark.parametrize(
    ("kind", "tuner"),
    [
        ("gpt2", "lora"),
        *(pytest.param("llama", name, marks=pytest.mark.slow) for name in ("lora", "layernorm", "prompt")),
    ],
)
def test_a_causal_language_model(kind: str, tuner: str, tmp_path: Path) -> None:
    cloze = {"templates": ["{text} It was [MASK]"], "words": ["terrible", "great"]}
    clf = Classifier.from_pretrained(causal_lm(tmp_path / "model", kind), ["negative", "positive"], **cloze)
    result = clf.adapt(REVIEWS, settings={"tuner.name": tuner, "steps": 2, "batch_size": 8, "snapshots": 1})
    clf = result.at("last")
    assert clf.postprocessor is not None, "its correction is part of what is exported"
    export_onnx(clf, tmp_path / "onnx", Texts(REVIEWS))
    check_batches(tmp_path / "onnx", clf, ["food", "the film was so very good and we loved the book", *REVIEWS])


@pytest.mark.slow
@pytest.mark.parametrize("tuner", ["lora", "layernorm", "prompt", "prototypes"])
def test_images_whatever_was_tuned(tuner: str, tmp_path: Path, pictures: list[Image.Image]) -> None:
    clf = Classifier.from_pretrained("pouf/tiny-clip", DIGITS)
    settings = {"tuner.name": tuner, "steps": 2, "snapshots": 1, "postprocess": "prior-correction"}
    clf = clf.adapt(pictures, settings=settings).at("last")
    export_onnx(clf, tmp_path / "onnx", Images(pictures))
    check_batches(tmp_path / "onnx", clf, pictures)


def test_vectors_with_a_map_from_made_up_examples(tmp_path: Path) -> None:
    features, prototypes = groups()
    clf = Classifier.from_vectors(prototypes, list("abcdef"))
    result = clf.adapt(features, recipe="features", settings={"tuner.name": "map", "steps": 5, "batch_size": 32})
    clf = result.at("last")
    export_onnx(clf, tmp_path)
    check_batches(tmp_path, clf, list(features.numpy()[:9]))
    assert description(tmp_path)["checked"]["real"] is False


def test_what_can_not_be_exported_is_told(tmp_path: Path, not_installed: Callable[[str], None]) -> None:
    prototypes = groups()[1]
    clf = Classifier.from_vectors(prototypes, list("abcdef"))
    clf.demonstrations = Demonstrations((("a", 0),))
    with pytest.raises(InputError, match="with demonstrations can't be exported"):
        export_onnx(clf, tmp_path / "onnx")
    clf.demonstrations = None
    not_installed("onnxruntime")
    with pytest.raises(InputError, match=r'needs onnxruntime: pip install "pouf\[onnx\]"'):
        export_onnx(clf, tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_an_export_that_differs_from_torch_is_refused(tmp_path: Path) -> None:
    prototypes = groups()[1]
    clf = Classifier.from_vectors(prototypes, list("abcdef"))
    right = clf.backbone.encode_inputs

    def other(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return right(batch).flip(1) if torch.compiler.is_exporting() else right(batch)

    clf.backbone.encode_inputs = other
    with pytest.raises(InputError, match="the exported classifier differs from torch by 1"):
        export_onnx(clf, tmp_path / "onnx")
    assert not list((tmp_path / "onnx").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*(kind for kind in MASKED_LMS if not kind.startswith("deberta")), "deberta-v3"])
def test_every_masked_language_model(kind: str, tmp_path: Path) -> None:
    clf = Classifier.from_pretrained(masked_lm(tmp_path / "model", kind), ["negative", "positive"], **CLOZE)
    export_onnx(clf, tmp_path / "onnx", Texts(REVIEWS))
    check_batches(tmp_path / "onnx", clf, [*REVIEWS, "we loved the food and the service but the film was so very bad"])


@pytest.mark.slow
@pytest.mark.parametrize("build", [clip, siglip])
def test_every_dual_encoder(build: Any, tmp_path: Path, pictures: list[Image.Image]) -> None:
    clf = Classifier.from_pretrained(build(tmp_path / "model"), ["cat", "dog"])
    export_onnx(clf, tmp_path / "onnx", Images(pictures))
    check_batches(tmp_path / "onnx", clf, pictures)


def test_examples_may_be_whatever_predict_takes(tmp_path: Path) -> None:
    features, prototypes = groups()
    export_onnx(Classifier.from_vectors(prototypes, list("abcdef")), tmp_path, list(features[:3]))
    assert (description(tmp_path)["checked"]["inputs"], description(tmp_path)["checked"]["real"]) == (3, True)


def test_examples_that_can_not_be_read_are_not_replaced_by_made_up_ones(tiny: Classifier, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no example"):
        export_onnx(tiny, tmp_path, [tmp_path / "gone.png"])
