"""Labels worth asking for: unbiased estimates from few answers, and advice only where they tell."""

import csv
import json
import random
import shutil
from pathlib import Path

import pytest

from pouf import EMBEDDED, Classifier, Images, InputError, Recipe, adapt_run
from pouf.demo import DIGITS
from pouf.validation.review import AGREE, DISAGREE, PLAN, ask, conclude, read_answers


@pytest.fixture(scope="module")
def run(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("review") / "run"
    recipe = Recipe.load("demo").with_settings(steps=10, snapshots=1)
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    adapt_run(classifier, Images.from_folder(few_digits), recipe, folder, on_start=lambda message: None)
    return folder


def test_questions_are_mostly_where_the_models_differ(run: Path, few_digits: Path) -> None:
    table, page = ask(run, Images.from_folder(few_digits), 20)
    plan = json.loads((run / PLAN).read_text())
    assert sum(plan["sizes"].values()) == 150 and len(plan["questions"]) == 20
    differ = [q for q in plan["questions"] if q["stratum"] == DISAGREE]
    assert len(differ) == min(plan["sizes"][DISAGREE], 13)
    assert all((q["zero_shot"] != q["adapted"]) == (q["stratum"] == DISAGREE) for q in plan["questions"])
    with table.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["id"] for row in rows] == [q["id"] for q in plan["questions"]] and {row["label"] for row in rows} == {
        ""
    }
    assert "data:image/" in page.read_text()


def test_more_questions_are_the_same_and_more_and_no_label_is_lost(run: Path, few_digits: Path) -> None:
    data = Images.from_folder(few_digits)
    table, _ = ask(run, data, 12)
    with table.open() as stream:
        first = [row["id"] for row in csv.DictReader(stream)]
    table.write_text("id,text,label\n" + "".join(f"{name},,two\n" for name in first[:5]))
    ask(run, data, 24)
    with table.open() as stream:
        rows = {row["id"]: row["label"] for row in csv.DictReader(stream)}
    assert set(first) < set(rows) and [rows[name] for name in first[:5]] == ["two"] * 5
    assert sum(label != "" for label in rows.values()) == 5
    table.unlink()


def test_all_answers_give_the_accuracy_itself(run: Path, few_digits: Path) -> None:
    data = Images.from_folder(few_digits)
    ask(run, data, 1000)
    answers = {name: name.split("/")[0] for name in data.ids}
    verdict = conclude(run, answers)
    adapted = Classifier.load(run).predict(few_digits)
    expected = sum(said == name.split("/")[0] for said, name in zip(adapted, data.ids, strict=True)) / len(data)
    assert verdict.adapted.value == pytest.approx(expected)
    assert verdict.adapted.low == pytest.approx(expected) == verdict.adapted.high


def test_the_adapted_model_is_the_chosen_step(run: Path, few_digits: Path, tmp_path: Path) -> None:
    run = shutil.copytree(run, tmp_path / "run")
    Classifier.load_zero_shot(run).save(run / "chosen")
    choice = json.loads((run / "choice.json").read_text()) | {"chosen": 5, "use": "chosen"}
    (run / "choice.json").write_text(json.dumps(choice))
    ask(run, Images.from_folder(few_digits), 20)
    assert json.loads((run / PLAN).read_text())["sizes"][DISAGREE] == 0, "here the chosen step says what zero-shot says"


def write_plan(run: Path, sizes: dict[str, int], questions: list[dict[str, str]]) -> None:
    (run / PLAN).write_text(json.dumps({"sizes": sizes, "questions": questions}))


def test_estimates_are_right_on_average_and_intervals_hold_them(run: Path) -> None:
    """1,000 inputs: 200 where they differ (adapted right in 60 %), 800 where they agree (right in 90 %)."""
    draw = random.Random(0)
    truth = 0.2 * 0.6 + 0.8 * 0.9
    values, held = [], 0
    for _ in range(200):
        questions, answers = [], {}
        for i in range(50):
            differ = i < 33
            right = draw.random() < (0.6 if differ else 0.9)
            other = "b" if differ else "a"
            stratum = DISAGREE if differ else AGREE
            questions.append({"id": str(i), "stratum": stratum, "zero_shot": other, "adapted": "a"})
            answers[str(i)] = "a" if right else "c"
        write_plan(run, {DISAGREE: 200, AGREE: 800}, questions)
        estimate = conclude(run, answers).adapted
        values.append(estimate.value)
        held += estimate.low <= truth <= estimate.high
    assert sum(values) / len(values) == pytest.approx(truth, abs=0.01)
    assert held / 200 > 0.9


def advice(run: Path, adapted: int, zero_shot: int) -> str:
    questions, answers = [], {}
    for i in range(adapted + zero_shot):
        questions.append({"id": str(i), "stratum": DISAGREE, "zero_shot": "b", "adapted": "a"})
        answers[str(i)] = "a" if i < adapted else "b"
    write_plan(run, {DISAGREE: 100, AGREE: 0}, questions)
    return conclude(run, answers).advice


def test_advice_is_given_where_the_answers_tell(run: Path) -> None:
    assert advice(run, 18, 2).startswith("Use the adapted model: it is right 18 to 2")
    assert advice(run, 2, 18).startswith("Use zero-shot")
    assert "may be chance" in advice(run, 6, 4) and "even" in advice(run, 5, 5)


def test_answers_are_checked(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "answers.csv"
    file.write_text("id,label\n1,Seven\n2,\n")
    assert read_answers(file, DIGITS) == {"1": "seven"}
    file.write_text("id,label\n1,elephant\n")
    with pytest.raises(InputError, match="label 'elephant' of 1 is no class"):
        read_answers(file, DIGITS)
    write_plan(run, {DISAGREE: 1, AGREE: 1}, [])
    with pytest.raises(InputError, match="none of the answers is about a question"):
        conclude(run, {"x": "seven"})
