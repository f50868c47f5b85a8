"""In a run whose features are looked up, each input is opened once, and each weight of the model is hashed once."""

from __future__ import annotations

import csv
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TEXTS, groups
from PIL import Image
from small_models import sentence_encoder

from pouf import EMBEDDED, Classifier, FeatureCache, Images, InferenceConfig, compare, read_labelled
from pouf.data import texts
from pouf.data.contents import MAX_WAITING
from pouf.demo import DIGITS
from pouf.models import base
from pouf.reporting import html
from pouf.runs.folder import Run
from pouf.runs.predict import PredictOptions, predict

opened: Counter[str] = Counter()  # by path; a hook can't be taken out, and so there is one for all tests
sys.addaudithook(lambda event, details: _count(details[0]) if event == "open" else None)


def _count(file: Any) -> None:
    if isinstance(file, (str, bytes, os.PathLike)):
        opened[os.fsdecode(file)] += 1


@pytest.fixture
def opens() -> Iterator[Callable[[Path], set[int]]]:
    """How often each of the files below a folder was opened since the last call."""

    def counts(folder: Path) -> set[int]:
        files = [folder] if folder.is_file() else [file for file in folder.rglob("*") if file.is_file()]
        found = {opened[str(file)] for file in files}
        opened.clear()
        return found

    opened.clear()
    yield counts


@pytest.fixture(params=["in memory", "on disk", "filled"])
def cache(request: pytest.FixtureRequest, tmp_path: Path, few_digits: Path) -> FeatureCache | None:
    """Without one, with an empty one, and with one that has the features of all digits."""
    if request.param == "filled":
        tiny = Classifier.from_pretrained(EMBEDDED, DIGITS)
        tiny.encode(Images.from_folder(few_digits), InferenceConfig(cache=FeatureCache(tmp_path / "cache")))
    return FeatureCache(tmp_path / "cache") if request.param != "in memory" else None


def test_images_are_opened_once(
    few_digits: Path, tiny: Classifier, cache: FeatureCache | None, tmp_path: Path, opens: Callable[[Path], set[int]]
) -> None:
    opens(few_digits)
    tiny.adapt(few_digits, recipe="fast", settings={"steps": 3}, cache=cache)
    assert opens(few_digits) == {1}, "adapt: encoded, changed for the diagnostics, hashed, timed for the estimate"
    tiny.search(few_digits, {"optimisation.lr": [1e-4, 1e-3]}, recipe="fast", settings={"steps": 2}, cache=cache)
    assert opens(few_digits) == {1}, "search: the trials share what was read"
    labelled = read_labelled(few_digits, DIGITS, "image")
    compare(tiny, tiny, tiny, labelled, InferenceConfig(cache=cache))
    assert opens(few_digits) == {1}, "evaluate: three classifiers look at the same features"
    tiny.predict(few_digits)
    assert opens(few_digits) == {1}


def test_crops_that_are_computed_once_are_made_of_one_reading(
    few_digits: Path, tiny: Classifier, opens: Callable[[Path], set[int]]
) -> None:
    settings = {"steps": 3, "augment": "crop-flip", "views": 3, "batch_size": 32}
    tiny.adapt(few_digits, recipe="fast", settings=settings)
    assert opens(few_digits) == {1}


def test_a_run_with_a_report_opens_again_what_the_report_shows(
    few_digits: Path, tiny: Classifier, tmp_path: Path, opens: Callable[[Path], set[int]], monkeypatch: Any
) -> None:
    """The limit: a thumbnail is made of the image itself, and the report shows 500 inputs at most.

    As many would take a minute: here it shows 20.
    """
    monkeypatch.setattr(html, "MAX_POINTS", 20)
    tiny.adapt(few_digits, recipe="fast", settings={"steps": 3}, output=tmp_path / "run")
    files = Counter(opened[str(file)] for file in few_digits.rglob("*.png"))
    assert files == {1: 130, 2: 20}
    opened.clear()
    for number, options in enumerate((PredictOptions(), PredictOptions(abstain=0.05, unknown=True))):
        predict(Run(tmp_path / "run"), few_digits, tmp_path / f"{number}.csv", options)
        assert opens(few_digits) == {1}


