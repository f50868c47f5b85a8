"""Images per second of `adapt` with the preset fast, report and predictions, against a bare loop over the same model.

    python benchmarks/reading.py ../shared/data/images/pacs

The bare loop opens, decodes, prepares and encodes each image once, in batches of 64, and does nothing else. Each run is
a process of its own and measured by CPU seconds. What an image costs is the difference between many images and some,
divided by their number: starting, training, the 512 inputs that checkpoints are judged on and the 500 that a report
shows cost the same in both.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BARE = """
import sys
from pathlib import Path
import torch
from PIL import Image
from pouf import Classifier
backbone = Classifier.from_pretrained(sys.argv[1], sys.argv[3].split(",")).backbone
files = sorted(Path(sys.argv[2]).iterdir())
with torch.no_grad():
    for start in range(0, len(files), 64):
        images = [Image.open(file).convert("RGB") for file in files[start : start + 64]]
        backbone.encode_inputs(backbone.prepare(images))
"""
POUF = """
import sys
from pouf import Classifier
classifier = Classifier.from_pretrained(sys.argv[1], sys.argv[3].split(","))
classifier.adapt(sys.argv[2], recipe="fast", output=sys.argv[4])
"""
CLASSES = "dog,elephant,giraffe,guitar,horse,house,person"


def larger_clip(folder: Path) -> str:
    """A CLIP that reads 224 x 224 pixels in 49 patches, 6 layers of 384 numbers, with random weights."""
    import torch
    from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel

    from pouf.models.load import embedded_folder

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    end = tokenizer.eos_token_id
    text = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
            "vocab_size": len(tokenizer), "max_position_embeddings": 77, "eos_token_id": end}  # fmt: skip
    vision = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6,
              "image_size": 224, "patch_size": 32}  # fmt: skip
    for part in (CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=128)), tokenizer,
                 CLIPImageProcessor()):  # fmt: skip
        part.save_pretrained(folder)
    return str(folder)


def cpu_seconds(code: str, *arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="folder of images")
    parser.add_argument("--n", type=int, nargs=2, default=[600, 1500], help="some images, and many")
    parser.add_argument("--rounds", type=int, default=2, help="of which the fastest counts")
    parser.add_argument("--only", choices=["tiny", "larger"], help="one of the models")
    given = parser.parse_args()
    files = sorted(file for file in given.images.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg", ".png"))
    some, many = given.n
    if len(files) < many:
        sys.exit(f"{given.images} has {len(files)} images, expected at least {many}")
    with tempfile.TemporaryDirectory() as name:
        for n in given.n:
            Path(name, str(n)).mkdir()
            for i, file in enumerate(files[:: len(files) // n][:n]):
                shutil.copy(file, Path(name, str(n), f"{i:05}{file.suffix}"))
        models = {"tiny": "pouf/tiny-clip", "larger": larger_clip(Path(name, "clip"))}
        for model, folder in models.items():
            if given.only not in (None, model):
                continue
            seconds = {}
            for n in given.n:
                for kind, code in (("bare", BARE), ("pouf", POUF)):
                    runs = [str(Path(name, f"{model} {n} {i}")) for i in range(given.rounds)]
                    seconds[kind, n] = min(cpu_seconds(code, folder, str(Path(name, str(n))), CLASSES, r) for r in runs)
            speed = {kind: (many - some) / (seconds[kind, many] - seconds[kind, some]) for kind in ("bare", "pouf")}
            print(f"{model:<8}bare {speed['bare']:7.1f} images/s, pouf {speed['pouf']:7.1f}: "
                  f"{speed['pouf'] / speed['bare']:.2f}; with all that a run of {many:,} images costs beside "
                  f"{seconds['bare', many] / seconds['pouf', many]:.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
