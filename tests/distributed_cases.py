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
from PIL import Image
from safetensors.torch import save_file

from pouf import EMBEDDED, Classifier, Images, Recipe, Stream, Texts, adapt
from pouf.data.shots import Shots
from pouf.demo import DIGITS
from pouf.distributed import join

TEXTS = [
    "the film is good", "food", "we hated the book and the very bad service", "who loved it?", "a sea", "the air",
    "so bad", "not so good", "it is okay",
]  # fmt: skip


def recipe(tune: str, **settings: object) -> Recipe:
    return Recipe(steps=3, batch_size=7, augment="none", temperature=0.1, snapshots=1).with_settings(
        **{"tuning.name": tune, "optimisation.lr": 1e-2, "optimisation.clip": 1.0, **settings}
    )


def images(folder: Path, tune: str, **settings: object) -> Classifier:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    adapt(classifier, Images.from_folder(folder / "images"), recipe(tune, **settings), on_start=lambda m: None)
    return classifier


def streamed(folder: Path, tune: str) -> Classifier:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    pictures = [Image.open(path) for path in sorted((folder / "images").glob("1*.png"))]
    adapt(classifier, Stream(lambda: pictures, "image", buffer=7), recipe(tune), on_start=lambda m: None)
    return classifier


def texts(folder: Path, tune: str, **settings: object) -> Classifier:
    classifier = Classifier.from_pretrained(folder / "encoder", ["good", "bad"], ["it is {}"])
    adapt(classifier, Texts(TEXTS), recipe(tune, **settings), on_start=lambda m: None)
    return classifier


def cloze(folder: Path, tune: str, **settings: object) -> Classifier:
    classifier = Classifier.from_pretrained(folder / "lm", ["bad", "good"], ["{text} it was [MASK]."])
    shots = Shots(Texts(TEXTS[:5]), F.one_hot(torch.tensor([1, 0, 0, 1, 1]), 2).float())
    weighed = recipe(tune, **{"objective.labels": 1.0, **settings})
    adapt(classifier, Texts(TEXTS), weighed, shots=shots, on_start=lambda m: None)
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
    "stream": lambda folder: streamed(folder, "full"),
    "batch of one": lambda folder: images(folder, "full", batch_size=1),
    "batch of one, prompt": lambda folder: cloze(folder, "prompt", batch_size=1),
}


def weights(classifier: Classifier) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone().contiguous() for name, p in classifier.named_parameters()}


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
        mine = weights(run(folder))
        # Every process must end with the same weights, to the last bit.
        sums = world.gather_objects([float(p.double().sum()) for p in mine.values()])
        assert all(other == sums[0] for other in sums), name
        if world.is_first:
            save_file(mine, folder / f"{name}.safetensors")


if __name__ == "__main__":
    main()
