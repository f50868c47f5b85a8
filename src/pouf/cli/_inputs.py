"""What the options of `adapt` and `tune` describe: data, and a classifier for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pouf.cli._options import columns_of
from pouf.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pouf.classifier import Classifier
    from pouf.data.base import Unlabelled
    from pouf.models.cloze import Cloze
    from pouf.training.methods import Kind, Method


class PromptSpec(NamedTuple):
    """What is to be told apart, and how the model is asked."""

    names: Sequence[str] | None  # None: they come with the prototypes
    templates: Sequence[str] | None
    words: Sequence[Sequence[str]] | None  # for [MASK]
    cloze: Cloze | None


def read_prompt_spec(
    classes: str | None, template: list[str] | None, words: str | None, max_length: int | None
) -> PromptSpec:
    from pouf.models.cloze import make_cloze, read_words
    from pouf.models.prompts import read_classes, read_templates

    names = read_classes(classes) if classes is not None else None
    templates = read_templates(template) if template else None
    label_words = read_words(words) if words is not None else None
    return PromptSpec(names, templates, label_words, make_cloze(names or (), templates, label_words, max_length))


def read_data(
    images: Path | None,
    texts: Path | None,
    features: str | None,
    shots: Path | None,
    cloze: Cloze | None,
    text_column: str | None,
) -> tuple[Kind, Unlabelled | None]:
    """What is to be adapted to, and the kind of model for it."""
    from pouf.data.images import Images
    from pouf.data.texts import Texts
    from pouf.data.vectors import Vectors

    given = [each for each in (images, texts, features) if each is not None]
    if len(given) > 1:
        raise InputError("give one of --images DIR, --texts FILE and --features FILE, and not several")
    if not given and shots is None:
        raise InputError("nothing to learn from: give --images DIR, --texts FILE or --features FILE")
    if features is not None:
        return "vector", Vectors.from_file(features)
    if images is not None:
        return "image", Images.from_folder(images)
    columns = columns_of(text_column, cloze.columns if cloze is not None else ("text",))
    kind: Kind = "cloze" if cloze is not None else "text"
    if texts is not None:
        return kind, Texts.from_file(texts, columns)
    return ("image" if shots is not None and shots.is_dir() else kind), None


def check_together(
    kind: Kind,
    model: str | None,
    names: Sequence[str] | None,
    prototypes: str | None,
    max_length: int | None,
    cloze: Cloze | None,
) -> None:
    """Options that need each other, or exclude each other."""
    if (kind == "vector") != (prototypes is not None):
        raise InputError("--features and --prototypes belong together: give both, or a --model and data")
    if kind != "vector" and model is None:
        raise InputError("no model: give --model, as openai/clip-vit-base-patch16")
    if kind != "vector" and names is None:
        raise InputError("no classes: give --classes, as cat,dog")
    if max_length is not None and cloze is None:
        raise InputError("--max-length is for a --template with [MASK]: other models have their own")


def build_classifier(
    method: Method | None,
    kind: Kind,
    model: str | None,
    names: Sequence[str] | None,
    templates: Sequence[str] | None,
    words: Sequence[Sequence[str]] | None,
    max_length: int | None,
    prototypes: str | None,
    seed: int,
) -> Classifier:
    """The classifier as it is before training."""
    from pouf.classifier import Classifier

    if kind == "vector":
        return Classifier.from_vectors(prototypes or "", names)
    assert model is not None and names is not None
    if method is not None and method.fresh_head:
        return Classifier.with_fresh_head(model, names, seed)
    return Classifier.from_pretrained(model, names, templates, words=words, max_length=max_length)
