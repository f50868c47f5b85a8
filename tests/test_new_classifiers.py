"""`adapt` and `search` return classifiers that share what is not tuned with the one they are called on: it stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import REVIEWS, groups
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small_models import masked_lm
from torch import Tensor

from pouf import EMBEDDED, Callback, Classifier, InputError, KeepNames, Output, Recipe
from pouf.demo import DIGITS
from pouf.tuners import TUNERS

QUICK = {"steps": 3, "snapshots": 2, "batch_size": 8, "min_class_usage": 0.0, "augment": "none"}


def snapshot(classifier: Classifier) -> dict[str, Any]:
    """All of a classifier that a run could change, by value."""
    numbers = {
        name: sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in classifier.state_dict().items()
        if tensor.ndim
    }
    flags = {name: (p.requires_grad, p.grad is None) for name, p in classifier.named_parameters()}
    names = ("tuner_settings", "prompt", "postprocessor", "demonstrations", "templates", "temperature", "model_card")
    return {
        "numbers": numbers, "flags": flags, "scale": classifier.backbone.logit_scale.item(),
        "modules": [(name, id(part), part.training) for name, part in classifier.named_modules()],
        **{name: getattr(classifier, name) for name in names},
    }  # fmt: skip


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if each.numel()}


def copied(classifier: Classifier, start: Classifier) -> int:
    """Bytes of a classifier that are not in the memory of another one; its correction is new and left out."""
    own = storages([*classifier.backbone.parameters(), *classifier.backbone.buffers()])
    if classifier.prompt is not None:
        own |= storages(classifier.prompt.parameters())
    shared = storages([*start.parameters(), *start.buffers()])
    return sum(size for storage, size in own.items() if storage not in shared)


@pytest.mark.parametrize("tuner", sorted(TUNERS.keys() - {"map", "upper"}))
def test_no_more_is_copied_than_what_is_tuned(tuner: str, pictures: list[Image.Image]) -> None:
    clf = Classifier.from_pretrained(EMBEDDED, DIGITS)
    before, p = snapshot(clf), clf.predict_proba(pictures)
    result = clf.adapt(pictures, settings=QUICK | {"tuner.name": tuner, "optimisation.lr": 1e-2})
    assert snapshot(clf) == before
    last = result.at("last")
    assert not torch.equal(last.predict_proba(pictures), p)
    for each in (last, result.at("zero-shot"), result.classifier):
        assert copied(each, clf) <= 4 * (result.trainable + 1), "and the temperature, which is one number"
    assert torch.equal(result.at("zero-shot").predict_proba(pictures), p)
    found = clf.search(
        pictures, {"optimisation.lr": [1e-3, 1e-2]}, settings=QUICK | {"tuner.name": tuner, "batch_size": 6}
    )
    assert copied(found.classifier, clf) <= 4 * (result.trainable + 1) and snapshot(clf) == before


def test_soft_vectors_of_a_masked_language_model_are_all_that_is_copied(tmp_path: Path) -> None:
    clf = Classifier.from_pretrained(masked_lm(tmp_path / "lm", "roberta"), ["bad", "good"], ["{text} it was [MASK]."])
    before = snapshot(clf)
    result = clf.adapt(REVIEWS, settings=QUICK | {"tuner.name": "prompt", "tuner.context": "it is"})
    assert snapshot(clf) == before and clf.backbone.input_prompt is None
    assert 0 < copied(result.at("last"), clf) <= 4 * (result.trainable + 1)


def test_a_result_does_not_hold_on_to_the_classifier_before_it(pictures: list[Image.Image], tmp_path: Path) -> None:
    def alive() -> int:
        gc.collect()  # what an export traced, and sparse tensors of other tests, have no memory to ask for
        tensors = [each for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter)]
        return sum(storages(each for each in tensors if each.layout == torch.strided).values())

    start = alive()
    clf = Classifier.from_pretrained(EMBEDDED, DIGITS)
    size = alive() - start
    p = clf.predict_proba(pictures)
    result = clf.adapt(pictures, settings=QUICK | {"tuner.name": "full", "optimisation.lr": 1e-2})
    watched = weakref.ref(clf)
    del clf
    assert alive() - start < 1.5 * size and watched() is None, "zero-shot's weights wait on the disk"
    assert torch.equal(result.at("zero-shot").predict_proba(pictures), p)
    result.save_pretrained(tmp_path / "saved")
    again = Classifier.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.predict_proba(pictures), result.classifier.predict_proba(pictures))


def test_classifiers_that_share_memory_are_frozen_and_moved_apart() -> None:
    clf = Classifier.from_pretrained(EMBEDDED, DIGITS)
    other = clf.copy()
    other.requires_grad_(False).to(torch.float64)
    other.set_temperature(0.5)
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in clf.parameters())
    assert clf.backbone.logit_scale.item() > 2.5


class Refuses(Callback):
    def on_start(self, recipe: Recipe, trainable: int, total: int) -> None:
        raise InputError("refused after all has been prepared")


WRONG: list[dict[str, Any]] = [
    {"method": "pouff"}, {"prior": [0.5, 0.6]}, {"settings": {"optimisation.lrr": 1.0}}, {"recipe": "no such recipe"},
    {"recipe": "fast", "max_minutes": 1.0}, {"demonstrations": True}, {"callbacks": [Refuses()]}, {"max_minutes": 1e-9},
    {"keep": KeepNames(["one", "two"])}, {"settings": {"objective.labels": 1.0}}, {"shots": "no such file.csv"},
]  # fmt: skip
RIGHT = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 3), "refine": st.booleans(), "prior": st.sampled_from(["uniform", "estimated"]),
        "settings": st.fixed_dictionaries(
            {"steps": st.just(2)},
            optional={
                "tuner.name": st.sampled_from(["prototypes", "map"]), "temperature": st.floats(0.01, 1.0),
                "postprocess": st.sampled_from(["none", "sinkhorn"]), "snapshots": st.integers(0, 2),
            },
        ),
        "method": st.sampled_from(["pouf", "zero-shot", "em"]),
    },
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(RIGHT, st.sampled_from(WRONG), st.booleans(), st.sampled_from(["adapt", "search"]))
def test_a_refused_call_has_changed_nothing(right: dict, wrong: dict, written: bool, call: str) -> None:
    features, prototypes = groups()
    clf = Classifier.from_vectors(prototypes, list("abcdef"))
    before = snapshot(clf)
    output = {"output": Output(Path("no such folder", "\0"), report=False)} if written else {}
    options = {**right, **wrong, **output, "settings": right.get("settings", {}) | wrong.get("settings", {})}
    try:
        getattr(clf, call)(features, **options)
    except (InputError, ValueError, OSError):
        pass
    else:
        assert options.get("method") in ("zero-shot", "em"), "what trains nothing has no use for some of these"
    assert snapshot(clf) == before
