"""A choice among settings without labels: bad trials have no vote, and only the best one's weights are kept."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from helpers import Steps, groups, same, sure, weights

from pouf import EMBEDDED, Classifier, Images, InputError, Output, Recipe, Vectors
from pouf.data.base import Subset
from pouf.demo import DIGITS
from pouf.training.search import Trial, all_combinations, choose_trial, usual_grid

K, N = 4, 60


def test_a_grid_is_all_combinations() -> None:
    assert all_combinations({"a": [1, 2], "b": [3]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    rates = usual_grid(Recipe())["optimisation.lr"]
    assert rates == pytest.approx([5e-7 / 3, 5e-7, 15e-7])


def test_trials_with_alarms_have_no_vote() -> None:
    truth = torch.arange(N) % K
    good, better = truth.clone(), truth.clone()
    good[:9] = (good[:9] + 1) % K
    better[:2] = (better[:2] + 1) % K
    trials = [
        Trial.from_predictions({"optimisation.lr": 1.0}, {10: sure(good), 20: sure(better)}),
        Trial.from_predictions({"optimisation.lr": 2.0}, {20: sure(truth)}),
        Trial({"optimisation.lr": 9.0}, {}, why_not="collapse"),
    ]
    ranking = choose_trial(trials)
    assert ranking.best in (0, 1) and ranking.step == 20 and (2, 20) not in ranking.agreement
    assert choose_trial(trials[2:]).best is None


def test_a_step_whose_weights_are_gone_votes_and_is_not_chosen() -> None:
    truth = torch.arange(N) % K
    trial = Trial.from_predictions({}, {10: sure(truth), 20: sure(truth)}, "", frozenset({10}))
    assert choose_trial([trial]).step == 10


def test_search_leaves_out_a_rate_that_is_too_large(digits_folder: Path, tmp_path: Path) -> None:
    data = Subset(images := Images.from_folder(digits_folder), range(0, len(images), 4))
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    truth = torch.tensor([DIGITS.index(name.split("/")[0]) for name in data.ids])
    before = (classifier.predict_proba(data).argmax(1) == truth).double().mean()
    tried: list[dict] = []
    found = classifier.search(
        data, {"optimisation.lr": [2e-2, 0.5]}, recipe=Recipe.load("demo").with_settings(steps=12, snapshots=2),
        on_trial=tried.append, output=Output(tmp_path / "run", report=False),
    )  # fmt: skip
    classifier = found.classifier
    assert found.settings == {"optimisation.lr": 2e-2} and found.trials[1].why_not and len(tried) == 2
    assert found.result.recipe.optimisation.lr == 2e-2, "the recipe is that of the trial"
    after = classifier.predict_proba(data)
    assert (after.argmax(1) == truth).double().mean() > before + 0.02
    assert torch.equal(Classifier.from_pretrained(tmp_path / "run").predict_proba(data), after)
    assert len(json.loads((tmp_path / "run" / "details/search.json").read_text())["trials"]) == 2
    assert "lr = 0.02" in (tmp_path / "run" / "details/recipe.toml").read_text()


def vectors() -> tuple[Vectors, Classifier]:
    features, prototypes = groups()
    return Vectors(features), Classifier.from_vectors(prototypes, list("abcdef"), temperature=0.05)


def test_a_search_over_one_setting_is_the_adaptation_itself() -> None:
    data, classifier = vectors()
    settings = {"steps": 20, "snapshots": 4, "optimisation.lr": 0.02}
    found = classifier.search(data, {"optimisation.lr": [0.02]}, settings=settings)
    classifier = found.classifier
    _, other = vectors()
    result = other.adapt(data, settings=settings)
    other = result.classifier
    if found.ranking.step == result.verdict.chosen:
        assert same(weights(classifier), weights(other))
    classifier = found.result.at("last")
    other = result.at("last")
    assert same(weights(classifier), weights(other))


def test_the_classifier_stands_where_the_search_says_with_its_correction(few_digits: Path) -> None:
    data, classifier = vectors()
    found = classifier.search(data, {"optimisation.lr": [1e-3, 3e-3]}, settings={"steps": 20, "snapshots": 4})
    classifier = found.classifier
    said = classifier.predict_proba(data)
    classifier = found.result.at("advised")
    assert classifier.postprocessor is not None and torch.equal(classifier.predict_proba(data), said)
    images = Classifier.from_pretrained(EMBEDDED, DIGITS)
    found = images.search(few_digits, {"optimisation.lr": [1e-2]}, recipe="demo-prompt", settings={"steps": 4})
    images = found.result.at("last")
    assert images.prompt is not None and "prompt.vectors" in dict(images.named_parameters())


def test_where_the_vote_ends_elsewhere_the_trial_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from pouf.training import search

    data, classifier = vectors()
    told: list[dict] = []
    grid = {"optimisation.lr": [0.01, 0.02]}
    monkeypatch.setattr(search, "choose_trial", _first_then_second(search.choose_trial))
    classifier.search(data, grid, settings={"steps": 6, "snapshots": 2}, on_trial=told.append)
    assert [each["optimisation.lr"] for each in told] == [0.01, 0.02, 0.01]


def _first_then_second(original):
    """The second looks best as long as there are two, and then the first is chosen after all."""
    calls: list[int] = []

    def choose(trials):
        calls.append(len(trials))
        return original(trials)._replace(best=0 if calls.count(2) == 2 else len(trials) - 1)

    return choose


def test_a_wrong_grid_is_said_before_anything_runs() -> None:
    data, classifier = vectors()
    told = Steps()
    with pytest.raises(InputError, match=r"optimisation.lrr: unknown setting"):
        classifier.search(data, {"optimisation.lrr": [1.0]}, callbacks=[told])
    with pytest.raises(InputError, match="at least one value"):
        classifier.search(data, {"optimisation.lr": []})
    with pytest.raises(InputError, match="needs checkpoints"):
        classifier.search(data, settings={"snapshots": 0})
    with pytest.raises(TypeError, match="unexpected keyword argument 'stps'"):
        classifier.search(data, stps=3)
    assert told.steps == []


def test_every_trial_that_diverges_is_an_error_and_some_are_not(tmp_path: Path, few_digits: Path) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    recipe = Recipe.load("demo").with_settings(steps=3, snapshots=1)
    with pytest.raises(InputError, match="every trial diverged"):
        classifier.search(few_digits, {"optimisation.lr": [1e30]}, recipe=recipe)
    found = classifier.search(few_digits, {"optimisation.lr": [1e30, 1e-3]}, recipe=recipe)
    assert "not a finite number" in found.trials[0].why_not and found.ranking.best == 1


def test_an_interrupted_search_keeps_the_trials_that_came_to_their_end(tmp_path: Path) -> None:
    data, classifier = vectors()

    class Interrupting(Steps):
        def on_step(self, step: object) -> None:
            super().on_step(step)
            if len(self.steps) == 9:  # in the second trial
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        classifier.search(
            data, {"optimisation.lr": [0.01, 0.02, 0.03]}, settings={"steps": 6, "snapshots": 2},
            callbacks=[Interrupting()], output=tmp_path / "run",
        )  # fmt: skip
    told = json.loads((tmp_path / "run" / "details/search.json").read_text())
    assert [trial["settings"]["optimisation.lr"] for trial in told["trials"]] == [0.01]
    assert Classifier.from_pretrained(tmp_path / "run").predict(data)
    assert json.loads((tmp_path / "run" / "details/run.json").read_text())["status"] == "interrupted"


def test_a_wrong_keyword_names_the_call_that_it_was_given_to() -> None:
    features, prototypes = groups()
    clf = Classifier.from_vectors(prototypes, list("abcdef"))
    for call in (clf.search, clf.adapt):
        with pytest.raises(TypeError, match=rf"{call.__name__}\(\) got an unexpected keyword argument 'steps'"):
            call(features, steps=5)
