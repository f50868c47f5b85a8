"""The recipe as it fits the data: what is decided once the inputs can be looked at, and before anything is trained."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Subset, Unlabelled
from pouf.data.labels import Teacher
from pouf.errors import InputError, plural
from pouf.inference.encode import FeatureSet, InferenceConfig
from pouf.losses.objective import share_of_classes
from pouf.options import AdaptOptions
from pouf.parallel.process_group import processes
from pouf.postprocess.clusters import names_agreement
from pouf.postprocess.shares import predicted_shares, share_offsets
from pouf.recipe import Kind, Recipe, full_name
from pouf.training.bias import find_bias
from pouf.tuners.weights import has_upper_layers
from pouf.validation.checkpoints import MIN_PER_CLASS
from pouf.validation.rules import FEW_INPUTS
from pouf.validation.selectors import SampleSize, sample_positions

MAX_COUNTED = 2**16  # inputs of a process, drawn at random, that tell how many of the classes are used
logger = logging.getLogger(__name__)
MAX_TUNED_CLASSES = 12  # of texts, for which all weights of a sentence encoder are tuned by default
AGREEMENT_SAMPLE = SampleSize(300, 0)  # inputs whose clusters are compared with the class names
CLEAR_CLUSTERS = 0.9  # kappa with the class names, from which nothing of an encoder needs to be tuned


class TargetShares(NamedTuple):
    """Shares of the classes (k,) that training holds to; None where it goes by the recipe."""

    probabilities: Tensor | None  # mean_i p(y|x_i)
    predictions: Tensor | None  # of argmax p
    offsets: Tensor | None = None  # (k,), with which zero-shot has these shares; None where they are not from it
    overpredicted: str = ""  # the class that zero-shot was found to predict too often, and has less of with them

    @property
    def known(self) -> Tensor | None:
        """Where they were given, and not estimated."""
        return self.probabilities if self.offsets is None else None


FREE = TargetShares(None, None)


class DataLook:
    """What the classifier says of the inputs before training: encoded once, however much is decided by it."""

    def __init__(self, classifier: Classifier, inputs: Unlabelled, inference: InferenceConfig) -> None:
        self.classifier, self.inputs, self.inference = classifier, inputs, inference

    @cached_property
    def features(self) -> FeatureSet:
        return self.classifier.store(self.inference).share(self.inputs)

    @cached_property
    def prototypes(self) -> Tensor:
        return self.classifier.fixed_prototypes()

    @cached_property
    def count(self) -> int:
        """Inputs that can be read, of all processes."""
        return sum(processes().gather_objects(len(self.features.indices)))

    @cached_property
    def class_usage(self) -> float:
        """exp H(mean p) / k, of some inputs where there are very many."""
        group, total, some = processes(), torch.zeros(len(self.classifier.classes)), self.features.drawn(MAX_COUNTED)
        for block in self.classifier.score_blocks(some, prototypes=self.prototypes):
            total = total + block.log_probabilities.exp().sum(0)
        n = sum(group.gather_objects(len(some.indices)))
        return group.broadcast(share_of_classes(group.sum(total) / n))

    @cached_property
    def names_agreement(self) -> float | None:
        """Kappa of zero-shot with the clusters that it makes of the features of a sample; None for a small one."""
        some = Subset(self.inputs, sample_positions(self.inputs, 0, AGREEMENT_SAMPLE))
        encoded = self.classifier.encode(some, self.inference)
        if len(encoded.indices) < max(FEW_INPUTS, MIN_PER_CLASS * len(self.classifier.classes)):
            return None
        scores = self.classifier.scores(encoded)
        return processes().broadcast(names_agreement(encoded.features.to(scores.logits.device), scores))

    @cached_property
    def bias(self) -> float:
        return find_bias(self.classifier, self.inputs, self.inference)


def recipe_for_data(
    recipe: Recipe,
    classes: Sequence[str],
    look: DataLook | None,
    *,
    learns_from_shots: bool = False,
    known_shares: Tensor | None = None,
    teacher: Teacher | None = None,
) -> tuple[Recipe, TargetShares, tuple[str, ...]]:
    """The recipe as it fits the inputs and the classes, the shares that training holds to, and why, in words.

    Args:
        look: of the inputs; None where there are none.
        learns_from_shots: labelled examples, or predictions that are taken for labels.
        known_shares: (k,), of the classes in these data.
        teacher: its shares of two classes are kept instead of zero-shot's.
    """
    inputs, decisions = look.inputs if look is not None else None, list[str]()
    if recipe.postprocess != "none" and inputs is not None and (inputs.streamed or len(inputs) == 1):
        recipe = _without_correction(
            recipe, "a stream can't be read again" if inputs.streamed else "there is one alone"
        )
        decisions.append("predictions are not corrected together")
    batch = recipe.batch_size
    recipe = _for_many_classes(recipe, len(classes))
    if recipe.batch_size != batch:
        decisions.append(f"{recipe.batch_size} samples per step for {len(classes)} classes, instead of {batch}")
    targets = TargetShares(known_shares, known_shares)
    if known_shares is None and not learns_from_shots and look is not None and not look.inputs.streamed:
        if recipe.steps and recipe.min_class_usage and teacher is None and len(look.inputs) > 1:
            recipe = _for_few_classes(recipe, look, decisions)
        if recipe.steps and recipe.keep_shares_max_classes >= len(classes) and recipe.objective.prior != "paper":
            keep = _keep_shares if teacher is None else partial(_keep_teacher_shares, teacher)
            recipe, targets = keep(recipe, look, decisions)
    return recipe, targets, tuple(decisions)


def tunes_texts_by_default(kind: Kind, options: AdaptOptions) -> bool:
    """Whether nothing was said about what is tuned, and weights of a sentence encoder would be."""
    usual = options.recipe is None or (isinstance(options.recipe, str) and options.recipe in ("light", "balanced"))
    return kind == "text" and usual and _tuner_is_open(options)


def _tuner_is_open(options: AdaptOptions) -> bool:
    changed = {full_name(name) for name in options.settings or {}}
    return options.method == "pouf" and not {"tuner.name", "optimisation.lr"} & changed


def recipe_for_model(classifier: Classifier, options: AdaptOptions) -> Recipe | str | Path | None:
    """The recipe that is given, or a preset that fits the model and its classes.

    Weights that are tuned on a batch of four texts a class unlearn what tells fine classes apart: 62.5 % became 57.7 %
    on 77 of them, in half an hour. The clusters of features that stay as they are gain, in seconds.

    On a CPU the upper layers of a masked language model gain as much as all of them, in 0.4 of the time. Labelled
    examples were not tried with them. A file of settings changes `Recipe.default`, whatever the device.
    """
    kind, k, recipe = classifier.kind, len(classifier.classes), options.recipe
    if k > MAX_TUNED_CLASSES and tunes_texts_by_default(kind, options):
        logger.info("%d classes are too many to tune weights: prototypes are tuned, as by the preset fast", k)
        return "fast"
    on_labels = options.shots is not None or options.demonstrations
    if recipe is None and kind == "cloze" and classifier.device.type == "cpu" and not on_labels:
        recipe = "light" if _tuner_is_open(options) else None
    unfit = recipe == "light" and kind in ("text", "cloze") and not has_upper_layers(classifier.backbone)
    return "balanced" if unfit else recipe


def choose_frozen(recipe: Recipe, frozen: Recipe | None, look: DataLook | None) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe that leaves the features as they are, where their clusters show more than two classes clearly.

    Then clusters gain at least as much as tuning all weights does, in seconds instead of minutes. Two groups need not
    be the two classes.
    """
    if frozen is None or look is None or look.inputs.streamed or len(look.classifier.classes) <= 2:
        return recipe, ()
    agreement = look.names_agreement
    if agreement is None or agreement < CLEAR_CLUSTERS:
        return recipe, ()
    why = f"clusters of the features show the classes already (kappa {agreement:.2f})"
    return frozen, (f"{why}: prototypes are tuned, as by the preset fast",)


