"""A step is chosen without labels: by agreement with the others, and never where an alarm speaks against it."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pouf import EMBEDDED, Classifier, Images, Recipe, adapt
from pouf.data.base import Subset
from pouf.data.vectors import Vectors
from pouf.demo import DIGITS
from pouf.runs.folder import adapt_run, advised_use, assess, load_run, read_choice, read_verdict
from pouf.training.search import Trial, choose_trial, grid, judge_trial, tune
from pouf.training.trainer import Adaptation
from pouf.validation.diagnostics import SnapshotPredictions, alarms, diagnose, kappa, perturbation
from pouf.validation.selectors import (
    Snapshots,
    choose,
    cluster,
    cluster_agreement,
    snapshot_steps,
    soft_neighbourhood_density,
)

K, N = 4, 60


def sure(labels: torch.Tensor, k: int = K) -> torch.Tensor:
    return F.one_hot(labels, k).float() * 0.9 + 0.1 / k


def seen(labels: torch.Tensor, perturbed: torch.Tensor | None = None) -> SnapshotPredictions:
    return SnapshotPredictions(sure(labels), sure(labels if perturbed is None else perturbed), torch.ones(len(labels)))


def test_the_step_that_agrees_with_the_others_is_chosen() -> None:
    truth = torch.arange(N) % K
    noisy = {step: truth.clone() for step in (0, 10, 20, 30)}
    for step, wrong in ((0, 24), (10, 9), (20, 3), (30, 12)):
        places = torch.randperm(N, generator=torch.Generator().manual_seed(step))[:wrong]
        noisy[step][places] = (noisy[step][places] + 1) % K
    features = F.one_hot(truth, K).float() + 0.01 * torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    choice = choose({step: sure(labels) for step, labels in noisy.items()}, features)
    assert choice.step == 20
    assert choice.chosen.agreement == max(s.agreement for s in choice.snapshots)
    by_clusters = max(choice.snapshots, key=lambda snapshot: snapshot.clustering)
    assert by_clusters.step == 20, "the second opinion sees it too"


def test_beginnings_have_no_vote() -> None:
    """A run that gets better all along: each step keeps what is right and mends some of the rest."""
    truth = torch.arange(N) % K
    steps = {step: truth.clone() for step in range(0, 110, 10)}
    for step, labels in steps.items():
        wrong = (100 - step) // 3
        labels[:wrong] = (labels[:wrong] + 1) % K
    choice = choose({step: sure(labels) for step, labels in steps.items()}, torch.randn(N, 3))
    assert choice.step >= 70


def ran(*labels: torch.Tensor) -> Snapshots:
    return Snapshots({}, torch.randn(N, 3), seen={10 * i: seen(each) for i, each in enumerate(labels)})


def test_a_run_that_ended_badly_is_not_trusted_however_good_it_was_before() -> None:
    truth = torch.arange(N) % K
    start = torch.where(torch.arange(N) < 12, (truth + 1) % K, truth)
    good = assess(ran(start, truth, truth, truth))
    assert good.use == "last" and good.alarms == []
    bad = assess(ran(start, truth, truth, truth, torch.zeros(N, dtype=torch.long)))
    assert bad.chosen == 30 and bad.use == "zero-shot" and "collapse" in {alarm.name for alarm in bad.alarms}
    assert "the run has collapsed (also: " in bad.words()
    assert bad.words().endswith("(--use chosen overrides). Try a smaller learning rate.")
    collapsed = ran(start, truth, truth, truth, torch.zeros(N, dtype=torch.long))
    trial = judge_trial({}, collapsed, collapsed.choose())
    assert trial.believable == {} and "collapse" in trial.why_not, "nor has it a vote among others"
    fine = ran(start, truth, truth)
    assert list(judge_trial({}, fine, fine.choose()).believable) == [10, 20]


def test_a_run_that_does_not_settle_is_not_trusted() -> None:
    """Each step is near zero-shot; it is the way from one to the next that tells."""
    truth = torch.arange(N) % K
    start, early, late = truth.clone(), truth.clone(), truth.clone()
    early[:12], late[-12:] = (early[:12] + 1) % K, (late[-12:] + 1) % K
    steady, restless = ran(start, early, early, early), ran(start, early, early, late)
    assert assess(steady).choice.settled == 1 and assess(steady).alarms == []
    assert assess(restless).choice.settled == kappa(early, late) < 0.7
    assert [alarm.name for alarm in assess(restless).alarms] == ["restless"] and assess(restless).use == "zero-shot"
    trial = judge_trial({}, restless, restless.choose())
    assert trial.why_not == "restless" and list(trial.believable) == [10, 20, 30], "it may vote, and is not chosen"
    settled = judge_trial({}, steady, steady.choose())
    assert choose_trial([trial, trial, settled]).best == 2 and choose_trial([trial]).best is None
    assert assess(ran(start, late, early, early, early, early)).alarms == [], "in its first third a run may jump"


def test_of_equals_the_latest_is_chosen() -> None:
    same = sure(torch.arange(N) % K)
    assert choose({0: same, 5: same, 10: same}, torch.randn(N, 3)).step == 10


def test_snapshots_are_spread_over_the_run() -> None:
    assert snapshot_steps(100, 4) == [0, 25, 50, 75, 100]
    assert snapshot_steps(3, 10) == [0, 1, 2, 3]
    assert snapshot_steps(100, 0) == []


def test_dense_predictions_have_dense_neighbourhoods() -> None:
    labels = torch.arange(N) % K
    # 15 of each class: the 14 others are equally near, and no one else is.
    assert soft_neighbourhood_density(sure(labels)) == pytest.approx(math.log(14), abs=0.01)
    assert soft_neighbourhood_density(torch.full((N, K), 1 / K)) == pytest.approx(math.log(N - 1), abs=0.01)
    assert soft_neighbourhood_density(sure(labels[:1])) == 0


def test_clusters_know_no_names() -> None:
    labels = torch.arange(N) % K
    clusters = cluster(F.one_hot(labels, K).float(), K)
    assert cluster_agreement((labels + 1) % K, clusters) == pytest.approx(1.0)
    assert abs(cluster_agreement(labels[torch.randperm(N, generator=torch.Generator().manual_seed(0))], clusters)) < 0.2


def seen_of(labels: torch.Tensor, k: int) -> SnapshotPredictions:
    return SnapshotPredictions(sure(labels, k), sure(labels, k), torch.ones(len(labels)))


def names_of(before: SnapshotPredictions, after: SnapshotPredictions) -> set[str]:
    return {alarm.name for alarm in alarms(diagnose(before, after))}


def test_a_good_run_raises_no_alarm_and_bad_ones_do() -> None:
    truth = torch.arange(N) % K
    start = truth.clone()
    start[:12] = (start[:12] + 1) % K
    assert names_of(seen(start), seen(truth)) == set()
    assert "collapse" in names_of(seen(start), seen(torch.zeros(N, dtype=torch.long)))
    lost = SnapshotPredictions(torch.full((N, K), 1 / K), torch.full((N, K), 1 / K), torch.ones(N))
    assert "undecided" in names_of(seen(start), lost)
    assert "estranged" in names_of(seen(start), seen((start + 1) % K))
    assert "shifted" in names_of(seen(torch.zeros(N, dtype=torch.long)), seen(truth))
    assert "unchosen" in names_of(seen(start), seen(start % 2))
    assert "unsteady" in names_of(seen(start, (start + torch.arange(N) % 2) % K), seen(truth))
    assert "overconfident" in names_of(seen(start), seen(truth, (truth + torch.arange(N) % 2) % K))


def test_agreement_counts_beyond_chance_only() -> None:
    """With six classes a good run can leave zero-shot on half of the inputs; with two classes that is chance."""
    start, half = torch.arange(600) % 6, torch.arange(600) < 300
    moved = torch.where(half, start, (start + 1 + torch.arange(600) // 6 % 5) % 6)
    diagnostics = diagnose(seen_of(start, 6), seen_of(moved, 6))
    assert diagnostics.agreement == 0.5 and diagnostics.chance == pytest.approx(1 / 6, abs=0.01)
    assert diagnostics.kappa == pytest.approx(0.4, abs=0.01) and "estranged" not in {
        alarm.name for alarm in alarms(diagnostics)
    }
    two = torch.arange(600) % 2
    diagnostics = diagnose(seen_of(two, 2), seen_of(torch.where(torch.arange(600) % 4 < 2, two, 1 - two), 2))
    assert (
        diagnostics.agreement == 0.5
        and diagnostics.kappa == pytest.approx(0)
        and "estranged" in {a.name for a in alarms(diagnostics)}
    )


def test_alarms_say_what_was_seen_and_what_to_do() -> None:
    diagnostics = diagnose(seen(torch.arange(N) % K), seen(torch.zeros(N, dtype=torch.long)))
    (alarm,) = [alarm for alarm in alarms(diagnostics) if alarm.name == "collapse"]
    assert "of 4 classes, zero-shot used 4.0" in alarm.words and "smaller learning rate" in alarm.advice


def test_disturbances_are_small_and_the_same_for_the_same_seed(pictures) -> None:
    image = perturbation("image").apply
    assert image(pictures[0], 1).size == pictures[0].size
    assert image(pictures[0], 1).tobytes() == image(pictures[0], 1).tobytes() != pictures[0].tobytes()
    text = perturbation("text").apply
    words = " ".join(f"w{i}" for i in range(200))
    kept = text(words, 3).split()
    assert 150 < len(kept) < 200 and text("word", 5) == "word" and text(words, 3) == text(words, 3)
    assert text(("a b", "c d"), 0) == text(("a b", "c d"), 0)


@pytest.fixture(scope="module")
def digits(digits_folder: Path) -> Images:
    return Images.from_folder(digits_folder)


def short(**settings: object) -> Recipe:
    return Recipe.load("demo").with_settings(**{"steps": 24, "snapshots": 3, **settings})


def run(data, recipe: Recipe, classes=DIGITS) -> Adaptation:
    return adapt(Classifier.from_pretrained(EMBEDDED, classes), data, recipe, on_start=lambda message: None)


def test_a_good_run_on_the_digits_is_trusted(digits: Images, tmp_path: Path) -> None:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    result = adapt_run(classifier, digits, short(), tmp_path / "run", on_start=lambda message: None)
    trust = assess(result.snapshots, result.choice)
    assert trust.alarms == [] and trust.use in ("chosen", "last") and trust.chosen > 0
    stored = read_choice(tmp_path / "run")
    assert stored["use"] == trust.use and len(stored["snapshots"]) == 4
    few = Subset(digits, range(0, len(digits), 40))
    last, advised = (load_run(tmp_path / "run", use).infer(few).log_probabilities for use in ("last", "auto"))
    assert torch.allclose(last, classifier.infer(few).log_probabilities, atol=1e-4), "the run ends at its last step"
    result.snapshots.restore(trust.chosen)
    assert torch.allclose(advised, classifier.infer(few).log_probabilities, atol=1e-4)


def test_a_learning_rate_that_destroys_the_model_falls_back_to_zero_shot(digits: Images, tmp_path: Path) -> None:
    data = Subset(digits, range(0, len(digits), 6))
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    recipe = short(**{"optimisation.lr": 0.5})
    result = adapt_run(classifier, data, recipe, tmp_path / "run", on_start=lambda message: None)
    trust = assess(result.snapshots, result.choice)
    assert trust.use == "zero-shot" and trust.alarms and "Do not trust" in trust.words()
    zero_shot = Classifier.from_pretrained(EMBEDDED, DIGITS).infer(data).log_probabilities
    assert torch.allclose(load_run(tmp_path / "run").infer(data).log_probabilities, zero_shot, atol=1e-5)
    assert not torch.allclose(load_run(tmp_path / "run", "last").infer(data).log_probabilities, zero_shot, atol=1e-2)


def test_classes_that_are_not_in_the_data_raise_an_alarm(digits: Images) -> None:
    data = Subset(digits, range(0, len(digits), 4))
    assert assess(run(data, short(), tuple("klmnopqrst")).snapshots).alarms


def test_a_folder_with_a_single_class_raises_an_alarm(digits: Images) -> None:
    sevens = [i for i, name in enumerate(digits.ids) if name.startswith("seven/")]
    assert assess(run(Subset(digits, sevens), short()).snapshots).alarms


def test_the_chosen_step_has_an_adjustment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Snapshots.choose
    monkeypatch.setattr(Snapshots, "choose", lambda self: original(self)._replace(step=10))
    draw = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(6, 16, generator=draw), dim=1)
    features = centres[torch.arange(120) % 6] + 0.2 * torch.randn(120, 16, generator=draw)
    prototypes = centres + 0.3 * torch.randn(6, 16, generator=draw)
    classifier = Classifier.from_vectors(prototypes, list("abcdef"), temperature=0.05)
    recipe = Recipe.load("features").with_settings(steps=40, snapshots=4, **{"optimisation.lr": 0.05})
    result = adapt_run(classifier, Vectors(features), recipe, tmp_path / "run", on_start=lambda message: None)
    assert result.choice.step == 10 and assess(result.snapshots, result.choice).use == "chosen"
    last, chosen = (load_run(tmp_path / "run", use) for use in ("last", "chosen"))
    assert not torch.equal(last.postprocessor.bias, chosen.postprocessor.bias)
    fitted = chosen.postprocessor.bias.clone()
    chosen.postprocessor = None
    chosen.adjust("refinement", chosen.encode(Vectors(features)))
    assert torch.allclose(chosen.postprocessor.bias, fitted, atol=1e-5)


def vectors_of(present: int, k: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of the first classes only, and prototypes of all k."""
    draw = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(k, 32, generator=draw), dim=1)
    features = centres[torch.arange(300) % present] + 0.15 * torch.randn(300, 32, generator=draw)
    return features, centres + 0.05 * torch.randn(k, 32, generator=draw)


