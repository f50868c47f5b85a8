"""`pouf names`: how well wordings of the classes fit the inputs, before training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pouf.cli import _console as console
from pouf.cli._options import DataOption, InferenceOptions, ModelOption, TextColumn, grouped
from pouf.cli._progress import encoding
from pouf.errors import InputError

if TYPE_CHECKING:
    from pouf.models.base import Backbone

MIN_AGREEMENT = 0.75  # with two classes 0.25 lower, as in the verdict


@grouped()
def names(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Folder of images, or file of texts.")],
    options: InferenceOptions,
    classes: Annotated[
        list[str], DataOption(help="Names or descriptions, or a file of them; repeat it for each wording.")
    ],
    template: Annotated[
        list[str] | None, ModelOption(help="Sentence with {} for the name; repeat it to compare several.")
    ] = None,
    model: Annotated[str | None, ModelOption(help="Name or folder of the model.")] = None,
    text_column: TextColumn = None,
) -> None:
    """Compare wordings of the classes on inputs without labels: which of them does the model understand?"""
    from pouf.classifier import Classifier
    from pouf.data.class_names import read_classes
    from pouf.data.inputs import normalise, split_columns
    from pouf.inference.cache import InMemoryFeatureCache
    from pouf.models.load import DEFAULT_MODELS
    from pouf.validation.names import judge_wording

    console.silence_libraries()
    texts = not (data.is_dir() or data.suffix == ".tar")
    kind = "text" if texts else "image"
    inputs = normalise(data, "text" if texts else "image", split_columns(text_column, ("text",))).data
    if any("[MASK]" in each for each in template or []):
        raise InputError("pouf names compares names in sentences: give templates with {}, and none with [MASK]")
    backbone: Backbone | None = None
    rows: list[dict[str, Any]] = []
    with encoding(options) as inference:
        inference = replace(inference, cache=inference.cache or InMemoryFeatureCache())
        for given in classes:
            for sentence in template if template else [None]:
                read = read_classes(given)
                wording = read.as_given()
                own = [sentence] if sentence is not None else None
                if backbone is None:
                    first = Classifier.from_pretrained(
                        model or DEFAULT_MODELS[kind], wording, own, trust_model=options.trust_model
                    ).to(options.resolve_device())
                    backbone = first.backbone
                found = judge_wording(Classifier(backbone, wording, own), inputs, inference)
                rows.append({"classes": given, "count": len(read.names), "template": sentence, **found._asdict()})
    rows.sort(key=lambda row: -row["agreement"])
    console.show_result({"wordings": rows}, _comparison(rows), options)


def _comparison(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        where = f" in {row['template']!r}" if row["template"] else ""
        near = f", nearer than {row['nearness']:.0%} of ordinary words" if row["nearness"] is not None else ""
        pairs = ", ".join(f"{one}/{other}" for one, other in row["confused"])
        lines.append(
            f"{row['classes']}{where}: agreement {row['agreement']:.2f}, mean confidence {row['confidence']:.0%}{near}"
            f"; hardest to tell apart: {pairs}"
        )
    best = rows[0]
    if best["agreement"] < MIN_AGREEMENT - 0.25 * (best["count"] == 2):
        lines.append("The model is unsure what any of these mean here: describe each class in a few words.")
    elif len(rows) > 1:
        lines.append(f"Best: {best['classes']}" + (f" in {best['template']!r}" if best["template"] else ""))
    return "\n".join(lines)
