"""Long texts in windows: the same features as the windows by hand, in training, prediction and ONNX alike."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import REVIEWS
from small_models import masked_lm, sentence_encoder

from pouf import Classifier, InputError, Texts
from pouf.models.text_side import special_tokens, split_evenly, warn_about_cut_texts

LONG = " ".join(REVIEWS * 12)
NAMES = ["good", "bad"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    sentence_encoder(folder / "encoder")
    masked_lm(folder / "lm", "bert")
    return folder


def classifier(models: Path, kind: str, windows: bool = True) -> Classifier:
    if kind == "encoder":
        return Classifier.from_pretrained(models / "encoder", NAMES, ["it is {}"], windows=windows)
    template = ["{text} It was [MASK]."]
    return Classifier.from_pretrained(models / "lm", NAMES, template, words=WORDS, max_length=24, windows=windows)


WORDS = ["great", "terrible"]


def test_windows_are_of_about_the_same_length_and_hold_everything() -> None:
    for n in range(40):
        found = split_evenly(list(range(n)), 7)
        assert [token for window in found for token in window] == list(range(n))
        assert max(map(len, found)) <= 7 and max(map(len, found)) - min(map(len, found)) <= 1


def test_features_of_a_long_text_are_the_mean_of_its_windows(models: Path) -> None:
    windowed, plain = classifier(models, "encoder"), classifier(models, "encoder", windows=False)
    backbone = windowed.backbone
    room = backbone.text_lengths([LONG])[1]
    ids = backbone.tokenizer(LONG, add_special_tokens=False)["input_ids"]
    windows = split_evenly(ids, room)
    assert len(windows) > 2
    before, after = special_tokens(backbone.tokenizer)
    expected = torch.zeros(1)
    with torch.no_grad():
        for window in windows:
            tokens = {name: torch.tensor([row]) for name, row in (
                ("input_ids", [*before, *window, *after]), ("attention_mask", [1] * (len(window) + 2)),
            )}  # fmt: skip
            expected = expected + len(window) * F.normalize(plain.backbone.encode_inputs(tokens), dim=1)
    assert torch.allclose(windowed.features([LONG]), F.normalize(expected, dim=1), atol=1e-5)
    assert not torch.allclose(windowed.features([LONG]), plain.features([LONG]), atol=1e-3), "the end counts too"


@pytest.mark.parametrize("kind", ["encoder", "lm"])
def test_short_texts_are_as_without_windows_and_neighbours_do_not_matter(models: Path, kind: str) -> None:
    windowed, plain = classifier(models, kind), classifier(models, kind, windows=False)
    assert torch.allclose(windowed.predict_proba(REVIEWS), plain.predict_proba(REVIEWS), atol=1e-5)
    together = windowed.predict_proba([*REVIEWS, LONG])
    assert torch.allclose(together[:-1], plain.predict_proba(REVIEWS), atol=1e-5)
    assert torch.allclose(together[-1], windowed.predict_proba([LONG])[0], atol=1e-5)
    assert not torch.allclose(together[-1], plain.predict_proba([LONG])[0], atol=1e-3)


@pytest.mark.parametrize("kind", ["encoder", "lm"])
def test_a_run_with_windows_is_loaded_with_them(models: Path, tmp_path: Path, kind: str) -> None:
    before = classifier(models, kind)
    data = [*REVIEWS, LONG]
    result = before.adapt(data, settings={"steps": 3, "snapshots": 1, "batch_size": 4}, output=tmp_path / "run")
    there = Classifier.from_pretrained(tmp_path / "run", use="last")
    assert there.backbone.windows and torch.equal(there.predict_proba(data), result.at("last").predict_proba(data))
    assert not torch.equal(there.predict_proba([LONG]), before.predict_proba([LONG])), "it was trained"


def test_what_is_cut_is_said(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = classifier(models, "encoder", windows=False)
    lengths, room = plain.backbone.text_lengths([*REVIEWS, LONG])
    cut, lost = sum(n > room for n in lengths), sum(max(0, n - room) for n in lengths) / sum(lengths)
    with caplog.at_level(logging.WARNING):
        warn_about_cut_texts(classifier(models, "encoder").backbone, Texts([LONG]), "")
        warn_about_cut_texts(plain.backbone, Texts(["a"]), "")
        assert not caplog.text
        plain.adapt([*REVIEWS, LONG], settings={"steps": 1, "snapshots": 0})
    numbers = f"{cut} of {len(lengths)} texts are longer than the {room} tokens that the model reads: {lost:.0%}"
    assert f"{numbers} of all tokens are lost; windows=True (--windows)" in caplog.text


def test_what_has_no_windows_says_so(models: Path) -> None:
    with pytest.raises(InputError, match="windows are for long texts"):
        Classifier.from_vectors(torch.eye(2), NAMES).backbone.use_windows()
    with pytest.raises(InputError, match="one text without a limit"):
        Classifier.from_pretrained(models / "lm", NAMES, ["{text_a} [MASK] {text_b}"], words=WORDS, windows=True)


@pytest.mark.parametrize("kind", ["encoder", "lm"])
def test_onnx_reads_the_same_windows(models: Path, tmp_path: Path, kind: str) -> None:
    onnx = pytest.importorskip("pouf.integrations.onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    windowed = classifier(models, kind)
    onnx.export_onnx(windowed, tmp_path / "onnx")
    longest = onnx._samples(windowed, Texts([LONG * 20, *REVIEWS]))[0]
    assert len(longest.split()) == onnx.LONG_TEXT_WORDS, "however long the first example is"
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "classifier.onnx"))
    for texts in ([REVIEWS[0]], [LONG, *REVIEWS]):
        found = onnx.run(session, windowed.backbone.prepare(texts))[0]
        assert torch.allclose(torch.from_numpy(found), windowed.predict_proba(texts), atol=1e-4)
