"""Vectors without a model: prototypes are adapted, saved and loaded, before and after."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import train

from pouf import Classifier, InputError, Recipe
from pouf.data.vectors import Vectors
from pouf.recipe import TunerSettings
from pouf.tuners import tune

K, D, EACH = 8, 32, 30
NAMES = [f"class {k}" for k in range(K)]


def vectors(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clusters, and prototypes that lie beside them."""
    draw = torch.Generator().manual_seed(seed)
    centres = F.normalize(torch.randn(K, D, generator=draw), dim=1)
    labels = torch.arange(K).repeat_interleave(EACH)
    features = F.normalize(centres[labels] + 0.15 * torch.randn(len(labels), D, generator=draw), dim=1)
    prototypes = F.normalize(centres + 0.28 * torch.randn(K, D, generator=draw), dim=1)
    return features, labels, prototypes


def accuracy(classifier: Classifier, features: torch.Tensor, labels: torch.Tensor) -> float:
    return (classifier.infer(Vectors(features)).log_probabilities.argmax(1) == labels).float().mean().item()


@pytest.mark.parametrize("tune", ["prototypes", "map"])
def test_adaptation_brings_prototypes_to_their_clusters(tune: str, tmp_path: Path) -> None:
    features, labels, prototypes = vectors()
    classifier = Classifier.from_vectors(prototypes, NAMES, temperature=0.05)
    before = accuracy(classifier, features, labels)
    recipe = Recipe.load("features").with_settings(**{"tuner.name": tune, "optimisation.lr": 3e-2})
    train(classifier, Vectors(features), recipe)
    after = accuracy(classifier, features, labels)
    assert after > before + 0.02
    classifier.save_pretrained(tmp_path)
    again, zero_shot = Classifier.from_pretrained(tmp_path), Classifier.from_pretrained(tmp_path, use="zero-shot")
    assert torch.allclose(again.predict_proba(features), classifier.predict_proba(features), atol=1e-6)
    assert accuracy(zero_shot, features, labels) == before and again.temperature == pytest.approx(0.05)


def test_features_are_not_copied_before_they_are_needed(tmp_path: Path) -> None:
    features, _, prototypes = vectors()
    np.save(tmp_path / "features.npy", features.numpy())
    data = Vectors.from_file(tmp_path / "features.npy")
    encoded = Classifier.from_vectors(prototypes, NAMES).encode(data)
    assert np.shares_memory(encoded.features.numpy(), data.array)


def test_half_precision_and_bad_rows_do_no_harm() -> None:
    features, _, prototypes = vectors()
    array = features.half().numpy()
    array[3] = np.nan
    classifier, data = Classifier.from_vectors(prototypes, NAMES), Vectors(array)
    train(classifier, data, Recipe.load("features").with_settings(steps=3))
    assert classifier.infer(data).indices == [i for i in range(len(array)) if i != 3]


def test_names_come_from_the_file_and_doubles_are_numbered(tmp_path: Path) -> None:
    _, _, prototypes = vectors()
    np.savez(tmp_path / "p.npz", text=prototypes.numpy(), names=np.array(["missile", *NAMES[:6], "missile"]))
    assert Classifier.from_vectors(tmp_path / "p.npz").classes[-1] == "missile (2)"


def test_what_does_not_fit_is_said() -> None:
    features, _, prototypes = vectors()
    with pytest.raises(InputError, match="expected names for 8 prototypes, not 7"):
        Classifier.from_vectors(prototypes, NAMES[:7])
    with pytest.raises(InputError, match="features have 31 dimensions, but prototypes 32"):
        Classifier.from_vectors(prototypes, NAMES).predict(features[:, :31])
    with pytest.raises(InputError, match="'map' is for vectors without a model"):
        tiny = Classifier.from_pretrained("pouf/tiny-clip", NAMES)
        tune(tiny, TunerSettings(name="map"))
    prototypes[2] = 0
    with pytest.raises(InputError, match="is zero, or not finite"):
        Classifier.from_vectors(prototypes, NAMES)