def test_what_is_too_large_to_wait_is_opened_once_where_nothing_but_its_digest_is_asked_first(
    tiny: Classifier, tmp_path: Path, opens: Callable[[Path], set[int]]
) -> None:
    side = int((MAX_WAITING / 3) ** 0.5) + 10
    for i in range(3):
        (tmp_path / "large").mkdir(exist_ok=True)
        Image.new("RGB", (side, side), (i, 90, 200)).save(tmp_path / "large" / f"{i}.bmp")
    opens(tmp_path / "large")
    tiny.encode(Images.from_folder(tmp_path / "large"), InferenceConfig(cache=FeatureCache(tmp_path / "cache")))
    assert opens(tmp_path / "large") == {1}


def test_worker_processes_send_the_digests_back(
    few_digits: Path, tiny: Classifier, tmp_path: Path, opens: Callable[[Path], set[int]]
) -> None:
    data, config = Images.from_folder(few_digits), InferenceConfig(workers=1, cache=FeatureCache(tmp_path))
    expected = tiny.encode(Images.from_folder(few_digits)).features
    opens(few_digits)
    for _ in range(2):
        assert torch.equal(tiny.encode(data, config).features, expected)
    assert opens(few_digits) == {0}, "all of them in the workers, and none for its digest here"


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_file_of_texts_is_opened_once(tmp_path: Path, opens: Callable[[Path], set[int]], on_disk: bool) -> None:
    file = tmp_path / "texts.csv"
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([["text", "label"], *([text, "good"] for text in TEXTS)])
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path / "model"), ["good", "bad"])
    cache = FeatureCache(tmp_path / "cache") if on_disk else None
    opens(file)
    classifier.adapt(file, recipe="fast", settings={"steps": 2}, cache=cache, output=tmp_path / "run")
    assert opens(file) == {1}
    classifier.search(file, {"optimisation.lr": [1e-3]}, recipe="fast", settings={"steps": 2}, cache=cache)
    assert opens(file) == {1}
    compare(classifier, classifier, classifier, read_labelled(file, ["good", "bad"], "text"))
    assert opens(file) == {1}
    predict(Run(tmp_path / "run"), file, tmp_path / "p.csv")
    assert opens(file) == {1}


def test_a_large_file_of_texts_is_opened_once_to_look_and_once_to_read(
    tmp_path: Path, opens: Callable[[Path], set[int]], monkeypatch: Any
) -> None:
    monkeypatch.setattr(texts, "IN_MEMORY", 0)  # a file above the limit of 64 MB takes ten seconds
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(f'{{"text": "{text} {i}"}}\n' for i in range(9) for text in TEXTS))
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path / "model"), ["good", "bad"])
    opens(file)
    classifier.adapt(file, recipe="fast", settings={"steps": 2})
    assert opens(file) == {2}, "its first bytes tell the encoding"


@pytest.mark.parametrize("ending", ["npy", "npz"])
def test_a_file_of_vectors_is_opened_once(tmp_path: Path, opens: Callable[[Path], set[int]], ending: str) -> None:
    features, prototypes = groups()
    file = tmp_path / f"x.{ending}"
    np.save(file, features.numpy()) if ending == "npy" else np.savez(file, features=features.numpy())
    classifier = Classifier.from_vectors(prototypes, list("abcdef"))
    opens(file)
    classifier.adapt(file, settings={"steps": 2}, output=tmp_path / "run")
    assert opens(file) == {1}
    classifier.search(file, {"optimisation.lr": [1e-3]}, settings={"steps": 2})
    assert opens(file) == {1}
    predict(Run(tmp_path / "run"), file, tmp_path / "p.csv")
    assert opens(file) == {1}


def test_weights_that_training_leaves_alone_are_hashed_once(
    pictures: list[Image.Image], tiny: Classifier, tmp_path: Path, monkeypatch: Any
) -> None:
    original, hashed = base._bytes, Counter[int]()

    def counting(tensor: torch.Tensor) -> Any:
        hashed[tensor.data_ptr()] += 1
        return original(tensor)

    monkeypatch.setattr(base, "_bytes", counting)
    tiny.adapt(pictures, recipe="fast", settings={"steps": 2})
    tiny.infer(Images(pictures), InferenceConfig(cache=FeatureCache(tmp_path)))
    assert set(hashed.values()) == {1}
    with torch.no_grad():
        tiny.backbone.model.visual_projection.weight[0, 0] += 1
    before = sum(hashed.values())
    tiny.backbone.fingerprint()
    assert sum(hashed.values()) == before + 1, "what has changed, and nothing else"
