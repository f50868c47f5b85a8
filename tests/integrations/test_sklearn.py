"""`PoufClassifier` among the tools of scikit-learn."""

import pickle
import warnings
import zlib
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pandas
import pytest
import torch
from helpers import REVIEWS, groups
from numpy.typing import NDArray
from PIL import Image
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.ensemble import VotingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator
from small_models import masked_lm, sentence_encoder

from pouf import EMBEDDED, Classifier, InputError, PoufClassifier
from pouf.demo import DIGITS
from pouf.integrations.sklearn import EXPECTED_FAILED_CHECKS

QUICK = {"steps": 3, "snapshots": 0, "postprocess": "none", "min_class_usage": 0.0}


class Encoder:
    """Prompts as vectors."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, prompts: list[str]) -> Any:
        rows = [np.random.RandomState(zlib.crc32(prompt.encode())).randn(self.width) for prompt in prompts]
        return np.stack(rows)


def checked(model: Any, expected: dict[str, str], on_fail: str | None) -> list[tuple[str, str]]:
    """What became of each of scikit-learn's checks, by name."""
    estimator = PoufClassifier(model, recipe="features-fast", settings=QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator, expected_failed_checks=expected, on_skip=None, on_fail=on_fail)
    return [(result["check_name"], result["status"]) for result in results]


def test_check_estimator_passes_but_for_what_is_declared() -> None:
    results = checked(np.random.RandomState(0).randn(3, 3), EXPECTED_FAILED_CHECKS, "raise")
    assert {name for name, status in results if status == "xfail"} == EXPECTED_FAILED_CHECKS.keys()


@pytest.mark.slow
def test_every_check_passes_with_prototypes_of_the_width_of_its_data() -> None:
    """Whoever encodes prompts has as many prototypes as y has values; the width alone is fixed."""
    results = [checked(Encoder(width), {}, None) for width in (2, 3, 4, 5, 10)]
    failed = {each[0][0] for each in zip(*results, strict=True) if not {"passed", "skipped"} & {s for _, s in each}}
    assert failed == {"check_estimators_dtypes"}, "its vector of zeros has no direction"


def test_without_prototypes_fit_says_what_to_give(vectors: tuple[Any, Any, Any]) -> None:
    features, prototypes, labels = vectors
    for y in (None, labels):
        with pytest.raises(InputError, match=r"give the prototypes \(k, d\).*PoufClassifier\(prototypes\)"):
            PoufClassifier().fit(features, y)
    with pytest.raises(InputError, match=r"X has 5 feature\(s\), but the prototypes have \d+: take both"):
        estimator(prototypes).fit(features[:, :5])
    with pytest.raises(InputError, match="give their names, or labels"):
        PoufClassifier(EMBEDDED).fit(["a.png"])


def test_predictions_have_types() -> None:
    for name, kind in {"predict": Any, "predict_proba": np.float64, "transform": np.float32}.items():
        assert get_type_hints(getattr(PoufClassifier, name))["return"] == NDArray[kind]  # type: ignore[valid-type]


@pytest.fixture(scope="module")
def vectors() -> tuple[Any, Any, Any]:
    """Vectors, prototypes and labels, the names not in the order of the alphabet."""
    features, prototypes = (each.numpy() for each in groups())
    names = np.array(["f", "a", "e", "b", "d", "c"])
    return features, prototypes, names[np.arange(len(features)) % 6]


def estimator(prototypes: Any, **more: Any) -> PoufClassifier:
    return PoufClassifier(prototypes, classes=["f", "a", "e", "b", "d", "c"], settings=QUICK, **more)


def test_columns_stand_in_the_order_of_scikit_learn(vectors: tuple[Any, Any, Any]) -> None:
    """Its scorers take the columns for those of the sorted classes."""
    features, prototypes, labels = vectors
    fitted = estimator(prototypes).fit(features)
    assert list(fitted.classes_) == list("abcdef")
    assert list(fitted.predict(features)) == fitted.classifier_.predict(features)
    column = fitted.predict_proba(features)[:, list(fitted.classes_).index("e")]
    own = fitted.classifier_.predict_proba(features)[:, list(fitted.classifier_.classes).index("e")]
    assert np.allclose(column, own, atol=1e-6)
    assert (cross_val_score(estimator(prototypes), features, labels, cv=3, scoring="neg_log_loss") > -1.0).all()
    assert (cross_val_score(estimator(prototypes), features, labels, cv=3, scoring="roc_auc_ovr") > 0.95).all()


def test_labels_decide_nothing_but_the_score(vectors: tuple[Any, Any, Any]) -> None:
    features, prototypes, labels = vectors
    alone, beside, wrong = (
        estimator(prototypes).fit(features, y).predict_proba(features) for y in (None, labels, labels[::-1])
    )
    assert np.array_equal(alone, beside)
    assert np.array_equal(alone, wrong)


