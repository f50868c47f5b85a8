"""Small changes of a sample: small, and the same for the same seed."""

import torch
import torch.nn.functional as F

from pouf import Classifier, Vectors
from pouf.data.views import perturbation


def test_perturbations_are_small_and_the_same_for_the_same_seed(pictures) -> None:
    image = perturbation("image").apply
    assert image(pictures[0], 1).size == pictures[0].size
    assert image(pictures[0], 1).tobytes() == image(pictures[0], 1).tobytes() != pictures[0].tobytes()
    text = perturbation("text").apply
    words = " ".join(f"w{i}" for i in range(200))
    left = text(words, 3).split()
    assert 150 < len(left) < 200 and text("word", 5) == "word" and text(words, 3) == text(words, 3)
    assert text(("a b", "c d"), 0) == text(("a b", "c d"), 0)


def test_vectors_are_perturbed_each_in_its_own_direction() -> None:
    data = Vectors(torch.ones(5, 8))
    classifier = Classifier.from_vectors(torch.randn(3, 8), list("abc"))
    moved = classifier.encode(data, transform=perturbation("vector")).features - 1
    assert moved.norm(dim=1).min() > 0.1
    assert F.cosine_similarity(moved[:1], moved[1:]).abs().max() < 0.99


def test_another_number_is_another_change() -> None:
    words = " ".join(f"w{i}" for i in range(200))
    first, second = (perturbation("text", number) for number in (0, 1))
    assert first.apply(words, 3) != second.apply(words, 3) and first.name != second.name
