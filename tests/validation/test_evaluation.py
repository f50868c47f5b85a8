"""Accuracy, recall and the calibration baseline, by hand."""

from pathlib import Path

import pytest
import torch

from pouf import Classifier, calibrate, evaluate, read_labelled
from pouf.demo import DIGITS
from pouf.validation.evaluation import accuracy


def test_calibration_subtracts_each_classes_mean_log_probability() -> None:
    log_p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]]).log()
    scores = calibrate(log_p)
    assert torch.allclose(scores.mean(0), torch.zeros(2), atol=1e-6)
    assert scores.argmax(1).tolist() == [0, 0, 1]  # by log-odds: 2.20, 1.39 and 0.41 around their mean of 1.33


def test_accuracy_is_the_share_that_is_right() -> None:
    assert accuracy(torch.tensor([1, 2, 3, 3]), torch.tensor([1, 2, 3, 0])) == 0.75


def test_evaluation_agrees_with_a_plain_count(tiny: Classifier, few_digits: Path) -> None:
    labelled = read_labelled(few_digits, DIGITS, "image")
    result = evaluate(tiny, tiny, labelled)
    guesses = tiny.predict(few_digits)
    truth = [Path(name).parts[0] for name in labelled.inputs.ids]
    right = [guess == name for guess, name in zip(guesses, truth, strict=True)]
    assert result.n == len(truth)
    assert result.zero_shot == result.adapted == pytest.approx(sum(right) / len(right))
    for name in DIGITS:
        own = [ok for ok, label in zip(right, truth, strict=True) if label == name]
        assert (result.per_class[name].n, result.per_class[name].adapted) == (
            len(own),
            pytest.approx(sum(own) / len(own)),
        )


def test_a_class_without_samples_has_no_recall(tiny: Classifier, few_digits: Path) -> None:
    result = evaluate(tiny, tiny, read_labelled(few_digits / "seven", DIGITS, "image"))
    assert result.per_class["two"] == (0, None, None, None, None)
    assert result.per_class["seven"].n == result.n


def test_files_that_cannot_be_read_are_left_out_of_the_count(
    tiny: Classifier, few_digits: Path, tmp_path: Path
) -> None:
    source = next((few_digits / "two").iterdir())
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "good.png").write_bytes(source.read_bytes())
    (tmp_path / "two" / "bad.png").write_bytes(b"bad")
    result = evaluate(tiny, tiny, read_labelled(tmp_path, DIGITS, "image"))
    assert (result.n, result.skipped) == (1, 1)
