"""What a run held is free once nobody uses it, without waiting for Python's collector of cycles.

That one looks at old objects rarely: the weights of a trial would stay for many more trials.
"""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from interruption_cases import CASES, Case, texts
from PIL import Image
from small_models import masked_lm, sentence_encoder

from pouf import Output

STEPS = 2
KINDS = {name: CASES[name] for name in ("full", "full, chunks", "prompt", "vectors", "text", "cloze")}
KINDS["lora"] = lambda folder: texts(folder, "lora")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("memory")
    (there / "images").mkdir()
    for i in range(9):
        Image.effect_noise((20, 20), 60).convert("RGB").save(there / "images" / f"{i}.png")
    sentence_encoder(there / "encoder")
    masked_lm(there / "lm", "roberta")
    return there


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def small(case: Case) -> Case:
    classifier, data, how = case
    return classifier, data, how | {"recipe": how["recipe"].with_settings(steps=STEPS, snapshots=STEPS)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_goes_with_the_last_who_uses_it(folder: Path, tmp_path: Path, kind: str) -> None:
    classifier, data, how = small(KINDS[kind](folder))
    model = weakref.ref(classifier.backbone)
    result = classifier.adapt(data, **how, output=Output(tmp_path / "run", report=False))
    assert result.history
    del classifier, result
    assert model() is None


def live_bytes() -> int:
    """Of all tensors that Python knows of, each memory once; sparse ones have none of their own."""
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = [each.untyped_storage() for each in tensors if each.layout == torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("kind", ["full", "text", "vectors"])
def test_a_search_holds_one_trial_and_of_the_others_only_their_votes(folder: Path, tmp_path: Path, kind: str) -> None:
    classifier, data, how = small(KINDS[kind](folder))
    held: list[int] = []
    rates = [1e-3 * (i + 1) for i in range(6)]
    found = classifier.search(
        data, {"optimisation.lr": rates}, **how, output=Output(tmp_path / "run", report=False),
        on_trial=lambda settings: held.append(live_bytes()),
    )  # fmt: skip
    classifier = found.classifier
    inputs, k = len(found.result.checkpoints.sample.features), len(classifier.classes)
    a_trial = 4 * inputs * k + 8 * inputs * STEPS  # probabilities of its last step, classes of every step
    assert max(held[2:]) - min(held[2:]) <= 4 * a_trial, held
