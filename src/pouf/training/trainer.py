"""The only training loop in the package. It never sees a label of the target."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pouf.base import BaseClassifier
from pouf.data.base import Unlabelled
from pouf.data.labelled import Shots
from pouf.distributed import World
from pouf.errors import Diverged, InputError
from pouf.inference import InferenceConfig
from pouf.losses import PaperPrior, PriorEstimate, effective_classes
from pouf.losses.objective import LABEL_LOSSES, total_loss, unlabelled_terms
from pouf.models.base import Scores, check_modality
from pouf.recipe import Recipe
from pouf.training.callbacks import Callbacks, Step
from pouf.training.feature_batches import FeatureBatch, checkpointing, feature_batches, precision, training_mode
from pouf.training.optim import learning_rate, make_optimizer, set_rate
from pouf.tuners import Tuner
from pouf.validation.checkpoints import Checkpoints, Sample
from pouf.validation.selectors import snapshot_steps


class Training(NamedTuple):
    history: list[Step]
    trainable: int
    checkpoints: Checkpoints | None  # where there is something to choose from


def train(
    classifier: BaseClassifier,
    data: Unlabelled | None,
    recipe: Recipe,
    shots: Shots | None,
    inference: InferenceConfig,
    callbacks: Callbacks,
    checkpoint_dir: Path | None = None,
) -> Training:
    """Tune a classifier in place, to its last step.

    L = transport * L_transport(sim, T) - information * I(logits) + entropy * H(logits) + labels * KL(shots)
    """
    stream = data if data is not None else shots.inputs if shots is not None else None
    if stream is None:
        raise InputError("nothing to learn from: give unlabelled data, labelled shots, or both")
    check_modality(classifier.backbone, stream.modality)
    _check_shots(shots, recipe, classifier)
    if data is not None and not recipe.objective.needs_unlabelled:
        raise InputError(
            "the recipe looks at labelled shots alone: leave the unlabelled data out, or weigh another term"
        )
    if recipe.temperature:
        classifier.set_temperature(recipe.temperature)
    # Without dropout, unless asked for: its noise falls on features and prototypes unlike, and the plan between them
    # follows the noise.
    classifier.eval()
    checkpoints = watched(classifier, stream, recipe, inference, checkpoint_dir)
    tuner = classifier.tune(recipe.tuner)
    if checkpoints is not None:
        checkpoints.begin(tuner)
    total = sum(parameter.numel() for parameter in classifier.parameters())
    callbacks.tell(lambda callback: callback.on_start(recipe, tuner.trainable, total))
    terms = _terms(classifier, tuner, stream, shots, recipe, inference)

    def look(step: int) -> None:
        if checkpoints is not None:
            checkpoints.take(step)
        callbacks.tell(lambda callback: callback.on_checkpoint(step))

    try:
        with checkpointing(classifier) if recipe.compute.checkpointing else nullcontext():
            history = _train(tuner, terms, recipe, inference.world, callbacks, look)
    finally:
        classifier.eval()
    return Training(history, tuner.trainable, checkpoints)


def watched(
    classifier: BaseClassifier, data: Unlabelled, recipe: Recipe, inference: InferenceConfig, folder: Path | None
) -> Checkpoints | None:
    """Checkpoints with zero-shot as the first; None where there is no choice to be made."""
    if recipe.snapshots == 0 or data.streamed or not recipe.objective.needs_unlabelled:
        return None
    # Demonstrations have labels: they are no part of zero-shot.
    demonstrations, classifier.demonstrations = classifier.demonstrations, None
    sample = Sample(classifier, data, recipe.seed, inference)
    checkpoints = Checkpoints(classifier, sample, recipe.steps, folder if recipe.steps else None)
    checkpoints.take_zero_shot()
    classifier.demonstrations = demonstrations
    return checkpoints


def _check_shots(shots: Shots | None, recipe: Recipe, classifier: BaseClassifier) -> None:
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
    """What a step sums up, the scores it came from, and what remains to be done once it is differentiated."""

    terms: dict[str, Tensor]  # scalars, before weighting
    scores: Scores
    push_back: list[Callable[[], object]]


def _terms(
    classifier: BaseClassifier,
    tuner: Tuner,
    stream: Unlabelled,
    shots: Shots | None,
    recipe: Recipe,
    inference: InferenceConfig,
) -> Iterator[StepTerms]:
    """The terms of one step after another, without end."""

    def batches_of(data: Unlabelled) -> Iterator[FeatureBatch]:
        # Each with a stream of random numbers of its own, so that what is read ahead of one does not change another.
        generator = torch.Generator().manual_seed(recipe.seed)
        return feature_batches(classifier, tuner, data, recipe, generator, inference)

    # Before the first step: what training leaves alone is encoded here, once.
    batches = batches_of(stream)
    shot_batches = batches_of(shots.inputs) if shots is not None and shots.inputs is not stream else None
    return _summed_up(classifier, recipe, batches, shots, shot_batches)


def _summed_up(
    classifier: BaseClassifier,
    recipe: Recipe,
    batches: Iterator[FeatureBatch],
    shots: Shots | None,
    shot_batches: Iterator[FeatureBatch] | None,
) -> Iterator[StepTerms]:
    objective = recipe.objective
    wanted = objective.weights()
    prior_of = _prior(classifier, recipe)
    draw = random.Random(recipe.seed)
    for batch in batches:
        with training_mode(classifier, recipe, draw.getrandbits(62)), precision(recipe, classifier.device):
            prototypes = classifier.prototypes().float()
        scores = classifier.backbone.scores(batch.features, prototypes)
        terms = unlabelled_terms(
            *scores, prior_of(scores), wanted=wanted, plan=objective.plan, cost=objective.cost,
            regularisation=objective.regularisation, pull=objective.prior != "paper",
        )  # fmt: skip
        push_back: list[Callable[[], object]] = [batch.push_back]
        if shots is not None:
            labelled, logits = batch, scores.logits
            if shot_batches is not None:
                labelled = next(shot_batches)
                push_back.append(labelled.push_back)
                logits = classifier.backbone.scores(labelled.features, prototypes).logits
            targets = shots.targets[labelled.indices].to(logits.device)
            terms["labels"] = LABEL_LOSSES[objective.label_loss](logits, targets)
        if recipe.optimisation.dropout:
            push_back.append(classifier.eval)
        yield StepTerms(terms, scores, push_back)


def _prior(classifier: BaseClassifier, recipe: Recipe) -> Callable[[Scores], Tensor | None]:
    """The class proportions to use with a batch: the known ones, or what the recipe says."""
    of, k = recipe.objective.prior, len(classifier.classes)
    if classifier.prior is not None or of == "uniform":
        return lambda scores: classifier.prior
    if of == "paper":
        papers = PaperPrior(k, recipe.steps)
        return lambda scores: papers.update(scores.sim / scores.temperature)
    estimate = PriorEstimate(k, recipe.steps)
    return lambda scores: estimate.update(scores.logits)


def _train(
    tuner: Tuner,
    terms: Iterator[StepTerms],
    recipe: Recipe,
    world: World,
    callbacks: Callbacks,
    look: Callable[[int], None],
) -> list[Step]:
    parameters = list(tuner.parameters.values())
    optimizer = make_optimizer(tuner.parameters, recipe.optimisation)
    last_good = [parameter.detach().clone() for parameter in parameters]
    history: list[Step] = []
    to_look_at = set(snapshot_steps(recipe.steps, recipe.snapshots))
    start = time.perf_counter()
    try:
        if 0 in to_look_at:
            look(0)
        for step in range(1, recipe.steps + 1):
            lr = learning_rate(recipe.optimisation, step - 1, recipe.steps)
            set_rate(optimizer, lr)
            current = next(terms)
            loss = total_loss(current.terms, recipe.objective.weights())
            if not loss.isfinite():
                raise Diverged(step, "the loss", recipe.optimisation.lr)
            # This loss is finite, so the weights that gave it are good.
            _copy(parameters, last_good)
            optimizer.zero_grad()
            loss.backward()
            for push_back in current.push_back:
                push_back()
            world.average_gradients(parameters)
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
            enough = callbacks.tell(lambda callback: callback.on_step(history[-1]))
            if step in to_look_at or (enough and to_look_at):
                look(step)
            if enough:
                break
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
