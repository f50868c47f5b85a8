"""What adaptation to digits costs on letters, and what `anchor` saves: the embedded model.

The model is adapted to handwritten digits without labels. Beside them it reads 520 capital letters, drawn
and bent as those it was pre-trained on, with another seed, and named as there. Accuracies at the last step, mean over
seeds. The anchors were laid on a grid before any figure was seen; none is chosen here.

    python benchmarks/drift.py    # needs matplotlib, for its fonts
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from pouf import Classifier, read_labelled
from pouf.demo import DIGITS, write_digits
from pouf.validation.evaluation import accuracy

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from train_tiny_clip import FONTS, LETTERS, photograph, render

OF_EACH = 20


def write_letters(folder: Path) -> Path:
    """Letters in `folder/letter a/00.png`."""
    draw = torch.Generator().manual_seed(12345)
    for glyph, name in LETTERS.items():
        (folder / name).mkdir(parents=True)
        fonts = [FONTS[i] for i in torch.randint(0, len(FONTS), (OF_EACH,), generator=draw).tolist()]
        pictures = photograph(torch.stack([render(glyph, font) for font in fonts]), draw)
        for i, picture in enumerate(pictures):
            pixels = (255 * picture).round().byte().permute(1, 2, 0).numpy()
            Image.fromarray(np.ascontiguousarray(pixels)).save(folder / name / f"{i:02d}.png")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", nargs="+", type=float, default=[0.0, 0.003, 0.01, 0.03, 0.1])
    parser.add_argument("--tuners", nargs="+", default=["full"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        digits, letters = write_digits(Path(folder) / "digits"), write_letters(Path(folder) / "letters")
        labelled = read_labelled(digits, DIGITS, "image")
        truth = torch.tensor(labelled.labels)
        for tuner in given.tuners:
            for anchor in given.anchors:
                right, kept, same, before = [], [], [], 0.0
                for seed in given.seeds:
                    clf = Classifier.from_pretrained("pouf/tiny-clip", DIGITS)
                    settings = {"tuner.name": tuner, "anchor": anchor, "snapshots": 1}  # zero-shot and the last step
                    result = clf.adapt(digits, recipe="demo", settings=settings, seed=seed,
                                       keep_classes=list(LETTERS.values()), keep_data=letters)  # fmt: skip
                    result.restore("last")
                    right.append(accuracy(clf.infer(labelled.inputs).log_probabilities.argmax(1), truth))
                    assert result.drift is not None
                    before = result.drift.accuracy_before or 0.0
                    kept.append(result.drift.accuracy_after or 0.0)
                    same.append(result.drift.agreement)
                    print(f"{tuner} anchor {anchor} seed {seed}: digits {right[-1]:.3f}, {result.drift}", flush=True)
                rows.append({"tuner": tuner, "anchor": anchor, "digits": right, "letters_before": before,
                             "letters": kept, "agreement": same})  # fmt: skip
    print("| tuning | anchor | digits | letters, before → after | same letter as before |\n|---|---|---|---|---|")
    for row in rows:
        digits_mean, kept_mean, same_mean = (
            100 * statistics.mean(row[name]) for name in ("digits", "letters", "agreement")
        )
        print(
            f"| {row['tuner']} | {row['anchor']:g} | {digits_mean:.1f} | {100 * row['letters_before']:.1f} → "
            f"{kept_mean:.1f} | {same_mean:.1f} |"
        )
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
