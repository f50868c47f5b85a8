"""A run over a real local Ray, and over tables of pandas as Spark hands them over."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import REVIEWS, groups
from PIL import Image
from small_models import sentence_encoder

from pouf import EMBEDDED, Classifier, InputError
from pouf.demo import DIGITS
from pouf.integrations.ray import BatchPredictor


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    Classifier.from_pretrained(EMBEDDED, DIGITS).save_pretrained(folder / "images")
    sentence_encoder(folder / "encoder")
    Classifier.from_pretrained(folder / "encoder", ["good", "bad"], ["it is {}"]).save_pretrained(folder / "texts")
    Classifier.from_vectors(groups()[1], list("abcdef")).save_pretrained(folder / "vectors")
    return folder


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def test_images_come_as_arrays_bytes_or_paths_and_what_is_none_has_no_class(runs: Path, few_digits: Path) -> None:
    files = sorted(few_digits.rglob("*.png"))[:6]
    pictures = [Image.open(file).convert("RGB") for file in files]
    clf = Classifier.from_pretrained(runs / "images")
    expected, sure = clf.predict(pictures), clf.predict_proba(pictures).max(1).values.numpy()
    predictor = BatchPredictor(runs / "images", batch_size=4)
    for column, samples in (
        ("image", np.stack([np.asarray(picture) for picture in pictures])),
        ("bytes", np.array([png(picture) for picture in pictures], dtype=object)),
        ("path", np.array([str(file) for file in files])),
    ):
        predictions = predictor({column: samples, "id": np.arange(6)})
        assert predictions["class"].tolist() == expected and predictions["id"].tolist() == list(range(6))
        assert np.allclose(predictions["probability"], sure, atol=1e-5)
    predictions = predictor({"bytes": np.array([png(pictures[0]), b"no image"], dtype=object)})
    assert predictions["class"].tolist() == [expected[0], None] and np.isnan(predictions["probability"][1])
    assert predictor({"bytes": np.array([b"no image"], dtype=object)})["class"].tolist() == [None]
    with pytest.raises(InputError, match="no column image or img or bytes or path, only: x"):
        predictor({"x": np.zeros(2)})


def test_a_table_of_pandas_comes_back_with_four_more_columns(runs: Path) -> None:
    """As in Spark's mapInPandas: an iterator of tables in, an iterator of tables out."""
    tables = [pd.DataFrame({"text": REVIEWS[:5], "n": range(5)}), pd.DataFrame({"text": [*REVIEWS[5:], ""], "n": 0})]
    first, second = map(BatchPredictor(runs / "texts"), iter(tables))
    expected = Classifier.from_pretrained(runs / "texts").predict(REVIEWS)
    assert [*first["class"], *second["class"][:-1]] == expected and pd.isna(second["class"].iloc[-1])
    assert list(first) == ["text", "n", "class", "probability", "runner_up", "runner_up_probability"]


@pytest.fixture
def ray():
    """A cluster for each test."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("run", "copies"), [("texts", 1), ("vectors", 2)])
def test_a_real_local_ray_predicts_what_one_process_predicts(runs: Path, ray, run: str, copies: int) -> None:
    column, samples, inputs = {
        "texts": ("text", REVIEWS, REVIEWS),
        "vectors": ("features", groups()[0].tolist(), groups()[0].numpy()),
    }[run]
    given = ray.data.from_items([{column: sample, "n": n} for n, sample in enumerate(samples)], override_num_blocks=2)
    mapped = given.map_batches(
        BatchPredictor, fn_constructor_args=[str(runs / run)], compute=ray.data.ActorPoolStrategy(size=copies)
    )
    predictions = mapped.to_pandas().sort_values("n")["class"].tolist()
    assert predictions == Classifier.from_pretrained(runs / run).predict(inputs)


@pytest.mark.slow
def test_ray_reads_photographs_and_a_second_data_set_in_the_same_cluster(
    runs: Path, ray, few_digits: Path, tmp_path: Path
) -> None:
    files = [shutil.copy(file, tmp_path / file.name) for file in sorted(few_digits.rglob("*.png"))[:30]]
    options = {
        "fn_constructor_args": [str(runs / "images")], "compute": ray.data.ActorPoolStrategy(size=1), "batch_size": 8,
    }  # fmt: skip
    photos = ray.data.read_images(str(tmp_path), include_paths=True, mode="RGB")
    predictions = photos.map_batches(BatchPredictor, **options).drop_columns(["image"]).to_pandas()
    by_path = dict(zip(predictions["path"], predictions["class"], strict=True))
    expected = Classifier.from_pretrained(runs / "images").predict(files)
    assert [by_path[str(file)] for file in files] == expected
    again = ray.data.from_items([{"path": str(file)} for file in files]).map_batches(BatchPredictor, **options)
    assert again.to_pandas()["class"].tolist() == expected
