"""Labels worth asking for: unbiased estimates from few answers, and advice only where they tell."""

import csv
import json
import random
from pathlib import Path

import pytest

from pouf import EMBEDDED, Classifier, Images, InputError, Output, Recipe
from pouf.demo import DIGITS
from pouf.reporting.html import read_review, write_review
from pouf.runs.folder import REVIEW
from pouf.validation.review import (
    AGREE,
    DISAGREE,
    NO_CLASS,
    UNSURE,
    Review,
    ReviewQuestion,
    ReviewResult,
    read_answers,
    sample_questions,
    score_answers,
)


@pytest.fixture(scope="module")
def run(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("review") / "run"
    recipe = Recipe.load("demo").with_settings(steps=10, snapshots=1)
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    classifier.adapt(few_digits, recipe=recipe, output=Output(folder, report=False))
    return folder


def write_questions(run: Path, data: Images, n: int, seed: int = 0) -> tuple[Path, Path]:
    """As `pouf review` does."""
    zero_shot, adapted = (Classifier.from_pretrained(run, use=use) for use in ("zero-shot", "last"))
    return write_review(run, *sample_questions(zero_shot, adapted, data, n, seed=seed), adapted.classes)


def test_many_questions_are_where_the_models_differ(run: Path, few_digits: Path) -> None:
    table, page = write_questions(run, Images.from_folder(few_digits), 20)
    plan = json.loads((run / REVIEW).read_text())
    assert sum(read_review(run).sizes.values()) == 150 and len(plan["questions"]) == 20
    differ = [q for q in plan["questions"] if q["stratum"] == DISAGREE]
    assert len(differ) == min(read_review(run).sizes[DISAGREE], 10)
    assert all((q["zero_shot"] != q["adapted"]) == (q["stratum"] == DISAGREE) for q in plan["questions"])
    with table.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["id"] for row in rows] == [q["id"] for q in plan["questions"]] and {row["label"] for row in rows} == {
        ""
    }
    assert "data:image/" in page.read_text()


def test_more_questions_are_the_same_and_more_and_no_label_is_lost(run: Path, few_digits: Path) -> None:
    data = Images.from_folder(few_digits)
    table, _ = write_questions(run, data, 12)
    with table.open() as stream:
        first = [row["id"] for row in csv.DictReader(stream)]
    table.write_text("id,text,label\n" + "".join(f"{name},,two\n" for name in first[:5]))
    write_questions(run, data, 24)
    with table.open() as stream:
        rows = {row["id"]: row["label"] for row in csv.DictReader(stream)}
    assert set(first) < set(rows) and [rows[name] for name in first[:5]] == ["two"] * 5
    assert sum(label != "" for label in rows.values()) == 5
    write_questions(run, data, 4, seed=7)
    questions = {question.id for question in read_review(run).questions}
    assert read_answers(table, DIGITS) == dict.fromkeys(first[:5], "two"), "fewer, and others: no answer is dropped"
    assert score_answers(read_review(run), read_answers(table, DIGITS), DIGITS).answered == 5 and len(questions) <= 9
    table.unlink()
    (run / REVIEW).unlink()


def test_unsure_questions_teach_and_do_not_count_and_nothing_is_asked_twice(run: Path, few_digits: Path) -> None:
    data = Images.from_folder(few_digits)
    zero_shot, adapted = (Classifier.from_pretrained(run, use=use) for use in ("zero-shot", "last"))
    first, _ = sample_questions(zero_shot, adapted, data, 6, unsure=5)
    likeliest = adapted.predict_proba(data).topk(2, dim=1).values
    margins = dict(zip(data.ids, (likeliest[:, 0] - likeliest[:, 1]).tolist(), strict=True))
    unsure = {each.id for each in first.questions if each.stratum == UNSURE}
    drawn = {each.id for each in first.questions} - unsure
    assert len(unsure) == 5 and len(drawn) == 6
    assert max(margins[name] for name in unsure) <= min(margins[name] for name in margins.keys() - unsure - drawn)
    right = dict.fromkeys(drawn, "two")
    alike = [score_answers(first, right | dict.fromkeys(unsure, name), DIGITS) for name in ("one", "two")]
    assert alike[0] == alike[1] == score_answers(first, right, DIGITS) and alike[0].answered == 6
    again, _ = sample_questions(zero_shot, adapted, data, 6, unsure=5, answered=unsure | drawn)
    assert not (unsure | drawn) & {each.id for each in again.questions} and sum(again.sizes.values()) == 150 - 11


