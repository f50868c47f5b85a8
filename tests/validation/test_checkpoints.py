"""A checkpoint owns what a step is: weights and everything beside them."""

import gc
from pathlib import Path

import pytest
import torch
from helpers import Steps, adapt, groups, same, weights
from small_models import masked_lm

from pouf import EMBEDDED, Classifier, Images, Recipe, Vectors
from pouf.demo import DIGITS
from pouf.postprocess import fit_correction
from pouf.validation.checkpoints import ZERO_SHOT, Checkpoint, Checkpoints
from pouf.validation.selectors import snapshot_steps

CLASSES = [f"c{i}" for i in range(30)]


def vectors(present: int = 30) -> tuple[Vectors, Classifier]:
    features, prototypes = groups(present, 30, 300, 32, 0.15, 0.05)
    return Vectors(features), Classifier.from_vectors(prototypes, CLASSES, temperature=0.05)


def recipe(**settings: object) -> Recipe:
    usual = {"steps": 40, "snapshots": 8, "optimisation.lr": 0.05}
    return Recipe.default("vector").with_settings({**usual, **settings})


def surest(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities.max(1).values.sort().values  # a sample is in an order of its own


def test_going_back_takes_weights_and_correction_along() -> None:
    data, classifier = vectors()
    before = classifier.predict_proba(data)
    result = adapt(classifier, data, recipe())
    seen = {}
    for use in ("last", "chosen", "zero-shot", "advised"):
        classifier = result.at(use)
        place = result.checkpoint(use)
        seen[use] = classifier.predict_proba(data)
        expected = result.checkpoints.predictions[place].probabilities
        assert torch.allclose(surest(expected), surest(seen[use]), atol=1e-5), use
    assert torch.equal(seen["zero-shot"], before) and not torch.allclose(seen["last"], before, atol=1e-3)
    assert torch.equal(seen["advised"], seen[result.verdict.advised])


def test_the_chosen_step_has_a_correction_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Checkpoints.choose
    monkeypatch.setattr(Checkpoints, "_forget", lambda self, latest: None)
    monkeypatch.setattr(Checkpoints, "choose", lambda self: original(self)._replace(step=10))
    data, classifier = vectors()
    result = adapt(classifier, data, recipe())
    assert result.verdict.chosen == 10 and result.verdict.advised == "chosen"
    fitted = result.classifier.postprocessor.bias.clone()
    classifier = result.at("last")
    assert not torch.equal(classifier.postprocessor.bias, fitted)
    classifier = result.at("chosen")
    classifier.postprocessor = None
    classifier.postprocessor = fit_correction(recipe().postprocess, classifier, classifier.encode(data))
    assert torch.allclose(classifier.postprocessor.bias, fitted, atol=1e-5)


def test_at_most_three_sets_of_weights_are_on_disk(few_digits: Path, tmp_path: Path) -> None:
    most: list[int] = []

    class Counting(Steps):
        def on_checkpoint(self, step: int, classifier: Classifier) -> None:
            most.append(len(list((tmp_path / "weights").glob("*.safetensors"))))

    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    short = Recipe.load("demo").with_settings(steps=12, snapshots=12)
    result = adapt(
        classifier, Images.from_folder(few_digits), short, callbacks=[Counting()], checkpoint_dir=tmp_path / "weights"
    )
    assert len(most) == 13 and max(most) == 3
    assert len(result.checkpoints.predictions) == 13, "all have been looked at"
    kept = {place.step for place in result.checkpoints.postprocessors}
    assert len(kept) <= 3 and {0, 12} <= kept and result.verdict.chosen in kept
    result.checkpoints.release()  # nothing is left to resume
    assert not (tmp_path / "weights").exists()
    folder = result.checkpoints.folder
    assert len(list(folder.glob("*.safetensors"))) == len(kept)
    del result
    gc.collect()
    assert not folder.exists(), "they are deleted with the result"


def test_classifiers_of_other_steps_leave_one_another_as_they_are(few_digits: Path) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    start = weights(classifier)
    result = adapt(classifier, Images.from_folder(few_digits), Recipe.load("demo").with_settings(steps=4, snapshots=2))
    last, end = result.at("last"), weights(result.at("last"))
    assert same(weights(result.at("zero-shot")), start) and not same(start, end)
    assert same(weights(last), end)
    with pytest.raises(ValueError, match="unknown use 'best'"):
        result.at("best")


@pytest.mark.parametrize("tune", ["full", "prompt", "layernorm"])
def test_zero_shot_is_what_was_there_before_whatever_was_tuned(few_digits: Path, tune: str) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS, ["the {}."])
    data = Images.from_folder(few_digits)
    before = classifier.predict_proba(data)
    short = Recipe.load("demo").with_settings({"steps": 3, "snapshots": 1, "tuner.name": tune})
    result = adapt(classifier, data, short)
    classifier = result.at("zero-shot")
    assert torch.equal(classifier.predict_proba(data), before) and classifier.prompt is None
    classifier = result.at("last")
    assert not torch.equal(classifier.predict_proba(data), before)


