"""Random views of images, as the published code made them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from PIL import Image

Augmentation = Callable[[Image.Image, int, torch.Generator], Image.Image]


def crop_flip(image: Image.Image, size: int, generator: torch.Generator) -> Image.Image:
    """Squash to (8/7 size)², cut a random part of 8 to 100 % of the area, scale it to size², flip every second one.

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
    """Left, top, width and height of a box whose area and ratio are drawn at random."""
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