@pytest.mark.parametrize(("present", "use"), [(30, "last"), (3, "zero-shot")])
def test_an_adjustment_without_training_is_judged_too(tmp_path: Path, present: int, use: str) -> None:
    """Sinkhorn gives each class its share, whether it is in the data or not."""
    features, prototypes = vectors_of(present)
    classifier = Classifier.from_vectors(prototypes, [f"c{i}" for i in range(30)], temperature=0.05)
    recipe = Recipe.load("features").with_settings(steps=0, adjust="sinkhorn")
    adapt_run(classifier, Vectors(features), recipe, tmp_path / "run", on_start=lambda message: None)
    choice, (verdict, trusted) = read_choice(tmp_path / "run"), read_verdict(tmp_path / "run")
    assert choice["use"] == use and trusted == (use == "last")
    assert ("Nothing was trained" in verdict) == (use == "last")
    assert (load_run(tmp_path / "run").postprocessor is None) == (use == "zero-shot")


def test_going_back_to_the_chosen_step_takes_its_adjustment_along() -> None:
    features, prototypes = vectors_of(30)
    classifier = Classifier.from_vectors(prototypes, [f"c{i}" for i in range(30)], temperature=0.05)
    recipe = Recipe.load("features").with_settings(steps=20, snapshots=4, **{"optimisation.lr": 0.05})
    result = adapt(classifier, Vectors(features), recipe, on_start=lambda message: None)

    def surest(probabilities: torch.Tensor) -> torch.Tensor:
        return probabilities.max(1).values.sort().values  # a sample is in an order of its own

    adjusted = classifier.infer(Vectors(features)).log_probabilities.exp()
    assert torch.allclose(surest(result.snapshots.seen[20].probabilities), surest(adjusted), atol=1e-4), "as it is used"
    result = result._replace(choice=result.choice._replace(step=10), chosen_adjustment=None)
    result.use_chosen()
    plain = classifier.infer(Vectors(features)).log_probabilities.exp()
    assert torch.allclose(surest(result.snapshots.seen[10].probabilities), surest(plain), atol=1e-4)
    assert not torch.allclose(surest(plain), surest(adjusted), atol=1e-3)


