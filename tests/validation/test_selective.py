"""Abstention and unknown inputs."""

from pathlib import Path

import pytest
import torch
from helpers import groups

from pouf import EMBEDDED, Classifier, Images, InputError, Vectors
from pouf.demo import DIGITS
from pouf.inference.encode import InferenceConfig
from pouf.validation.selective import out_of_distribution, unreliable, within_error_rate


def test_as_many_are_kept_as_the_rate_allows() -> None:
    estimated = torch.tensor([0.99, 0.5, 0.97, 0.9])
    assert within_error_rate(0.02, estimated).tolist() == [True, False, True, False]
    assert within_error_rate(0.05, estimated).tolist() == [True, False, True, True]
    assert within_error_rate(0.0, torch.tensor([0.9])).tolist() == [False]
    assert within_error_rate(0.5, estimated).all()


@pytest.mark.parametrize("rate", [-0.1, 1.0, 5.0])
def test_a_rate_is_a_share(rate: float) -> None:
    with pytest.raises(InputError, match="expected a rate of errors"):
        within_error_rate(rate, torch.tensor([0.9]))


def test_what_is_kept_is_righter_than_what_is_left_out(digits_folder: Path) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    data = Images(sorted(digits_folder.rglob("*.png"))[::6])
    truth = torch.tensor([DIGITS.index(Path(name).parent.name) for name in data.ids])
    encoded = classifier.encode(data)
    found = unreliable(classifier, classifier, data, encoded, 0.05, InferenceConfig())
    estimated = torch.tensor(list(found.reliability.values()))
    right = classifier.log_probabilities(encoded).argmax(1) == truth
    reliable = within_error_rate(0.1, estimated)
    assert 0 < reliable.sum() < len(reliable)
    assert right[reliable].double().mean() > right[~reliable].double().mean() + 0.2


def test_what_is_left_out_is_told_by_position(digits_folder: Path) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    data = Images(sorted(digits_folder.rglob("*.png"))[::30])
    encoded = classifier.encode(data)
    left_out, estimated, _ = unreliable(classifier, classifier, data, encoded, 0.1, InferenceConfig())
    assert estimated.keys() == set(range(len(data))) and 0 < len(left_out) < len(data)
    assert max(estimated[i] for i in left_out) <= min(estimated[i] for i in set(estimated) - set(left_out))


def test_what_is_far_from_all_prototypes_is_a_stranger() -> None:
    """The limit is what 99 of 100 inputs reach: few of these are far, and nearly all of the noise is."""
    features, prototypes = groups(n=600, d=64, spread=0.05, apart=0.05)
    classifier = Classifier.from_vectors(prototypes, list("abcdef"))
    known = classifier.encode(Vectors(features))
    noise = classifier.encode(Vectors(torch.randn(200, 64, generator=torch.Generator().manual_seed(1))))
    near = known.nearness(classifier.fixed_prototypes()).quantile(0.01).item()
    assert len(out_of_distribution(classifier, known, near)) <= 0.01 * len(features)
    assert len(out_of_distribution(classifier, noise, near)) >= 0.95 * 200
    with pytest.raises(InputError, match="has no checkpoints"):
        out_of_distribution(classifier, known, None)
