"""How long a first run takes on one core of a CPU, and how much an installation weighs.

    python benchmarks/first_run.py --out benchmarks/results/first_run.json

What `pouf adapt` says before it starts, for 2,000 photographs of 500 x 375 pixels (or 2,000 texts of 30 words) and 100
classes, by preset. Models have the shapes of those on the hub and random weights, which compute as slowly. Seconds are
those of the processor, on one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from speed import machine, names, tokenizer
from transformers import BertConfig, BertModel, CLIPConfig, CLIPImageProcessor, CLIPModel

from pouf import Classifier, Images, InferenceConfig, Recipe, Texts
from pouf.models.sentence_encoder import SentenceEncoder
from pouf.models.vision import DualEncoder
from pouf.recipe import PRESETS
from pouf.runs.folder import versions
from pouf.training import estimate as estimates

INPUTS, CLASSES, WORDS = 2000, 100, 30
BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
VISION = {
    "CLIP ViT-B/32": {**BASE, "patch_size": 32},
    "CLIP ViT-B/16": {**BASE, "patch_size": 16},
    "CLIP ViT-L/14": {**LARGE, "patch_size": 14},
}
LARGE_TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}


def clip(name: str) -> DualEncoder:
    text = {"eos_token_id": 1, **(LARGE_TEXT if name.endswith("L/14") else {})}
    config = CLIPConfig(text_config=text, vision_config=VISION[name], projection_dim=768 if "L/14" in name else 512)
    return DualEncoder(CLIPModel(config).eval(), tokenizer(), CLIPImageProcessor())


def minilm() -> SentenceEncoder:
    config = BertConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12)
    return SentenceEncoder(BertModel(config).eval(), tokenizer(), "mean", 256)


def photographs(folder: Path) -> Images:
    """A few files, each many times: what is timed is a few of them in any case."""
    noise = np.random.default_rng(0)
    for i in range(8):
        pixels = noise.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{i}.jpg")
    return Images(sorted(folder.glob("*.jpg")) * (INPUTS // 8))


def timed(backbone: Any, data: Any) -> dict[str, float]:
    """Seconds of each preset."""
    classifier = Classifier(backbone, names(CLASSES))
    kind = classifier.kind
    return {
        preset: estimates.estimate(classifier, data, Recipe.preset(preset, kind), InferenceConfig(), True).seconds
        for preset in PRESETS
    }


def installed(name: str = "pouf") -> int:
    """Bytes of a package and all that it needs."""
    counted: set[str] = set()

    def add(package: str) -> int:
        key = re.sub(r"[-_.]+", "-", package).lower()
        if key in counted:
            return 0
        counted.add(key)
        try:
            there = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            return 0
        own = sum(file.locate().stat().st_size for file in there.files or () if file.locate().is_file())
        needed = [line for line in there.requires or () if "extra ==" not in line]
        return own + sum(add(re.split(r"[ ;<>=!~\[(]", line)[0]) for line in needed)

    return add(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*VISION, "all-MiniLM-L6"], help="which of them")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    estimates.clock = time.process_time
    results: dict[str, Any] = {"machine": machine(), "versions": versions(), "installed_mb": round(installed() / 1e6)}
    print(f"installed: {results['installed_mb']:,} MB")
    print("| model | inputs | " + " | ".join(PRESETS) + " |\n|---|---|" + "---|" * len(PRESETS))
    with tempfile.TemporaryDirectory() as folder:
        for name in given.models:
            images = name in VISION
            data = photographs(Path(folder)) if images else Texts(["word " * WORDS] * INPUTS)
            seconds = timed(clip(name) if images else minilm(), data)
            results[name] = {preset: round(value, 1) for preset, value in seconds.items()}
            spoken = " | ".join(estimates.spoken(value).removeprefix("about ") for value in seconds.values())
            print(f"| {name} | {INPUTS:,} {data.modality}s | {spoken} |", flush=True)
            if given.out is not None:  # after each, so that an interruption loses little
                given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
