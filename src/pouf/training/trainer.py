"""The only training loop in the package. It never sees a label of the target."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.errors import Diverged, InputError
from pouf.inference.encode import InferenceConfig
from pouf.interruption import defer_signals
from pouf.losses import effective_classes
from pouf.losses.objective import Objective
from pouf.models.base import check_modality
from pouf.parallel.process_group import connection_errors, processes
from pouf.recipe import SAVE_EVERY, Recipe
from pouf.training.batches import Batches
from pouf.training.callbacks import Callback, Callbacks, Step
from pouf.training.model import Engine, checkpointing, learning_rate, make_optimizer
from pouf.training.plan import Plan, check_shots
from pouf.training.state import Saver, TrainingState
from pouf.training.two_pass import two_pass, whole
from pouf.tuners import tune
from pouf.validation.checkpoints import Checkpoints
from pouf.validation.selectors import Sample, changes_features, sample_size, snapshot_steps

LOOKING, TRAINING = "looking at a sample", "training"
COPY_EVERY = 10  # steps between two copies of the trained weights, which a run that diverges goes back to
TRIES = 20  # steps that fp16 may skip until it has found a scale of the loss that it can hold


class Training(NamedTuple):
    history: list[Step]
    trainable: int
    checkpoints: Checkpoints | None  # where there is something to choose from


def train(
    classifier: Classifier,
    plan: Plan,
    inference: InferenceConfig,
    callbacks: Callbacks,
    checkpoint_dir: Path | None = None,
    resume: bool = False,
) -> Training:
    """Tune a classifier in place, to its last step.

    L = transport * L_transport(sim, T) - information * I(logits) + entropy * H(logits) + labels * KL(shots)
    + teacher * KL(teacher)
    """
    stream, recipe = _checked(classifier, plan), plan.recipe
    # Without dropout, unless the recipe has it: its noise differs for features and prototypes, and the plan between
    # them follows the noise.
    classifier.eval()
    about = run_identity(classifier, plan) if checkpoint_dir is not None else {}
    saver = Saver(checkpoint_dir, recipe.compute.save_every, about, classifier.backbone.sharded)
    saved = saver.read() if resume else None
    own_dir = checkpoint_dir if processes().is_main else None
    checkpoints = make_checkpoints(classifier, plan, callbacks.watching(inference, LOOKING), own_dir)
    tuner = tune(classifier, recipe.tuner)
    if checkpoints is not None:
        checkpoints.begin(tuner)
    total = sum(parameter.numel() for parameter in classifier.parameters())
    callbacks.notify(lambda callback: callback.on_start(recipe, tuner.trainable, total))
    objective = Objective(recipe.objective, len(classifier.classes), recipe.steps, plan.targets.probabilities)
    engine = Engine(classifier, tuner, objective, recipe, processes())
    batches = Batches(classifier, tuner, stream, plan.shots, recipe, inference, plan.teacher)
    callbacks.phase(TRAINING, recipe.steps)
    start_weights = (
        [parameter.detach().clone() for parameter in engine.parameters.values()] if recipe.weight_pull else []
    )
    optimizer = make_optimizer(engine.parameters, recipe.optimisation)
    state = TrainingState(engine, optimizer, batches, objective, checkpoints, callbacks)
    if saved is not None:
        state.load_state_dict(saved)
        callbacks.notify(lambda callback: callback.on_resume(state.history))
    try:
        with (
            closing(batches),
            defer_signals(),
            checkpointing(classifier) if recipe.compute.checkpointing else nullcontext(),
        ):
            _train(state, recipe, saver, start_weights)
    finally:
        engine.release()
    return Training(state.history, tuner.trainable, checkpoints)


def _checked(classifier: Classifier, plan: Plan) -> Unlabelled:
    """What to learn from, where classifier, recipe and shots fit it."""
    if plan.inputs is None:
        raise InputError("nothing to learn from: give unlabelled data, labelled shots, or both")
    check_modality(classifier.backbone, plan.inputs.modality)
    check_shots(plan.shots, plan.recipe, classifier)
    if plan.data is not None and not plan.recipe.objective.needs_unlabelled:
        raise InputError(
            "the recipe learns from labelled shots alone: leave the unlabelled data out, or weigh another term"
        )
    return plan.inputs


def run_identity(classifier: Classifier, plan: Plan) -> dict[str, Any]:
    """What must be the same where a run is resumed, by what to call it."""
    known, sources = plan.targets.known, {"the data": plan.inputs, "the shots": plan.shots, "the teacher": plan.teacher}
    return {
        **{name: value for name, value in plan.recipe.flat().items() if name != SAVE_EVERY},
        "the model": classifier.backbone.fingerprint(),
        "the classes": str([classifier.classes, classifier.descriptions]),
        "the templates": list(classifier.templates),
        **{name: source.fingerprint() if source is not None else None for name, source in sources.items()},
        "the proportions": known.tolist() if known is not None else None,
        "the number of processes": processes().size,
        "the sharding of weights": classifier.backbone.sharded,
    }


def make_checkpoints(
    classifier: Classifier, plan: Plan, inference: InferenceConfig, folder: Path | None
) -> Checkpoints | None:
    """Checkpoints with zero-shot as the first; None where there is no choice to be made."""
    data, recipe, shares = plan.inputs, plan.recipe, plan.targets
    if data is None or recipe.snapshots == 0 or data.streamed or not recipe.objective.needs_unlabelled:
        return None
    zero_shot = classifier.copy()
    zero_shot.demonstrations = None  # they have labels
    size = sample_size(len(data), len(classifier.classes), recipe, changes_features(classifier, recipe))
    sample = Sample(zero_shot, data, recipe.seed, size, inference, plan.teacher)
    checkpoints = Checkpoints(
        classifier, zero_shot, sample, recipe.steps, folder if recipe.steps else None,
        without_bias=recipe.steps > 0 and recipe.postprocess == "prior-correction", target_offsets=shares.offsets,
        known_shares=shares.known, teacher=plan.teacher,
    )  # fmt: skip
    checkpoints.overpredicted = shares.overpredicted
    checkpoints.take_zero_shot()
    return checkpoints


def _train(state: TrainingState, recipe: Recipe, saver: Saver, start_weights: Sequence[Tensor]) -> None:
    """The steps that are left. Where one diverges, weights go back to the last copy."""
    engine, optimizer, history = state.engine, state.optimizer, state.history
    settings, parameters = recipe.optimisation, list(engine.parameters.values())
    last_good, good_step = [parameter.detach().clone() for parameter in parameters], len(history)
    checkpoint_steps = set(snapshot_steps(recipe.steps, recipe.snapshots))
    start = time.perf_counter() - (history[-1].seconds if history else 0.0)
    overflows = 0  # steps in a row whose scaled gradient was too large for fp16
    try:
        if 0 in checkpoint_steps and not history:
            record_checkpoint(state, 0, settings.lr)
        # The steps come first: no batch is drawn after the last one.
        for step, batch in zip(range(len(history) + 1, recipe.steps + 1), state.batches, strict=False):
            lr = learning_rate(settings, step - 1, recipe.steps)
            for group in optimizer.param_groups:
                group["lr"] = lr * group["share"]
            optimizer.zero_grad()
            with connection_errors():
                loss = (two_pass if batch.chunked else whole)(engine, batch, state.objective)
            if not loss.total.isfinite():
                raise Diverged(step, "the loss", settings.lr)
            if step - 1 - good_step >= COPY_EVERY:  # the loss is finite, so the weights that gave it are good
                _copy(parameters, last_good)
                good_step = step - 1
            norm = engine.clip_gradients(optimizer, settings.clip or math.inf)
            overflows = 0 if norm.isfinite() else overflows + 1
            if overflows > (TRIES if engine.scaler.is_enabled() else 0):
                raise Diverged(step, "the gradient", settings.lr)
            _update(engine.scaler, optimizer, step, settings.lr)
            _pull(parameters, start_weights, recipe.weight_pull)
            if settings.dropout:
                engine.classifier.eval()
            history.append(
                Step(
                    step=step,
                    loss=loss.total.item(),
                    terms={name: term.item() for name, term in loss.terms.items()},
                    effective_classes=effective_classes(loss.scores.logits).item(),
                    temperature=loss.scores.temperature.item(),
                    lr=lr,
                    seconds=time.perf_counter() - start,
                )
            )
            stop = _any_process(state, lambda callback: callback.on_step(history[-1]))
            if step in checkpoint_steps or (stop and checkpoint_steps):
                stop = record_checkpoint(state, step, settings.lr) or stop
            if stop:
                break
            saver.after_step(state)
        if not engine.all_finite():
            raise Diverged(len(history), "a weight after the update", settings.lr)
    except Diverged as error:
        _copy(last_good, parameters)
        raise Diverged(error.step, error.what, error.lr, good_step) from None


def record_checkpoint(state: TrainingState, step: int, lr: float) -> bool:
    """What the classifier predicts now. Returns whether training is to stop."""
    if state.checkpoints is not None:
        state.checkpoints.take(step)
        if not state.checkpoints.finite:
            raise Diverged(step, "a prediction", lr)
    return _any_process(state, lambda callback: callback.on_checkpoint(step, state.engine.classifier))


def _any_process(state: TrainingState, event: Callable[[Callback], bool | None]) -> bool:
    """Whether a callback of any process answers with True: all continue, or none."""
    return any(processes().gather_objects(state.callbacks.notify(event)))


def _update(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, step: int, lr: float) -> None:
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        if "without overflow" not in str(error):  # a rate, or its product with another, beyond fp32
            raise
        raise Diverged(step, "the update", lr) from None
    scaler.update()


@torch.no_grad()
def _pull(parameters: Sequence[Tensor], start_weights: Sequence[Tensor], share: float) -> None:
    """θ ← θ + share (θ₀ - θ), where there are start weights."""
    for parameter, start in zip(parameters if share else (), start_weights, strict=True):
        parameter.add_(start - parameter, alpha=share)


@torch.no_grad()
def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for to, value in zip(target, source, strict=True):
        to.copy_(value)
