"""What is decided before training, and what follows from it: each of these was wrong once."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_runner import pouf
from helpers import REVIEWS, groups
from PIL import Image
from small_models import masked_lm

from pouf import EMBEDDED, Callback, Classifier, Images, InputError, Output, Recipe, Shots, Stream, Texts
from pouf.data.labels import read_labelled
from pouf.demo import DIGITS
from pouf.inference.cache import InMemoryFeatureCache
from pouf.options import AdaptOptions
from pouf.postprocess.propagation import propagation
from pouf.training.plan import draft_plan
from pouf.validation.evaluation import compare

QUICK = {"steps": 4, "snapshots": 2, "batch_size": 60}


def vectors(temperature: float | None = None) -> tuple[torch.Tensor, Classifier]:
    features, prototypes = groups(spread=0.4, apart=0.4)
    return features, Classifier.from_vectors(prototypes, list("abcdef"), temperature)


def test_a_temperature_holds_where_nothing_is_trained_and_before_anything_is_looked_at() -> None:
    features, clf = vectors()
    sharp = clf.predict_proba(features)
    clf = clf.adapt(features, method="zero-shot", settings={"temperature": 1.0}).classifier
    assert clf.predict_proba(features).max() < sharp.max() - 0.2
    seen: list[float] = []

    class Watch(Callback):
        def on_start(self, recipe: Recipe, trainable: int, total: int) -> None:
            seen.append(recipe.temperature)

        def on_checkpoint(self, step: int, classifier: Classifier) -> None:
            seen.append(float(1 / classifier.backbone.logit_scale.exp()))

    features, clf = vectors(0.05)
    clf.adapt(features, settings=QUICK, callbacks=[Watch()])
    assert seen == [pytest.approx(0.05)] * 4, "what the classifier was given is not replaced by the recipe's"


def test_known_shares_hold_for_label_propagation_too() -> None:
    features, clf = vectors()
    encoded = clf.encode(clf.data(features))
    prior = torch.tensor([0.5, 0.1, 0.1, 0.1, 0.1, 0.1])
    fitted = propagation(encoded.features, clf.prototypes(), clf.scores(encoded), prior)
    assert fitted.votes is not None
    assert float((fitted.votes.mean(0) - prior).abs().max()) < 0.1
    assert float(propagation(encoded.features, clf.prototypes(), clf.scores(encoded)).votes.mean(0)[0]) < 0.3


def test_a_search_keeps_to_its_minutes_for_all_trials_together() -> None:
    features, clf = vectors()
    cache = InMemoryFeatureCache()
    cheapest = draft_plan(clf, features, AdaptOptions(recipe="fast"), cache=cache, report=False).estimate(
        clf, cache, report=False
    )
    minutes = 50 * cheapest.seconds / 60  # many times what one run takes, however busy the machine is

    class Started(Callback):
        def on_step(self, step: object) -> None:
            raise AssertionError("so many trials can't be run in this time")

    assert draft_plan(clf, features, AdaptOptions(max_minutes=minutes), cache=cache, report=False).recipe.steps
    with pytest.raises(InputError, match=rf"needs more than the {minutes / 5000:g} minutes"):
        clf.search(features, {"seed": range(5000)}, max_minutes=minutes, callbacks=[Started()])
    with pytest.raises(InputError, match="needs more than the"):  # of the usual three trials
        clf.search(features, max_minutes=1e-9)
    largest = draft_plan(clf, features, AdaptOptions(max_minutes=1e6), cache=cache, report=False, runs=10).recipe
    assert largest == Recipe.preset("paper", "vector"), "the largest that fits"


def test_zero_shot_is_not_claimed_where_there_is_no_way_back() -> None:
    features, clf = vectors()
    result = clf.adapt(features, settings={"steps": 3, "snapshots": 0, "postprocess": "none"})
    with pytest.raises(InputError, match="no checkpoints to go back to"):
        result.at("zero-shot")
    result = clf.adapt(features, method="zero-shot")
    assert result.at("zero-shot") is result.classifier


def test_a_row_without_a_label_is_left_out_of_an_evaluation(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"text": "one", "label": "a"}\n{"text": "two"}\n{"text": "x", "label": "b"}\n'
    )
    rows = read_labelled(tmp_path / "rows.jsonl", ["a", "b"], "text")
    assert rows.inputs.skipped == {1: "this row has no readable label"}
    features, clf = vectors()
    arrays = clf.data(features)
    arrays.skipped[3] = "this row has no readable label"
    labels = clf.predict(features)
    from pouf.data.labels import Labelled

    numbers = [clf.classes.index(name) for name in labels]
    found = compare(clf, clf, clf, Labelled(arrays, [*numbers[:3], -1, *numbers[4:]]))
    assert found.n == len(labels) - 1 and found.advised == 1.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"templates": ["a {}"]}, "has its own templates"), ({"words": ["x", "y"]}, "has its own words"),
        ({"max_length": 9}, "has its own max_length"),
    ],
)  # fmt: skip
def test_a_run_that_is_loaded_takes_no_other_question(tmp_path: Path, given: dict, words: str) -> None:
    _, clf = vectors()
    clf.save_pretrained(tmp_path / "run")
    with pytest.raises(InputError, match=words):
        Classifier.from_pretrained(tmp_path / "run", **given)
    assert Classifier.from_pretrained(tmp_path / "run", temperature=0.5).temperature == 0.5
    with pytest.raises(InputError, match="for a run that is loaded"):
        Classifier.from_pretrained(EMBEDDED, DIGITS, use="last")


def test_a_stream_of_images_ends_with_the_default_recipe(
    pictures: list[Image.Image], caplog: pytest.LogCaptureFixture
) -> None:
    clf = Classifier.from_pretrained(EMBEDDED, DIGITS)
    assert Recipe.default("image").postprocess != "none", "or this shows nothing"
    result = clf.adapt(Stream(lambda: iter(pictures), "image"), settings={"steps": 2})
    clf = result.classifier
    assert len(result.history) == 2 and "can't be read again" in caplog.text
    with pytest.raises(InputError, match="corrects all predictions together"):
        clf.adapt(Stream(lambda: iter(pictures), "image"), method="sinkhorn")


def test_one_image_alone_is_adapted_to_with_a_caution(pictures: list[Image.Image]) -> None:
    result = Classifier.from_pretrained(EMBEDDED, DIGITS).adapt(Images(pictures[:1]), settings={"steps": 12})
    assert "few inputs" in [caution.name for caution in result.verdict.cautions]


def test_large_half_precision_vectors_are_as_good_as_others() -> None:
    features, clf = vectors()
    result = clf.adapt((300 * features).half().numpy(), settings=QUICK)
    assert not result.checkpoints.sample.inputs.skipped and result.verdict.diagnostics.inputs == len(features)


def test_no_vectors_at_all_are_an_error() -> None:
    _, clf = vectors()
    with pytest.raises(InputError, match="no inputs"):
        clf.adapt(np.zeros((0, 16), np.float32))


@pytest.mark.parametrize("wrong", [Callback(), [Callback], [object()]])
def test_what_is_no_callback_is_said(wrong: object) -> None:
    features, clf = vectors()
    with pytest.raises(InputError, match="callback"):
        clf.adapt(features, callbacks=wrong)  # type: ignore[arg-type]


def test_a_set_has_no_order() -> None:
    with pytest.raises(InputError, match="not a set"):
        Classifier.from_pretrained(EMBEDDED, {"one", "two"})  # type: ignore[arg-type]


def test_a_stack_of_grey_pictures_is_as_many(pictures: list[Image.Image]) -> None:
    clf = Classifier.from_pretrained(EMBEDDED, DIGITS)
    stack = np.stack([np.asarray(picture.convert("L")) for picture in pictures])
    assert clf.predict(stack) == clf.predict([picture.convert("L") for picture in pictures])


def test_texts_of_one_column_name_the_other_ones(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("review\nfine\n")
    with pytest.raises(InputError, match="give text_column= to read another"):
        Texts.from_file(tmp_path / "a.csv")


def test_shots_that_are_missing_are_told_before_anything_is_timed() -> None:
    told: list[object] = []

    class Watch(Callback):
        def on_estimate(self, estimate: object) -> None:
            told.append(estimate)

    features, clf = vectors()
    with pytest.raises(InputError, match="no labelled shots"):
        clf.adapt(features, settings=QUICK | {"objective.labels": 1.0}, callbacks=[Watch()])
    assert told == []


def test_known_shares_are_those_of_one_run_and_no_other_inherits_them(tmp_path: Path) -> None:
    features, clf = vectors()
    shares = [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]
    first = clf.adapt(features, prior=shares, settings=QUICK, output=Output(tmp_path / "run", report=False))
    clf = first.classifier
    assert first.target_shares.tolist() == pytest.approx(shares) and first.verdict.diagnostics.known_shares
    assert json.loads((tmp_path / "run" / "details/run.json").read_text())["known_shares"] == pytest.approx(shares)
    for classifier in (clf, Classifier.from_pretrained(tmp_path / "run")):
        second = classifier.adapt(features, prior="uniform", settings=QUICK)
        assert second.target_shares is None and not second.verdict.diagnostics.known_shares
    searched = vectors()[1].search(features, {"seed": [0]}, prior=shares, settings=QUICK)
    assert searched.result.target_shares.tolist() == pytest.approx(shares)


def everything(clf: Classifier) -> dict[str, object]:
    """All of a classifier that a run can change."""
    named = {name: (p.detach().clone(), p.requires_grad) for name, p in clf.named_parameters()}
    plain = ("tuner_settings", "prompt", "postprocessor", "demonstrations", "templates", "temperature")
    own = {name: getattr(clf, name) for name in plain} | {"backbone": clf.backbone}
    return own | {"scale": float(clf.backbone.logit_scale), "weights": str(named)}


class Refuses(Callback):
    def on_start(self, recipe: Recipe, trainable: int, total: int) -> None:
        raise InputError("refused after all has been prepared")


@pytest.mark.parametrize(
    "call",
    [
        {"method": "majority", "output": "there"},
        {"method": "lm-bff", "prior": [0.7, 0.3], "output": "there"},
        {"demonstrations": True, "data": Texts([""] * 9)},
        {"settings": {"temperature": 0.5, "tuner.name": "lora"}, "callbacks": [Refuses()]},
        {"method": "fine-tuning", "settings": {"optimisation.name": "sgd"}, "callbacks": [Refuses()]},
        {"settings": {"tuner.name": "prompt"}, "callbacks": [Refuses()], "output": "new"},
        {"method": "in-context", "settings": {"seed": -1}},
    ],
)
def test_a_refused_call_leaves_the_classifier_as_it_was(call: dict, tmp_path: Path) -> None:
    clf = Classifier.from_pretrained(masked_lm(tmp_path / "lm", "bert"), ["bad", "good"], ["{text} It was [MASK]."])
    shots, before = Shots(Texts(REVIEWS[:6]), torch.eye(2)[[1, 1, 1, 0, 0, 0]]), everything(clf)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("not a run")
    places = {name: tmp_path / folder for name, folder in call.items() if name == "output"}
    with pytest.raises(InputError):
        clf.adapt(**{"data": REVIEWS, "shots": shots, **call, **places})
    assert everything(clf) == before
    assert not (tmp_path / "new").exists()


def test_a_run_on_top_of_a_run_says_what_it_compares_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    features, clf = vectors()
    first = clf.adapt(features, settings=QUICK)
    clf = first.classifier
    assert not first.verdict.started_adapted and "adapted before" not in caplog.text
    clf = first.at("last")
    second = clf.adapt(features, settings=QUICK, output=Output(tmp_path / "run", report=False))
    assert second.verdict.started_adapted and "was adapted before" in second.verdict.message
    assert "adapted before" in json.loads((tmp_path / "run" / "details/run.json").read_text())["started_from"]
    assert [record.levelname for record in caplog.records if "was adapted before" in record.message] == ["WARNING"]


def test_a_plan_is_shown_without_training_and_is_that_of_the_run(tmp_path: Path) -> None:
    features, prototypes = groups()
    np.save(tmp_path / "x.npy", features.numpy())
    np.savez(tmp_path / "p.npz", prototypes=prototypes.numpy(), classes=list("abcdef"))
    options = ["--features", "x.npy", "--prototypes", "p.npz", "--steps", 3, "--seed", 4]
    plan = json.loads(pouf("adapt", *options, "--plan", "--json", cwd=tmp_path).stdout)
    assert {each.name for each in tmp_path.iterdir()} == {"x.npy", "p.npz"}, "nothing is written"
    assert "3 steps of" in pouf("adapt", *options, "--plan", cwd=tmp_path).stdout
    pouf("adapt", *options, "--out", "run", "--quiet", cwd=tmp_path)
    assert plan == json.loads((tmp_path / "run" / "details/plan.json").read_text())
