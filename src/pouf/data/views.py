"""Changed views of samples: random augmentations for training, as in the published code, and small perturbations that
a reliable prediction survives."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

from pouf.data.base import Modality, Transform

Augmentation = Callable[[Image.Image, int, torch.Generator], Image.Image]


def crop_flip(image: Image.Image, size: int, generator: torch.Generator) -> Image.Image:
    """Squash to (8/7 size)², cut a random part of 8 to 100 % of the area, scale it to size², flip it half of the time.

    For size 224 this is: resize 256 x 256, random resized crop 224 with scale (0.08, 1) and ratio (3/4, 4/3), and a
    horizontal flip.
    """
    side = round(size * 256 / 224)
    image = image.resize((side, side), Image.Resampling.BILINEAR)
    left, top, width, height = _random_box(side, generator)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
    if torch.rand((), generator=generator) < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


def _random_box(side: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Left, top, width and height of a box of random area and aspect ratio."""
    for _ in range(10):
        u = torch.rand(2, generator=generator).tolist()
        area = side * side * (0.08 + 0.92 * u[0])
        ratio = math.exp(math.log(3 / 4) + u[1] * (math.log(4 / 3) - math.log(3 / 4)))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= side and 0 < height <= side:
            left = int(torch.randint(0, side - width + 1, (), generator=generator))
            top = int(torch.randint(0, side - height + 1, (), generator=generator))
            return left, top, width, height
    return 0, 0, side, side


AUGMENTATIONS: dict[str, Augmentation | None] = {"crop-flip": crop_flip, "none": None}


def perturbation(modality: Modality, number: int = 0) -> Transform:
    """A small change: a slight crop of an image, one word in ten of a text dropped, noise on a vector.

    Args:
        number: selects one of many such changes.
    """
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
    remaining = [word for word in words if draw.random() > 0.1]
    if len(remaining) == len(words) > 2:
        del remaining[draw.randrange(len(remaining))]
    return " ".join(remaining) or str(sample)


def _noise(vector: Any, seed: int) -> Any:
    noise = np.random.default_rng(seed).normal(size=vector.shape)
    return vector + (0.3 * np.linalg.norm(vector) * noise / np.linalg.norm(noise)).astype(vector.dtype)


PERTURBATIONS: dict[Modality, Callable[[Any, int], Any]] = {"image": _crop, "text": _fewer_words, "vector": _noise}
