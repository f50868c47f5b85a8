"""Small real parts that the tests share: models built from their config classes, real files, no network."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["POUF_CACHE"] = tempfile.mkdtemp(prefix="pouf-cache-")

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pouf import EMBEDDED, Classifier
from pouf.demo import DIGITS, write_digits

torch.set_num_threads(1)
atexit.register(shutil.rmtree, os.environ["POUF_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's digits, one sub-folder a class."""
    return write_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="session")
def few_digits(digits_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every twelfth digit: 150 images."""
    folder = tmp_path_factory.mktemp("few")
    for i, path in enumerate(sorted(digits_folder.rglob("*.png"), key=lambda p: p.name)):
        if i % 12 == 0:
            target = folder / path.parent.name / path.name
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def tiny() -> Classifier:
    """The embedded model with the ten digits as classes."""
    return Classifier.from_pretrained(EMBEDDED, DIGITS)


@pytest.fixture
def pictures() -> list[Image.Image]:
    """Twelve pictures of noise, always the same."""
    noise = np.random.default_rng(0)
    return [Image.fromarray(noise.integers(0, 256, (20, 20, 3), dtype=np.uint8)) for _ in range(12)]