def test_soft_vectors_of_a_masked_language_model_come_and_go(tmp_path: Path) -> None:
    folder = masked_lm(tmp_path / "lm", "roberta")
    classifier = Classifier.from_pretrained(folder, ["bad", "good"], ["{text} it was [MASK]."])
    texts = ["the film is good", "we hated the food", "a book", "so bad"] * 3
    before = classifier.predict_proba(texts)
    short = Recipe.default("cloze").with_settings(
        {"steps": 2, "snapshots": 1, "tuner.name": "prompt", "tuner.context": "it is", "optimisation.lr": 0.1}
    )
    result = adapt(classifier, classifier.data(texts), short)
    classifier = result.at("zero-shot")
    assert torch.equal(classifier.predict_proba(texts), before)
    classifier = result.at("last")
    assert not torch.allclose(classifier.predict_proba(texts), before)


@pytest.mark.parametrize(("present", "advised"), [(30, "last"), (3, "zero-shot")])
def test_a_correction_without_training_is_judged_too(present: int, advised: str) -> None:
    """Sinkhorn gives each class its share, whether it is in the data or not."""
    data, classifier = vectors(present)
    result = adapt(classifier, data, recipe(steps=0, postprocess="sinkhorn"))
    assert result.verdict.advised == advised and bool(result.verdict.alarms) == (advised == "zero-shot")
    assert ("zero-shot with corrected predictions" in str(result.verdict)) == (advised == "last")
    assert (result.classifier.postprocessor is None) == (advised == "zero-shot")
    assert set(result.checkpoints.postprocessors) == {ZERO_SHOT, Checkpoint(0, True)}, "no step is made up"


def test_without_snapshots_there_is_nothing_to_go_back_to() -> None:
    data, classifier = vectors()
    result = adapt(classifier, data, recipe(snapshots=0, postprocess="none"))
    assert result.checkpoints is None and "Not judged" in str(result.verdict)
    with pytest.raises(ValueError, match="no checkpoints to go back to"):
        result.at("zero-shot")


def test_training_can_be_ended_early_and_the_last_step_is_the_last() -> None:
    class Enough(Steps):
        def on_step(self, step: object) -> bool:
            super().on_step(step)
            return len(self.steps) == 13

    data, classifier = vectors()
    told = Enough()
    result = adapt(classifier, data, recipe(), callbacks=[told, Steps()])
    assert len(result.history) == 13 and result.verdict.last == 13
    assert told.checkpoints == [*snapshot_steps(40, 8)[:3], 13] and told.started == [(30 * 32, 30 * 32)]


def test_a_model_that_says_one_class_of_all_is_compared_without_its_bias() -> None:
    """As many causal language models do. Two groups, told apart by the margin, but not by its sign."""
    generator = torch.Generator().manual_seed(0)
    side = torch.where(torch.arange(200) < 100, -1.0, 1.0)
    features = torch.stack([torch.ones(200), 0.3 * side, torch.zeros(200)], 1)
    features = features + 0.05 * torch.randn(200, 3, generator=generator)
    prototypes = torch.tensor([[1.0, -0.1, 0.0], [1.0, 0.1, 1.0]])
    classifier = Classifier.from_vectors(prototypes, ["left", "right"], temperature=0.05)
    assert set(classifier.predict(features)) == {"left"}
    settings = {
        "keep_shares_max_classes": 0,
        "min_class_usage": 0.0,
        "postprocess": "prior-correction",
        "optimisation.lr": 0.003,
    }
    verdict = adapt(classifier, Vectors(features), recipe(**settings)).verdict
    assert verdict.advised != "zero-shot" and verdict.alarms == []
    assert "shares moved" in {each.name for each in verdict.cautions}, "or the data are of one class: only labels tell"
    right = [(said == "right") == (s > 0) for said, s in zip(classifier.predict(features), side, strict=True)]
    assert sum(right) > 160


def test_steps_of_a_run_that_keeps_shares_are_compared_with_these_shares() -> None:
    """What the shares do along the run is taken back at its end, and must not count for or against a step."""
    generator = torch.Generator().manual_seed(0)
    side = torch.where(torch.arange(200) < 40, -1.0, 1.0)
    features = torch.stack([torch.ones(200), 0.3 * side, torch.randn(200, generator=generator)], 1)
    prototypes = torch.tensor([[1.0, -0.3, 0.4], [1.0, 0.3, -0.4]])
    classifier = Classifier.from_vectors(prototypes, ["left", "right"], temperature=0.05)
    # Transport alone, nearly, so that shares are free to move on the way.
    settings = {
        "keep_shares_max_classes": 2,
        "keep_shares_lr_factor": 1.0,
        "objective.information": 0.001,
        "optimisation.lr": 0.3,
    }
    result = adapt(classifier, Vectors(features), recipe(**settings))
    checkpoints = result.checkpoints
    trained = [place for place in checkpoints.predictions if not place.postprocessed]
    kept = checkpoints.predictions[ZERO_SHOT].shares()
    assert max((checkpoints.predictions[place].shares() - kept).abs().max() for place in trained) > 0.05, "they move"
    for place in trained:
        assert torch.allclose(checkpoints.comparable(place).shares(), kept, atol=0.011), place
    assert torch.equal(
        checkpoints.comparable(ZERO_SHOT).probabilities.argmax(1),
        checkpoints.predictions[ZERO_SHOT].probabilities.argmax(1),
    )