def test_all_answers_give_the_accuracy_itself(run: Path, few_digits: Path) -> None:
    data = Images.from_folder(few_digits)
    write_questions(run, data, 1000)
    answers = {name: name.split("/")[0] for name in data.ids}
    verdict = score_answers(read_review(run), answers, DIGITS)
    adapted = Classifier.from_pretrained(run, use="last").predict(few_digits)
    expected = sum(predicted == name.split("/")[0] for predicted, name in zip(adapted, data.ids, strict=True)) / len(
        data
    )
    assert verdict.adapted.value == pytest.approx(expected)
    assert verdict.adapted.low == pytest.approx(expected) == verdict.adapted.high


def test_estimates_are_right_on_average_and_intervals_hold_them() -> None:
    """1,000 inputs: 200 where they differ (adapted right in 60 %), 800 where they agree (right in 90 %)."""
    draw = random.Random(0)
    truth = 0.2 * 0.6 + 0.8 * 0.9
    values, covered = [], 0
    for _ in range(200):
        questions, answers = [], {}
        for i in range(50):
            differ = i < 33
            right = draw.random() < (0.6 if differ else 0.9)
            other = "b" if differ else "a"
            stratum = DISAGREE if differ else AGREE
            questions.append(ReviewQuestion(str(i), stratum, other, "a"))
            answers[str(i)] = "a" if right else "c"
        estimate = score_answers(Review({DISAGREE: {"a": 200}, AGREE: {"a": 800}}, questions), answers, "abc").adapted
        values.append(estimate.value)
        covered += estimate.low <= truth <= estimate.high
    assert sum(values) / len(values) == pytest.approx(truth, abs=0.01)
    assert covered / 200 > 0.9


def advice(adapted: int, zero_shot: int) -> str:
    n = adapted + zero_shot
    questions = [ReviewQuestion(str(i), DISAGREE, "b", "a") for i in range(n)]
    answers = {str(i): "a" if i < adapted else "b" for i in range(n)}
    return score_answers(Review({DISAGREE: {"a": 100}, AGREE: {}}, questions), answers, "ab").advice


def test_advice_is_given_where_the_answers_tell() -> None:
    assert advice(18, 2).startswith(
        "Use the adapted model: it is right 18 to 2 where they differ (sign test, p = 0.0004"
    )
    assert advice(2, 18).startswith("Use zero-shot")
    assert "may be chance" in advice(6, 4) and "equal where they differ" in advice(5, 5)


def test_none_of_these_is_wrong_for_both() -> None:
    questions = [ReviewQuestion(str(i), AGREE, "a", "a") for i in range(10)]
    answers = {str(i): "a" if i < 7 else NO_CLASS for i in range(10)}
    result = score_answers(Review({DISAGREE: {}, AGREE: {"a": 10}}, questions), answers, "ab")
    assert result.none_of_these == 3 and result.adapted.value == result.zero_shot.value == pytest.approx(0.7)
    assert "Answered 'none of these': 3." in str(result)


