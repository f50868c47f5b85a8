"""From unlabelled data to a verdict: train, correct, choose."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.labels import Teacher
from pouf.errors import InputError, one_of
from pouf.inference.cache import FeatureCache
from pouf.inference.encode import FeatureSet, InferenceConfig
from pouf.models.lower_layers import using
from pouf.parallel.process_group import by_all_processes, processes
from pouf.postprocess import fit_correction
from pouf.recipe import Recipe
from pouf.saving import USES, Use
from pouf.training.callbacks import Callback, Callbacks, Step
from pouf.training.plan import Plan
from pouf.training.teachers import pseudo_labelled
from pouf.training.trainer import Training, make_checkpoints, train
from pouf.tuners.weights import lower_layers
from pouf.validation.checkpoints import ZERO_SHOT, Checkpoint, Checkpoints
from pouf.validation.names import Drift
from pouf.validation.selectors import Choice
from pouf.validation.verdict import Verdict, assess, not_judged, nothing_to_judge

logger = logging.getLogger(__name__)


@dataclass
class Adaptation:
    """The result of an adaptation: classifiers, and what speaks for them and against them."""

    classifier: Classifier = field(repr=False)  # what the verdict advises: a step of the run, or zero-shot
    recipe: Recipe = field(repr=False)
    history: list[Step] = field(repr=False)  # empty where nothing was trained
    trainable: int
    total: int
    checkpoints: Checkpoints | None = field(repr=False)
    verdict: Verdict
    target_shares: Tensor | None = field(default=None, repr=False)  # (k,), of corrected predictions
    method: str = "pouf"
    absent: list[str] = field(default_factory=list)  # class names that seem not to occur, where predictions are written
    # What it learned from, by what to call it, with what this run could not read of it.
    sources: dict[str, Unlabelled] = field(default_factory=dict, repr=False)
    drift: Drift | None = None  # of names outside of the task, where a loss of others is measured
    files: dict[str, Path] = field(default_factory=dict)  # the run, its predictions and its report, where written

    def at(self, use: Use | Literal["adapted"]) -> Classifier:
        """The classifier before training (zero-shot), adapted whether advised or not, or at a step: last or chosen.

        Each call gives one of its own, whose weights are read from the disk. Where weights are sharded, there is one
        set of them, and all classifiers of the run have those of the latest call.
        """
        known: dict[str, Use] = {**{each: each for each in USES}, "adapted": self.verdict.adapted}
        use = one_of("use", use, known)
        checkpoint, sharded = self.checkpoint(cast("Use", use)), self.classifier.backbone.sharded
        if checkpoint == self.checkpoint("advised") and not sharded:
            return self.classifier
        if self.checkpoints is None:
            raise InputError("this run has no checkpoints to go back to: set snapshots above 0")
        found = self.checkpoints.classifier(checkpoint)
        found.model_card = self.classifier.model_card
        return found

    def with_prior(self, prior: str | Sequence[float]) -> Classifier:
        """What the verdict advises, with these shares of the data it was adapted to: "uniform", or one per class."""
        data = self.sources.get("data")
        if data is None or data.streamed:
            raise InputError("shares are of data that can be read again: take `classifier.with_prior(prior, inputs)`")
        return self.classifier.with_prior(prior, data)

    def save_pretrained(self, folder: str | Path, **options: Any) -> str | None:
        """Write what the verdict advises; options as of `Classifier.save_pretrained`."""
        return self.classifier.save_pretrained(folder, **options)

    def checkpoint(self, use: Use) -> Checkpoint:
        use = self.verdict.advised if use == "advised" else use
        if self.checkpoints is None:  # then there is one state, the last
            changed = self.history or self.classifier.postprocessor is not None
            return ZERO_SHOT if use == "zero-shot" and changed else Checkpoint(len(self.history), True)
        if use == "zero-shot" or (use == "chosen" and self.verdict.chosen == 0 != self.verdict.last):
            return ZERO_SHOT
        chosen = self.verdict.chosen if use == "chosen" else None
        return self.checkpoints.last if chosen is None else self.checkpoints.at_step(chosen)


@by_all_processes
def run_adaptation(
    classifier: Classifier,
    plan: Plan,
    *,
    cache: FeatureCache | None = None,
    callbacks: Iterable[Callback] = (),
    checkpoint_dir: Path | None = None,
    resume: bool = False,
    keep_tuned: bool = True,
) -> Adaptation:
    """Tune a classifier on unlabelled data, and correct its predictions as a whole where the recipe says so.

    Args:
        classifier: `prepared`. It is trained in place, to its last step.
        plan: `fitted` to the data.
        cache: where features that training can't change are stored.
        checkpoint_dir: of weights and of the state that a run resumes from; by default a temporary one of weights.
        resume: continue from the state in `checkpoint_dir`, if there is one.
        keep_tuned: features of the tuned weights stay in the cache too, for the next prediction of the data.
    """
    notify, recipe, sources = Callbacks(callbacks), plan.recipe, plan.sources()
    inference = notify.watching(plan.inference(cache), "encoding")
    if recipe.pseudo_labels:
        surest = pseudo_labelled(classifier, plan.data, plan.shots, recipe.pseudo_labels, inference)
        plan = replace(plan, data=None, shots=surest)
    inputs, prior = plan.inputs, plan.targets.predictions
    training = Training([], 0, None)
    once = recipe.steps > 0 and classifier.demonstrations is None  # with demonstrations no text comes twice
    lower = lower_layers(classifier.backbone, recipe.tuner) if once else None
    if recipe.steps > 0:
        with using(lower):
            training = train(classifier, plan, inference, notify, checkpoint_dir, resume)
    elif recipe.postprocess != "none":
        training = Training([], 0, make_checkpoints(classifier, plan, inference, checkpoint_dir))
    checkpoints = training.checkpoints
    notify.phase("choosing a step" if recipe.postprocess == "none" else "choosing a step, correcting predictions")
    choice = processes().broadcast(checkpoints.choose()) if checkpoints is not None and recipe.steps else None
    if recipe.postprocess != "none" and inputs is None:
        raise InputError(f"nothing to fit {recipe.postprocess!r} on: give unlabelled data")
    if not keep_tuned and checkpoints is not None and checkpoints.tuner and checkpoints.tuner.touches_inputs:
        inference = replace(inference, cache=None)
    last = training.history[-1].step if training.history else 0
    finish = partial(finish_step, inputs, recipe, inference, checkpoints, prior)
    # Of many more texts than training drew, most are encoded here for the first time, faster together.
    few = inputs is not None and not inputs.streamed and len(inputs) <= recipe.steps * recipe.batch_size
    with using(lower if few else None):
        if checkpoints is not None and choice is not None and choice.step not in (0, last):
            finish(choice.step, checkpoints.classifier(Checkpoint(choice.step)))
            checkpoints.refill(last)
        finish(last, classifier)
    total = sum(p.numel() for p in classifier.parameters())
    result = Adaptation(
        classifier, recipe, training.history, training.trainable, total, checkpoints, _judge(training, choice, recipe),
        prior, plan.method, sources=sources,
    )  # fmt: skip
    if checkpoints is not None:
        result.classifier = checkpoints.hand_over(result.checkpoint("advised"))
    return result


def _judge(training: Training, choice: Choice | None, recipe: Recipe) -> Verdict:
    checkpoints = training.checkpoints
    if checkpoints is None:
        return not_judged(recipe) if training.history else nothing_to_judge()
    # Where nothing is trained there is one thing to choose: zero-shot with its correction.
    choice = choice or Choice(0, checkpoints.choose().snapshots, 1.0)
    return processes().broadcast(assess(checkpoints, choice))


def finish_step(
    data: Unlabelled | None,
    recipe: Recipe,
    inference: InferenceConfig,
    checkpoints: Checkpoints | None,
    prior: Tensor | None,
    step: int,
    classifier: Classifier,
) -> None:
    """Complete a step that may be advised: the recipe's correction, fitted to its predictions, and what its verdict
    needs.

    Where a teacher's answers are learned from, and predictions agree less with them once they are corrected, they stay
    as they are; not where a correction gives them shares of the classes.

    Args:
        prior: (k,), of corrected predictions.
        classifier: at this step; it gets the correction.
    """
    corrects = recipe.postprocess != "none" and data is not None
    if corrects and data is not None:
        classifier.postprocessor = None  # that of another step would not fit
        encoded = classifier.store(inference).share(data)
        teacher = checkpoints.teacher if checkpoints is not None else None
        before = _agreeing(classifier, encoded, teacher)
        classifier.postprocessor = fit_correction(recipe.postprocess, classifier, encoded, recipe.seed, prior)
        if recipe.postprocess != "shares" and prior is None and _agreeing(classifier, encoded, teacher) < before:
            logger.info("predictions are not corrected together: they would agree less with the teacher")
            classifier.postprocessor = None
    if checkpoints is not None and (corrects or step):
        checkpoints.take_final(step, classifier, corrects, inference.cache)


def _agreeing(classifier: Classifier, encoded: FeatureSet, teacher: Teacher | None) -> int:
    """How many of the answers of a teacher are predicted, over all processes."""
    if teacher is None:
        return 0
    answers = teacher.probabilities[encoded.indices]
    same = classifier.log_probabilities(encoded).argmax(1) == answers.argmax(1)
    return int(processes().sum((same & (answers.sum(1) > 0)).sum()))
