"""Adaptations that one process and several must agree on. Run under torchrun, it writes the weights of each.

torchrun --nproc-per-node 2 tests/distributed_cases.py FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from helpers import REVIEWS as TEXTS
from helpers import groups, train, weights
from PIL import Image
from safetensors.torch import save_file

from pouf import EMBEDDED, Classifier, Images, Recipe, Stream, Texts, Vectors
from pouf.data.labelled import Shots
from pouf.demo import DIGITS
from pouf.distributed import join


def recipe(tune: str, **settings: object) -> Recipe:
    return Recipe(steps=3, batch_size=7, augment="none", temperature=0.1, snapshots=1).with_settings(
        **{"tuner.name": tune, "optimisation.lr": 1e-2, "optimisation.clip": 1.0, **settings}
    )


def images(folder: Path, tune: str, **settings: object) -> Classifier:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    train(classifier, Images.from_folder(folder / "images"), recipe(tune, **settings))
    return classifier


def streamed(folder: Path, tune: str) -> Classifier:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    pictures = [Image.open(path) for path in sorted((folder / "images").glob("1*.png"))]
    train(classifier, Stream(lambda: pictures, "image", buffer=7), recipe(tune))
    return classifier


def texts(folder: Path, tune: str, **settings: object) -> Classifier:
    classifier = Classifier.from_pretrained(folder / "encoder", ["good", "bad"], ["it is {}"])
    train(classifier, Texts(TEXTS), recipe(tune, **settings))
    return classifier


def cloze(folder: Path, tune: str, **settings: object) -> Classifier:
    classifier = Classifier.from_pretrained(folder / "lm", ["bad", "good"], ["{text} it was [MASK]."])
    shots = Shots(Texts(TEXTS[:5]), F.one_hot(torch.tensor([1, 0, 0, 1, 1]), 2).float())
    weighed = recipe(tune, **{"objective.labels": 1.0, **settings})
    train(classifier, Texts(TEXTS), weighed, shots=shots)
    return classifier


def vectors(folder: Path, tune: str, **settings: object) -> Classifier:
    features, prototypes = groups(n=61)
    classifier = Classifier.from_vectors(prototypes, list("abcdef"), temperature=0.05)
    train(classifier, Vectors(features), recipe(tune, **settings))
    return classifier


# A batch of 7 is uneven for two; so is a last share of the data.
CASES: dict[str, Callable[[Path], Classifier]] = {
    f"{kind.__name__} {tune}": lambda folder, kind=kind, tune=tune: kind(folder, tune)  # type: ignore[misc]
    for kind in (images, texts, cloze)
    for tune in ("full", "prompt", "layernorm")
} | {
    "crops": lambda folder: images(folder, "full", augment="crop-flip"),
    "crops, frozen": lambda folder: images(folder, "prompt", augment="crop-flip"),
    "views": lambda folder: images(folder, "prompt", augment="crop-flip", views=2),
    "chunks": lambda folder: images(folder, "full", **{"compute.chunk": 2}),
    "chunks, workers": lambda folder: images(folder, "full", **{"compute.chunk": 2, "compute.workers": 1}),
    "estimated prior": lambda folder: images(folder, "full", **{"objective.prior": "estimated"}),
    "vectors": lambda folder: vectors(folder, "prototypes"),
    "vectors, map": lambda folder: vectors(folder, "map"),
    "vectors, refined": lambda folder: vectors(folder, "prototypes", postprocess="refinement"),
    "images, refined": lambda folder: images(folder, "prompt", postprocess="refinement"),
    "texts, prior-corrected": lambda folder: texts(folder, "full", postprocess="prior-correction"),
    "stream": lambda folder: streamed(folder, "full"),
    "batch of one": lambda folder: images(folder, "full", batch_size=1),
    "batch of one, prompt": lambda folder: cloze(folder, "prompt", batch_size=1),
}


def state(classifier: Classifier) -> dict[str, torch.Tensor]:
    """Weights, and what predictions are corrected with."""
    fitted = classifier.postprocessor.state_dict() if classifier.postprocessor is not None else {}
    return weights(classifier) | {f"postprocessor.{name}": tensor.contiguous() for name, tensor in fitted.items()}


def _failing_at_the_second_call(original: Callable[[Classifier], torch.Tensor]) -> Callable[[Classifier], torch.Tensor]:
    calls: list[int] = []

    def failing(classifier: Classifier) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("this process fails on purpose")
        return original(classifier)

    return failing


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    world = join(torch.device("cpu"))
    assert world.size == int(os.environ["WORLD_SIZE"]) > 1
    if os.environ.get("FAILS_ON_RANK") == str(world.rank):
        Classifier.prototypes = _failing_at_the_second_call(Classifier.prototypes)  # type: ignore[method-assign]
    for name, run in CASES.items():
        mine = state(run(folder))
        # Every process must end with the same weights, to the last bit.
        sums = world.gather_objects([float(p.double().sum()) for p in mine.values()])
        assert all(other == sums[0] for other in sums), name
        if world.is_first:
            save_file(mine, folder / f"{name}.safetensors")


if __name__ == "__main__":
    main()