def _without_correction(recipe: Recipe, why: str) -> Recipe:
    """A correction is fitted to all predictions together, which there must be."""
    if not recipe.steps:
        raise InputError(
            f"{recipe.postprocess!r} corrects all predictions together, but {why}: give more inputs at once"
        )
    logger.warning("predictions are not corrected together (%s): %s", recipe.postprocess, why)
    return recipe.with_settings(postprocess="none")


def _for_many_classes(recipe: Recipe, k: int) -> Recipe:
    """With a batch that follows the number of classes: in a batch that holds most of them not even once, the entropy of
    the mean prediction says little about the data. Memory does not follow, since a larger batch is encoded in parts."""
    wanted = recipe.batch_per_class * k
    if wanted > recipe.batch_size:
        chunk = recipe.compute.chunk or recipe.batch_size
        recipe = recipe.with_settings({"batch_size": wanted, "compute.chunk": chunk})
    if recipe.steps and recipe.objective.information and recipe.batch_size < 2 * k:
        logger.warning(
            "%d samples per step for %d classes are too few for the mutual information: take at least %d",
            recipe.batch_size, k, 4 * k,
        )  # fmt: skip
    return recipe


def _for_few_classes(recipe: Recipe, look: DataLook, decisions: list[str]) -> Recipe:
    """Without training, where the model finds few of the named classes in the data: exp H(mean p) / k below the limit.

    Training would spread the inputs over classes that are not there.
    """
    if look.class_usage >= recipe.min_class_usage:
        return recipe
    k, n = len(look.classifier.classes), look.count
    decisions.append(
        f"{plural(k, 'class')} for {plural(n, 'input')}: predictions use {look.class_usage:.0%} of the classes, so "
        "nothing is trained, only predictions are corrected"
    )
    return recipe.with_settings(steps=0, postprocess="few-classes")


