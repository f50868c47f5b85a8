"""adapt(): the only training loop in the package. It never sees a label of the target."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.backbones.base import check_modality
from pouf.classifier import Classifier
from pouf.data.augment import AUGMENTATIONS
from pouf.data.base import Unlabelled
from pouf.data.shots import Shots
from pouf.demonstrations import Demonstrated
from pouf.errors import Diverged, InputError
from pouf.objectives import effective_classes
from pouf.objectives.terms import Scores, label_terms, needs_unlabelled, total_loss, unlabelled_terms
from pouf.recipe import Optimisation, Recipe
from pouf.tuners import Tuner, describe


class Step(NamedTuple):
    """What one step of training showed, before its update."""

    step: int  # from 1
    loss: float
    terms: dict[str, float]  # each term of the loss, before weighting
    effective_classes: float  # exp H(mean p) over the batch: near 1 means collapse
    temperature: float
    lr: float
    seconds: float  # since the start


class Adaptation(NamedTuple):
    classifier: Classifier  # the one that was given, tuned, at the last step
    history: list[Step]
    trainable: int
    total: int


def adapt(
    classifier: Classifier,
    data: Unlabelled | None,
    recipe: Recipe | None = None,
    *,
    shots: Shots | None = None,
    on_start: Callable[[str], None] = print,
    on_step: Callable[[Step], None] | None = None,
) -> Adaptation:
    """Tune a classifier on unlabelled data, in place.

        L = transport * L_transport(sim, T) - information * I(logits) + entropy * H(logits) + labels * KL(shots)

    Args:
        classifier: its `classes` and `templates` say what to look for.
        data: images or texts. They have no labels, and neither their names nor their order play a part.
            None with shots: the shots themselves, their labels left out.
        recipe: all settings; the paper's by default.
        shots: a few examples with labels, for the term `labels` of the recipe. The data stay without.
        on_start: is told "trainable a of b (c %)"; printed by default.
        on_step: is told of each step.

    Raises:
        Diverged: the loss or its gradient is not finite. The classifier then has the weights of the last good step.
    """
    recipe = recipe or Recipe()
    stream = data if data is not None else shots.inputs if shots is not None else None
    if stream is None:
        raise InputError("nothing to learn from: give unlabelled data, labelled shots, or both")
    check_modality(classifier.backbone, stream.modality)
    _check_shots(shots, recipe, classifier)
    if data is not None and not needs_unlabelled(recipe.objective):
        raise InputError(
            "the recipe looks at labelled shots alone: leave the unlabelled data out, or weigh another term"
        )
    if recipe.temperature:
        classifier.set_temperature(recipe.temperature)
    tuner = classifier.tune(recipe.tuning)
    total = sum(parameter.numel() for parameter in classifier.parameters())
    on_start(describe(tuner.trainable, total))
    generator = torch.Generator().manual_seed(recipe.seed)
    terms = _terms(classifier, tuner, stream, shots, recipe, generator)
    history = _train(classifier, tuner, terms, recipe, on_step)
    return Adaptation(classifier, history, tuner.trainable, total)


def _check_shots(shots: Shots | None, recipe: Recipe, classifier: Classifier) -> None:
    if (shots is not None) != (recipe.objective.labels > 0):
        raise InputError(
            "labelled shots need a weight, as objective.labels = 1.0"
            if shots is not None
            else "the recipe weighs labels, but there are no labelled shots: give some, or set objective.labels to 0"
        )
    if shots is not None and shots.targets.shape != (len(shots.inputs), len(classifier.classes)):
        raise InputError(
            f"targets of shape {tuple(shots.targets.shape)}, expected one row for each of the {len(shots.inputs)} "
            f"shots and one column for each of the {len(classifier.classes)} classes"
        )


class StepTerms(NamedTuple):
    """What a step sums up, and the scores it came from."""

    terms: dict[str, Tensor]  # scalars, before weighting
    scores: Scores


def _terms(
    classifier: Classifier,
    tuner: Tuner,
    stream: Unlabelled,
    shots: Shots | None,
    recipe: Recipe,
    generator: torch.Generator,
) -> Iterator[StepTerms]:
    """The terms of one step after another, without end. Where the stream is the shots, both share their batches."""
    weights = recipe.objective
    score = _scorer(classifier, tuner, stream, recipe, generator)
    score_shots = None
    if shots is not None and shots.inputs is not stream:
        score_shots = _scorer(classifier, tuner, shots.inputs, recipe, generator)
    while True:
        prototypes = classifier.prototypes()
        scores, indices = score(prototypes)
        terms = unlabelled_terms(scores, weights)
        if shots is not None:
            shot_scores, shot_indices = (scores, indices) if score_shots is None else score_shots(prototypes)
            terms |= label_terms(shot_scores, shots.targets[shot_indices].to(shot_scores.logits.device), weights)
        yield StepTerms(terms, scores)


def _scorer(
    classifier: Classifier, tuner: Tuner, data: Unlabelled, recipe: Recipe, generator: torch.Generator
) -> Callable[[Tensor], tuple[Scores, list[int]]]:
    """Scores of the next random batch against prototypes, and which samples these were."""
    source = _feature_source(classifier, tuner, data, recipe, generator)
    batches = data.random_batches(recipe.batch_size, generator, source.read)

    def score(prototypes: Tensor) -> tuple[Scores, list[int]]:
        batch = next(batches)
        return classifier.backbone.scores(source.features(batch.samples), prototypes), batch.indices

    return score


def _train(
    classifier: Classifier,
    tuner: Tuner,
    terms: Iterator[StepTerms],
    recipe: Recipe,
    on_step: Callable[[Step], None] | None,
) -> list[Step]:
    parameters = list(tuner.parameters.values())
    optimizer = make_optimizer(parameters, recipe.optimisation)
    last_good = [parameter.detach().clone() for parameter in parameters]
    history: list[Step] = []
    start = time.perf_counter()
    # Without dropout: its noise falls on features and prototypes unlike, and the plan between them follows the noise.
    classifier.eval()
    try:
        for step in range(1, recipe.steps + 1):
            lr = learning_rate(recipe.optimisation, step - 1, recipe.steps)
            for group in optimizer.param_groups:
                group["lr"] = lr
            current = next(terms)
            loss = total_loss(current.terms, recipe.objective)
            if not loss.isfinite():
                raise Diverged(step, "the loss", recipe.optimisation.lr)
            # This loss is finite, so the weights that gave it are good.
            _copy(parameters, last_good)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, recipe.optimisation.clip or math.inf)
            if not norm.isfinite():
                raise Diverged(step, "the gradient", recipe.optimisation.lr)
            optimizer.step()
            history.append(
                Step(
                    step=step,
                    loss=loss.item(),
                    terms={name: term.item() for name, term in current.terms.items()},
                    effective_classes=effective_classes(current.scores.logits.detach()).item(),
                    temperature=current.scores.temperature.item(),
                    lr=lr,
                    seconds=time.perf_counter() - start,
                )
            )
            if on_step is not None:
                on_step(history[-1])
        if not all(parameter.isfinite().all() for parameter in parameters):
            raise Diverged(recipe.steps, "a weight after the update", recipe.optimisation.lr)
    except Diverged:
        _copy(last_good, parameters)
        raise
    return history


@torch.no_grad()
def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for to, value in zip(target, source, strict=True):
        to.copy_(value)


class FeatureSource(NamedTuple):
    read: Callable[[int], Any]  # one sample of the data
    features: Callable[[list[Any]], Tensor]  # several samples -> (n, d)


def _feature_source(
    classifier: Classifier, tuner: Tuner, data: Unlabelled, recipe: Recipe, generator: torch.Generator
) -> FeatureSource:
    """How samples become features: looked up where training can't change them, else computed anew."""
    backbone = classifier.backbone
    augment = AUGMENTATIONS[recipe.augment] if data.modality == "image" else None
    size = backbone.image_size
    if augment is not None and size is None:
        raise InputError(f"{type(backbone).__name__} has no image_size to crop to: set it, or use augment = 'none'")
    if augment is None and not tuner.touches_inputs:
        encoded = classifier.encode(data)
        row = {index: i for i, index in enumerate(encoded.indices)}
        table = encoded.features.to(backbone.device)
        return FeatureSource(row.__getitem__, lambda rows: table[rows])

    def compute(samples: list[Any]) -> Tensor:
        if augment is not None and size is not None:
            samples = [augment(sample, size, generator) for sample in samples]
        tensors = {name: tensor.to(backbone.device) for name, tensor in backbone.prepare(samples).items()}
        with torch.set_grad_enabled(tuner.touches_inputs):
            return backbone.encode_inputs(tensors)

    if classifier.demonstrations is not None:
        data = Demonstrated(data, classifier.demonstrations, generator)
    return FeatureSource(data.read, compute)


def make_optimizer(parameters: list[torch.nn.Parameter], settings: Optimisation) -> torch.optim.Optimizer:
    return OPTIMIZERS[settings.name](parameters, settings)


OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter], Optimisation], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, s: torch.optim.SGD(
        parameters,
        lr=s.lr,
        momentum=s.momentum,
        nesterov=s.nesterov and s.momentum > 0,
        weight_decay=s.weight_decay,
    ),
    "adamw": lambda parameters, s: torch.optim.AdamW(parameters, lr=s.lr, weight_decay=s.weight_decay),
}


def learning_rate(settings: Optimisation, step: int, steps: int) -> float:
    """The rate of update number `step`, from 0."""
    return settings.lr * SCHEDULES[settings.schedule](settings, step, steps)


SCHEDULES: dict[str, Callable[[Optimisation, int, int], float]] = {
    "paper": lambda s, step, steps: (1 + s.gamma * step) ** -s.alpha,
    "linear": lambda s, step, steps: 1 - step / steps,
    "cosine": lambda s, step, steps: 0.5 * (1 + math.cos(math.pi * step / steps)),
    "constant": lambda s, step, steps: 1.0,
}
