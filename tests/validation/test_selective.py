"""Abstention and unknown inputs."""

from pathlib import Path

import pytest
import torch

from pouf import EMBEDDED, Classifier, Images, InputError
from pouf.demo import DIGITS
from pouf.inference import InferenceConfig
from pouf.validation.selective import kept_at, nearness, reliability


def test_as_many_are_kept_as_the_rate_allows() -> None:
    estimated = torch.tensor([0.99, 0.5, 0.97, 0.9])
    assert kept_at(0.02, estimated).tolist() == [True, False, True, False]
    assert kept_at(0.05, estimated).tolist() == [True, False, True, True]
    assert kept_at(0.0, torch.tensor([0.9])).tolist() == [False]
    assert kept_at(0.5, estimated).all()


@pytest.mark.parametrize("rate", [-0.1, 1.0, 5.0])
def test_a_rate_is_a_share(rate: float) -> None:
    with pytest.raises(InputError, match="expected a rate of errors"):
        kept_at(rate, torch.tensor([0.9]))


def test_what_is_kept_is_righter_than_what_is_left_out(digits_folder: Path) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    data = Images(sorted(digits_folder.rglob("*.png"))[::6])
    truth = torch.tensor([DIGITS.index(Path(name).parent.name) for name in data.ids])
    predictions = classifier.infer(data)
    estimated = reliability(classifier, classifier, data, predictions, InferenceConfig())
    right = predictions.log_probabilities.argmax(1) == truth
    kept = kept_at(0.1, estimated)
    assert 0 < kept.sum() < len(kept)
    assert right[kept].double().mean() > right[~kept].double().mean() + 0.2


def test_noise_is_far_from_all_prototypes(digits_folder: Path, pictures) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    digits = nearness(classifier, classifier.encode(Images(sorted(digits_folder.rglob("*.png"))[::20])))
    noise = nearness(classifier, classifier.encode(Images(pictures)))
    assert noise.median() < digits.median()
