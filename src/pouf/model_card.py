"""The model card of a classifier: the README.md of its folder, for users and the hub."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.utils import logging as hub_logging

from pouf.models.load import EMBEDDED
from pouf.recipe import Kind, Recipe

if TYPE_CHECKING:
    from pouf.classifier import Classifier

README = "README.md"
PIPELINES: dict[Kind, str] = {
    "image": "zero-shot-image-classification", "text": "text-classification", "cloze": "text-classification",
    "causal": "text-classification",
}  # fmt: skip
NO_FACTS: dict[str, Any] = {
    "method": None, "sources": {}, "verdict": None, "diagnostics": (), "trainable": None, "total": None, "drift": None,
}  # fmt: skip
OWN_LICENCE = "apache-2.0"  # of this package, and of the model that comes with it


def model_card(classifier: Classifier, recipe: Recipe | None = None, facts: Mapping[str, Any] | None = None) -> str:
    """Markdown with the hub's metadata at the top.

    Args:
        recipe: the settings of the run; None for a classifier that was not adapted.
        facts: of the run: `method`, `sources` (role -> number of inputs), `verdict` (as JSON), `diagnostics` (rows of
            label, zero-shot, adapted and limits), `trainable` and `total` numbers, `drift` as text.
    """
    base, licence = classifier.model, base_licence(classifier.model, classifier.revision)
    on_hub = base is not None and not os.path.isabs(base) and base != EMBEDDED and ":" not in base
    data = ModelCardData(
        library_name="pouf",
        pipeline_tag=PIPELINES.get(classifier.kind),
        tags=["pouf", "zero-shot", "unsupervised"],
        base_model=base if on_hub else None,
        license=licence,
    )
    template = resources.files("pouf") / "reporting" / "templates" / "model_card.md"
    card = ModelCard.from_template(
        data,
        template_str=template.read_text(encoding="utf-8"),
        classes=classifier.classes,
        words=classifier.backbone.card_facts().get("words"),
        templates=classifier.templates,
        kind=classifier.kind,
        base=base_display_name(base),
        revision=classifier.revision,
        licence=licence,
        tuner=recipe.tuner.name if recipe is not None and recipe.steps else None,
        settings=recipe.to_toml() if recipe is not None else None,
        **NO_FACTS | dict(facts or {}),
    )
    return str(card)


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """While open, the hub library logs errors only, not warnings about cards without metadata."""
    hub, level = hub_logging.get_logger(), hub_logging.get_verbosity()
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub.setLevel(level)


def base_licence(model: str | None, revision: str | None = None) -> str | None:
    """The licence in the base model's card, if that card is on this machine."""
    if model is None:
        return None
    if model == EMBEDDED:
        return OWN_LICENCE
    readme: Any = Path(model) / README if os.path.isdir(model) else None
    if readme is None and not os.path.isabs(model) and ":" not in model:
        readme = try_to_load_from_cache(model, README, revision=revision)
    if not isinstance(readme, (str, Path)) or not Path(readme).is_file():
        return None
    try:
        with _quiet_hub():
            found = ModelCard.load(readme).data.get("license")
    except Exception:  # an invalid card must not break a run
        return None
    return found if isinstance(found, str) else None


def base_display_name(model: str | None) -> str:
    """The name of a model without the path of a local folder, which is private."""
    if model is None:
        return "a model of the user's own"
    return Path(model).name if os.path.isabs(model) else model
