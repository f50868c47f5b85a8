"""Features that a run will look up, encoded together, so that each input is opened once for all of them."""

from __future__ import annotations

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.labels import Teacher
from pouf.data.views import perturbation
from pouf.inference.encode import InferenceConfig
from pouf.inference.views import View
from pouf.recipe import Recipe
from pouf.training.batches import make_crop
from pouf.validation.sample import changes_features, sample_positions, sample_size

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
