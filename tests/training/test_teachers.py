"""A teacher pulls the student its way; a bad one raises an alarm, and zero-shot is used."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cli_runner import pouf
from helpers import REVIEWS, groups
from PIL import Image
from small_models import cross_encoder, masked_lm, sentence_encoder

from pouf import Callback, Classifier, InputError, Output, Vectors
from pouf.data.labels import Teacher
from pouf.postprocess import fit_correction
from pouf.postprocess.shares import predicted_shares
from pouf.training.teachers import corrected, load
from pouf.validation.diagnostics import share

NAMES = list("abcdef")
QUICK = {"steps": 40, "snapshots": 4}


def task(n: int = 240) -> tuple[torch.Tensor, torch.Tensor, Classifier]:
    features, prototypes = groups(n=n, spread=0.3, apart=0.3)
    return features, torch.arange(n) % 6, Classifier.from_vectors(prototypes, NAMES, temperature=0.1)


def answers(labels: torch.Tensor, sure: float = 0.9) -> torch.Tensor:
    return F.one_hot(labels, 6) * (sure - (1 - sure) / 5) + (1 - sure) / 5


def right(classifier: Classifier, features: torch.Tensor, labels: torch.Tensor) -> float:
    return share(classifier.predict_proba(features).argmax(1) == labels)


def test_a_good_teacher_takes_the_student_beyond_what_it_finds_alone() -> None:
    features, labels, clf = task()
    alone, taught = (clf.adapt(features, settings=QUICK, teacher=each) for each in (None, answers(labels)))
    assert right(taught.classifier, features, labels) > right(alone.classifier, features, labels) + 0.03
    found = taught.verdict.diagnostics
    assert found.teacher_inputs == 240 and found.teacher_adapted > found.teacher_zero_shot
    assert not [alarm.name for alarm in taught.verdict.alarms if "teacher" in alarm.name]
    assert f"{found.teacher_adapted:.0%}" in taught.verdict.message
    assert alone.verdict.diagnostics.teacher_inputs == 0


def test_a_few_answers_teach_all_inputs() -> None:
    features, labels, clf = task()
    few = answers(labels) * (torch.arange(240) % 5 == 0)[:, None]
    alone, taught = (clf.adapt(features, settings=QUICK, teacher=each) for each in (None, few))
    assert right(taught.classifier, features, labels) > right(alone.classifier, features, labels) + 0.02
    assert taught.verdict.diagnostics.teacher_inputs == 48


@pytest.mark.parametrize(
    ("kind", "alarm"),
    [
        ("noise", "teacher without pattern"),
        ("one class", "teacher of few classes"),
        ("swapped", "teacher swaps classes"),
    ],
)
def test_a_bad_teacher_raises_an_alarm_and_zero_shot_is_used(kind: str, alarm: str) -> None:
    features, labels, clf = task()
    draw = torch.Generator().manual_seed(1)
    wrong = {
        "noise": torch.randint(0, 6, (240,), generator=draw),
        "one class": torch.zeros(240, dtype=torch.long),
        "swapped": torch.tensor([1, 0, 2, 3, 4, 5])[labels],
    }[kind]
    result = clf.adapt(features, settings=QUICK, teacher=answers(wrong))
    assert alarm in [each.name for each in result.verdict.alarms] and result.verdict.advised == "zero-shot"


def test_a_teacher_who_knows_nothing_changes_nothing() -> None:
    features, _, clf = task()
    settings = QUICK | {"postprocess": "none", "min_class_usage": 0.0}
    alone, taught = (
        clf.adapt(features, settings=settings, teacher=each) for each in (None, torch.full((240, 6), 1 / 6))
    )
    assert torch.equal(alone.at("last").predict_proba(features), taught.at("last").predict_proba(features))


def test_a_correction_that_leads_away_from_the_teacher_is_left_out() -> None:
    features, labels, clf = task(600)
    skewed = torch.tensor([i for i in range(600) if i % 6 < 2 or i % 10 == 0 or i // 6 % 8 == 0])
    features, labels = features[skewed], labels[skewed]
    teacher = Teacher(answers(labels))
    last = clf.adapt(features, recipe="texts-fast", settings={"snapshots": 1}, teacher=teacher).at("last")
    found = right(last, features, labels)
    last.postprocessor = fit_correction("clusters", last, last.encode(last.data(features)))
    assert found > right(last, features, labels) + 0.02


def test_known_shares_correct_the_teacher_and_two_classes_keep_its_own() -> None:
    _, labels, _ = task()
    leaning = answers(labels, 0.5) * torch.tensor([3.0, 1, 1, 1, 1, 1])
    teacher = Teacher(leaning / leaning.sum(1, keepdim=True))
    prior = torch.tensor([0.3, 0.2, 0.2, 0.1, 0.1, 0.1])
    assert torch.allclose(corrected(teacher, prior).probabilities.mean(0), prior, atol=0.01)
    assert predicted_shares(corrected(teacher, None).probabilities).max() < 0.2
    two = Teacher(torch.tensor([[0.9, 0.1]] * 5))
    assert corrected(two, None) is two

    features, prototypes = groups(present=2, k=2, spread=0.8)
    shares = torch.tensor([[0.05, 0.95]]).repeat(120, 1)
    shares[:40] = torch.tensor([0.95, 0.05])
    clf = Classifier.from_vectors(prototypes, ["a", "b"], temperature=0.1)
    result = clf.adapt(features, recipe="texts-fast", settings={"steps": 5}, teacher=shares)
    assert predicted_shares(result.at("last").predict_proba(features))[0] == pytest.approx(1 / 3, abs=0.02)


def test_a_run_and_a_file_of_its_predictions_teach_the_same(tmp_path: Path) -> None:
    features, _, clf = task()
    reordered = Classifier.from_vectors(clf.prototypes().flip(0), NAMES[::-1], temperature=0.1)
    reordered.save_pretrained(tmp_path / "run")
    np.savez(tmp_path / "probs.npz", probabilities=clf.predict_proba(features).numpy())
    given = [reordered, tmp_path / "run", str(tmp_path / "probs.npz")]
    results = [clf.adapt(features, settings=QUICK, teacher=each).at("last").predict_proba(features) for each in given]
    assert all(torch.allclose(each, results[0], atol=1e-5) for each in results)


def test_a_run_is_not_resumed_with_other_answers(tmp_path: Path) -> None:
    features, labels, clf = task()

    class Stop(RuntimeError): ...

    class Ends(Callback):
        def on_step(self, step: object) -> None:
            if step.step == 20:
                raise Stop

    settings = QUICK | {"compute.save_every": 0.0}
    with pytest.raises(Stop):
        clf.adapt(
            features, settings=settings, teacher=answers(labels), callbacks=[Ends()], output=Output(tmp_path / "run")
        )
    with pytest.raises(InputError, match="the teacher"):
        clf.adapt(
            features, settings=settings, teacher=answers(labels, 0.8), output=Output(tmp_path / "run", resume=True)
        )
    resumed = clf.adapt(
        features, settings=settings, teacher=answers(labels), output=Output(tmp_path / "run", resume=True)
    )
    whole = clf.adapt(features, settings=settings, teacher=answers(labels))
    assert torch.equal(resumed.at("last").predict_proba(features), whole.at("last").predict_proba(features))


@pytest.mark.parametrize("labels", [["contradiction", "entailment"], ["score"]])
def test_a_cross_encoder_scores_texts_by_the_prompts(tmp_path: Path, labels: list[str]) -> None:
    student = Classifier.from_pretrained(
        sentence_encoder(tmp_path / "student"), {"good": ["good", "great"], "bad": "bad"}, ["It was {}."]
    )
    scorer = load(cross_encoder(tmp_path / "nli", labels), student)
    given = [["It was good.", "It was great."], ["It was bad."]]
    found = scorer.log_probabilities(REVIEWS, given)
    batch = scorer.tokenizer([REVIEWS[2]] * 3, [*given[0], *given[1]], return_tensors="pt", padding=True)
    scores = scorer.model(**batch).logits[:, labels.index(labels[-1])].detach()
    expected = torch.stack([scores[:2].mean(), scores[2]]).log_softmax(0)
    assert torch.allclose(found[2], expected, atol=1e-5)
    result = student.adapt(REVIEWS, settings={"steps": 2}, teacher=tmp_path / "nli")
    assert result.verdict.diagnostics.teacher_inputs == len(REVIEWS)
    with pytest.raises(InputError, match="expected one with a label for entailment"):
        load(cross_encoder(tmp_path / "topics", ["sports", "politics"]), student)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"teacher": torch.ones(3, 6) / 6}, "3 rows for 240 inputs"),
        ({"teacher": torch.ones(240, 5) / 5}, "5 columns of probabilities for 6 classes"),
        ({"teacher": torch.ones(240, 6) / 6, "method": "stata"}, "learns nothing from a teacher"),
        ({"settings": {"objective.teacher": 1.0}}, "weighs a teacher"),
    ],
)
def test_what_can_not_teach_is_refused(given: dict, words: str) -> None:
    features, _, clf = task()
    with pytest.raises(InputError, match=words):
        clf.adapt(Vectors(features.numpy()), **given)


@pytest.mark.parametrize("tune", ["prototypes", "prompt", "full"])
def test_images_and_texts_with_a_gap_are_taught_too(
    tune: str, tmp_path: Path, tiny: Classifier, pictures: list[Image.Image]
) -> None:
    teaching = {"steps": 6, "batch_size": 8, "snapshots": 1, "tuner.name": tune, "objective.teacher": 10.0}
    gap = Classifier.from_pretrained(
        masked_lm(tmp_path / "lm", "roberta"), {"bad": "terrible", "good": "great"}, ["{text} It was [MASK]."]
    )
    for clf, inputs in ((tiny, pictures), (gap, REVIEWS)):
        k = len(clf.classes)
        wanted = F.one_hot(torch.arange(len(inputs)) % k, k).float()
        history = clf.adapt(inputs, recipe="fast", settings=teaching, teacher=wanted).history
        assert history[-1].terms["teacher"] < history[0].terms["teacher"]


def test_the_command_line_learns_what_python_learns(tmp_path: Path) -> None:
    model = sentence_encoder(tmp_path / "model")
    (tmp_path / "texts.csv").write_text("text\n" + "".join(f"{text}\n" for text in REVIEWS))
    (tmp_path / "answers.csv").write_text("row,label,confidence\n0,good,0.9\n3,bad,0.8\n5,bad,\n")
    pouf(
        "adapt", "texts.csv", "--classes", "good,bad", "--model", model, "--teacher", "answers.csv", "--steps", 3,
        "--tune", "prototypes", "--no-report", "--out", "run", "--json", cwd=tmp_path,
    )  # fmt: skip
    clf = Classifier.from_pretrained(model, ["good", "bad"])
    result = clf.adapt(REVIEWS, teacher=tmp_path / "answers.csv", settings={"steps": 3, "tuner.name": "prototypes"})
    same = Classifier.from_pretrained(tmp_path / "run", use="last").predict_proba(REVIEWS)
    assert torch.equal(same, result.at("last").predict_proba(REVIEWS))
    plan = json.loads((tmp_path / "run" / "details/plan.json").read_text())
    assert plan["teacher"] == {"source": "answers.csv", "answers": 3}
