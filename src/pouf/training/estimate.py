"""How long a run will take, told before it starts: a small batch is timed, and the rest is counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.loader import Reader
from pouf.data.random_batches import Draw
from pouf.errors import InputError
from pouf.inference.encode import FeatureStore, InferenceConfig
from pouf.losses.objective import Objective
from pouf.models.base import Scores
from pouf.parallel.process_group import processes
from pouf.recipe import PRESETS, ObjectiveSettings, Recipe
from pouf.training.bias import MOST, supports_bias_probe
from pouf.training.model import precision
from pouf.tuners import TUNERS, Target, Tuner
from pouf.validation.checkpoints import PERTURBED, SAMPLE

logger = logging.getLogger(__name__)
clock = time.perf_counter
TIMED = 8  # inputs, and classes, that are timed


class Estimate(NamedTuple):
    """`about 14 minutes: 2,000 images to encode, then 100 steps`"""

    seconds: float
    encoded: int  # inputs to encode once, before training or beside it
    steps: int
    batch: int  # inputs that go through the encoder at each step; 0 where they are looked up
    modality: str

    def __str__(self) -> str:
        work = [f"{self.encoded:,} {self.modality}s to encode"] if self.encoded and not self.batch else []
        work += [
            f"{self.steps:,} step{'s' * (self.steps != 1)}"
            + (f" of {self.batch:,} {self.modality}s" if self.batch else "")
        ]
        return f"{spoken(self.seconds)}: {', then '.join(work)}"


def spoken(seconds: float) -> str:
    """`about 14 minutes`"""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            n = round(seconds / size)
            return f"about {n} {unit}{'s' if n > 1 else ''}"
    return "less than a minute"


def estimate(
    classifier: Classifier,
    data: Unlabelled,
    recipe: Recipe,
    inference: InferenceConfig,
    report: bool = False,
    demonstrations: bool = False,
    known_shares: bool = False,
) -> Estimate:
    """The time of a run, from a few inputs and a few classes that are timed; nothing of the classifier changes.

    Args:
        report: predictions and a report are written at the end.
        demonstrations: solved examples will be shown beside each input.
        known_shares: those of the classes are known, and need not be looked for.
    """
    classifier, n, k = classifier.copy(), len(data), len(classifier.classes)
    few, shown = min(k, TIMED), demonstrations or classifier.demonstrations is not None
    # Of a few classes: a thousand prompts would take longer than the answer is worth.
    tuner: Tuner = TUNERS[recipe.tuner.name](
        Target(classifier.backbone, classifier.texts()[:few], None, lambda: _some_prototypes(classifier, few)),
        recipe.tuner,
    )
    cropped = recipe.augment != "none" and data.modality == "image"
    looked_up = not (tuner.touches_inputs or shown) and (recipe.views or not cropped)
    batch = min(max(recipe.batch_size, recipe.batch_per_class * k), n)
    once, trained = _inputs(classifier, tuner, data, recipe) if recipe.steps else (0.0, 0.0)
    prompts = _prompts(classifier, tuner, few) * k / few if recipe.steps else 0.0
    loss = _loss(classifier, recipe, batch) if recipe.steps else 0.0
    missing, sample = FeatureStore(classifier.backbone, inference).missing(data), min(n, PERTURBED)
    if looked_up:
        encoded = missing * (recipe.views if cropped else 1)
        forward, per_step = encoded + (sample if recipe.snapshots else 0), 0.0
    else:
        encoded = 0
        looks = (min(recipe.snapshots, recipe.steps) + 1) * (min(n, SAMPLE) + sample) if recipe.snapshots else 0
        forward = looks + n * ((recipe.postprocess != "none") + report + bool(recipe.min_class_usage))
        # In chunks the features are computed twice, the first time without a gradient.
        chunked = 0 < recipe.compute.chunk < batch and tuner.touches_inputs
        per_step = batch * (trained if tuner.touches_inputs else once) + chunked * batch * once
    asks = recipe.find_bias and recipe.keep_shares_max_classes >= k and not (known_shares or shown)
    if asks and supports_bias_probe(classifier):
        forward += 2 * min(n, MOST)
    share = processes().size
    seconds = forward * once / share + recipe.steps * ((per_step + prompts) / share + loss)
    return Estimate(seconds, encoded, recipe.steps, 0 if looked_up else batch, data.modality)


def _inputs(classifier: Classifier, tuner: Tuner, data: Unlabelled, recipe: Recipe) -> tuple[float, float]:
    """Seconds per input: read and encoded, and encoded with the gradient of what is tuned."""
    backbone = classifier.backbone
    if backbone.ready_features(data) is not None:
        return 0.0, 0.0
    places = range(0, len(data), max(1, len(data) // TIMED))[:TIMED]
    read = Reader(data, backbone.prepare, None, backbone.image_size)
    with data.peek():
        read[[Draw(places[-1], 0)]]  # the first sample waits for processors to load, which no other does
        start = clock()
        there = read[[Draw(place, 0) for place in places]]
        reading = (clock() - start) / len(places)
    if not there.indices:
        return reading, reading  # none of these can be read; whether others can, the run will say
    tensors = {name: tensor.to(classifier.device) for name, tensor in there.tensors.items()}
    with precision(recipe, classifier.device):
        with torch.no_grad():
            forward = _seconds(lambda: backbone.encode_inputs(tensors)) / len(there.indices)
        if not tuner.touches_inputs:
            return reading + forward, 0.0
        trained = _seconds(lambda: _differentiated(backbone.encode_inputs(tensors), tuner)) / len(there.indices)
    return reading + forward, reading + trained


def _prompts(classifier: Classifier, tuner: Tuner, few: int) -> float:
    """Seconds of the text side at each step, for a few classes."""
    if not tuner.touches_prompts or classifier.backbone.modality == "vector":
        return 0.0
    prompt = tuner.prompt
    return _seconds(
        lambda: _differentiated(prompt() if prompt is not None else _some_prototypes(classifier, few), tuner)
    )


def _some_prototypes(classifier: Classifier, few: int) -> Tensor:
    return classifier.backbone.prototypes(classifier.prompts()[:few])


def _loss(classifier: Classifier, recipe: Recipe, batch: int) -> float:
    """Seconds of the loss of one batch and its gradient, beside the encoders."""
    k, draw = len(classifier.classes), torch.Generator().manual_seed(0)
    sim = torch.rand(batch, k, generator=draw).to(classifier.device).requires_grad_()
    temperature = torch.tensor(0.1, device=classifier.device)
    objective = Objective(ObjectiveSettings(plan=recipe.objective.plan), k)

    def once() -> None:
        torch.autograd.grad(objective([Scores(sim, sim / temperature, temperature)]).total, sim)

    return _seconds(once)


def _differentiated(output: Tensor, tuner: Tuner) -> None:
    parameters = [parameter for parameter in tuner.parameters.values() if parameter.requires_grad]
    if output.requires_grad and parameters:
        torch.autograd.grad(output.sum(), parameters, allow_unused=True)


def _seconds(work: Callable[[], Any]) -> float:
    """The shorter of two times: the first is slower than all that follow."""
    times = []
    for _ in range(2):
        start = clock()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(clock() - start)
    return min(times)


def largest_preset(estimate_of: Callable[[str], Estimate | None], minutes: float) -> str:
    """The dearest preset that is expected to take at most so many minutes."""
    if not minutes > 0:
        raise InputError(f"expected a number of minutes above 0, not {minutes:g}")
    for name in reversed(PRESETS):
        estimated = estimate_of(name)
        if estimated is None:
            raise InputError(
                "a limit of minutes needs something to train, on unlabelled data of a known number, and weights that "
                "are not sharded"
            )
        if estimated.seconds <= 60 * minutes:
            logger.info("the preset %s fits into %g minutes", name, minutes)
            return name
    raise InputError(
        f"even the preset {name!r} needs more than the {minutes:g} minutes allowed ({estimated}): allow more, or give "
        "fewer inputs"
    )