@pytest.mark.parametrize(
    ("manifest", "words", "trusted", "use"),
    [
        ({"status": "diverged", "error": "the loss is not finite"}, "Zero-shot is used instead", False, "zero-shot"),
        ({"status": "interrupted"}, "not come to its end (interrupted)", False, "last"),
        ({"status": "finished", "trainable": 7}, "Not judged", False, "last"),
        ({"status": "finished", "trainable": 0}, "Nothing was trained", True, "last"),
        ({}, "Nothing was trained", True, "last"),
    ],
)
def test_a_run_without_a_choice_says_so(tmp_path: Path, manifest: dict, words: str, trusted: bool, use: str) -> None:
    (tmp_path / "run.json").write_text(json.dumps(manifest))
    verdict, good = read_verdict(tmp_path)
    assert words in verdict and good == trusted and advised_use(tmp_path) == use


def test_a_single_input_gives_numbers() -> None:
    choice = choose({0: sure(torch.tensor([1])), 5: sure(torch.tensor([2]))}, torch.randn(1, 3))
    json.loads(json.dumps([snapshot._asdict() for snapshot in choice.snapshots], allow_nan=False))


def test_vectors_are_disturbed_each_in_its_own_direction() -> None:
    data = Vectors(torch.ones(5, 8))
    classifier = Classifier.from_vectors(torch.randn(3, 8), list("abc"))
    moved = classifier.encode(data, change=perturbation("vector")).features - 1
    assert moved.norm(dim=1).min() > 0.1
    assert F.cosine_similarity(moved[:1], moved[1:]).abs().max() < 0.99


