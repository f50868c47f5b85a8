"""Peak memory of `pouf predict` over large photographs, and over an image of too many pixels.

python benchmarks/large_images.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from pouf import EMBEDDED, Classifier
from pouf.demo import DIGITS


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Classifier.from_pretrained(EMBEDDED, DIGITS).save_pretrained(folder / "run")
        for kind in ("none", "photos", "bomb"):
            (folder / kind).mkdir()
        Image.new("RGB", (64, 64)).save(folder / "none" / "small.png")
        Image.effect_noise((6000, 4000), 60).convert("RGB").save(folder / "photos" / "0.jpg", quality=85)
        for i in range(1, 64):
            (folder / "photos" / f"{i}.jpg").hardlink_to(folder / "photos" / "0.jpg")
        Image.new("RGB", (13300, 13300)).save(folder / "bomb" / "0.png")
        Image.new("RGB", (64, 64)).save(folder / "bomb" / "1.png")
        for kind, about in {
            "none": "one image of 64 x 64", "photos": "64 JPEGs of 6000 x 4000", "bomb": "one PNG of 13300 x 13300",
        }.items():  # fmt: skip
            command = ["predict", "run", kind, "--no-cache", "--out", f"{kind}.csv", "--quiet"]
            # In a process of its own, so that the peak is this command's.
            code = (
                "import resource, subprocess, sys;"
                "subprocess.run([sys.executable, '-m', 'pouf', *sys.argv[1:]], check=True);"
                "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
            )
            output = subprocess.run(
                [sys.executable, "-c", code, *command], cwd=folder, capture_output=True, text=True, check=True
            )
            rows = len((folder / f"{kind}.csv").read_text().splitlines()) - 1
            unit = 2**20 if sys.platform != "darwin" else 2**30
            print(f"{about}: {int(output.stdout) / unit:.2f} GB at most, {rows} predictions")


if __name__ == "__main__":
    main()
