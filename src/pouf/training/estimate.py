"""How long a run will take, before it starts: a small batch is timed, and the rest is counted."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.batches import BatchReader, Draw, ReadBatch
from pouf.errors import InputError
from pouf.inference.encode import FITTED_ON, FeatureStore, InferenceConfig
from pouf.losses.objective import Objective
from pouf.models.lower_layers import using
from pouf.parallel.process_group import processes
from pouf.postprocess import POSTPROCESSORS
from pouf.recipe import PRESETS, Recipe
from pouf.training.bias import MOST, supports_bias_probe
from pouf.training.model import Chunk, make_optimizer, precision
from pouf.training.recipe_for_data import MAX_COUNTED
from pouf.training.two_pass import split_by_length
from pouf.tuners import TUNERS, Target, Tuner
from pouf.tuners.weights import lower_layers
from pouf.validation.selectors import SampleSize, changes_features, sample_size

logger = logging.getLogger(__name__)
clock = time.perf_counter
TIMED = 8  # inputs, and classes, that are timed
SCORED, CORRECTED, UPDATED = 2048, 1024, 2**20  # predictions, corrected ones, and weights that are timed
RUN, REPORT = 0.3, 1.3  # seconds of what does not follow the number of inputs
CORRECTIONS = 1.2  # how often one is fitted: to the last step, and to the chosen one where that is another
SHARED = 0.7  # of the n² similarities of a correction: those of two blocks are computed once for both
NAMES = 40  # passes over predictions that tell which names do not occur, for a report
POINTS = 500  # inputs that a report shows


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
        demonstrations: each input will be read with solved examples.
        known_shares: those of the classes are known, and need not be looked for.
    """
    classifier, n, k = classifier.copy(), len(data), len(classifier.classes)
    few, with_examples = min(k, TIMED), demonstrations or classifier.demonstrations is not None
    # Of a few classes: a thousand prompts would take longer than the answer is worth.
    tuner: Tuner = TUNERS[recipe.tuner.name](
        Target(classifier.backbone, classifier.texts()[:few], None, lambda: _some_prototypes(classifier, few)),
        recipe.tuner,
    )
    cropped = recipe.augment != "none" and data.modality == "image"
    looked_up = not (tuner.touches_inputs or with_examples) and (recipe.views or not cropped)
    batch = min(max(recipe.batch_size, recipe.batch_per_class * k), n)
    lower = lower_layers(classifier.backbone, recipe.tuner) if recipe.steps and not with_examples else None
    with using(lower):
        reading, forward, trained = _inputs(classifier, tuner, data, recipe, batch)
        prompts = _prompts(classifier, tuner, few) * k / few if recipe.steps else 0.0
    once, whole = reading + forward, lower.depth / (lower.depth - lower.count) if lower is not None else 1.0
    missing, size = FeatureStore(classifier.backbone, inference).missing(data), SampleSize(0, 0)
    if recipe.snapshots:
        size = sample_size(n, k, recipe, changes_features(classifier, recipe))
    if looked_up:
        encoded = missing * (recipe.views if cropped else 1)
        inputs, per_step = encoded + size.perturbed, 0.0
    else:
        encoded = 0
        looks = (min(recipe.snapshots, recipe.steps) + 1) * size.inputs + 2 * size.perturbed
        inputs = looks + n * ((recipe.postprocess != "none") + report + bool(recipe.min_class_usage))
        # Each text goes through the lower layers once.
        inputs += round((whole - 1) * (min(n, recipe.steps * batch + size.inputs) + size.perturbed))
        # In chunks the features are computed twice, the first time without a gradient.
        chunked = 0 < recipe.compute.chunk < batch and tuner.touches_inputs
        per_step = batch * (trained if tuner.touches_inputs else once) + chunked * batch * once
    probes = recipe.find_bias and recipe.keep_shares_max_classes >= k and not (known_shares or with_examples)
    if probes and supports_bias_probe(classifier):
        inputs += round(2 * whole * min(n, MOST))
    prototypes = _stand_ins(classifier, few)
    loss = _loss(classifier, recipe, batch, prototypes) + _update(tuner, recipe) if recipe.steps else 0.0
    scored = min(n, MAX_COUNTED) * bool(recipe.min_class_usage) + n * report
    scoring = _scoring(classifier, prototypes)
    seconds = inputs * once + scored * scoring + recipe.steps * (per_step + prompts)
    seconds /= processes().size
    seconds += recipe.steps * loss + _correction(classifier, recipe, n, prototypes) + RUN
    if report:
        seconds += REPORT + min(n, POINTS) * reading + NAMES * min(n, FITTED_ON) * scoring
    return Estimate(seconds, encoded, recipe.steps, 0 if looked_up else batch, data.modality)