def test_without_snapshots_there_is_no_choice(digits: Images) -> None:
    result = run(Subset(digits, range(40)), short(steps=2, snapshots=0))
    assert result.choice is None and result.snapshots is None


def test_trials_with_alarms_have_no_vote() -> None:
    truth = torch.arange(N) % K
    good, better = truth.clone(), truth.clone()
    good[:9] = (good[:9] + 1) % K
    better[:2] = (better[:2] + 1) % K
    trials = [
        Trial({"optimisation.lr": 1.0}, {10: sure(good), 20: sure(better)}),
        Trial({"optimisation.lr": 2.0}, {20: sure(truth)}),
        Trial({"optimisation.lr": 9.0}, {}, "collapse"),
    ]
    tuning = choose_trial(trials)
    assert tuning.best in (0, 1) and tuning.step == 20 and (2, 20) not in tuning.agreement
    assert choose_trial(trials[2:]).best is None
    assert json.dumps(tuning.to_json())


def test_tune_leaves_out_a_rate_that_is_too_large(digits: Images) -> None:
    data = Subset(digits, range(0, len(digits), 4))
    settings = grid(**{"optimisation.lr": [2e-2, 0.5]})
    tuning, classifier = tune(
        lambda: Classifier.from_pretrained(EMBEDDED, DIGITS), data, short(steps=12, snapshots=2), settings
    )
    assert tuning.best == 0 and tuning.trials[1].why_not
    truth = [DIGITS.index(name.split("/")[0]) for name in data.ids]
    tuned, before = (
        (each.infer(data).log_probabilities.argmax(1) == torch.tensor(truth)).double().mean()
        for each in (classifier, Classifier.from_pretrained(EMBEDDED, DIGITS))
    )
    assert tuned > before + 0.02
