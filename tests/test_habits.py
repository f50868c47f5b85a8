"""What Python users try first, and what they are told where it is something else."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import REVIEWS, groups
from small_models import sentence_encoder

from pouf import EMBEDDED, Classifier, InputError
from pouf.options import AdaptArguments, AdaptOptions


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    folder = tmp_path_factory.mktemp("habits")
    return Classifier.from_pretrained(sentence_encoder(folder / "model"), ["bad", "good"], template="it is {}")


def test_a_classifier_answers_when_it_is_called_and_prints_in_three_lines(texts: Classifier) -> None:
    assert texts("a good film") == texts.predict("a good film") in ("bad", "good")
    lines = repr(texts).splitlines()
    assert (
        len(lines) == 3 and "2 classes: bad, good" in lines[0] and "'it is {}'" in lines[1] and "zero-shot" in lines[2]
    )


def test_one_template_is_the_list_of_it_and_both_are_refused(texts: Classifier) -> None:
    assert texts.templates == ("it is {}",)
    with pytest.raises(InputError, match="give template or templates"):
        Classifier.from_pretrained(EMBEDDED, ["a", "b"], ["a {}"], template="a {}")


@pytest.mark.parametrize(
    ("arguments", "named", "hint"),
    [
        ((["x"], ["good"]), {}, "No labels are needed"),
        ((["x"],), {"labels": ["good"]}, "No labels are needed"),
        ((["x"],), {"lr": 1e-3}, "Give settings={'lr': …}"),
        ((["x"],), {"output_dir": "run"}, "Give output=Output"),
        ((["x"],), {"receipe": "fast"}, "Did you mean 'recipe'"),
    ],
)
def test_a_wrong_argument_is_a_type_error_that_says_what_to_give(
    texts: Classifier, arguments: tuple, named: dict, hint: str
) -> None:
    with pytest.raises(TypeError, match="adapt.*" + hint):
        texts.adapt(*arguments, **named)


def test_a_setting_by_its_last_word_and_another_text_column(texts: Classifier, tmp_path: Path) -> None:
    file = tmp_path / "reviews.csv"
    file.write_text("review\n" + "".join(f"{text} {i}\n" for i, text in enumerate(REVIEWS * 4)))
    result = texts.adapt(file, text_column="review", settings={"lr": 0.002, "steps": 1})
    whole = texts.adapt(file, text_column="review", settings={"optimisation.lr": 0.002, "steps": 1})
    assert result.recipe == whole.recipe and result.recipe.keep_shares_lr_factor == 1.0
    assert len(texts.predict(file, text_column="review")) == 4 * len(REVIEWS)
    with pytest.raises(InputError, match="no column 'text', only: review: give text_column="):
        texts.predict(file)


def test_predictions_are_scored_by_labels_and_left_out_where_they_are_unsure() -> None:
    features, prototypes = groups(present=3, k=3, n=60, d=8)
    classifier = Classifier.from_vectors(prototypes, ["a", "b", "c"])
    names = classifier.predict(features)
    right = names[:45] + [{"a": "b", "b": "c", "c": "a"}[name] for name in names[45:]]
    score = classifier.evaluate(features, right)
    assert score.n == 60 and score.accuracy == 0.75 and score.interval[0] < 0.75 < score.interval[1]
    assert score == classifier.evaluate(features, ["abc".index(name) for name in right])
    assert "accuracy 75.0%" in str(score) and "60 inputs" in str(score)
    for wrong, words in ((right[:3], "60 inputs and 3 labels"), (["z"] * 60, "label 'z' is no class")):
        with pytest.raises(InputError, match=words):
            classifier.evaluate(features, wrong)
    unsure = classifier.predict(torch.cat([features, features.mean(0, keepdim=True)]), abstain=0.02)
    assert None in unsure and all(name in (None, known) for name, known in zip(unsure, names, strict=False))
    assert classifier.predict(features, abstain=0.99) == names


@pytest.mark.parametrize("data", [b"a good film", bytearray(b"x")])
def test_bytes_are_to_be_decoded(texts: Classifier, data: bytes) -> None:
    with pytest.raises(InputError, match=r"not bytes: give data\.decode"):
        texts.predict(data)


def test_a_folder_of_a_model_asks_for_classes(texts: Classifier) -> None:
    with pytest.raises(InputError, match="is a model and not a run: give classes= to use it zero-shot"):
        Classifier.from_pretrained(str(texts.model))


@pytest.mark.parametrize("method", [Classifier.adapt, Classifier.search])
def test_adapt_and_search_show_all_their_arguments_to_people_and_editors(method: Callable) -> None:
    fields = {each.name: each for each in dataclasses.fields(AdaptOptions)}
    assert {name: each.type for name, each in fields.items()} == {
        name: hint.__forward_arg__ for name, hint in AdaptArguments.__annotations__.items()
    }
    parameters = inspect.signature(method).parameters
    assert all(parameters[name].default == each.default for name, each in fields.items())
    assert all(f"\n    {name}: " in (method.__doc__ or "") for name in fields)
