"""A model that finds one of two classes too often is told from data that hold more of it, or is left alone."""

import math
from pathlib import Path

import pytest
import torch
from small_models import CLOZE_WORDS, causal_lm, masked_lm, reading_lm
from torch import Tensor

from pouf import Classifier, Recipe, Shots, Texts
from pouf.inference.encode import InferenceConfig
from pouf.models.demonstrations import Demonstrations
from pouf.postprocess import fit_correction
from pouf.training.adaptation import Adaptation
from pouf.training.bias import (
    EMPTY,
    FEWEST,
    MOST,
    Margins,
    agreed,
    by_shape,
    by_words,
    find_bias,
    read_margins,
    supports_bias_probe,
)

CLASSES, TEMPLATE = ["terrible", "great"], "{text} it was [MASK]."


def drawn(share: float, n: int = 2000) -> Tensor:
    """Margins that are log-odds: Gaussians of variance 9 around ±4.5, of which the upper one has this share."""
    draw = torch.Generator().manual_seed(0)
    upper = torch.arange(n) < share * n
    return torch.where(upper, 4.5, -4.5) + 3 * torch.randn(n, generator=draw, dtype=torch.float64)


def answering(share: float, bias: float, counts: float = 0.5) -> Margins:
    """The words of a text count less once more words follow it; what the model adds to all texts does not."""
    own = drawn(share)
    return Margins(own + bias, (1 - counts) * own - 3 + bias, (1 - counts) * own + 3 + bias, undecided=0.0)


@pytest.mark.parametrize("bias", [-3.0, 0.0, 2.0])
@pytest.mark.parametrize("share", [0.15, 0.5, 0.8])
def test_both_signs_find_the_bias_whatever_the_shares(share: float, bias: float) -> None:
    best = bias + math.log((1 - share) / share)  # Bayes' threshold
    assert by_shape(drawn(share) + bias) == pytest.approx(best, abs=0.5)
    assert by_words(answering(share, bias)) == pytest.approx(best, abs=0.5)


def test_what_the_words_do_to_texts_without_content_is_taken_off() -> None:
    margins = answering(0.5, bias=-3.0)
    assert by_words(margins) == pytest.approx(-3, abs=0.3)
    assert by_words(margins._replace(undecided=-2.0)) == pytest.approx(-1, abs=0.6)


def test_a_sign_that_tells_nothing_says_so() -> None:
    told = answering(0.5, bias=-3.0)
    assert by_words(told) < -1 and by_shape(told.plain) < -1
    few = Margins(*(margins[: FEWEST - 1] for margins in told[:3]), undecided=0.0)
    assert by_words(few) == by_shape(few.plain) == 0, "too few texts"
    assert by_words(answering(0.5, -3.0, counts=0.15)) == 0, "added words hardly count"
    assert by_words(answering(0.5, -3.0)._replace(undecided=30.0)) == 0, "EM leaves no text to a class"
    same = torch.zeros(500, dtype=torch.float64)
    assert by_shape(same) == by_words(Margins(same, same - 1, same + 1, 0.0)) == 0, "all texts are one to the model"


def test_signs_that_disagree_move_nothing_and_the_more_cautious_one_limits_the_other() -> None:
    assert agreed(-1.0, -0.4) == -0.8 and agreed(0.3, 2.0) == 0.6 and agreed(3.0, 2.0) == 3.0
    assert agreed(-1.0, 0.4) == agreed(1.0, 0.0) == agreed(0.0, -1.0) == 0


def test_margins_are_of_texts_that_go_on_with_the_prompt_of_a_class(tmp_path: Path) -> None:
    clf = Classifier.from_pretrained(masked_lm(tmp_path, "bert"), CLASSES, [TEMPLATE])
    texts = ["we loved the film", "they hated the food and the service"]

    def margins(of: list[str]) -> Tensor:
        log = clf.predict_proba(of).double().log()
        return log[:, 1] - log[:, 0]

    found = read_margins(clf, Texts(texts), InferenceConfig())
    for label, after in enumerate((found.first, found.second)):
        expected = margins([f"{text} it was {CLASSES[label]}." for text in texts])
        torch.testing.assert_close(after, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.plain, margins(texts), atol=1e-4, rtol=1e-4)
    empty = [margins([f"{text} it was {name}." for text in EMPTY]).mean() for name in CLASSES]
    assert found.undecided == pytest.approx(float(sum(empty)) / 2, abs=1e-4)
    assert clf.backbone.preprocessing().startswith(TEMPLATE), "the template is as it was"
    many = read_margins(clf, Texts(texts * MOST), InferenceConfig())
    assert len(many.plain) == len(many.first) == MOST


def test_the_prompt_of_a_class_stays_where_a_text_is_too_long(tmp_path: Path) -> None:
    clf = Classifier.from_pretrained(masked_lm(tmp_path, "bert"), CLASSES, [TEMPLATE], max_length=20)
    long = read_margins(clf, Texts(["film " * 100]), InferenceConfig())
    assert (long.first - long.second).abs() > 1e-3

    def shown() -> str:
        return str(clf.backbone.tokenizer.decode(clf.backbone.prepare(["film " * 100])["input_ids"][0]))

    plain = shown()
    with clf.backbone.with_suffix("it was great."):
        followed = shown()
    assert followed.count("film") == plain.count("film") >= 10 and "it was great." in followed
    assert shown() == plain


