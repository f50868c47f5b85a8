"""What tables are made of: cells, the settings that they share, and their scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Cell:
    table: str
    task: str
    method: str
    seed: int


@dataclass(frozen=True)
class Setting:
    """What all cells of a table share.

    Args:
        data: the folder that holds the data sets.
        changes: to the recipes, by dotted name.
        batch_size: of evaluation.
        limit: most test texts of a language task, drawn once and the same for all cells; 0 takes all.
        unlabelled: texts to adapt to: kshot, the paper's 16 per class of each seed, or train, the training set.
        text_columns, label_column: of the files of language tasks, where they do not have the usual names.
        grid: "paper" trains fine-tuning and LM-BFF with each of Gao et al.'s batch sizes and rates, and takes the best
            on D_dev.
        demo_filter: a sentence encoder, by name or folder: LM-BFF's demonstrations come from the half of each class
            that is most like the text.
    """

    data: str
    model: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 256
    limit: int = 0
    unlabelled: str = "kshot"
    text_columns: tuple[str, ...] = ()
    label_column: str = ""
    grid: str = ""
    demo_filter: str = ""


class Score(NamedTuple):
    """A metric at the last step, of what `adapt` would use, and at the best step by the labels of the test.

    `chosen` is what the verdict advises: the step chosen without labels, or zero-shot where an alarm speaks against it.

    Language tasks also have D_dev, as many labelled texts as the shots: `dev` is the metric at the step that is best
    there. None where no checkpoints were evaluated.
    """

    last: float
    chosen: float | None = None
    oracle: float | None = None
    dev: float | None = None


class Result(NamedTuple):
    """Of a cell: scores by column, or an error."""

    cell: Cell
    scores: dict[str, Score]
    facts: dict[str, float]
    error: str = ""
    seconds: float = 0.0
