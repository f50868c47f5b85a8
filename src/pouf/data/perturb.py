"""Small changes of a sample that should not matter: what predictions must survive to be believed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from pouf.data.base import Modality, Transform


def perturbation(modality: Modality, number: int = 0) -> Transform:
    """A picture a little cropped, one word in ten left out, a little noise; another one for each number."""
    apply = PERTURBATIONS[modality]
    name = f"perturbed {number}" if number else "perturbed"
    return Transform(name, lambda sample, seed: apply(sample, seed + number))


def _crop(image: Image.Image, seed: int) -> Image.Image:
    draw = random.Random(seed)
    width, height = (round(side * 0.9) for side in image.size)
    left, top = draw.randint(0, image.width - width), draw.randint(0, image.height - height)
    return image.resize(image.size, Image.Resampling.BILINEAR, (left, top, left + width, top + height))


def _fewer_words(sample: Any, seed: int) -> Any:
    draw = random.Random(seed)
    if isinstance(sample, tuple):
        return tuple(_fewer_words(part, seed + i) for i, part in enumerate(sample))
    words = str(sample).split()
    kept = [word for word in words if draw.random() > 0.1]
    if len(kept) == len(words) > 2:
        del kept[draw.randrange(len(kept))]
    return " ".join(kept) or str(sample)


def _noise(vector: Any, seed: int) -> Any:
    noise = np.random.default_rng(seed).normal(size=vector.shape)
    return vector + (0.3 * np.linalg.norm(vector) * noise / np.linalg.norm(noise)).astype(vector.dtype)


PERTURBATIONS: dict[Modality, Callable[[Any, int], Any]] = {"image": _crop, "text": _fewer_words, "vector": _noise}
