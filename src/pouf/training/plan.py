"""Every decision that is taken before training, in one place."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.inputs import Inputs
from pouf.data.labels import Shots, Teacher, read_shots
from pouf.data.views import perturbation
from pouf.errors import InputError, one_of
from pouf.inference.cache import FeatureCache, InMemoryFeatureCache
from pouf.inference.encode import InferenceConfig
from pouf.inference.views import View
from pouf.options import AdaptOptions
from pouf.parallel.fsdp import should_shard, sync_weights
from pouf.parallel.process_group import by_all_processes, processes
from pouf.postprocess.shares import known_shares
from pouf.recipe import PRESETS, Recipe, full_name
from pouf.training import teachers
from pouf.training.batches import make_crop
from pouf.training.estimate import Estimate, estimate, largest_preset
from pouf.training.methods import METHODS, Method, Preparation
from pouf.training.recipe_for_data import (
    FREE,
    DataLook,
    TargetShares,
    choose_frozen,
    recipe_for_data,
    recipe_for_model,
    tunes_texts_by_default,
)  # fmt: skip
from pouf.validation.selectors import changes_features, sample_positions, sample_size

LEAVES_INPUTS = ("prompt", "prototypes")  # tuners after which a dual encoder gives the same features of images


def encode_once(
    classifier: Classifier,
    data: Unlabelled | None,
    recipe: Recipe,
    inference: InferenceConfig,
    shares_given: bool,
    teacher: Teacher | None = None,
) -> None:
    """Put what zero-shot makes of images, of changed ones and of their crops into the cache, each opened once.

    Args:
        shares_given: shots or shares of the classes are there, so that zero-shot need not predict all inputs.
    """
    if data is None or data.streamed or data.modality != "image" or classifier.demonstrations is not None:
        return
    crop = make_crop(classifier, data, recipe)
    looked_up = recipe.tuner.name in LEAVES_INPUTS and (crop is None or recipe.views > 0)
    predicts_all = recipe.min_class_usage > 0 or recipe.keep_shares_max_classes >= len(classifier.classes)
    plain = looked_up and (crop is None or recipe.postprocess != "none")
    every = plain or not recipe.steps or (predicts_all and not shares_given)
    sample = recipe.snapshots > 0 and recipe.objective.needs_unlabelled
    size = sample_size(len(data), len(classifier.classes), recipe, changes_features(classifier, recipe))
    positions = sample_positions(data, recipe.seed, size, teacher) if sample else []
    views = [View()] if every else [View(only=set(positions))]
    if sample:
        views.append(View(perturbation(data.modality), set(positions[: size.perturbed])))
    if recipe.steps and looked_up and crop is not None:
        views += [View(crop.view(recipe.seed, number)) for number in range(recipe.views)]
    classifier.store(inference).fill(data, views)


logger = logging.getLogger(__name__)
NO_PREPARATION = Preparation()
TEACHER_WEIGHT = 3.0  # where none is set


@dataclass(frozen=True)
class Plan:
    """What is to be done, with every decision that is taken before training."""

    data: Unlabelled | None
    recipe: Recipe
    shots: Shots | None = None
    method: str = "pouf"  # what it is called
    preparation: Preparation = NO_PREPARATION  # of the classifier
    targets: TargetShares = FREE  # shares of the classes that training holds to
    teacher: Teacher | None = None  # of `data`, corrected
    frozen: Recipe | None = None  # in the place of `recipe`, where clusters of the features show the classes already
    decisions: tuple[str, ...] = ()  # what the data decided, in words

    def sources(self) -> dict[str, Unlabelled]:
        """What is learned from, by what to call it."""
        both = {"data": self.data, "shots": self.shots.inputs if self.shots is not None else None}
        return {name: source for name, source in both.items() if source is not None}

    @property
    def inputs(self) -> Unlabelled | None:
        """What is looked at without labels."""
        return self.data if self.data is not None else self.shots.inputs if self.shots is not None else None

    def inference(self, cache: FeatureCache | None) -> InferenceConfig:
        return InferenceConfig.from_compute(self.recipe.compute, cache)

    def estimate(self, classifier: Classifier, cache: FeatureCache, report: bool) -> Estimate | None:
        """How long it will take; None where nobody can know: streams, shots alone, nothing to train, or a model that
        need not fit where it would be timed."""
        if self.data is None or self.data.streamed or not len(self.data) or not self.recipe.steps:
            return None
        if should_shard(classifier, self.recipe):
            return None
        return estimate(
            classifier, self.data, self.recipe, self.inference(cache), report,
            demonstrations=self.preparation.demonstrations is not None,
            known_shares=self.targets.known is not None,
        )  # fmt: skip

    def fitted(self, look: DataLook | None) -> Plan:
        """With what the data decide.

        Args:
            look: of a classifier that is prepared, at `inputs`; None where there are none.
        """
        from_labels = self.shots is not None or bool(self.recipe.pseudo_labels)
        chosen, why = choose_frozen(self.recipe, self.frozen, look)
        recipe, targets, decisions = recipe_for_data(
            chosen, look.classifier.classes if look else (), look, learns_from_shots=from_labels,
            known_shares=self.targets.known, teacher=self.teacher,
        )  # fmt: skip
        for decision in (*why, *decisions):
            logger.info("%s", decision)
        return replace(self, recipe=recipe, targets=targets, decisions=(*why, *decisions))

    def complete(self, classifier: Classifier, inference: InferenceConfig) -> tuple[Classifier, Plan]:
        """The classifier that is to be trained, and the plan with what the data decide."""
        prepared = self.preparation.applied_to(classifier)
        start_as_recipe_says(prepared, self.recipe)
        return prepared, self.fitted(look_at_data(prepared, self, inference))

    def to_json(self) -> dict[str, Any]:
        shares = self.targets.predictions
        return {
            "method": self.method,
            "inputs": {name: len(source) for name, source in self.sources().items() if not source.streamed},
            "decisions": list(self.decisions),
            "target_shares": shares.tolist() if shares is not None else None,
            "shares_are_known": self.targets.known is not None,
            "overpredicted": self.targets.overpredicted,
            "teacher": self.teacher.to_json() if self.teacher is not None else None,
            "new_head": self.preparation.head_seed is not None,
            "demonstrations": self.preparation.demonstrations is not None,
            "recipe": self.recipe.model_dump(),
        }

    def __str__(self) -> str:
        sources = [
            f"{name} {source.source}" + ("" if source.streamed else f" ({len(source):,})")
            for name, source in self.sources().items()
        ]
        recipe = self.recipe
        work = f"{recipe.steps:,} steps of {recipe.batch_size}, tuning {recipe.tuner.name}" if recipe.steps else "none"
        lines = {
            "method": self.method, "inputs": ", ".join(sources), "training": work, "correction": recipe.postprocess,
            "decided by the data": "; ".join(self.decisions) or "nothing",
        }  # fmt: skip
        return "\n".join(f"{name}: {text}" for name, text in lines.items())


def start_as_recipe_says(classifier: Classifier, recipe: Recipe) -> None:
    """In place: the temperature, and the weights of the first process on all."""
    if recipe.temperature:
        classifier.set_temperature(recipe.temperature)
    sync_weights(classifier, recipe)


def look_at_data(classifier: Classifier, plan: Plan, inference: InferenceConfig) -> DataLook | None:
    """Of all processes together, at inputs that they all have."""
    for source in (plan.data, plan.shots.inputs if plan.shots is not None else None) if processes().size > 1 else ():
        processes().check_equal(source.fingerprint() if source is not None else "", "inputs")
    if plan.inputs is None:
        return None
    known = plan.shots is not None or plan.targets.known is not None
    encode_once(classifier, plan.data, plan.recipe, inference, known, plan.teacher)
    if not plan.inputs.streamed:
        plan.inputs.check_readable()
    return DataLook(classifier, plan.inputs, inference)


@by_all_processes
def make_plan(
    classifier: Classifier, data: Inputs | None, options: AdaptOptions, *, cache: FeatureCache | None = None
) -> Plan:
    """All that is decided before a classifier is adapted; it stays as it is, and nothing is written but features into
    the cache."""
    cache = cache or InMemoryFeatureCache()
    plan = draft_plan(classifier, data, options, cache=cache, report=False)
    return plan.complete(classifier, plan.inference(cache))[1]


def draft_plan(
    classifier: Classifier,
    data: Inputs | None,
    options: AdaptOptions,
    *,
    cache: FeatureCache,
    report: bool,
    runs: int = 1,
) -> Plan:
    """What can be decided before the data are encoded.

    Args:
        report: predictions and a report are written at the end.
        runs: how often it is to be done, as by a search; a limit of minutes is for all of them.
    """
    if classifier.adapted:
        logger.warning(
            "this classifier was adapted before: what this run compares with, and calls zero-shot, is the classifier "
            "as it is now"
        )
    if isinstance(data, str) and classifier.backbone.modality == "text":
        raise InputError(f"one text is nothing to adapt to; a file is given as Path({data[:40]!r})")
    inputs = None if data is None else classifier.data(data, options.text_column)
    options = _with_teacher(options, classifier, inputs, InferenceConfig(cache=cache))
    plan_with = partial(resolve_plan, classifier, inputs)
    if options.max_minutes is None:
        plan = plan_with(options)
        if runs > 1 or plan.shots or plan.teacher or not tunes_texts_by_default(classifier.kind, options):
            return plan
        return replace(plan, frozen=plan_with(replace(options, recipe="fast")).recipe)
    if options.recipe is not None:
        raise InputError("a recipe and a limit of minutes: give one of them, since the limit chooses a preset")
    fitting = largest_preset(
        lambda name: plan_with(replace(options, recipe=name)).estimate(classifier, cache, report),
        options.max_minutes / runs,
    )
    return plan_with(replace(options, recipe=processes().broadcast(fitting)))


def resolve_plan(classifier: Classifier, data: Unlabelled | None, options: AdaptOptions) -> Plan:
    """The recipe, shots and data of a run. Nothing changes: the run has lists of its own of what can't be read."""
    method, recipe, shots = options.method, recipe_for_model(classifier, options), options.shots
    settings: dict[str, Any] = {full_name(name): value for name, value in (options.settings or {}).items()}
    chosen: Method = one_of("method", method, METHODS)
    if classifier.temperature is not None and (recipe is None or (isinstance(recipe, str) and recipe in PRESETS)):
        settings = {"temperature": classifier.temperature, **settings}  # its own, unless another is set
    settled = chosen.recipe(classifier.kind, recipe, _changes(chosen, replace(options, settings=settings)))
    if isinstance(shots, (str, Path)):
        shots = read_shots(shots, classifier.classes, classifier.backbone.modality, classifier.columns)
    chosen.check(method, classifier.kind, shots)
    if shots is not None:
        alike = shots.inputs is data
        shots = shots._replace(inputs=shots.inputs.with_own_skipped())
        data = shots.inputs if alike else data
    if data is not None and (shots is None or data is not shots.inputs):
        data = data.with_own_skipped()
    if shots is not None and settled.steps and settled.objective.labels == 0:
        settled = settled.with_settings({"objective.labels": 1.0})
    if options.demonstrations:
        if shots is None or not classifier.backbone.supports_demonstrations:
            raise InputError("demonstrations are shots in a template: give shots, and a template with [MASK]")
        chosen = replace(chosen, demonstrations="after")
    if data is None and shots is None:
        raise InputError("nothing to learn from: give unlabelled data, labelled shots, or both")
    settled, teacher = _with_weight(settled, options), options.teacher
    preparation, known = chosen.preparation(shots, settled.seed), given_shares(options, classifier)
    if known is not None:
        trains = settled.steps and settled.objective.needs_unlabelled
        ours = settled.objective.prior != "paper"
        if trains and ours and settled.postprocess == "none" and options.refine is None:
            # Training pulls towards known shares; these offsets see to it that it ends there.
            settled = settled.with_settings(postprocess="shares")
    learns_from_shots_alone = chosen.needs_shots and not settled.objective.needs_unlabelled
    learns = shots if settled.steps and settled.objective.labels else None
    if settled.steps and not settled.pseudo_labels:
        check_shots(learns, settled, classifier)  # now, and not after a batch was timed
    # A recipe that leaves the paper's losses out goes by its own name.
    own = method == "pouf" and isinstance(recipe, (str, Path)) and not settled.objective.needs_unlabelled
    name = Path(str(recipe)).stem if own else method
    inputs = None if learns_from_shots_alone and shots is not None else data
    return Plan(inputs, settled, learns, name, preparation, TargetShares(known, known), teacher)


