"""Adapt zero-shot models to your own data without labels: prompt-oriented unsupervised fine-tuning (POUF)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pouf.classifier import Classifier as Classifier
    from pouf.data.images import Images as Images
    from pouf.data.labels import Shots as Shots
    from pouf.data.labels import read_labelled as read_labelled
    from pouf.data.labels import read_shots as read_shots
    from pouf.data.streams import Stream as Stream
    from pouf.data.texts import Texts as Texts
    from pouf.data.vectors import Vectors as Vectors
    from pouf.errors import Diverged as Diverged
    from pouf.errors import InputError as InputError
    from pouf.inference.cache import FeatureCache as FeatureCache
    from pouf.inference.encode import InferenceConfig as InferenceConfig
    from pouf.integrations.sklearn import PoufClassifier as PoufClassifier
    from pouf.integrations.trackers import Tracking as Tracking
    from pouf.models import EMBEDDED as EMBEDDED
    from pouf.models import Backbone as Backbone
    from pouf.models.demonstrations import Demonstrations as Demonstrations
    from pouf.options import KeepNames as KeepNames
    from pouf.options import Output as Output
    from pouf.recipe import Recipe as Recipe
    from pouf.reporting.html import write_report as write_report
    from pouf.training.adaptation import Adaptation as Adaptation
    from pouf.training.callbacks import Callback as Callback
    from pouf.training.callbacks import EarlyStopping as EarlyStopping
    from pouf.training.callbacks import Step as Step
    from pouf.training.methods import METHODS as METHODS
    from pouf.training.search import Search as Search
    from pouf.validation.evaluation import compare as compare
    from pouf.validation.verdict import Verdict as Verdict

__version__ = "0.1.0"

# Names are looked up when first used, so that `pouf --help` need not wait for torch.
_HOME = {
    "Adaptation": "training.adaptation",
    "Backbone": "models",
    "Callback": "training.callbacks",
    "Classifier": "classifier",
    "Demonstrations": "models.demonstrations",
    "Diverged": "errors",
    "EMBEDDED": "models",
    "EarlyStopping": "training.callbacks",
    "FeatureCache": "inference.cache",
    "Images": "data.images",
    "InferenceConfig": "inference.encode",
    "InputError": "errors",
    "KeepNames": "options",
    "METHODS": "training.methods",
    "Output": "options",
    "PoufClassifier": "integrations.sklearn",
    "Recipe": "recipe",
    "Search": "training.search",
    "Shots": "data.labels",
    "Step": "training.callbacks",
    "Stream": "data.streams",
    "Texts": "data.texts",
    "Tracking": "integrations.trackers",
    "Vectors": "data.vectors",
    "Verdict": "validation.verdict",
    "compare": "validation.evaluation",
    "read_labelled": "data.labels",
    "read_shots": "data.labels",
    "write_report": "reporting.html",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pouf' has no attribute {name!r}")
    return getattr(import_module(f"pouf.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