def test_nobody_else_is_asked(tmp_path: Path) -> None:
    folder = masked_lm(tmp_path / "masked", "bert")

    def asked(classes: list[str], template: str, model: Path = folder) -> Classifier:
        return Classifier.from_pretrained(model, classes, [template])

    assert supports_bias_probe(asked(CLASSES, TEMPLATE))
    assert not supports_bias_probe(asked(["no", "yes"], "{text_a}? [MASK], {text_b}")), "pairs"
    assert not supports_bias_probe(asked(["bad", "okay", "good"], TEMPLATE)), "three classes"
    assert not supports_bias_probe(asked(CLASSES, "{text} " + "it was so " * 6 + "[MASK].")), "no room for it twice"
    assert not supports_bias_probe(asked(CLASSES, "{text} it was [MASK]", causal_lm(tmp_path / "causal", "gpt2")))
    corrected = asked(CLASSES, TEMPLATE)
    encoded = corrected.encode(Texts(["a film", "a book"]))
    corrected.postprocessor = fit_correction("prior-correction", corrected, encoded)
    assert not supports_bias_probe(corrected), "what was corrected before"
    shown = asked(CLASSES, TEMPLATE)
    shots = Shots(Texts(["a good film", "a bad book"]), torch.eye(2).flip(0))
    shown.demonstrations = Demonstrations.from_shots(shots, samples=1, seed=0)
    assert not supports_bias_probe(shown), "solved texts beside a text"
    assert find_bias(asked(CLASSES, TEMPLATE), Texts(["a film"] * (FEWEST - 1)), InferenceConfig()) == 0


def test_what_is_looked_at_depends_neither_on_the_order_nor_on_blank_texts(tmp_path: Path) -> None:
    clf = Classifier.from_pretrained(masked_lm(tmp_path, "bert"), CLASSES, [TEMPLATE])
    texts = [f"{a} {b} {c}" for a in CLOZE_WORDS for b in CLOZE_WORDS[:5] for c in CLOZE_WORDS[:5]]
    there = read_margins(clf, Texts(texts), InferenceConfig())
    assert len(there.plain) == MOST < len(texts)
    other = Texts(["  "] * 300 + texts[::-1])
    clf.encode(other)  # blank texts are known to be blank once all were read, as in a run
    again = read_margins(clf, other, InferenceConfig())
    for one, two in zip(there[:3], again[:3], strict=True):
        torch.testing.assert_close(one.sort().values, two.sort().values, atol=1e-5, rtol=1e-5)


def reviews(share: float, domain: str, n: int = 300) -> tuple[list[str], list[int]]:
    """Of a film or of a service: five words, of which most are of the side that the text is on."""
    draw = torch.Generator().manual_seed(0)
    labels = [int(i < share * n) for i in range(n)]
    sides = [["bad", "hated"], ["good", "loved"]]
    texts = []
    for label in labels:
        on = torch.rand(5, generator=draw) < 0.85
        picks = torch.randint(2, (5,), generator=draw)
        texts.append(
            " ".join([sides[label if own else 1 - label][int(k)] for own, k in zip(on, picks, strict=True)] + [domain])
        )
    return texts, labels


@pytest.mark.parametrize(("share", "weighted_votes"), [(0.4, -0.3), (0.75, -0.2)])
def test_what_is_found_too_often_is_told_and_found_less_and_a_skew_is_kept(
    tmp_path: Path, share: float, weighted_votes: float
) -> None:
    """The model hears a complaint in every text about a service, and none in one about a film."""
    folder, whole = reading_lm(tmp_path / "lm", {"service": weighted_votes}), Recipe.load("masked").optimisation.lr

    def after(domain: str) -> tuple[float, float, Adaptation]:
        texts, labels = reviews(share, domain)
        clf = Classifier.from_pretrained(folder, CLASSES, [TEMPLATE])
        before = clf.predict_proba(texts).argmax(1)
        result = clf.adapt(texts, settings={"steps": 10})
        clf = result.classifier
        said, truth = clf.predict_proba(texts).argmax(1), torch.tensor(labels)
        return float((before == truth).double().mean()), float((said == truth).double().mean()), result

    zero_shot, adapted, result = after("service")
    assert zero_shot < 0.9 and adapted > zero_shot + 0.05
    assert "find 'terrible' too often" in str(result.verdict)
    assert [caution.name for caution in result.verdict.cautions] == ["shares moved"], "and never without a word"
    assert result.recipe.optimisation.lr == whole, "there is something to learn"
    zero_shot, adapted, result = after("film")
    assert zero_shot > 0.9 and adapted >= zero_shot - 0.005
    if share == 0.4:
        assert "too often" not in str(result.verdict)
        assert result.recipe.optimisation.lr == pytest.approx(whole / 10), "there is not"


def test_a_large_move_is_compared_with_zero_shot_after_the_same_move(tmp_path: Path) -> None:
    """Else the two would agree no more than by chance, and zero-shot be used."""
    texts, labels = reviews(0.75, "service")
    clf = Classifier.from_pretrained(reading_lm(tmp_path / "lm", {"service": -0.45}), CLASSES, [TEMPLATE])
    assert (clf.predict_proba(texts).argmax(1) == torch.tensor(labels)).double().mean() < 0.45
    result = clf.adapt(texts, settings={"steps": 10})
    clf, verdict = result.classifier, result.verdict
    assert verdict.diagnostics is not None and verdict.diagnostics.moved > 0.4
    assert not verdict.alarms and verdict.advised != "zero-shot"
    assert "shares moved" in {caution.name for caution in verdict.cautions}, "four tenths are a lot to believe in"
    assert (clf.predict_proba(texts).argmax(1) == torch.tensor(labels)).double().mean() > 0.9
