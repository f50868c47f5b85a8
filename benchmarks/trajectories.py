"""Does training take the same steps as another version of the code, to the last bit?

    python benchmarks/trajectories.py                      # a digest of weights and the last loss, for each case
    python benchmarks/trajectories.py --against ../base    # the same with the sources of another checkout: what differs
    python benchmarks/trajectories.py --only "texts full" cloze

Tiny models on the CPU, three steps each: every tuner, kind of model, loss, prior, chunks, crops, shots, dropout. With
`--against` the largest difference of a weight and of a loss is printed, and the exit code is 1 if any is not 0.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from pouf import EMBEDDED, Classifier, Recipe, Stream
from pouf.demo import DIGITS

TOP = Path(__file__).resolve().parents[1]
REVIEWS = [
    "we loved the food", "very good film", "the book is great", "we hated it", "bad service", "terrible film",
    "so so", "the service was okay and not very good", "who loved it?", "a sea",
]  # fmt: skip
PULL = "weight_pull" if "weight_pull" in Recipe.model_fields else "anchor"  # its name in earlier versions
Run = Callable[[Path], Any]  # from a folder of models and data to the result of `adapt`


def recipe(tune: str, **settings: Any) -> Recipe:
    plain = Recipe(steps=3, batch_size=7, augment="none", temperature=0.1, snapshots=2)
    return plain.with_settings({"tuner.name": tune, "optimisation.lr": 1e-2, "optimisation.clip": 1.0, **settings})


def images(tune: str, folder: str = "images", options: dict[str, Any] | None = None, **settings: Any) -> Run:
    def run(root: Path) -> Any:
        classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
        return classifier.adapt(root / folder, recipe=recipe(tune, **settings), **(options or {}))

    return run


def described(tune: str, **settings: Any) -> Run:
    """Descriptions and templates: classes have different numbers of prompts."""
    names = {name: [name, f"a {name}", f"number {name}"][: 1 + i % 3] for i, name in enumerate(DIGITS)}

    def run(root: Path) -> Any:
        classifier = Classifier.from_pretrained(EMBEDDED, names, ["a photo of a {}.", "{}"])
        return classifier.adapt(root / "images", recipe=recipe(tune, **settings))

    return run


def stream(root: Path) -> Any:
    classifier = Classifier.from_pretrained(EMBEDDED, DIGITS)
    files = sorted((root / "images").glob("1*.png"))
    return classifier.adapt(Stream(lambda: map(Image.open, files), "image", buffer=7), recipe=recipe("full"))


def texts(tune: str, **settings: Any) -> Run:
    def run(root: Path) -> Any:
        classifier = Classifier.from_pretrained(root / "encoder", ["good", "bad"], ["it is {}"])
        return classifier.adapt(REVIEWS, recipe=recipe(tune, **settings))

    return run


def cloze(tune: str, options: dict[str, Any] | None = None, data: bool = True, **settings: Any) -> Run:
    def run(root: Path) -> Any:
        classifier = Classifier.from_pretrained(root / "lm", ["bad", "good"], ["{text} it was [MASK]."])
        given = {name: root / value if name == "shots" else value for name, value in (options or {}).items()}
        return classifier.adapt(REVIEWS if data else None, recipe=recipe(tune, **settings), **given)

    return run


def vectors(tune: str, options: dict[str, Any] | None = None, **settings: Any) -> Run:
    def run(root: Path) -> Any:
        draw = torch.Generator().manual_seed(0)
        centres = torch.randn(6, 16, generator=draw)
        features = centres[torch.arange(61) % 6] + torch.randn(61, 16, generator=draw)
        prototypes = centres + torch.randn(6, 16, generator=draw)
        classifier = Classifier.from_vectors(prototypes, list("abcdef"), temperature=0.05)
        return classifier.adapt(features.numpy(), recipe=recipe(tune, **settings), **(options or {}))

    return run


SHOTS = {"shots": "shots.csv"}
CASES: dict[str, Run] = {
    **{f"images {tune}": images(tune) for tune in ("full", "prompt", "layernorm", "lora", "prototypes")},
    **{f"texts {tune}": texts(tune) for tune in ("full", "prompt", "layernorm", "lora", "prototypes")},
    **{f"cloze {tune}": cloze(tune) for tune in ("full", "prompt", "layernorm", "lora", "prototypes")},
    "vectors prototypes": vectors("prototypes"),
    "vectors map": vectors("map"),
    "crops": images("full", augment="crop-flip"),
    "crops, frozen": images("prompt", augment="crop-flip"),
    "views": images("prompt", augment="crop-flip", views=2),
    "chunks": images("full", **{"compute.chunk": 2}),
    "chunks of crops, workers": images("full", augment="crop-flip", **{"compute.chunk": 3, "compute.workers": 1}),
    "chunks, frozen": images("prompt", augment="crop-flip", **{"compute.chunk": 2, "tuner.class_specific": True}),
    "few readable": images("full", "mostly broken", batch_size=3),
    "few readable, chunks": images("full", "mostly broken", batch_size=3, **{"compute.chunk": 1}),
    "few readable, entropy": images("layernorm", "mostly broken", **{"compute.chunk": 2, "objective.entropy": 1.0}),
    "descriptions": described("full"),
    "descriptions, chunks": described("full", **{"compute.chunk": 4}),
    "descriptions, prompt": described("prompt", **{"compute.chunk": 4, "tuner.class_specific": True}),
    "stream": stream,
    "estimated prior": images("full", **{"objective.prior": "estimated"}),
    "prior of the paper": images("prototypes", **{"objective.prior": "paper"}),
    "known prior": images("full", options={"prior": [0.28] + [0.08] * 9}),
    "known prior, paper": vectors("prototypes", options={"prior": [0.5] + [0.1] * 5}, **{"objective.prior": "paper"}),
    "weight pull": images("full", **{PULL: 0.3}),
    "bf16": images("full", **{"compute.precision": "bf16"}),
    "bf16, chunks": texts("full", **{"compute.precision": "bf16", "compute.chunk": 3}),
    "checkpointing": images("full", **{"compute.checkpointing": True}),
    "adamw": texts("full", **{"optimisation.name": "adamw", "optimisation.weight_decay": 0.1, "optimisation.lr": 1e-3}),
    "temperature of its own": images("prompt", **{"optimisation.temperature_lr": 1e-3}),
    "texts, chunks": texts("full", **{"compute.chunk": 2, "objective.prior": "estimated"}),
    "dropout": cloze("full", **{"optimisation.dropout": True}),
    "dropout, chunks": cloze("full", **{"optimisation.dropout": True, "compute.chunk": 3}),
    "dropout, checkpointing": cloze("full", **{"optimisation.dropout": True, "compute.checkpointing": True}),
    "dropout of texts": texts("full", **{"optimisation.dropout": True}),
    "cloze, chunks": cloze("full", **{"compute.chunk": 2}),
    "shots": cloze("full", SHOTS),
    "shots, chunks": cloze("full", SHOTS, **{"compute.chunk": 3}),
    "shots, features": cloze("prototypes", SHOTS),
    "shots alone": cloze("full", SHOTS, data=False, **{"objective.labels": 1.0, "objective.transport": 0.0,
                                                        "objective.information": 0.0}),
    "shots, squared error": cloze("full", SHOTS, **{"objective.labels": 1.0, "objective.label_loss": "mse"}),
    "demonstrations": cloze("full", {**SHOTS, "demonstrations": True}),
    "demonstrations, chunks": cloze("full", {**SHOTS, "demonstrations": True}, **{"compute.chunk": 3}),
    "demonstrations, prototypes": cloze("prototypes", {**SHOTS, "demonstrations": True}),
    "entropy": vectors("map", **{"objective.transport": 0.0, "objective.entropy": 1.0}),
    "optimal transport": vectors("map", **{"objective.plan": "sinkhorn", "objective.cost": "exponential"}),
    "batch of one": images("full", batch_size=1),
}  # fmt: skip


def write_inputs(root: Path) -> None:
    """Models and data of all cases. Of one folder most pictures can't be read."""
    sys.path.insert(0, str(TOP / "tests"))
    from small_models import masked_lm, sentence_encoder

    noise = np.random.default_rng(0)
    for name in ("images", "mostly broken"):
        (root / name).mkdir()
        for i in range(17):
            pixels = noise.integers(0, 256, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
            if i == 3 or (name == "mostly broken" and i % 5):
                (root / name / f"{i}.png").write_bytes(f"no picture {i}".encode())
    sentence_encoder(root / "encoder")
    masked_lm(root / "lm", "roberta")
    with (root / "shots.csv").open("w", newline="") as file:
        rows = zip(REVIEWS[:6], ("good", "good", "good", "bad", "bad", "bad"), strict=True)
        csv.writer(file).writerows([("text", "label"), *rows])


def last_weights(result: Any) -> dict[str, torch.Tensor]:
    if hasattr(result, "restore"):  # earlier versions adapt in place
        result.restore("last")
        classifier = result.classifier
    else:
        classifier = result.at("last")
    return {name: p.detach().clone().contiguous() for name, p in classifier.named_parameters()}


def run_cases(root: Path, out: Path, names: list[str]) -> None:
    """In a process of its own, whose sources may be another checkout's."""
    torch.set_num_threads(1)
    logging.getLogger("pouf").setLevel(logging.ERROR)
    for name in names:
        torch.manual_seed(0)
        result = CASES[name](root)
        losses = [step.loss for step in result.history]
        save_file(last_weights(result), out / f"{name}.safetensors", {"losses": json.dumps(losses)})


def trajectories(root: Path, sources: Path, names: list[str]) -> dict[str, tuple[dict[str, torch.Tensor], list[float]]]:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(sources / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--only", *names, "--worker", str(root), folder]
        subprocess.run(command, check=True, env=environment)
        found = {}
        for name in names:
            file = Path(folder) / f"{name}.safetensors"
            header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
            found[name] = load_file(file), json.loads(header["__metadata__"]["losses"])
        return found


def digest(weights: dict[str, torch.Tensor]) -> str:
    found = blake2b(digest_size=6)
    for name in sorted(weights):
        found.update(name.encode() + weights[name].numpy().tobytes())
    return found.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, whose sources take the same steps")
    parser.add_argument("--only", nargs="*", default=list(CASES), help="names of cases")
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        run_cases(*given.worker, given.only)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        ours = trajectories(Path(folder), TOP, given.only)
        theirs = trajectories(Path(folder), given.against, given.only) if given.against else {}
    different = 0
    for name, (weights, losses) in ours.items():
        line = f"{name:30} {digest(weights)}  loss {losses[-1]:.9f}"
        if given.against:
            other, other_losses = theirs[name]
            apart = max(float((weights[key] - other[key]).abs().max()) for key in weights)
            of_loss = max(abs(a - b) for a, b in zip(losses, other_losses, strict=True))
            same = weights.keys() == other.keys() and apart == of_loss == 0
            different += not same
            line += "  same" if same else f"  DIFFERENT: weights by {apart:.1e}, losses by {of_loss:.1e}"
        print(line, flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
