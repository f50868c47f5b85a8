"""Verdicts: a run that ended badly is not trusted, and one that was not judged says so."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import adapt, seen
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from pouf import EMBEDDED, Classifier, Diverged, Images, Output, Recipe, Verdict
from pouf.data.base import Subset
from pouf.demo import DIGITS
from pouf.models.load import embedded_folder
from pouf.postprocess.base import kappa
from pouf.runs.folder import Run
from pouf.training.search import choose_trial, judge_trial
from pouf.validation.checkpoints import Checkpoint, Checkpoints
from pouf.validation.review import ReviewResult, ShareEstimate
from pouf.validation.verdict import assess, failed_verdict, not_judged, nothing_to_judge

K, N = 4, 60
TRUTH = torch.arange(N) % K
START = torch.where(torch.arange(N) < 12, (TRUTH + 1) % K, TRUTH)
ZEROS = torch.zeros(N, dtype=torch.long)


class Past(Checkpoints):
    """Checkpoints of which only the predictions are known."""

    def __init__(self, *labels: torch.Tensor) -> None:
        self.predictions = {Checkpoint(10 * i): seen(each) for i, each in enumerate(labels)}
        self.postprocessors = dict.fromkeys(self.predictions)
        self.tuner, self.teacher, self.target_offsets, self.known_shares = object(), None, None, None
        self.without_bias = self.started_adapted = False
        self.sample = type("Sample", (), {"features": torch.eye(K)[TRUTH]})()


def test_a_run_that_ended_badly_is_not_trusted_however_good_it_was_before() -> None:
    good = assess(Past(START, TRUTH, TRUTH, TRUTH))
    assert good.advised == "last" and good.alarms == [] and good.trusted and good.level == "unverified"
    assert str(good) == (
        "Unverified: no warning signs, and no labels. Using step 30 of 30, picked without labels; whether it beats "
        "zero-shot, only labels can show: `pouf review`."
    )
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


def test_a_caution_is_said_and_does_not_fall_back() -> None:
    verdict = assess(Past(START, START, START))
    assert verdict.advised == "last" and not verdict.trusted and verdict.level == "caution" and verdict.alarms == []
    assert [caution.name for caution in verdict.cautions] == ["nothing changed"]
    assert str(verdict).startswith(
        "Caution: adaptation changed no prediction of the 60 inputs that were looked at. If you know"
    )
    assert "no warning signs" not in str(verdict) and "only labels can show" in str(verdict)


def test_a_second_opinion_that_fell_all_along_is_said() -> None:
    def ending(*clustering: float) -> Verdict:
        run = Past(START, *[TRUTH] * (len(clustering) - 1))
        choice = run.choose()
        pairs = zip(choice.snapshots, clustering, strict=True)
        return assess(run, choice._replace(snapshots=[snapshot._replace(clustering=c) for snapshot, c in pairs]))

    falling, rising, back = ending(0.8, 0.75, 0.7), ending(0.7, 0.75, 0.8), ending(0.8, 0.5, 0.7)
    assert [caution.name for caution in falling.cautions] == ["second opinion fell"] and falling.advised == "last"
    assert "fell all along the run, by 0.10" in str(falling)
    assert rising.trusted and back.trusted and ending(0.8, 0.799, 0.798).trusted, "nor is noise"


def test_what_labels_said_counts_for_more_than_what_was_guessed() -> None:
    def reviewed(verdict: Verdict, better: str | None) -> Verdict:
        found = ReviewResult(
            9, ShareEstimate(0.5, 0.4, 0.6), ShareEstimate(0.8, 0.7, 0.9), 8, 1, 0, better, "So it is."
        )
        return TypeAdapter(Verdict).validate_python(json.loads(json.dumps(replace(verdict, review=found).to_json())))

    good, bad, open_ = assess(Past(START, TRUTH, TRUTH)), assess(Past(START, ZEROS)), assess(Past(START, START))
    assert (
        reviewed(good, "adapted").level
        == reviewed(open_, "adapted").level
        == reviewed(bad, "zero-shot").level
        == "confirmed"
    )
    assert reviewed(good, "zero-shot").level == reviewed(bad, "adapted").level == "alarm", "it is not what is used"
    assert reviewed(open_, None).level == "caution" and reviewed(good, None).level == "unverified"
    assert str(reviewed(good, "adapted")) == (
        "Confirmed by labels. Using step 20 of 20, picked without labels. By 9 answers, "
        "zero-shot is right in 50.0 % (95 % confidence interval 40.0 to 60.0) and adapted is "
        "right in 80.0 % (95 % confidence interval 70.0 to 90.0). So it is."
    )


def test_a_trusted_run_tells_how_far_it_converged() -> None:
    nearly = TRUTH.clone()
    nearly[:4] = (nearly[:4] + 1) % K
    run = Past(START, nearly, nearly, TRUTH, TRUTH)
    verdict = assess(run)
    assert verdict.trusted and verdict.diagnostics.convergence == run.choose().convergence < 1


def test_a_verdict_survives_json() -> None:
    for verdict in (
        assess(Past(START, TRUTH, TRUTH)),
        assess(Past(START, ZEROS)),
        assess(Past(START, START)),
        not_judged(Recipe()),
    ):
        assert TypeAdapter(Verdict).validate_json(json.dumps(verdict.to_json(), allow_nan=False)) == verdict


@pytest.mark.parametrize(
    ("verdict", "words", "trusted", "advised"),
    [
        (failed_verdict(Diverged(3, "the loss", 1.0)), "Zero-shot is used instead", False, "zero-shot"),
        (failed_verdict(KeyboardInterrupt()), "not come to its end (interrupted)", False, "last"),
        (failed_verdict(OSError("disk full")), "not come to its end (failed)", False, "last"),
        (
            not_judged(Recipe()),
            "Not judged: the data are a stream, which can't be looked at again along the way. Using the last step",
            False,
            "last",
        ),
        (nothing_to_judge(), "Nothing was trained", True, "last"),
    ],
)
def test_a_run_without_a_choice_says_so(verdict: Verdict, words: str, trusted: bool, advised: str) -> None:
    assert words in str(verdict) and verdict.trusted == trusted and verdict.advised == advised


@pytest.fixture(scope="module")
def digits(digits_folder: Path) -> Images:
    return Images.from_folder(digits_folder)


def short(**settings: object) -> Recipe:
    return Recipe.load("demo").with_settings({"steps": 24, "snapshots": 3, **settings})


@pytest.mark.parametrize("recipe", [{"steps": 12}, {"steps": 0, "postprocess": "prior-correction"}], ids=str)
def test_a_model_whose_weights_are_zeros_is_not_advised(
    tmp_path: Path, few_digits: Path, recipe: dict[str, object]
) -> None:
    model = shutil.copytree(embedded_folder(), tmp_path / "model")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(zeros, model / "model.safetensors", {"format": "pt"})
    verdict = Classifier.from_pretrained(model, DIGITS).adapt(few_digits, settings=recipe).verdict
    assert verdict.advised == "zero-shot" and verdict.alarms[0].name == "constant features"
    assert "same direction" in verdict.message


def test_a_good_run_on_the_digits_is_trusted(digits: Images, tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    result = classifier.adapt(digits, recipe=short(), output=Output(tmp_path / "run", report=False))
    assert result.verdict.alarms == [] and result.verdict.advised in ("chosen", "last") and result.verdict.chosen > 0
    stored = Run(tmp_path / "run").verdict
    assert stored == result.verdict and len(stored.snapshots) == 4


def test_no_verdict_is_green_without_evidence(few_digits: Path) -> None:
    image = next(few_digits.rglob("*.png"))
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    verdict = classifier.adapt([image], recipe=short(steps=2, snapshots=2)).verdict
    assert {"few inputs", "few steps"} <= {caution.name for caution in verdict.cautions} and verdict.level == "caution"
    untrained = Classifier.from_pretrained(EMBEDDED, DIGITS)
    torch.manual_seed(0)
    untrained.backbone.model.load_state_dict(
        type(untrained.backbone.model)(untrained.backbone.model.config).state_dict()
    )
    verdict = untrained.adapt(few_digits, recipe=short(steps=2, snapshots=1)).verdict
    assert "uninformative" in {caution.name for caution in verdict.cautions} and verdict.level in ("alarm", "caution")


def test_classes_that_are_not_in_the_data_raise_an_alarm(digits: Images) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, tuple("klmnopqrst"))
    # One checkpoint leaves room for 250 perturbed inputs in what a run of 24 steps may spend on them.
    assert adapt(classifier, Subset(digits, range(0, len(digits), 4)), short(snapshots=1)).verdict.alarms


def test_a_folder_with_a_single_class_raises_an_alarm(digits: Images) -> None:
    sevens = [i for i, name in enumerate(digits.ids) if name.startswith("seven/")]
    assert adapt(Classifier.from_pretrained(EMBEDDED, DIGITS), Subset(digits, sevens), short()).verdict.alarms
