"""What the tests of the tables share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spy import Spy

from pouf import Classifier
from pouf.bench.standins import make_data


@pytest.fixture(scope="session")
def standins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("standins"))


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Cells give back figures, which do not tell what they were made of: so the two public calls are listened to."""
    given, adapt, infer = Spy(), Classifier.adapt, Classifier.infer

    def listened(classifier: Classifier, data: Any, **more: Any) -> Any:
        given.calls += 1
        given.classifier, given.data, given.recipe, given.shots = classifier, data, more["recipe"], more.get("shots")
        given.before()
        return adapt(classifier, data, **more)

    def judged(classifier: Classifier, data: Any, *more: Any) -> Any:
        given.judged.append(data)
        return infer(classifier, data, *more)

    monkeypatch.setattr(Classifier, "adapt", listened)
    monkeypatch.setattr(Classifier, "infer", judged)
    return given