def _inputs(
    classifier: Classifier, tuner: Tuner, data: Unlabelled, recipe: Recipe, batch: int
) -> tuple[float, float, float]:
    """Seconds per input: to read it, to encode it among inputs of its length, and to read it and encode it in a batch
    with the gradient of what is tuned."""
    backbone = classifier.backbone
    if backbone.ready_features(data) is not None:
        return 0.0, 0.0, 0.0
    order = data.reading_order() if data.modality == "text" else range(len(data))
    read = BatchReader(data, backbone.prepare, None, backbone.image_size)
    # Of texts some of each length; a batch of training is padded to its longest.
    parts = 3 if data.modality == "text" and len(data) >= 3 * TIMED else 1
    apart = max(1, len(data) // TIMED) if data.modality != "text" else 1
    starts = [len(data) * (2 * part + 1) // (2 * parts) - TIMED // 2 for part in range(parts)] if parts > 1 else [0]
    reading = forward = trained = 0.0
    with data.peek():
        read[[Draw(order[-1], 0)]]  # the first sample waits for processors to load, which no other does
        for start in starts:
            indices = order[start : start + apart * TIMED : apart][:TIMED]
            begun = clock()
            there = read[[Draw(i, 0) for i in indices]]
            reading += (clock() - begun) / len(indices) / parts
            if not there.indices:
                return reading, 0.0, reading  # whether others can be read, the run will say
            forward += _encoding(classifier, there, recipe, None) / parts
        if tuner.touches_inputs and recipe.steps:
            if data.modality == "text":
                size = min(recipe.compute.chunk or batch, batch, 4 * TIMED)
                there = read[[Draw(i, 0) for i in random.Random(0).sample(range(len(data)), size)]]
            trained = reading + (_encoding(classifier, there, recipe, tuner) if there.indices else 0.0)
    return reading, forward, trained


def _encoding(classifier: Classifier, read: ReadBatch, recipe: Recipe, tuner: Tuner | None) -> float:
    """Seconds per input, with the gradient of what is tuned, if anything."""
    tensors = {name: tensor.to(classifier.device) for name, tensor in read.tensors.items()}
    parts = [Chunk(tensors, 0, len(read.indices))]
    if tuner is not None and not recipe.compute.compile:  # as a batch of training
        parts = split_by_length(parts[0], classifier.device)[0]

    def encode() -> None:
        for part in parts:
            assert isinstance(part.content, dict)
            features = classifier.backbone.encode_inputs(part.content)
            if tuner is not None:
                _differentiated(features, tuner)

    with precision(recipe, classifier.device), torch.set_grad_enabled(tuner is not None):
        return _seconds(encode) / len(read.indices)


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


@torch.no_grad()
def _stand_ins(classifier: Classifier, few: int) -> Tensor:
    """(k, d), random, in the place of the prototypes."""
    d = classifier.backbone.prototypes(classifier.prompts()[:few]).shape[1]
    return torch.randn(len(classifier.classes), d, generator=torch.Generator().manual_seed(0)).to(classifier.device)


def _features(prototypes: Tensor, n: int) -> Tensor:
    """(n, d), each near one of the prototypes."""
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(len(prototypes), (n,), generator=draw)
    return prototypes[labels] + torch.randn(n, prototypes.shape[1], generator=draw).to(prototypes)


def _loss(classifier: Classifier, recipe: Recipe, batch: int, prototypes: Tensor) -> float:
    """Seconds of the scores and the loss of one batch and their gradient, beside the encoders."""
    features, moving = _features(prototypes, batch), prototypes.clone().requires_grad_()
    objective = Objective(recipe.objective.model_copy(update={"labels": 0.0}), len(prototypes))

    def once() -> None:
        scores = classifier.backbone.scores(features[torch.arange(batch).tolist()], moving)
        torch.autograd.grad(objective([scores]).total, moving)

    return _seconds(once) if objective.used else 0.0


@torch.no_grad()
def _scoring(classifier: Classifier, prototypes: Tensor) -> float:
    """Seconds per input of its log-probabilities, once it is encoded."""
    features = _features(prototypes, SCORED)
    return _seconds(lambda: classifier.backbone.scores(features, prototypes).logits.log_softmax(1).exp()) / SCORED


def _update(tuner: Tuner, recipe: Recipe) -> float:
    """Seconds of the optimizer at each step, from some of as many weights."""
    size = sum(parameter.numel() for parameter in tuner.parameters.values())
    timed = min(size, UPDATED)
    if not timed:
        return 0.0
    weight = torch.zeros(timed, device=next(iter(tuner.parameters.values())).device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = make_optimizer({"weight": weight}, recipe.optimisation)  # type: ignore[dict-item]
    return _seconds(optimizer.step) * size / timed


@torch.no_grad()
def _correction(classifier: Classifier, recipe: Recipe, n: int, prototypes: Tensor) -> float:
    """Seconds of the correction of all predictions, fitted to the chosen step and to the last: a n + b n²."""
    if recipe.postprocess == "none":
        return 0.0
    fit = POSTPROCESSORS[recipe.postprocess]

    def seconds(m: int) -> float:
        features = _features(prototypes, m)
        scores = classifier.backbone.scores(features, prototypes)
        return _seconds(lambda: fit(features, prototypes, scores, None))

    m, n = CORRECTED, min(n, FITTED_ON)
    if n <= 2 * m:
        return CORRECTIONS * seconds(n)
    first, second = seconds(m), seconds(2 * m)
    square = max(0.0, (second - 2 * first) / (2 * m * m))
    return CORRECTIONS * (max(0.0, first / m - square * m) * n + SHARED * square * n * n)


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
