"""What adaptation costs on names outside of the task, and what `weight_pull` saves.

    python benchmarks/drift.py                                        # needs matplotlib, for its fonts
    python benchmarks/drift.py --sets photographs --data DIR --names NAMES --anchors 0 0.03 0.1

Letters: the embedded model is adapted to handwritten digits without labels. Beside them it reads 520 capital letters,
drawn and bent as those it was pre-trained on, with another seed, and named as there.

Photographs: the model of `photos.py` (its packages, DIR and NAMES are told there) is adapted to Office-Caltech's dslr,
all weights. Beside them it names the photographs of PACS: seven classes, none of which is among the ten of the task.

Accuracies at the last step, mean over seeds. The anchors were laid on a grid before any figure was seen; none is chosen
here. What is in the results already is not computed again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from pouf import Classifier, FeatureCache, KeepNames, Recipe, read_labelled
from pouf.data.labels import Labelled
from pouf.demo import DIGITS, write_digits
from pouf.files import write_json
from pouf.validation.diagnostics import share

RESULTS = Path(__file__).parent / "results" / "drift.json"
OF_EACH = 20


class Task(NamedTuple):
    """What is adapted to, what is asked beside it, and how a model starts."""

    start: Callable[[], Classifier]
    recipe: Recipe
    labelled: Labelled
    names: list[str]
    beside: Labelled


def write_letters(folder: Path) -> list[str]:
    """Letters in `folder/letter a/00.png`; their names."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
    from train_tiny_clip import FONTS, LETTERS, photograph, render

    draw = torch.Generator().manual_seed(12345)
    for glyph, name in LETTERS.items():
        (folder / name).mkdir(parents=True)
        fonts = [FONTS[i] for i in torch.randint(0, len(FONTS), (OF_EACH,), generator=draw).tolist()]
        pictures = photograph(torch.stack([render(glyph, font) for font in fonts]), draw)
        for i, picture in enumerate(pictures):
            pixels = (255 * picture).round().byte().permute(1, 2, 0).numpy()
            Image.fromarray(np.ascontiguousarray(pixels)).save(folder / name / f"{i:02d}.png")
    return list(LETTERS.values())


def letters(folder: Path, options: argparse.Namespace) -> Task:
    names = write_letters(folder / "letters")
    digits = read_labelled(write_digits(folder / "digits"), DIGITS, "image")
    beside = read_labelled(folder / "letters", names, "image")
    return Task(
        lambda: Classifier.from_pretrained("pouf/tiny-clip", DIGITS), Recipe.load("demo"), digits, names, beside
    )


def photographs(folder: Path, options: argparse.Namespace) -> Task:
    import photos

    bench = photos.Bench(options.data / "images", options.names, FeatureCache(folder / "cache"))
    classes, dslr = bench.read("office-caltech:dslr")
    names, beside = bench.read("pacs:photo")
    return Task(lambda: bench.classifier(classes), photos.FULL, dslr, names, beside)


SETS = {"letters": letters, "photographs": photographs}


def run_cell(task: Task, tuner: str, anchor: float, seed: int) -> dict[str, Any]:
    classifier = task.start()
    settings = {"tuner.name": tuner, "weight_pull": anchor, "snapshots": 1}  # zero-shot and the last step
    result = classifier.adapt(task.labelled.inputs, recipe=task.recipe, settings=settings, seed=seed,
                              keep=KeepNames(task.names, task.beside))  # fmt: skip
    accuracies = {}
    for use in ("zero-shot", "last"):
        predictions = result.at(use).infer(task.labelled.inputs)  # type: ignore[arg-type]
        truth = torch.tensor([task.labelled.labels[i] for i in predictions.indices])
        accuracies[use] = share(predictions.log_probabilities.argmax(1) == truth)
    drift = result.drift
    assert drift is not None
    return {"task_before": accuracies["zero-shot"], "task": accuracies["last"], "beside_before": drift.accuracy_before,
            "beside": drift.accuracy_after, "agreement": drift.agreement}  # fmt: skip


def table(cells: list[dict[str, Any]]) -> str:
    lines = ["| | tuning | anchor | seeds | task, before → after | other names, before → after | same name as before |"]
    lines.append("|---|---|---|---|---|---|---|")
    for kind, tuner, anchor in dict.fromkeys((c["set"], c["tuner"], c["weight_pull"]) for c in cells):
        matching = [c for c in cells if (c["set"], c["tuner"], c["weight_pull"]) == (kind, tuner, anchor)]
        columns = ("task_before", "task", "beside_before", "beside", "agreement")
        mean = {name: 100 * statistics.mean(c[name] for c in matching) for name in columns}
        lines.append(
            f"| {kind} | {tuner} | {anchor:g} | {len(matching)} | {mean['task_before']:.1f} → {mean['task']:.1f} | "
            f"{mean['beside_before']:.1f} → {mean['beside']:.1f} | {mean['agreement']:.0f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["letters"], choices=list(SETS))
    parser.add_argument("--data", type=Path, help="for photographs: the folder that holds images/")
    parser.add_argument("--names", type=Path, help="for photographs: the names of ImageNet, as in photos.py")
    parser.add_argument("--anchors", nargs="+", type=float, default=[0.0, 0.003, 0.03, 0.1])
    parser.add_argument("--tuners", nargs="+", default=["full"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results, JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.is_file() else []
    wanted = [
        {"set": kind, "tuner": tuner, "weight_pull": anchor, "seed": seed}
        for kind in options.sets for tuner in options.tuners for seed in options.seeds for anchor in options.anchors
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        tasks: dict[str, Task] = {}
        for cell in wanted:
            if any(cell.items() <= there.items() for there in cells):
                continue
            if cell["set"] not in tasks:
                tasks[cell["set"]] = SETS[cell["set"]](Path(folder), options)
            found = run_cell(tasks[cell["set"]], cell["tuner"], cell["weight_pull"], cell["seed"])
            cells.append({**cell, **found})
            cells.sort(key=lambda c: (list(SETS).index(c["set"]), c["tuner"], c["weight_pull"], c["seed"]))
            write_json(options.out, cells)
            print({**cell, **found}, flush=True)
    print(table(cells))


if __name__ == "__main__":
    main()