def reviewed(predicted_b: float, true_b: float, right: float, answers: int, draw: random.Random) -> ReviewResult:
    """1,000 inputs of a or b on which both models agree, of which some are asked about.

    Args:
        predicted_b: share of the inputs that b is predicted for.
        true_b: share of the inputs that are b; right of these are predicted to be.
    """
    truth = ["b" if i < 1000 * true_b else "a" for i in range(1000)]
    found = round(1000 * true_b * right)
    false = round(1000 * predicted_b) - found
    predicted = ["b" if i < found or 0 <= i - truth.count("b") < false else "a" for i in range(1000)]
    chosen = draw.sample(range(1000), answers)
    questions = [ReviewQuestion(str(i), AGREE, predicted[i], predicted[i]) for i in chosen]
    counts = {DISAGREE: {}, AGREE: {"a": predicted.count("a"), "b": predicted.count("b")}}
    return score_answers(Review(counts, questions), {str(i): truth[i] for i in chosen}, ["a", "b"])


def test_answers_tell_that_predicted_shares_are_wrong() -> None:
    """47 % are said to be b, 68 % are, as with tweets: 50 answers see it and give the shares to adapt with."""
    results = [reviewed(0.47, 0.68, 0.66, 50, random.Random(seed)) for seed in range(100)]
    priors = [result.prior for result in results if result.prior is not None]
    assert len(priors) > 90
    assert sum(prior[1] for prior in priors) / len(priors) == pytest.approx(0.68, abs=0.02)
    assert all(sum(prior) == pytest.approx(1) for prior in priors)
    advice = next(result.advice for result in results if result.prior == priors[0])
    assert f"By the answers {100 * priors[0][0]:.0f} % of the inputs are a (" in advice
    assert "53 % are predicted to be" in advice
    assert advice.endswith(f"adapt again with the prior {priors[0][0]:g},{priors[0][1]:g}.")


def test_right_shares_are_left_alone() -> None:
    priors = [reviewed(0.3, 0.3, 0.7, 50, random.Random(seed)).prior for seed in range(200)]
    assert sum(prior is not None for prior in priors) < 16  # 5 % of them by chance


def test_shares_of_many_classes_are_not_told_by_few_answers() -> None:
    names = [str(i) for i in range(11)]
    questions = [ReviewQuestion(str(i), AGREE, "0", "0") for i in range(50)]
    review = Review({DISAGREE: {}, AGREE: {"0": 1000}}, questions)
    answers = {str(i): "1" for i in range(50)}
    assert (
        score_answers(review, answers, names).prior is None
        and score_answers(review, answers, names[:10]).prior is not None
    )


def test_answers_that_were_not_asked_for_are_named_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    review = Review({DISAGREE: {"a": 1}, AGREE: {"a": 1}}, [ReviewQuestion("1", DISAGREE, "a", "b")])
    result = score_answers(review, {"1": "a", "typo": "b", "12": "a"}, "ab")
    assert (result.answered, result.not_asked) == (1, 2)
    assert "2 of 3 answers" in caplog.text and "12, typo" in caplog.text


def test_answers_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "answers.csv"
    file.write_text("id,label\n1,Seven\n2,\n")
    assert read_answers(file, DIGITS) == {"1": "seven"}
    file.write_text("id,label\n1,None of these\n2,none\n")
    assert read_answers(file, DIGITS) == {"1": NO_CLASS, "2": NO_CLASS}
    file.write_text("id,label\n1,none\n")
    assert read_answers(file, ["some", "none"]) == {"1": "none"}, "unless it is the name of a class"
    file.write_text("id,label\n1,elephant\n")
    with pytest.raises(InputError, match=r"label 'elephant' of 1 is no class: expected zero, .*, or 'none of these'"):
        read_answers(file, DIGITS)
    with pytest.raises(InputError, match="none of the answers is about a question"):
        score_answers(Review({DISAGREE: {"a": 1}, AGREE: {"a": 1}}, []), {"x": "seven"}, "ab")
    with pytest.raises(InputError, match="no label is filled in yet"):
        score_answers(Review({DISAGREE: {"a": 1}, AGREE: {"a": 1}}, []), {}, "ab")
    with pytest.raises(InputError, match="no review in"):
        read_review(tmp_path)
