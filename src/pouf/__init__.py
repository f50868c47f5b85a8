"""Adapt zero-shot models to your own data without labels: prompt-oriented unsupervised fine-tuning (POUF)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pouf.classifier import Classifier as Classifier
    from pouf.data.cache import FeatureCache as FeatureCache
    from pouf.data.images import Images as Images
    from pouf.data.labelled import read_labelled as read_labelled
    from pouf.data.shots import Shots as Shots
    from pouf.data.shots import read_shots as read_shots
    from pouf.data.streams import Stream as Stream
    from pouf.data.texts import Texts as Texts
    from pouf.data.vectors import Vectors as Vectors
    from pouf.errors import Diverged as Diverged
    from pouf.errors import InputError as InputError
    from pouf.models import EMBEDDED as EMBEDDED
    from pouf.models import Backbone as Backbone
    from pouf.models.demonstrations import Demonstrations as Demonstrations
    from pouf.postprocess.postprocessor import calibrate as calibrate
    from pouf.recipe import Recipe as Recipe
    from pouf.reporting.html import write_report as write_report
    from pouf.runs.folder import adapt_run as adapt_run
    from pouf.runs.folder import assess as assess
    from pouf.runs.folder import load_run as load_run
    from pouf.training.search import tune as tune
    from pouf.training.search import tune_run as tune_run
    from pouf.training.trainer import Adaptation as Adaptation
    from pouf.training.trainer import Step as Step
    from pouf.training.trainer import adapt as adapt
    from pouf.validation.evaluation import evaluate as evaluate

__version__ = "0.1.0"

# Names are looked up when first used, so that `pouf --help` need not wait for torch.
_HOME = {
    "Adaptation": "training.trainer",
    "Backbone": "models",
    "Classifier": "classifier",
    "Demonstrations": "models.demonstrations",
    "Diverged": "errors",
    "EMBEDDED": "models",
    "FeatureCache": "data.cache",
    "Images": "data.images",
    "InputError": "errors",
    "Recipe": "recipe",
    "Shots": "data.shots",
    "Step": "training.trainer",
    "Stream": "data.streams",
    "Texts": "data.texts",
    "Vectors": "data.vectors",
    "adapt": "training.trainer",
    "adapt_run": "runs.folder",
    "calibrate": "postprocess.postprocessor",
    "evaluate": "validation.evaluation",
    "assess": "runs.folder",
    "load_run": "runs.folder",
    "read_labelled": "data.labelled",
    "read_shots": "data.shots",
    "tune": "training.search",
    "tune_run": "training.search",
    "write_report": "reporting.html",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pouf' has no attribute {name!r}")
    return getattr(import_module(f"pouf.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
