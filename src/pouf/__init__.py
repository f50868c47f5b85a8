"""Adapt zero-shot models to your own data without labels: prompt-oriented unsupervised fine-tuning (POUF)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pouf.adaptation import Adaptation as Adaptation
    from pouf.adaptation import Step as Step
    from pouf.adaptation import adapt as adapt
    from pouf.adjustment import calibrate as calibrate
    from pouf.backbones import EMBEDDED as EMBEDDED
    from pouf.backbones import Backbone as Backbone
    from pouf.classifier import Classifier as Classifier
    from pouf.data.cache import FeatureCache as FeatureCache
    from pouf.data.images import Images as Images
    from pouf.data.labelled import read_labelled as read_labelled
    from pouf.data.shots import Shots as Shots
    from pouf.data.shots import read_shots as read_shots
    from pouf.data.stream import Stream as Stream
    from pouf.data.texts import Texts as Texts
    from pouf.data.vectors import Vectors as Vectors
    from pouf.demonstrations import Demonstrations as Demonstrations
    from pouf.errors import Diverged as Diverged
    from pouf.errors import InputError as InputError
    from pouf.evaluation import evaluate as evaluate
    from pouf.recipe import Recipe as Recipe
    from pouf.report import write_report as write_report
    from pouf.runs import adapt_run as adapt_run
    from pouf.runs import judge as judge
    from pouf.runs import load_run as load_run
    from pouf.tuning import tune as tune
    from pouf.tuning import tune_run as tune_run

__version__ = "0.1.0"

# Names are looked up when first used, so that `pouf --help` need not wait for torch.
_HOME = {
    "Adaptation": "adaptation",
    "Backbone": "backbones",
    "Classifier": "classifier",
    "Demonstrations": "demonstrations",
    "Diverged": "errors",
    "EMBEDDED": "backbones",
    "FeatureCache": "data.cache",
    "Images": "data.images",
    "InputError": "errors",
    "Recipe": "recipe",
    "Shots": "data.shots",
    "Step": "adaptation",
    "Stream": "data.stream",
    "Texts": "data.texts",
    "Vectors": "data.vectors",
    "adapt": "adaptation",
    "adapt_run": "runs",
    "calibrate": "adjustment",
    "evaluate": "evaluation",
    "judge": "runs",
    "load_run": "runs",
    "read_labelled": "data.labelled",
    "read_shots": "data.shots",
    "tune": "tuning",
    "tune_run": "tuning",
    "write_report": "report",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pouf' has no attribute {name!r}")
    return getattr(import_module(f"pouf.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
