"""A scikit-learn estimator; its `fit` needs no labels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.class_names import Classes
from pouf.data.vectors import to_numpy
from pouf.errors import InputError
from pouf.models.templates import DEFAULT_TEMPLATES, check_templates, fill
from pouf.recipe import Recipe

VECTOR_FILES = (".npy", ".npz", ".safetensors", ".parquet")
_WIDTH = "its X has another number of features than the prototypes"
_COUNT = "its X has another number of features, or its y another number of values, than there are prototypes"
_OTHER_COUNT = """
classifier_data_not_an_array classifiers_classes classifiers_train dtype_object estimators_nan_inf
estimators_pickle fit2d_1feature fit_check_is_fitted fit_idempotent n_features_in pipeline_consistency
transformer_data_not_an_array transformer_general
"""
_OTHER_WIDTH = """
estimators_fit_returns_self estimators_overwrite_params n_features_in_after_fitting
positive_only_tag_during_fit readonly_memmap_input
"""
# For `check_estimator(PoufClassifier(prototypes), expected_failed_checks=EXPECTED_FAILED_CHECKS)` with three prototypes
# of three features, the size that most of its checks use: name of the check -> reason.
EXPECTED_FAILED_CHECKS = {
    "check_estimators_dtypes": "its integers hold a vector of zeros, which has no direction",
    **dict.fromkeys((f"check_{name}" for name in _OTHER_COUNT.split()), _COUNT),
    **dict.fromkeys((f"check_{name}" for name in _OTHER_WIDTH.split()), _WIDTH),
}


class PoufClassifier(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A zero-shot classifier that adapts to X in `fit`, without labels.

        clf = PoufClassifier("openai/clip-vit-base-patch16", classes=["cat", "dog"])
        clf.fit(paths)
        cross_val_score(clf, paths, labels)   # labels are used for the score only

    Args:
        model: for images or texts, the name or folder of a model, or a `pouf.Classifier`. If X is a matrix of features:
            the prototypes (k, d), a file of them, or a function from m prompts to vectors (m, d), as the `encode` of a
            sentence encoder.
        classes: names, or {name: descriptions}, as for `Classifier`. None takes the distinct values of y as the names;
            y has no other effect.
        templates: sentences with `{}` for the name, or one with `[MASK]` for a masked language model.
        words: label words of a masked language model.
        recipe: a preset, a `pouf.Recipe`, the name of one or a TOML file; None takes the default for the kind of model.
        method: "pouf" or a baseline, by its name in `pouf.METHODS`.
        settings: changes to the recipe, by dotted name.
        batch_size: inputs encoded at once for predictions.
        random_state: seed of the run; None takes the recipe's.

    Attributes:
        classes_: the classes in the order of the columns of `predict_proba`, sorted as everywhere in scikit-learn.
        classifier_: the `pouf.Classifier` that the verdict advises.
        verdict_: whether to trust it, and why.
    """

    def __init__(
        self,
        model: Any = None,
        classes: Classes | None = None,
        templates: Sequence[str] | None = None,
        recipe: Recipe | str | Path | None = None,
        *,
        words: Sequence[str] | Sequence[Sequence[str]] | None = None,
        method: str = "pouf",
        settings: Mapping[str, Any] | None = None,
        batch_size: int = 64,
        random_state: Any = None,
    ) -> None:
        self.model = model
        self.classes = classes
        self.templates = templates
        self.recipe = recipe
        self.words = words
        self.method = method
        self.settings = settings
        self.batch_size = batch_size
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> PoufClassifier:  # noqa: N803
        """Adapt to X. Of y only the set of its values is used: as names, or to warn if they are not the classes."""
        if self.model is None:
            raise InputError(
                "no model: give a name or a folder, as PoufClassifier('openai/clip-vit-base-patch16', "
                "classes=['cat', 'dog']); for a matrix of features, give the prototypes (k, d) of the classes, as in "
                "PoufClassifier(prototypes)"
            )
        X = self._checked(X, reset=True)  # noqa: N806
        if y is not None:
            y = column_or_1d(y, warn=True)
            check_consistent_length(X, y)
            check_classification_targets(y)
        classifier = self._start(y)
        width = classifier.prototypes().shape[1]
        if self._reads_vectors and X.shape[1] != width:
            raise InputError(
                f"X has {X.shape[1]} feature(s), but the prototypes have {width}: take both from the same model"
            )
        seed = None if self.random_state is None else int(check_random_state(self.random_state).randint(2**31))
        result = classifier.adapt(X, method=self.method, recipe=self.recipe, settings=self.settings, seed=seed)
        self.classifier_, self.verdict_ = result.classifier, result.verdict
        self._n_features_out = width
        return self

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803
        """(n,), of `classes_`."""
        best = self.predict_log_proba(X).argmax(1)
        predicted: NDArray[Any] = self.classes_[best]
        return predicted

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """(n, k), columns as in `classes_`."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        check_is_fitted(self, "classifier_")
        logs = self.classifier_.predict_log_proba(self._checked(X, reset=False), self.batch_size)
        return to_numpy(logs.double().log_softmax(1))[:, self._order]  # in double precision, so that each row sums to 1

    def transform(self, X: Any) -> NDArray[np.float32]:  # noqa: N803
        """The adapted features (n, d), each of length 1."""
        check_is_fitted(self, "classifier_")
        return to_numpy(self.classifier_.features(self._checked(X, reset=False), self.batch_size))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = False
        tags.classifier_tags.poor_score = True  # without labels, the score depends on the prototypes
        tags.transformer_tags.preserves_dtype = []  # models compute in float32
        tags.input_tags.two_d_array = self._reads_vectors
        tags.input_tags.string = not self._reads_vectors
        return tags

    @property
    def _reads_vectors(self) -> bool:
        if isinstance(self.model, Classifier):
            return self.model.backbone.modality == "vector"
        return not isinstance(self.model, (str, Path)) or str(self.model).endswith(VECTOR_FILES)

    def _checked(self, X: Any, reset: bool) -> Any:  # noqa: N803
        """Validated X: a matrix, a list of samples, or a table with columns."""
        if self._reads_vectors:
            return validate_data(self, X, reset=reset, dtype=(np.float64, np.float32)).astype(np.float32)
        if isinstance(X, (str, Path)):
            raise InputError(f"expected a list of inputs, not {str(X)!r} alone: give a list")
        if hasattr(X, "iloc") and hasattr(X, "columns") and len(X.columns) == 1:
            X = X.iloc[:, 0]  # noqa: N806  # of any name
        if isinstance(X, np.ndarray) and X.ndim == 2 and X.shape[1] > 1 and X.dtype.kind in "biuf":
            raise InputError(
                f"X is a matrix, but the model {str(self.model)!r} reads no features: give the prototypes (k, d) of "
                "the classes, as in PoufClassifier(prototypes), or a function that encodes their names"
            )
        if hasattr(X, "columns") or hasattr(X, "column_names"):
            return X
        if isinstance(X, np.ndarray) and X.ndim == 2 and X.shape[1] == 1:
            X = X[:, 0]  # noqa: N806  # a column of a table
        return list(X)

    def _start(self, y: Any) -> Classifier:
        """The zero-shot classifier, with `classes_` and the order of its columns set."""
        names, labels = self._names(y)
        if isinstance(self.model, Classifier):
            given = {"classes": self.classes, "templates": self.templates, "words": self.words}
            if surplus := [name for name, value in given.items() if value is not None]:
                raise InputError(f"a classifier has its own {' and '.join(surplus)}: leave that out")
            classifier: Any = self.model
        elif not self._reads_vectors:
            if names is None:
                raise InputError("no classes: give their names, or labels with the names as values")
            classifier = Classifier.from_pretrained(self.model, names, self.templates, words=self.words)
        else:
            classifier = Classifier.from_vectors(self._prototypes(names), names)
        self.classes_ = np.asarray(classifier.classes if labels is None else labels)
        self._order = np.argsort(self.classes_)
        self.classes_ = self.classes_[self._order]
        if y is not None and (unknown := sorted({str(v) for v in y} - {str(v) for v in self.classes_})):
            listed = ", ".join(map(str, self.classes_[:5])) + ", …" * (len(self.classes_) > 5)
            warnings.warn(
                f"y has values that are no class, such as {unknown[0]!r}; the classes are {listed}: fit ignores them, "
                "and no prediction can be equal to them",
                stacklevel=3,
            )
        return classifier  # type: ignore[no-any-return]

    def _names(self, y: Any) -> tuple[Classes | None, Any]:
        """The names of the classes; and, if they are taken from y, their values in y."""
        if self.classes is not None:
            return self.classes, None
        if y is None or isinstance(self.model, Classifier):
            return None, None
        labels = np.unique(y)
        if len(labels) < 2:
            raise InputError(f"y has only one class, {labels[0]!r}: name all classes, at least two")
        return [str(label) for label in labels], labels

    def _prototypes(self, names: Classes | None) -> Any:
        """(k, d) vectors, or a file of them."""
        if not callable(self.model):
            return self.model
        if names is None or isinstance(names, (Mapping, Path)):
            raise InputError("a function that encodes prompts needs the classes as a list of names")
        templates = check_templates(DEFAULT_TEMPLATES["text"] if self.templates is None else self.templates)
        return _mean_of_prompts(self.model, list(names), templates)


def _mean_of_prompts(encode: Callable[[list[str]], Any], names: list[str], templates: Sequence[str]) -> Any:
    """Means over the templates of normalised vectors: k names -> (k, d)."""
    prompts = [prompt for name in names for prompt in fill(templates, name)]
    encoded = encode(prompts)
    vectors = to_numpy(encoded) if isinstance(encoded, Tensor) else np.asarray(encoded, dtype=np.float32)
    if vectors.ndim != 2 or len(vectors) != len(prompts):
        raise InputError(f"the model gave shape {vectors.shape} for {len(prompts)} prompts: expected one row for each")
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.reshape(len(names), len(templates), -1).mean(1)
