"""Accuracy, recall and the prior-corrected baseline, by hand."""

from pathlib import Path

import pytest
import torch
from sklearn.metrics import classification_report

from pouf import EMBEDDED, Classifier, InputError, compare, read_labelled
from pouf.demo import DIGITS
from pouf.validation.diagnostics import share


def test_the_baseline_divides_by_the_mean_prediction(tiny: Classifier, few_digits: Path) -> None:
    labelled = read_labelled(few_digits, DIGITS, "image")
    p = tiny.predict_proba(few_digits)
    guess = (p / p.mean(0)).argmax(1)
    assert compare(tiny, tiny, tiny, labelled).prior_corrected == share(guess == torch.tensor(labelled.labels))


def test_evaluation_agrees_with_a_plain_count(tiny: Classifier, few_digits: Path) -> None:
    labelled = read_labelled(few_digits, DIGITS, "image")
    result = compare(tiny, tiny, tiny, labelled)
    guesses = tiny.predict(few_digits)
    truth = [Path(name).parts[0] for name in labelled.inputs.ids]
    right = [guess == name for guess, name in zip(guesses, truth, strict=True)]
    assert result.n == len(truth)
    assert result.zero_shot == result.last == result.advised == pytest.approx(sum(right) / len(right))
    for name in DIGITS:
        own = [ok for ok, label in zip(right, truth, strict=True) if label == name]
        assert (result.per_class[name].n, result.per_class[name].last) == (
            len(own),
            pytest.approx(sum(own) / len(own)),
        )


def test_precision_f1_intervals_and_confusion_are_scikit_learns(tiny: Classifier, few_digits: Path) -> None:
    labelled = read_labelled(few_digits, DIGITS, "image")
    result = compare(tiny, tiny, tiny, labelled)
    guesses = [DIGITS.index(name) for name in tiny.predict(few_digits)]
    report = classification_report(labelled.labels, guesses, target_names=DIGITS, output_dict=True, zero_division=0)
    for name, own in result.per_class.items():
        assert own.precision == pytest.approx(report[name]["precision"]) and own.advised == report[name]["recall"]
        assert own.f1 == pytest.approx(report[name]["f1-score"])
    assert result.macro_f1["advised"] == pytest.approx(report["macro avg"]["f1-score"])
    assert [sum(row) for row in result.confusion] == [own.n for own in result.per_class.values()]
    assert sum(result.confusion[k][k] for k in range(10)) == round(result.advised * result.n)
    z, p, n = 1.959964, result.advised, result.n
    centre, half = p + z**2 / (2 * n), z * (p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5
    low, high = ((centre + side * half) / (1 + z**2 / n) for side in (-1, 1))
    assert result.intervals["advised"] == pytest.approx((low, high), abs=1e-5)


def test_a_class_without_samples_has_no_recall(tiny: Classifier, few_digits: Path) -> None:
    result = compare(tiny, tiny, tiny, read_labelled(few_digits / "seven", DIGITS, "image"))
    assert result.per_class["two"][:5] == (0, None, None, None, None) and result.per_class["two"].f1 is None
    assert result.per_class["seven"].n == result.n


def test_files_that_cannot_be_read_are_left_out_of_the_count(
    tiny: Classifier, few_digits: Path, tmp_path: Path
) -> None:
    source = next((few_digits / "two").iterdir())
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "good.png").write_bytes(source.read_bytes())
    (tmp_path / "two" / "bad.png").write_bytes(b"bad")
    result = compare(tiny, tiny, tiny, read_labelled(tmp_path, DIGITS, "image"))
    assert (result.n, len(result.skipped), result.to_json()["skipped"]) == (1, 1, 1)


def test_what_one_model_has_no_answer_to_is_still_evaluated_with_another(tiny: Classifier, few_digits: Path) -> None:
    labelled, bad = read_labelled(few_digits / "seven", DIGITS, "image"), Classifier.from_pretrained(EMBEDDED, DIGITS)
    with torch.no_grad():
        for parameter in bad.backbone.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(InputError, match="can be read"):
        compare(bad, bad, bad, labelled)
    result = compare(tiny, tiny, tiny, labelled)
    assert (result.n, result.skipped) == (len(labelled.labels), {})