def test_labels_of_something_else_are_warned_of_and_no_more(vectors: tuple[Any, Any, Any]) -> None:
    """A step before another classifier, or a vote over encoded labels, sees a y that is not its own."""
    features, prototypes, labels = vectors
    with pytest.warns(UserWarning, match="y has values that are no class, such as 'x'; the classes are a, b"):
        fitted = estimator(prototypes).fit(features, ["x", "y"] * (len(features) // 2))
    assert np.array_equal(fitted.predict_proba(features), estimator(prototypes).fit(features).predict_proba(features))
    both = [("pouf", estimator(prototypes)), ("em", estimator(prototypes, method="em").set_params(settings=None))]
    with pytest.warns(UserWarning, match="no class"):
        vote = VotingClassifier(both, voting="soft").fit(features, labels)
    assert vote.score(features, labels) > 0.9


def test_parameters_clones_grids_and_pipelines(vectors: tuple[Any, Any, Any]) -> None:
    features, prototypes, labels = vectors
    first = estimator(prototypes, random_state=3)
    assert first.get_params()["random_state"] == 3
    again = clone(first).set_params(method="prior-correction", settings=None)
    assert again.fit(features).verdict_ is not None
    grid = {"pouf__method": ["prior-correction", "em"]}
    pipeline = Pipeline([("same", FunctionTransformer()), ("pouf", again)])
    search = GridSearchCV(pipeline, grid, cv=2).fit(features, labels)
    assert search.best_score_ > 0.8
    # Its features are good for what comes after it, too.
    probe = make_pipeline(estimator(prototypes), LogisticRegression()).fit(features, labels)
    assert probe.score(features, labels) > 0.9


def test_a_fitted_one_is_pickled(tiny: Classifier, pictures: list[Any], vectors: tuple[Any, Any, Any]) -> None:
    features, prototypes, _ = vectors
    of_images = PoufClassifier(tiny, settings=QUICK).fit(pictures)
    for fitted, inputs in ((estimator(prototypes).fit(features), features), (of_images, pictures)):
        again = pickle.loads(pickle.dumps(fitted))
        assert np.array_equal(again.predict_proba(inputs), fitted.predict_proba(inputs))


@pytest.mark.parametrize("given", ["paths", "pictures", "arrays", "grey"])
def test_images_as_people_have_them(few_digits: Path, given: str) -> None:
    paths = sorted(few_digits.rglob("*.png"))[:40]
    opened = [Image.open(path).convert("RGB") for path in paths]
    inputs = {
        "paths": [str(path) for path in paths],
        "pictures": opened,
        "arrays": np.stack([np.asarray(image) for image in opened]),
        "grey": np.stack([np.asarray(Image.open(path)) for path in paths]),  # (n, h, w)
    }[given]
    fitted = PoufClassifier(EMBEDDED, classes=DIGITS, settings=QUICK).fit(inputs)
    expected = Classifier.from_pretrained(EMBEDDED, DIGITS)
    expected = expected.adapt(paths, settings=QUICK).classifier
    assert np.allclose(
        fitted.predict_proba(inputs)[:, fitted._order.argsort()], expected.predict_proba(paths), atol=1e-4
    )
    assert fitted.transform(inputs).shape == (40, len(fitted.get_feature_names_out()))


@pytest.mark.parametrize("given", ["list", "array", "column", "series", "frame"])
def test_texts_as_people_have_them(tmp_path: Path, given: str) -> None:
    inputs = {
        "list": REVIEWS,
        "array": np.array(REVIEWS),
        "column": np.array(REVIEWS)[:, None],
        "series": pandas.Series(REVIEWS, index=range(5, 13)),
        "frame": pandas.DataFrame({"review": REVIEWS}),
    }[given]
    fitted = PoufClassifier(sentence_encoder(tmp_path), ["bad", "good"], ["it is {}."], settings=QUICK).fit(inputs)
    assert fitted.predict(inputs).shape == (len(REVIEWS),)
    assert list(fitted.predict(inputs)) == fitted.classifier_.predict(REVIEWS)


def test_a_masked_language_model_and_names_from_labels(tmp_path: Path) -> None:
    model = masked_lm(tmp_path, "roberta")
    labels = ["great"] * 3 + ["terrible"] * 5
    fitted = PoufClassifier(model, templates=["{text} It was [MASK]."], settings=QUICK).fit(REVIEWS, labels)
    assert fitted.classifier_.backbone.cloze.words == (("great",), ("terrible",))
    with pytest.raises(InputError, match="give their names, or labels"):
        PoufClassifier(model, templates=["{text} It was [MASK]."]).fit(REVIEWS)


def test_a_function_that_encodes_prompts(vectors: tuple[Any, Any, Any]) -> None:
    features, prototypes, labels = vectors
    known = dict(zip(["f", "a", "e", "b", "d", "c"], prototypes, strict=True))
    prompts_encoded = []

    def encode(prompts: list[str]) -> Any:
        prompts_encoded.extend(prompts)
        return torch.tensor(np.stack([known[prompt[-1]] for prompt in prompts]))

    templates = ["{}", "this is {}"]
    by_function = PoufClassifier(encode, templates=templates, settings=QUICK).fit(features, labels)
    assert prompts_encoded[:2] == ["a", "this is a"]
    by_vectors = estimator(prototypes).fit(features)
    assert np.allclose(by_function.predict_proba(features), by_vectors.predict_proba(features), atol=1e-5)
    with pytest.raises(InputError, match="expected one row for each"):
        PoufClassifier(lambda prompts: np.ones(3), ["a", "b"]).fit(features)


def test_digits_from_a_matrix_of_pixels_by_cross_validation() -> None:
    """End to end: images as arrays, labels as the words for them, in a pipeline."""
    digits = load_digits()
    images = (digits.images[:100] * (255 / 16)).round().astype(np.uint8)
    labels = np.array(DIGITS)[digits.target[:100]]
    scores = cross_val_score(PoufClassifier(EMBEDDED, classes=DIGITS, recipe="fast"), images, labels, cv=2)
    assert scores.mean() > 0.5
    with pytest.raises(InputError, match="pixels must be floats from 0 to 1, not from 0 to 15: scale them"):
        PoufClassifier(EMBEDDED, classes=DIGITS).fit(digits.images)
