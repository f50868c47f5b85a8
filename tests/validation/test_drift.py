"""What is left of names outside of the task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_runner import pouf
from helpers import REVIEWS, adapt, groups, weights
from small_models import masked_lm

from pouf import Callback, Classifier, InputError, KeepNames, Output, Step, Vectors, read_labelled
from pouf.demo import DIGITS
from pouf.recipe import Recipe
from pouf.validation.names import other_names

LETTERS = ["letter a", "letter b", "letter c", "letter d"]
SETTINGS = {"steps": 12, "batch_size": 32, "snapshots": 1}


def letters() -> Classifier:
    """The task is to tell letters apart; digits are what is to be kept."""
    return Classifier.from_pretrained("pouf/tiny-clip", LETTERS)


def right(classifier: Classifier, digits: Path) -> float:
    """The same weights with digits for classes, without any help of ours."""
    labelled = read_labelled(digits, DIGITS, "image")
    predicted = Classifier(classifier.backbone, DIGITS).infer(labelled.inputs).log_probabilities.argmax(1)
    return float((predicted == torch.tensor(labelled.labels)).double().mean())


def test_drift_is_what_the_same_weights_say_of_other_names(few_digits: Path) -> None:
    clf = letters()
    before = right(clf, few_digits)
    result = clf.adapt(few_digits, recipe="demo", settings=SETTINGS, keep=KeepNames(DIGITS, few_digits))
    clf = result.at("last")
    drift = result.drift
    assert drift is not None and (drift.names, drift.inputs) == (10, 150)
    assert (drift.accuracy_before, drift.accuracy_after) == (before, right(clf, few_digits))
    assert drift.accuracy_after < before - 0.2 and drift.agreement < 0.8
    anchored = letters()
    pulled = anchored.adapt(
        few_digits, recipe="demo", settings=SETTINGS | {"weight_pull": 0.2}, keep=KeepNames(DIGITS, few_digits)
    )
    assert pulled.drift is not None and pulled.drift.agreement > drift.agreement + 0.1


@pytest.mark.parametrize("tuner", ["prompt", "prototypes"])
def test_what_leaves_the_encoders_alone_loses_nothing(tuner: str, few_digits: Path) -> None:
    settings = SETTINGS | {"tuner.name": tuner, "steps": 4, "optimisation.lr": 0.1}
    result = letters().adapt(few_digits, recipe="demo", settings=settings, keep=KeepNames(DIGITS))
    assert result.drift is not None and result.drift.agreement == 1.0 and result.drift.accuracy_after is None


def test_an_anchor_gives_back_its_share_of_each_step() -> None:
    features, prototypes = groups()
    start, free, pulled = (Classifier.from_vectors(prototypes, list("abcdef")) for _ in range(3))
    one = Recipe.load("features").with_settings(
        {"steps": 1, "batch_size": 32, "min_class_usage": 0.0, "postprocess": "none", "snapshots": 0}
    )
    adapt(free, Vectors(features), one)
    adapt(pulled, Vectors(features), one.with_settings(weight_pull=0.25))
    expected = free.backbone.table + 0.25 * (start.backbone.table - free.backbone.table)
    assert not torch.equal(free.backbone.table, start.backbone.table)
    assert torch.allclose(pulled.backbone.table, expected, atol=1e-7)


def test_an_anchored_run_that_goes_on_holds_to_where_it_first_started(tmp_path: Path) -> None:
    class Enough(Callback):
        def on_step(self, step: Step) -> None:
            if step.step == 5:
                raise KeyboardInterrupt

    features, prototypes = groups()
    settings = SETTINGS | {"weight_pull": 0.3, "steps": 10, "compute.save_every": 0.0, "optimisation.lr": 0.1}
    whole, broken, resumed = (Classifier.from_vectors(prototypes, list("abcdef")) for _ in range(3))
    whole = whole.adapt(features, settings=settings).at("last")
    with pytest.raises(KeyboardInterrupt):
        broken.adapt(features, settings=settings, output=tmp_path / "run", callbacks=[Enough()])
    resumed = resumed.adapt(features, settings=settings, output=Output(tmp_path / "run", resume=True)).at("last")
    assert torch.equal(weights(whole)["backbone.table"], weights(resumed)["backbone.table"])


def test_names_to_keep_are_others_that_the_model_can_read(tmp_path: Path) -> None:
    clf = letters()
    assert other_names(["Letter_A", "one", "two"], clf) == ("one", "two")
    assert len(other_names("words", clf)) > 200
    with pytest.raises(InputError, match="1 names are left without those of the task"):
        other_names(["letter a", "one"], clf)
    with pytest.raises(InputError, match="needs a model that encodes names"):
        other_names(["one", "two"], Classifier.from_vectors(groups()[1], list("abcdef")))
    cloze = Classifier.from_pretrained(
        masked_lm(tmp_path / "model", "roberta"), ["negative", "positive"], ["{text} It was [MASK]."],
        words=["terrible", "great"],
    )  # fmt: skip
    assert other_names(["food", "film", "unheard-of"], cloze) == ("food", "film")
    result = cloze.adapt(
        REVIEWS * 4, settings={"steps": 3, "optimisation.lr": 1e-2}, keep=KeepNames(["food", "film", "book"])
    )
    assert result.drift is not None and result.drift.names == 3 and result.drift.inputs == 32


def test_the_command_line_tells_drift_and_the_run_keeps_it(few_digits: Path, tmp_path: Path) -> None:
    (tmp_path / "digits.txt").write_text("".join(f"{name}\n" for name in DIGITS))
    command = ["adapt", few_digits, "--model", "pouf/tiny-clip", "--classes", ",".join(LETTERS), "--recipe", "demo",
               "--steps", 3, "--keep-classes", "digits.txt"]  # fmt: skip
    output = pouf(*command, "--keep-data", few_digits, "--out", "run", cwd=tmp_path).stdout
    assert "Outside of the task: " in output and "among 10 other names; accuracy there went from" in output
    drift = json.loads((tmp_path / "run" / "details/run.json").read_text())["drift"]
    assert drift["names"] == 10 and 0 < drift["accuracy_before"] < 1
    assert "among 10 other names" in (tmp_path / "run" / "model/README.md").read_text()
    assert "predictions unchanged among other names" in (tmp_path / "run" / "report.html").read_text()


def test_a_search_tells_the_drift_of_what_it_chose(few_digits: Path) -> None:
    clf = letters()
    found = clf.search(
        few_digits, {"optimisation.lr": [1e-3]}, recipe="demo", settings=SETTINGS, keep=KeepNames(DIGITS, few_digits),
    )  # fmt: skip
    drift = found.result.drift
    assert drift is not None and drift.accuracy_before == right(letters(), few_digits)
    assert drift.accuracy_after == right(found.result.at(found.result.verdict.adapted), few_digits)
