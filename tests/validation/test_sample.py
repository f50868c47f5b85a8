"""A run is judged for at most 15 % of what its training costs."""

from pathlib import Path

import pytest
import torch
from helpers import adapt, groups
from small_models import sentence_encoder

from pouf import Classifier, Recipe, Vectors
from pouf.models.sentence_encoder import SentenceEncoder
from pouf.validation.checkpoints import ZERO_SHOT, Checkpoint
from pouf.validation.selectors import BUDGET, FORWARD_AND_BACKWARD, MIN_INPUTS, sample_size

TRAINED = Recipe(steps=75, batch_size=32, augment="none", temperature=0.1)


@pytest.mark.parametrize("snapshots", [2, 4])
def test_judging_encodes_at_most_its_share_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshots: int
) -> None:
    rows = {True: 0, False: 0}  # with a gradient, and without
    encode = SentenceEncoder.encode_inputs

    def counted(self: SentenceEncoder, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows[torch.is_grad_enabled()] += len(batch["input_ids"])
        return encode(self, batch)

    monkeypatch.setattr(SentenceEncoder, "encode_inputs", counted)
    classifier = Classifier.from_pretrained(sentence_encoder(tmp_path), ["good", "bad", "food"])
    texts = [f"the {word} {other}" for word in ("film", "food", "book") for other in ("is good", "was bad", "we hated")]
    data = classifier.data([f"{text} {i}" for i in range(60) for text in texts])
    result = adapt(classifier, data, TRAINED.with_settings(snapshots=snapshots))
    share = rows[False] / (FORWARD_AND_BACKWARD * rows[True])
    assert rows[True] == 75 * 32 and 0.7 * BUDGET < share <= BUDGET
    assert result.verdict.diagnostics.inputs == result.verdict.diagnostics.perturbed > MIN_INPUTS


def test_how_many_inputs_are_judged_follows_the_training_and_the_data() -> None:
    usual, large = (sample_size(2000, 6, TRAINED.with_settings(steps=steps), True) for steps in (75, 5000))
    assert usual.inputs * (TRAINED.snapshots + 3) <= BUDGET * FORWARD_AND_BACKWARD * 75 * 32
    assert large == (512, 256), "a long run is judged on no more than verdicts need"
    assert sample_size(2000, 6, TRAINED.with_settings(steps=5), True) == (MIN_INPUTS, MIN_INPUTS)
    assert sample_size(20, 6, TRAINED, True) == (20, 20)
    assert sample_size(2000, 60, TRAINED.with_settings(batch_per_class=4), True).inputs > 5 * usual.inputs / 2
    # Of features that are looked up only those of perturbed inputs cost anything.
    assert sample_size(1000, 6, TRAINED, False) == (512, 150) and sample_size(10**6, 6, TRAINED, False) == (512, 256)


def test_perturbed_inputs_are_predicted_where_the_verdict_needs_them() -> None:
    features, prototypes = groups(6, 6, 300, 32, 0.15, 0.05)
    classifier = Classifier.from_vectors(prototypes, list("abcdef"), temperature=0.05)
    recipe = Recipe.default("vector").with_settings(steps=40, snapshots=4)
    result = adapt(classifier, Vectors(features), recipe)
    perturbed = {key: len(each.perturbed) for key, each in result.checkpoints.predictions.items()}
    last = Checkpoint(40, True)
    assert perturbed[ZERO_SHOT] == perturbed[last] == MIN_INPUTS
    assert sum(map(bool, perturbed.values())) == 2 + (result.verdict.chosen != 40)
    assert 0 < result.verdict.diagnostics.stability_after < 1 or torch.equal(
        result.checkpoints.predictions[last].perturbed.argmax(1),
        result.checkpoints.predictions[last].probabilities[:MIN_INPUTS].argmax(1),
    )
