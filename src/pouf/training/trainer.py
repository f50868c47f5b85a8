"""adapt(): the only training loop in the package. It never sees a label of the target."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Subset, Unlabelled
from pouf.data.cache import FeatureCache
from pouf.data.shots import Shots
from pouf.distributed import World, join
from pouf.errors import Diverged, InputError
from pouf.inference import InferenceConfig
from pouf.losses import PriorEstimate, effective_classes
from pouf.losses.objective import Scores, label_terms, needs_unlabelled, total_loss, unlabelled_terms
from pouf.models.base import check_modality
from pouf.postprocess.postprocessor import Postprocessor
from pouf.recipe import Recipe
from pouf.training.feature_batches import FeatureBatch, checkpointing, feature_batches, precision
from pouf.training.optim import learning_rate, make_optimizer
from pouf.training.pseudo_labels import pseudo_labelled
from pouf.tuners import Tuner, describe
from pouf.validation.diagnostics import SnapshotPredictions, perturbation
from pouf.validation.selective import nearness
from pouf.validation.selectors import PERTURBED, SAMPLE, Choice, Snapshots, snapshot_steps


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
    history: list[Step]  # empty where nothing was trained
    trainable: int
    total: int
    snapshots: Snapshots | None = None  # of some steps, where there are any: weights to go back to
    choice: Choice | None = None  # the step to believe, found without labels
    chosen_adjustment: Postprocessor | None = (
        None  # of that step, where predictions are adjusted and it is not the last
    )

    def use_chosen(self) -> None:
        """Put the classifier back to the step that was chosen."""
        if self.choice is not None and self.snapshots is not None and self.choice.step != max(self.snapshots.seen):
            self.snapshots.restore(self.choice.step)
            self.classifier.postprocessor = self.chosen_adjustment


def adapt(
    classifier: Classifier,
    data: Unlabelled | None,
    recipe: Recipe | None = None,
    *,
    shots: Shots | None = None,
    cache: FeatureCache | None = None,
    on_start: Callable[[str], None] = print,
    on_step: Callable[[Step], None] | None = None,
    on_snapshot: Callable[[int], None] | None = None,
) -> Adaptation:
    """Tune a classifier on unlabelled data, in place.

        L = transport * L_transport(sim, T) - information * I(logits) + entropy * H(logits) + labels * KL(shots)

    and then, where the recipe says so, adjust its predictions as a whole.

    Args:
        classifier: its `classes` and `templates` say what to look for.
        data: images or texts. They have no labels, and neither their names nor their order play a part.
            None with shots: the shots themselves, their labels left out.
        recipe: all settings; the paper's by default.
        shots: a few examples with labels, for the term `labels` of the recipe. The data stay without.
        cache: where features that training can't change are kept and found again.
        on_start: is told "trainable a of b (c %)"; printed by default.
        on_step: is told of each step.
        on_snapshot: is told the number of a step at which the classifier can be looked at; 0 is before the first.

    Returns:
        The classifier at the last step, and the step that was chosen without labels, `result.choice.step`, which
        `result.use_chosen()` goes back to.

    Raises:
        Diverged: the loss or its gradient is not finite. The classifier then has the weights of the last good step.
    """
    recipe = recipe or Recipe()
    world = join(classifier.backbone.device)
    inference = InferenceConfig(recipe.compute.chunk or 64, recipe.compute.workers, cache, world=world)
    if recipe.pseudo_labels:
        data, shots = None, pseudo_labelled(classifier, data, shots, recipe.pseudo_labels, inference)
    tuned = Tuned([], 0, None)
    if recipe.steps > 0:
        watch = Watch(on_start, on_step, on_snapshot)
        tuned = _tune(classifier, data, recipe, shots, inference, watch)
    snapshots = tuned.snapshots
    choice = snapshots.choose() if snapshots is not None else None
    chosen_adjustment = None
    if recipe.adjust != "none":
        inputs = data if data is not None else shots.inputs if shots is not None else None
        if inputs is None:
            raise InputError(f"nothing to fit {recipe.adjust!r} on: give unlabelled data")
        if recipe.steps == 0:
            snapshots = _snapshots(classifier, None, inputs, recipe, inference)
        if snapshots is not None and choice is not None and choice.step not in (0, recipe.steps):
            # Fitted on what the chosen step predicts: the last one's would not fit it.
            snapshots.restore(choice.step)
            chosen_adjustment = adjust_at(classifier, choice.step, inputs, recipe, inference, snapshots)
            snapshots.restore(recipe.steps)
        # Where nothing is trained, the adjustment is the only step there is.
        adjust_at(classifier, max(1, recipe.steps), inputs, recipe, inference, snapshots)
        if snapshots is not None and recipe.steps == 0:
            choice = snapshots.choose()
    total = sum(p.numel() for p in classifier.parameters())
    return Adaptation(classifier, tuned.history, tuned.trainable, total, snapshots, choice, chosen_adjustment)


def adjust_at(
    classifier: Classifier,
    step: int,
    data: Unlabelled,
    recipe: Recipe,
    inference: InferenceConfig,
    snapshots: Snapshots | None,
) -> Postprocessor | None:
    """Adjust predictions as the recipe says; the snapshot of this step then shows them as they will be used."""
    classifier.postprocessor = None
    classifier.adjust(recipe.adjust, classifier.encode(data, inference), recipe.seed)
    if snapshots is not None and snapshots.look is not None:
        snapshots.seen[step] = snapshots.look(True)
    return classifier.postprocessor


class Watch(NamedTuple):
    """Who is told of what happens."""

    on_start: Callable[[str], None]
    on_step: Callable[[Step], None] | None
    on_snapshot: Callable[[int], None] | None


class Tuned(NamedTuple):
    history: list[Step]
    trainable: int
    snapshots: Snapshots | None


def _tune(
    classifier: Classifier,
    data: Unlabelled | None,
    recipe: Recipe,
    shots: Shots | None,
    inference: InferenceConfig,
    watch: Watch,
) -> Tuned:
    world, cache = inference.world, inference.cache
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
    watch.on_start(describe(tuner.trainable, total))
    # Without dropout: its noise falls on features and prototypes unlike, and the plan between them follows the noise.
    classifier.eval()
    generator = torch.Generator().manual_seed(recipe.seed)
    batches = feature_batches(classifier, tuner, stream, recipe, generator, world, cache)
    shot_batches = None
    if shots is not None and shots.inputs is not stream:
        # A stream of its own, so that what is read ahead of the one does not change the other.
        own = torch.Generator().manual_seed(recipe.seed)
        shot_batches = feature_batches(classifier, tuner, shots.inputs, recipe, own, world, cache)
    terms = _terms(classifier, batches, shots, shot_batches, recipe)
    snapshots = _snapshots(classifier, tuner, stream, recipe, inference)

    def look(step: int) -> None:
        if snapshots is not None:
            snapshots.take(step)
        if watch.on_snapshot is not None:
            watch.on_snapshot(step)

    with checkpointing(classifier) if recipe.compute.checkpointing else nullcontext():
        history = _train(tuner, terms, recipe, world, watch.on_step, look)
    return Tuned(history, tuner.trainable, snapshots)


def _snapshots(
    classifier: Classifier, tuner: Tuner | None, stream: Unlabelled, recipe: Recipe, inference: InferenceConfig
) -> Snapshots | None:
    """Where snapshots are kept, with the first one where nothing is to be trained; None where there is no choice."""
    if recipe.snapshots == 0 or stream.streamed or not needs_unlabelled(recipe.objective):
        return None
    order = torch.randperm(len(stream), generator=torch.Generator().manual_seed(recipe.seed))
    by_content = stream.content_order()
    sample = Subset(stream, [by_content[int(place)] for place in order[:SAMPLE]])
    inference = replace(inference, on_batch=None)
    few, change = Subset(sample, range(min(PERTURBED, len(sample)))), perturbation(stream.modality)
    encoded, perturbed = classifier.encode(sample, inference), classifier.encode(few, inference, change=change)
    # The disturbed ones stand for the first of the others: what can't be read must not shift them.
    both = sum(place < len(few) for place in encoded.indices)

    def look(trained: bool) -> SnapshotPredictions:
        seen, changed = encoded, perturbed
        if trained and tuner is not None and tuner.touches_inputs:
            fresh = replace(inference, cache=None)
            seen, changed = classifier.encode(sample, fresh), classifier.encode(few, fresh, change=change)
        probabilities = [
            torch.cat([block.log_probabilities for block in classifier.score_features(each)]).exp()
            for each in (seen, changed)
        ]
        return SnapshotPredictions(probabilities[0], probabilities[1][:both], nearness(classifier, seen))

    snapshots = Snapshots(tuner.parameters if tuner is not None else {}, encoded.features, look)
    if tuner is None:
        snapshots.take(0)
    return snapshots


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
    """What a step sums up, the scores it came from, and what remains to be done once it is differentiated."""

    terms: dict[str, Tensor]  # scalars, before weighting
    scores: Scores
    push_back: list[Callable[[], None]]


def _terms(
    classifier: Classifier,
    batches: Iterator[FeatureBatch],
    shots: Shots | None,
    shot_batches: Iterator[FeatureBatch] | None,
    recipe: Recipe,
) -> Iterator[StepTerms]:
    """The terms of one step after another, without end. Shots without batches of their own share the others."""
    weights = recipe.objective
    estimate = None
    if weights.prior == "estimated" and classifier.prior is None:
        estimate = PriorEstimate(len(classifier.classes), recipe.steps)
    for batch in batches:
        with precision(recipe, classifier.backbone.device):
            prototypes = classifier.prototypes().float()
        scores = classifier.backbone.scores(batch.features, prototypes)
        prior = estimate.update(scores.logits) if estimate is not None else classifier.prior
        terms = unlabelled_terms(scores, weights, prior)
        push_back = [batch.push_back]
        if shots is not None:
            shot_scores, indices = scores, batch.indices
            if shot_batches is not None:
                labelled = next(shot_batches)
                push_back.append(labelled.push_back)
                shot_scores, indices = classifier.backbone.scores(labelled.features, prototypes), labelled.indices
            terms |= label_terms(shot_scores, shots.targets[indices].to(shot_scores.logits.device), weights)
        yield StepTerms(terms, scores, push_back)


def _train(
    tuner: Tuner,
    terms: Iterator[StepTerms],
    recipe: Recipe,
    world: World,
    on_step: Callable[[Step], None] | None,
    look: Callable[[int], None],
) -> list[Step]:
    parameters = list(tuner.parameters.values())
    optimizer = make_optimizer(parameters, recipe.optimisation)
    last_good = [parameter.detach().clone() for parameter in parameters]
    history: list[Step] = []
    to_look_at = set(snapshot_steps(recipe.steps, recipe.snapshots))
    start = time.perf_counter()
    try:
        if 0 in to_look_at:
            look(0)
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
            if on_step is not None:
                on_step(history[-1])
            if step in to_look_at:
                look(step)
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