def _keep_teacher_shares(
    teacher: Teacher, recipe: Recipe, look: DataLook, decisions: list[str]
) -> tuple[Recipe, TargetShares]:
    """Hold to the shares that a teacher gives the classes: it knows more than zero-shot, also of these."""
    answers = teacher.probabilities[teacher.answered]
    predicted = predicted_shares(answers)
    own = look.classifier.log_probabilities(look.features, look.prototypes)
    shares = ", ".join(f"{p:.0%} {name}" for p, name in zip(predicted.tolist(), look.classifier.classes, strict=True))
    decisions.append(f"the classes keep the shares that the teacher gives them ({shares}): if you know the true ones, "
                     "give a prior")  # fmt: skip
    targets = TargetShares(answers.mean(0), predicted, share_offsets(own, predicted))
    return recipe.with_settings(postprocess="shares", keep_shares_lr_factor=1.0), processes().broadcast(targets)


def _keep_shares(recipe: Recipe, look: DataLook, decisions: list[str]) -> tuple[Recipe, TargetShares]:
    """Hold to the shares that zero-shot gives the classes, without its bias where one is found.

    With two classes a share is a threshold and nothing else. That zero-shot has it wrong and that the data are skewed
    look the same in its predictions, and a pull towards equal shares is right for the one and ruins the other. A masked
    language model can tell more: see `find_bias`.
    """
    if not recipe.objective.information:
        return recipe, FREE
    classes, group = look.classifier.classes, processes()
    own = look.classifier.log_probabilities(look.features, look.prototypes)
    bias = look.bias if recipe.find_bias else 0.0
    offsets = torch.zeros(own.shape[1]).to(own)
    if bias:
        offsets[1] = -bias
        own = (own + offsets).log_softmax(1)
    n = sum(group.gather_objects(len(own)))
    counts = group.sum(torch.bincount(own.argmax(1), minlength=own.shape[1]))
    mean = own.exp().mean(0) if group.size == 1 else group.sum(own.exp().sum(0)) / n
    shares = ", ".join(f"{c / n:.0%} {name}" for c, name in zip(counts, classes, strict=True))
    overpredicted = classes[bias > 0] if bias else ""
    origin = f"they have without a bias of zero-shot to {overpredicted}" if bias else "zero-shot gives them"
    decisions.append(
        f"the classes keep the shares that {origin} ({shares}): if you know the true ones, or that they are about "
        "equal, give a prior; if not, 50 answers to `pouf review` tell them"
    )
    # Where both signs point to a bias, however small, there is something to learn about these texts.
    rate = recipe.optimisation.lr * (1.0 if bias else recipe.keep_shares_lr_factor)
    # Both give the shares to the predictions; clusters need features that stay as they are.
    last = "clusters" if recipe.postprocess == "clusters" and len(classes) == 2 else "shares"
    settings = {"postprocess": last, "optimisation.lr": rate, "keep_shares_lr_factor": 1.0}
    return recipe.with_settings(settings), group.broadcast(TargetShares(mean, counts / n, offsets, overpredicted))
