"""From unlabelled data to a verdict: train, correct, choose, and stand where the verdict says."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pouf.base import BaseClassifier
from pouf.data.base import Unlabelled
from pouf.data.cache import FeatureCache
from pouf.data.labelled import Shots
from pouf.distributed import join
from pouf.errors import InputError, one_of
from pouf.inference import InferenceConfig
from pouf.losses.prior import share_of_classes
from pouf.recipe import Recipe
from pouf.saving import USES, Use
from pouf.training.callbacks import Callback, Callbacks, Step
from pouf.training.pseudo_labels import pseudo_labelled
from pouf.training.trainer import Training, train, watched
from pouf.validation.checkpoints import ZERO_SHOT, Checkpoint, Checkpoints
from pouf.validation.selectors import Choice
from pouf.validation.verdict import Verdict, assess, not_judged

logger = logging.getLogger(__name__)


@dataclass
class Adaptation:
    """What came of an adaptation. The classifier stands where the verdict says, unless `restore` moves it."""

    classifier: BaseClassifier = field(repr=False)
    recipe: Recipe = field(repr=False)
    history: list[Step] = field(repr=False)  # empty where nothing was trained
    trainable: int
    total: int
    checkpoints: Checkpoints | None = field(repr=False)
    verdict: Verdict
    method: str = "pouf"
    files: dict[str, Path] = field(default_factory=dict)  # the run, its predictions and its report, where written

    def restore(self, use: Use) -> None:
        """Put the classifier where the verdict advises, to the chosen step, the last one, or zero-shot."""
        one_of("use", use, dict.fromkeys(USES))
        use = self.verdict.advised if use == "advised" else use
        if self.checkpoints is not None:
            self.checkpoints.restore(self.place(use))
        elif use == "zero-shot":
            raise InputError("this run kept no checkpoints to go back to: give it snapshots")

    @contextmanager
    def at(self, use: Use) -> Iterator[BaseClassifier]:
        """The classifier as it was there, for a while."""
        if self.checkpoints is None:
            yield self.classifier
        else:
            with self.checkpoints.at(self.place(self.verdict.advised if use == "advised" else use)) as classifier:
                yield classifier

    def place(self, use: Use) -> Checkpoint:
        assert self.checkpoints is not None
        if use == "zero-shot" or (use == "chosen" and self.verdict.chosen == 0 != self.verdict.last):
            return ZERO_SHOT
        chosen = self.verdict.chosen
        return self.checkpoints.of(chosen) if use == "chosen" and chosen is not None else self.checkpoints.last


def adapt(
    classifier: BaseClassifier,
    data: Unlabelled | None,
    recipe: Recipe,
    *,
    shots: Shots | None = None,
    cache: FeatureCache | None = None,
    callbacks: Iterable[Callback] = (),
    checkpoint_dir: Path | None = None,
) -> Adaptation:
    """Tune a classifier on unlabelled data, in place, and correct its predictions as a whole where the recipe says so.

    Args:
        data: they have no labels, and neither their names nor their order play a part. None with shots: the shots
            themselves, their labels left out.
        recipe: all settings.
        shots: a few examples with labels, for the term `labels` of the recipe. The data stay without.
        cache: where features that training can't change are kept and found again.
        checkpoint_dir: where weights wait; a temporary folder by default.

    Raises:
        Diverged: the loss or its gradient is not finite. The classifier then has the weights of the last good step.
    """
    told = Callbacks(callbacks)
    world = join(classifier.device)
    inference = InferenceConfig(recipe.compute.chunk or 64, recipe.compute.workers, cache, world=world)
    if recipe.pseudo_labels:
        data, shots = None, pseudo_labelled(classifier, data, shots, recipe.pseudo_labels, inference)
    inputs = data if data is not None else shots.inputs if shots is not None else None
    if recipe.steps and recipe.few_classes and inputs is not None and classifier.prior is None and shots is None:
        recipe = _for_few_classes(classifier, inputs, recipe, inference)
    training = Training([], 0, None)
    if recipe.steps > 0:
        training = train(classifier, data, recipe, shots, inference, told, checkpoint_dir)
    elif recipe.postprocess != "none" and inputs is not None:
        training = Training([], 0, watched(classifier, inputs, recipe, inference, checkpoint_dir))
    checkpoints = training.checkpoints
    choice = checkpoints.choose() if checkpoints is not None and recipe.steps else None
    if recipe.postprocess != "none":
        if inputs is None:
            raise InputError(f"nothing to fit {recipe.postprocess!r} on: give unlabelled data")
        last = training.history[-1].step if training.history else 0
        if checkpoints is not None and choice is not None and choice.step not in (0, last):
            with checkpoints.at(Checkpoint(choice.step)):
                correct(classifier, inputs, recipe, inference, checkpoints, choice.step)
        correct(classifier, inputs, recipe, inference, checkpoints, last)
    total = sum(p.numel() for p in classifier.parameters())
    verdict = assess(checkpoints, choice or _corrected(checkpoints)) if checkpoints is not None else None
    result = Adaptation(
        classifier, recipe, training.history, training.trainable, total, checkpoints,
        verdict or not_judged(bool(training.history)),
    )  # fmt: skip
    result.restore("advised")
    return result


def _for_few_classes(
    classifier: BaseClassifier, data: Unlabelled, recipe: Recipe, inference: InferenceConfig
) -> Recipe:
    """Without training, where the model finds few of the named classes in the data: exp H(mean p) / k below the limit.

    Training would spread the inputs over classes that are not there.
    """
    if data.streamed:
        return recipe
    encoded = classifier.encode(data, inference)
    total = sum(block.log_probabilities.exp().sum(0) for block in classifier.score_blocks(encoded))
    used = share_of_classes(torch.as_tensor(total) / len(encoded.indices))
    if used >= recipe.few_classes:
        return recipe
    logger.info("predictions use %.0f %% of the classes: nothing is trained, they are corrected instead", 100 * used)
    return recipe.with_settings(steps=0, postprocess="few-classes")


def correct(
    classifier: BaseClassifier,
    data: Unlabelled,
    recipe: Recipe,
    inference: InferenceConfig,
    checkpoints: Checkpoints | None,
    step: int,
) -> None:
    """Fit the recipe's correction to what the classifier predicts now: that of another step would not fit it."""
    classifier.postprocessor = None
    classifier.fit_postprocessor(recipe.postprocess, classifier.encode(data, inference), recipe.seed)
    if checkpoints is not None:
        checkpoints.take_postprocessed(step)


def _corrected(checkpoints: Checkpoints) -> Choice:
    """Where nothing is trained there is one thing to choose: zero-shot with its correction."""
    return Choice(0, checkpoints.choose().snapshots, 1.0)
