"""The only training loop in the package. It never sees a label of the target."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.labelled import Shots
from pouf.errors import Diverged, InputError
from pouf.inference.encode import InferenceConfig
from pouf.interruption import defer_signals
from pouf.losses import PaperPrior, PriorEstimate, effective_classes
from pouf.losses.objective import LABEL_LOSSES, UNIFORM, Shares, total_loss, unlabelled_terms
from pouf.models.base import Scores, check_modality
from pouf.parallel.process_group import processes
from pouf.recipe import SAVE_EVERY, Recipe
from pouf.training.callbacks import Callback, Callbacks, Step
from pouf.training.engine import Engine
from pouf.training.feature_batches import InputBatches
from pouf.training.optim import learning_rate, make_optimizer, set_rate
from pouf.training.recipe_for_data import FREE, TargetShares
from pouf.training.state import Saver, TrainingState, random_state, set_random_state
from pouf.training.step import StepLoss, checkpointing
from pouf.validation.checkpoints import Checkpoints, Sample
from pouf.validation.selectors import snapshot_steps

LOOKING, TRAINING = "looking at a sample", "training"
TRIES = 20  # steps that fp16 may skip until it has found a scale of the loss that it can hold


class Training(NamedTuple):
    history: list[Step]
    trainable: int
    checkpoints: Checkpoints | None  # where there is something to choose from


def train(
    classifier: Classifier,
    data: Unlabelled | None,
    recipe: Recipe,
    shots: Shots | None,
    inference: InferenceConfig,
    callbacks: Callbacks,
    checkpoint_dir: Path | None = None,
    shares: TargetShares = FREE,
    resume: bool = False,
) -> Training:
    """Tune a classifier in place, to its last step.

    L = transport * L_transport(sim, T) - information * I(logits) + entropy * H(logits) + labels * KL(shots)

    Args:
        shares: class proportions to hold to, instead of what the recipe assumes.
    """
    stream = data if data is not None else shots.inputs if shots is not None else None
    if stream is None:
        raise InputError("nothing to learn from: give unlabelled data, labelled shots, or both")
    check_modality(classifier.backbone, stream.modality)
    check_shots(shots, recipe, classifier)
    if data is not None and not recipe.objective.needs_unlabelled:
        raise InputError(
            "the recipe looks at labelled shots alone: leave the unlabelled data out, or weigh another term"
        )
    # Without dropout, unless asked for: its noise falls on features and prototypes unlike, and the plan between them
    # follows the noise.
    classifier.eval()
    about = run_identity(classifier, stream, shots, recipe, shares.known) if checkpoint_dir is not None else {}
    saver = Saver(checkpoint_dir, recipe.compute.save_every, about, classifier.backbone.sharded)
    saved = saver.read() if resume else None
    own_dir = checkpoint_dir if processes().is_main else None
    checkpoints = watched(classifier, stream, recipe, callbacks.watching(inference, LOOKING), own_dir, shares)
    tuner = classifier.tune(recipe.tuner)
    if checkpoints is not None:
        checkpoints.begin(tuner)
    total = sum(parameter.numel() for parameter in classifier.parameters())
    callbacks.notify(lambda callback: callback.on_start(recipe, tuner.trainable, total))
    engine = Engine(classifier, tuner, recipe, processes())
    terms = Terms(classifier, engine, stream, shots, recipe, inference, shares.probabilities)
    callbacks.phase(TRAINING, recipe.steps)
    start = [parameter.detach().clone() for parameter in engine.parameters.values()] if recipe.weight_pull else []
    optimizer = make_optimizer(engine.parameters, recipe.optimisation)
    state = TrainingState(engine, optimizer, terms, checkpoints, callbacks)
    if saved is not None:
        state.load_state_dict(saved)
        callbacks.notify(lambda callback: callback.on_resume(state.history))
    try:
        with (
            closing(terms),
            defer_signals(),
            checkpointing(classifier) if recipe.compute.checkpointing else nullcontext(),
        ):
            _train(state, recipe, saver, start)
    finally:
        engine.settle()
    return Training(state.history, tuner.trainable, checkpoints)


def run_identity(
    classifier: Classifier,
    data: Unlabelled,
    shots: Shots | None,
    recipe: Recipe,
    known_shares: Tensor | None,
) -> dict[str, Any]:
    """What must be the same where a run goes on, by what to call it."""
    settings = {name: value for name, value in recipe.flat().items() if name != SAVE_EVERY}
    return settings | {
        "the model": classifier.backbone.fingerprint(),
        "the classes": str([classifier.classes, classifier.descriptions]),
        "the templates": list(classifier.templates),
        "the data": data.fingerprint(),
        "the shots": shots.fingerprint() if shots is not None else None,
        "the proportions": known_shares.tolist() if known_shares is not None else None,
        "the number of processes": processes().size,
        "the sharding of weights": classifier.backbone.sharded,
    }


def watched(
    classifier: Classifier,
    data: Unlabelled,
    recipe: Recipe,
    inference: InferenceConfig,
    folder: Path | None,
    shares: TargetShares = FREE,
) -> Checkpoints | None:
    """Checkpoints with zero-shot as the first; None where there is no choice to be made."""
    if recipe.snapshots == 0 or data.streamed or not recipe.objective.needs_unlabelled:
        return None
    zero_shot = classifier.copy()
    zero_shot.demonstrations = None  # they have labels
    sample = Sample(zero_shot, data, recipe.seed, inference)
    checkpoints = Checkpoints(
        classifier, zero_shot, sample, recipe.steps, folder if recipe.steps else None,
        without_bias=recipe.steps > 0 and recipe.postprocess == "prior-correction", keeps=shares.offsets,
        known_shares=shares.known,
    )  # fmt: skip
    checkpoints.overpredicted = shares.overpredicted
    checkpoints.take_zero_shot()
    return checkpoints


def check_shots(shots: Shots | None, recipe: Recipe, classifier: Classifier) -> None:
    """Labelled shots are there just where the recipe weighs them, with a target for each class."""
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


class Terms(Iterator[StepLoss]):
    """The terms of one step after another, without end, and where they stand."""

    def __init__(
        self,
        classifier: Classifier,
        engine: Engine,
        stream: Unlabelled,
        shots: Shots | None,
        recipe: Recipe,
        inference: InferenceConfig,
        prior: Tensor | None,
    ) -> None:
        def batches_of(data: Unlabelled) -> InputBatches:
            # Each with random numbers of its own, so that what is read ahead of one does not change another.
            generator = torch.Generator().manual_seed(recipe.seed)
            return InputBatches(classifier, engine, data, recipe, generator, inference)

        self.engine, self.recipe, self.shots = engine, recipe, shots
        # Before the first step: what training leaves alone is encoded here, once.
        self.batches = batches_of(stream)
        self.shot_batches = batches_of(shots.inputs) if shots is not None and shots.inputs is not stream else None
        self.estimate, self.shares = _shares(len(classifier.classes), recipe, prior)
        self.draw = random.Random(recipe.seed)

    def __next__(self) -> StepLoss:
        batch = labelled = next(self.batches)
        seed = self.draw.getrandbits(62)
        if self.shot_batches is not None:
            labelled = next(self.shot_batches)
        objective = self.recipe.objective

        def loss_of(scores: list[Scores]) -> StepLoss:
            """From the scores of the batch, and of the labelled one where that is another."""
            first, last = scores[0], scores[-1]
            terms = unlabelled_terms(
                *first, self.shares(first), wanted=objective.weights(), plan=objective.plan, cost=objective.cost,
                regularisation=objective.regularisation,
            )  # fmt: skip
            if self.shots is not None:
                targets = self.shots.targets[labelled.indices].to(last.logits.device)
                terms["labels"] = LABEL_LOSSES[objective.label_loss](last.logits, targets)
            known = {name: term.detach() for name, term in terms.items()}
            return StepLoss(total_loss(terms, objective.weights()), known, Scores(*(each.detach() for each in first)))

        inputs = [batch.own] if labelled is batch else [batch.own, labelled.own]
        return self.engine.loss(inputs, seed, loss_of)

    def close(self) -> None:
        self.batches.close()
        if self.shot_batches is not None:
            self.shot_batches.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "batches": self.batches.state_dict(),
            "shots": self.shot_batches.state_dict() if self.shot_batches is not None else None,
            "prior": vars(self.estimate) if self.estimate is not None else None,
            "dropout": random_state(self.draw),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state["batches"])
        if self.shot_batches is not None:
            self.shot_batches.load_state_dict(state["shots"])
        if self.estimate is not None:
            vars(self.estimate).update(state["prior"])
        set_random_state(self.draw, state["dropout"])


Estimate = PaperPrior | PriorEstimate


def _shares(k: int, recipe: Recipe, prior: Tensor | None) -> tuple[Estimate | None, Callable[[Scores], Shares]]:
    """What is estimated, if anything, and the proportions of k classes to assume with a batch.

    Those to hold to, or what the recipe says.
    """
    of = recipe.objective.prior
    if prior is not None and of == "paper":
        papers_own = Shares(plan=prior)  # appendix: p(w) is set to the known proportions, the information has none
        return None, lambda scores: papers_own
    if prior is not None:
        # One pull is enough: with the prior in the plan as well, the predictions overshoot it.
        fixed = Shares(marginal=prior, known=True)
        return None, lambda scores: fixed
    if of == "paper":
        papers = PaperPrior(k, recipe.steps)
        return papers, lambda scores: Shares(plan=papers.update(scores.sim / scores.temperature))
    if of == "estimated":
        estimate = PriorEstimate(k, recipe.steps)
        return estimate, lambda scores: Shares(*(estimate.update(scores.logits),) * 2)
    return None, lambda scores: UNIFORM


def _train(state: TrainingState, recipe: Recipe, saver: Saver, anchors: Sequence[Tensor]) -> None:
    engine = state.engine
    parameters = list(engine.parameters.values())
    last_good = [parameter.detach().clone() for parameter in parameters]
    history, callbacks = state.history, state.callbacks
    to_look_at = set(snapshot_steps(recipe.steps, recipe.snapshots))
    start = time.perf_counter() - (history[-1].seconds if history else 0.0)
    skipped = 0  # steps in a row whose scaled gradient was too large for fp16

    def agreed(event: Callable[[Callback], bool | None]) -> bool:
        """Whether a callback of any process answered with True: all go on, or none."""
        return any(processes().gather_objects(callbacks.notify(event)))

    def look(step: int) -> bool:
        if state.checkpoints is not None:
            state.checkpoints.take(step)
            if not state.checkpoints.finite:
                raise Diverged(step, "a prediction", recipe.optimisation.lr)
        return agreed(lambda callback: callback.on_checkpoint(step, engine.classifier))

    try:
        if 0 in to_look_at and not history:
            look(0)
        for step in range(len(history) + 1, recipe.steps + 1):
            lr = learning_rate(recipe.optimisation, step - 1, recipe.steps)
            set_rate(state.optimizer, lr)
            current = next(state.terms)
            if not current.loss.isfinite():
                raise Diverged(step, "the loss", recipe.optimisation.lr)
            # This loss is finite, so the weights that gave it are good.
            _copy(parameters, last_good)
            state.optimizer.zero_grad()
            engine.backward(current.loss)
            engine.scaler.unscale_(state.optimizer)
            norm = engine.clip_gradients(recipe.optimisation.clip or math.inf)
            skipped = 0 if norm.isfinite() else skipped + 1
            if skipped > (TRIES if engine.scaler.is_enabled() else 0):
                raise Diverged(step, "the gradient", recipe.optimisation.lr)
            try:
                engine.scaler.step(state.optimizer)
            except RuntimeError as error:
                if "without overflow" not in str(error):  # a rate, or its product with another, beyond fp32
                    raise
                raise Diverged(step, "the update", recipe.optimisation.lr) from None
            engine.scaler.update()
            _pull(parameters, anchors, recipe.weight_pull)
            if recipe.optimisation.dropout:
                engine.classifier.eval()
            history.append(
                Step(
                    step=step,
                    loss=current.loss.item(),
                    terms={name: term.item() for name, term in current.terms.items()},
                    effective_classes=effective_classes(current.scores.logits).item(),
                    temperature=current.scores.temperature.item(),
                    lr=lr,
                    seconds=time.perf_counter() - start,
                )
            )
            enough = agreed(lambda callback: callback.on_step(history[-1]))
            if step in to_look_at or (enough and to_look_at):
                enough = look(step) or enough
            if enough:
                break
            saver.after_step(state)
        if not engine.all_finite():
            raise Diverged(len(history), "a weight after the update", recipe.optimisation.lr)
    except Diverged:
        _copy(last_good, parameters)
        raise


@torch.no_grad()
def _pull(parameters: Sequence[Tensor], anchors: Sequence[Tensor], share: float) -> None:
    """θ ← θ + share (θ₀ - θ), where there are anchors."""
    for parameter, anchor in zip(parameters if share else (), anchors, strict=True):
        parameter.add_(anchor - parameter, alpha=share)


@torch.no_grad()
def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for to, value in zip(target, source, strict=True):
        to.copy_(value)