def _with_teacher(
    options: AdaptOptions, classifier: Classifier, data: Unlabelled | None, inference: InferenceConfig
) -> AdaptOptions:
    """With the answers themselves in the place of who gives them."""
    teacher, prior = options.teacher, given_shares(options, classifier)
    if teacher is not None:
        teacher = teachers.read(teacher, classifier, data, inference, prior)
    if options.second_features is not None:
        teacher = teachers.second_opinion(options.second_features, classifier, data, inference, prior, teacher)
    return replace(options, teacher=teacher, second_features=None)


def given_shares(options: AdaptOptions, classifier: Classifier) -> Tensor | None:
    """(k,), the shares of the classes as a prior gives them."""
    prior = options.prior
    return None if prior is None or isinstance(prior, str) else known_shares(prior, len(classifier.classes))


def _with_weight(recipe: Recipe, options: AdaptOptions) -> Recipe:
    """The recipe with a weight for the teacher's answers, or an error if nothing can learn from them."""
    if options.teacher is None:
        if recipe.objective.teacher:
            raise InputError("the recipe weighs a teacher, but there is none: give one, or set objective.teacher to 0")
        return recipe
    if not recipe.steps or not recipe.objective.needs_unlabelled or recipe.pseudo_labels:
        raise InputError(
            f"method {options.method!r} learns nothing from a teacher: take one that trains on unlabelled data, as pouf"
        )
    return recipe if recipe.objective.teacher else recipe.with_settings({"objective.teacher": TEACHER_WEIGHT})


def _changes(chosen: Method, options: AdaptOptions) -> dict[str, Any]:
    """All changes to the recipe, by dotted name."""
    changes = dict(options.settings or {})
    if changes.get("steps") and chosen.settings.get("steps") == 0:
        raise InputError(
            f"method {options.method!r} trains nothing: leave the steps out, or set postprocess in a recipe"
        )
    if options.refine is not None:
        changes |= {"postprocess": "clusters" if options.refine else "none", "keep_shares_max_classes": 0}
    if isinstance(options.prior, str):
        changes |= {"objective.prior": options.prior, "keep_shares_max_classes": 0}
    if options.seed is not None:
        changes["seed"] = options.seed
    if "optimisation.lr" in changes:  # an explicit rate is taken as it is
        changes.setdefault("keep_shares_lr_factor", 1.0)
    return changes


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
