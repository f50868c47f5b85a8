"""Verdicts: a run that ended badly is not trusted, and one that was not judged says so."""

import json
from pathlib import Path

import pytest
import torch
from helpers import seen

from pouf import EMBEDDED, Classifier, Diverged, Images, Recipe, Verdict
from pouf.data.base import Subset
from pouf.demo import DIGITS
from pouf.runs.folder import Run
from pouf.training.adaptation import adapt
from pouf.training.search import choose_trial, judge_trial
from pouf.validation.checkpoints import Checkpoint, Checkpoints
from pouf.validation.diagnostics import kappa
from pouf.validation.verdict import assess, broken_off, not_judged

K, N = 4, 60
TRUTH = torch.arange(N) % K
START = torch.where(torch.arange(N) < 12, (TRUTH + 1) % K, TRUTH)
ZEROS = torch.zeros(N, dtype=torch.long)


class Past(Checkpoints):
    """Checkpoints of which only the predictions are known."""

    def __init__(self, *labels: torch.Tensor) -> None:
        self.predictions = {Checkpoint(10 * i): seen(each) for i, each in enumerate(labels)}
        self.states = dict.fromkeys(self.predictions)
        self.tuner = object()
        self.sample = type("Sample", (), {"features": torch.randn(N, 3)})()


def test_a_run_that_ended_badly_is_not_trusted_however_good_it_was_before() -> None:
    good = assess(Past(START, TRUTH, TRUTH, TRUTH))
    assert good.advised == "last" and good.alarms == [] and good.trusted
    bad = assess(Past(START, TRUTH, TRUTH, TRUTH, ZEROS))
    assert bad.chosen == 30 and bad.advised == "zero-shot" and "collapse" in {alarm.name for alarm in bad.alarms}
    assert "the run has collapsed (also: " in str(bad)
    assert str(bad).endswith("Zero-shot is used instead. Try a smaller learning rate.")
    collapsed = Past(START, TRUTH, TRUTH, TRUTH, ZEROS)
    trial = judge_trial({}, collapsed, collapsed.choose())
    assert trial.believable == {} and "collapse" in trial.why_not, "nor has it a vote among others"
    fine = Past(START, TRUTH, TRUTH)
    assert list(judge_trial({}, fine, fine.choose()).believable) == [10, 20]


def test_a_run_that_does_not_converge_is_not_trusted() -> None:
    """Each step is near zero-shot; it is the way from one to the next that tells."""
    start, early, late = TRUTH.clone(), TRUTH.clone(), TRUTH.clone()
    early[:12], late[-12:] = (early[:12] + 1) % K, (late[-12:] + 1) % K
    steady, restless = Past(start, early, early, early), Past(start, early, early, late)
    assert steady.choose().convergence == 1 and assess(steady).alarms == []
    assert restless.choose().convergence == kappa(early, late) < 0.7
    verdict = assess(restless)
    assert [alarm.name for alarm in verdict.alarms] == ["not converged"] and verdict.advised == "zero-shot"
    trial = judge_trial({}, restless, restless.choose())
    assert trial.why_not == "not converged" and list(trial.believable) == [10, 20, 30], "it may vote, and is not chosen"
    settled = judge_trial({}, steady, steady.choose())
    assert choose_trial([trial, trial, settled]).best == 2 and choose_trial([trial]).best is None
    assert assess(Past(start, late, early, early, early, early)).alarms == [], "in its first third a run may jump"


def test_a_trusted_run_tells_how_far_it_converged() -> None:
    nearly = TRUTH.clone()
    nearly[:4] = (nearly[:4] + 1) % K
    run = Past(START, nearly, nearly, TRUTH, TRUTH)
    verdict = assess(run)
    assert verdict.trusted and verdict.diagnostics.convergence == run.choose().convergence < 1


def test_a_verdict_survives_json() -> None:
    for verdict in (assess(Past(START, TRUTH, TRUTH)), assess(Past(START, ZEROS)), not_judged(True)):
        assert Verdict.from_json(json.loads(json.dumps(verdict.to_json(), allow_nan=False))) == verdict


@pytest.mark.parametrize(
    ("verdict", "words", "trusted", "advised"),
    [
        (broken_off(Diverged(3, "the loss", 1.0)), "Zero-shot is used instead", False, "zero-shot"),
        (broken_off(KeyboardInterrupt()), "not come to its end (interrupted)", False, "last"),
        (broken_off(OSError("disk full")), "not come to its end (failed)", False, "last"),
        (not_judged(True), "Not judged", False, "last"),
        (not_judged(False), "Nothing was trained", True, "last"),
    ],
)
def test_a_run_without_a_choice_says_so(verdict: Verdict, words: str, trusted: bool, advised: str) -> None:
    assert words in str(verdict) and verdict.trusted == trusted and verdict.advised == advised


@pytest.fixture(scope="module")
def digits(digits_folder: Path) -> Images:
    return Images.from_folder(digits_folder)


def short(**settings: object) -> Recipe:
    return Recipe.load("demo").with_settings({"steps": 24, "snapshots": 3, **settings})


def test_a_good_run_on_the_digits_is_trusted(digits: Images, tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    result = classifier.adapt(digits, recipe=short(), output_dir=tmp_path / "run", report=False)
    assert result.verdict.alarms == [] and result.verdict.advised in ("chosen", "last") and result.verdict.chosen > 0
    stored = Run(tmp_path / "run").verdict
    assert stored == result.verdict and len(stored.snapshots) == 4


def test_classes_that_are_not_in_the_data_raise_an_alarm(digits: Images) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, tuple("klmnopqrst"))
    assert adapt(classifier, Subset(digits, range(0, len(digits), 4)), short()).verdict.alarms


def test_a_folder_with_a_single_class_raises_an_alarm(digits: Images) -> None:
    sevens = [i for i, name in enumerate(digits.ids) if name.startswith("seven/")]
    assert adapt(Classifier.from_pretrained(EMBEDDED, DIGITS), Subset(digits, sevens), short()).verdict.alarms
