"""Every decision that is taken before training, in one place."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.inputs import Inputs
from pouf.data.labelled import Shots, read_shots
from pouf.errors import InputError, one_of
from pouf.inference.cache import FeatureCache
from pouf.inference.encode import InferenceConfig
from pouf.options import AdaptOptions
from pouf.parallel.fsdp import asks_to_shard
from pouf.parallel.process_group import processes
from pouf.postprocess.shares import known_shares
from pouf.recipe import PRESETS, Recipe, full_name
from pouf.training.estimate import Estimate, estimate, largest_preset
from pouf.training.methods import METHODS, Method, Preparation
from pouf.training.recipe_for_data import preset_for_classes
from pouf.training.trainer import check_shots

logger = logging.getLogger(__name__)


class Plan(NamedTuple):
    """What is to be done."""

    data: Unlabelled | None
    recipe: Recipe
    shots: Shots | None
    method: str  # what it is called
    preparation: Preparation  # of the classifier
    known_shares: Tensor | None  # (k,), of the classes in these data

    def sources(self) -> dict[str, Unlabelled]:
        """What is learned from, by what to call it."""
        both = {"data": self.data, "shots": self.shots.inputs if self.shots is not None else None}
        return {name: source for name, source in both.items() if source is not None}

    def inference(self, classifier: Classifier, cache: FeatureCache) -> InferenceConfig:
        return InferenceConfig.of(self.recipe.compute, cache)

    def estimate(self, classifier: Classifier, cache: FeatureCache, report: bool) -> Estimate | None:
        """How long it will take; None where nobody can know: streams, shots alone, nothing to train, or a model that
        need not fit where it would be timed."""
        if self.data is None or self.data.streamed or not self.recipe.steps:
            return None
        if asks_to_shard(classifier, self.recipe):
            return None
        return estimate(
            classifier, self.data, self.recipe, self.inference(classifier, cache), report,
            demonstrations=self.preparation.demonstrations is not None, known_shares=self.known_shares is not None,
        )  # fmt: skip


def make_plan(
    classifier: Classifier,
    data: Inputs | None,
    options: AdaptOptions,
    *,
    cache: FeatureCache,
    report: bool,
    runs: int = 1,
) -> Plan:
    """What to do with a classifier, as `Classifier.adapt` describes it.

    Args:
        report: predictions and a report are written at the end.
        runs: how often it is to be done, as by a search; a limit of minutes is for all of them.
    """
    if classifier.adapted:
        logger.warning(
            "this classifier was adapted before: what this run compares with, and calls zero-shot, is the classifier "
            "as it is now"
        )
    plan_with = partial(resolve_plan, classifier, unlabelled(classifier, data))
    if options.max_minutes is None:
        return plan_with(options)
    if options.recipe is not None:
        raise InputError("a recipe and a limit of minutes: give one of them, since the limit chooses a preset")
    fitting = largest_preset(
        lambda name: plan_with(replace(options, recipe=name)).estimate(classifier, cache, report),
        options.max_minutes / runs,
    )
    return plan_with(replace(options, recipe=processes().broadcast(fitting)))


def resolve_plan(classifier: Classifier, data: Unlabelled | None, options: AdaptOptions) -> Plan:
    """The recipe, shots and data of a run. Nothing changes: the run has lists of its own of what can't be read."""
    method, recipe, shots, prior = options.method, options.recipe, options.shots, options.prior
    settings: dict[str, Any] = {full_name(name): value for name, value in (options.settings or {}).items()}
    if method == "pouf":
        recipe = preset_for_classes(classifier.kind, len(classifier.classes), recipe, settings)
    chosen: Method = one_of("method", method, METHODS)
    if classifier.temperature is not None and (recipe is None or (isinstance(recipe, str) and recipe in PRESETS)):
        settings = {"temperature": classifier.temperature, **settings}  # its own, unless told otherwise
    settled = chosen.recipe(classifier.kind, recipe, _changes(chosen, replace(options, settings=settings)))
    if isinstance(shots, (str, Path)):
        shots = read_shots(shots, classifier.classes, classifier.backbone.modality, classifier.columns)
    chosen.check(method, classifier.kind, shots)
    if shots is not None:
        alike = shots.inputs is data
        shots = shots._replace(inputs=shots.inputs.for_one_reader())
        data = shots.inputs if alike else data
    if data is not None and (shots is None or data is not shots.inputs):
        data = data.for_one_reader()
    if shots is not None and settled.steps and settled.objective.labels == 0:
        settled = settled.with_settings({"objective.labels": 1.0})
    if options.demonstrations:
        if shots is None or not classifier.backbone.supports_demonstrations:
            raise InputError("demonstrations are shots in a template: give shots, and a template with [MASK]")
        chosen = replace(chosen, demonstrations="after")
    if data is None and shots is None:
        raise InputError("nothing to learn from: give unlabelled data, labelled shots, or both")
    preparation, known = chosen.preparation(shots, settled.seed), None
    if prior is not None and not isinstance(prior, str):
        known = known_shares(prior, len(classifier.classes))
        trains = settled.steps and settled.objective.needs_unlabelled
        few = (
            len(classifier.classes) <= settled.keep_shares_max_classes
        )  # then shares are all that refinement would move
        ours = settled.objective.prior != "paper"
        if trains and ours and (settled.postprocess == "none" or few) and options.refine is None:
            # Training pulls towards known shares; these offsets see to it that it ends there.
            settled = settled.with_settings(postprocess="shares")
    learns_from_shots_alone = chosen.needs_shots and not settled.objective.needs_unlabelled
    learns = shots if settled.steps and settled.objective.labels else None
    if settled.steps and not settled.pseudo_labels:
        check_shots(learns, settled, classifier)  # now, and not after a batch was timed
    # A recipe that leaves the paper's losses out is told by its own name.
    own = method == "pouf" and isinstance(recipe, (str, Path)) and not settled.objective.needs_unlabelled
    told = Path(str(recipe)).stem if own else method
    inputs = None if learns_from_shots_alone and shots is not None else data
    return Plan(inputs, settled, learns, told, preparation, known)


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
    if "optimisation.lr" in changes:  # what was asked for is what is done
        changes.setdefault("keep_shares_lr_factor", 1.0)
    return changes


def unlabelled(classifier: Classifier, data: Inputs | None) -> Unlabelled | None:
    """What is to be adapted to, read."""
    if isinstance(data, str) and classifier.backbone.modality == "text":
        raise InputError(f"one text is nothing to adapt to; a file is given as Path({data[:40]!r})")
    return None if data is None else classifier.data(data)
