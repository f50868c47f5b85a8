"""Predictions block by block, and each process's part of them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from helpers import groups

from pouf import Classifier, FeatureCache, Images, InferenceConfig, InputError, Vectors
from pouf.inference.encode import BLOCK, FITTED_ON
from pouf.runs.predict import predict_share


@pytest.fixture
def broken(few_digits: Path, tmp_path: Path) -> Path:
    for i, file in enumerate(sorted(few_digits.rglob("*.png"))[:30]):
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / "images" / f"{i:02}.png").write_bytes(b"no picture" if i in (3, 29) else file.read_bytes())
    return tmp_path / "images"


@pytest.mark.parametrize("kept", [False, True])
def test_blocks_hold_few_inputs_and_are_the_whole_together(
    broken: Path, tmp_path: Path, tiny: Classifier, kept: bool
) -> None:
    data, whole = Images.from_folder(broken), tiny.infer(Images.from_folder(broken))
    seen: list[int] = []
    told: list[int] = []
    total: list[int] = []
    config = InferenceConfig(4, cache=FeatureCache(tmp_path / "cache") if kept else None, on_batch=told.append,
                             on_start=total.append)  # fmt: skip
    for _ in range(2):  # the second time the features are found again
        blocks = []
        for encoded in tiny.store(config).blocks(data, rows=7):
            seen.append(len(encoded.indices))
            blocks += tiny.score_blocks(encoded)
        assert [index for block in blocks for index in block.indices] == whole.indices
        assert torch.allclose(
            torch.cat([block.log_probabilities for block in blocks]), whole.log_probabilities, atol=1e-5
        )
    assert max(seen) <= 7 and sum(seen) == 2 * 28
    assert total[0] == 30 and sum(told) == 2 * 28, "progress is told of all blocks together"


def test_one_process_writes_one_file_with_the_rows_of_all_blocks(tmp_path: Path) -> None:
    features, prototypes = groups(n=BLOCK + 30)
    features[[3, BLOCK + 9]] = 0.0
    data, classifier = Vectors(features), Classifier.from_vectors(prototypes, list("abcdef"))
    share = predict_share(tmp_path / "p.csv", classifier, data, InferenceConfig())
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    readable = [row for row in range(BLOCK + 30) if row not in (3, BLOCK + 9)]
    assert [int(row["row"]) for row in rows] == readable
    assert [row["class"] for row in rows] == classifier.predict(features[readable])
    assert (share.n, sorted(data.skipped)) == (BLOCK + 28, [3, BLOCK + 9])
    assert FITTED_ON - 2 <= len(share.sample.indices) <= FITTED_ON


def test_nothing_is_written_where_nothing_can_be_read(tmp_path: Path, tiny: Classifier) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match="none of the 1 inputs"):
        predict_share(tmp_path / "p.csv", tiny, Images.from_folder(tmp_path), InferenceConfig())
    assert not (tmp_path / "p.csv").exists()


def test_features_for_a_fit_are_the_same_rows_however_many_there_are() -> None:
    features, prototypes = groups(n=FITTED_ON + 12)
    classifier = Classifier.from_vectors(prototypes, list("abcdef"))
    own = classifier.encode(Vectors(features))
    some = classifier.store().some(own)
    assert len(some.indices) == FITTED_ON and some.indices == sorted(set(some.indices))
    assert torch.equal(some.features, own.features[some.indices])
    assert some.indices == classifier.store().some(own).indices
