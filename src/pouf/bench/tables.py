"""The paper's tables: their cells and settings, the paper's own figures, and rows of means over seeds."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pouf import METHODS
from pouf.bench.tasks import GRID_METHODS, IMAGE_SETS, SEEDS, TASKS, image_tasks
from pouf.recipe import Kind


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


# A model of this name is the paper's, in any account of the hub.
IMAGE_MODEL, LANGUAGE_MODEL = "clip-vit-base-patch16", "roberta-large"


class Figure(NamedTuple):
    mean: float
    std: float | None = None


Figures = dict[tuple[str, str], Figure]


def papers_model(task: str, model: str) -> bool:
    """Whether the paper's figure of this task is one of this model."""
    return model.rstrip("/").split("/")[-1] == (LANGUAGE_MODEL if task in TASKS else IMAGE_MODEL)


def _rows(columns: list[str], rows: dict[str, str]) -> Figures:
    """(task, method) -> figure, from lines such as `81.5(0.1) 80.7(0.7)`; a dash leaves one out."""
    found: Figures = {}
    for method, figures in rows.items():
        for column, figure in zip(columns, figures.split(), strict=True):
            if figure != "-":
                mean, *std = re.findall(r"-?[\d.]+", figure)
                found[column, method] = Figure(float(mean), float(std[0]) if std else None)
    return found


IMAGES = _rows(
    [task for name in ("office31", "office-home", "domainnet") for task in (*image_tasks(name), f"{name} average")],
    {
        "zero-shot": "79.0 77.5 74.7 77.1 82.7 68.1 89.1 89.8 82.4 70.9 48.2 65.9 14.0 83.6 63.6 57.7",
        "tent": "81.5(0.1) 80.7(0.7) 82.8(0.2) 81.7 83.2(0.1) 67.8(0.2) 91.9(0.1) 90.4(0.1) 83.3 "
        "71.4(0.2) 47.8(0.5) 66.2(0.1) 14.2(0.1) 83.9(0.1) 64.1(0.2) 57.9",
        "upl": "81.4(0.1) 82.6(0.1) 83.6(0.3) 82.5 83.3(0.1) 67.7(0.1) 91.5(0.1) 90.7(0.1) 83.3 "
        "71.7(0.1) 47.5(0.4) 66.3(0.2) 14.4(0.3) 83.8(0.1) 64.3(0.1) 58.0",
        "pouf-prompt": "83.6(0.5) 89.9(2.5) 90.6(2.3) 88.0 83.7(0.1) 71.2(0.1) 91.4(0.1) 90.8(0.1) 84.3 "
        "72.8(0.1) 53.1(0.3) 68.6(0.1) 15.9(0.1) 84.4(0.0) 66.2(0.1) 60.2",
        "pouf-full": "84.4(0.4) 91.1(2.1) 91.3(2.5) 88.9 86.2(0.4) 73.8(0.3) 92.7(0.1) 91.7(0.1) 86.1 "
        "73.8(0.1) 55.7(0.3) 68.6(0.1) 18.8(0.7) 84.6(0.0) 66.4(0.1) 61.3",
        # As printed: the mean of DomainNet's six figures would be 62.4.
        "coop": "83.7(2.1) 98.8(0.6) 98.2(0.8) 93.6 85.6(0.4) 73.2(0.2) 92.7(0.1) 91.6(0.1) 85.8 "
        "75.3(0.2) 55.7(0.2) 71.9(0.2) 20.7(0.2) 83.4(0.1) 67.4(0.1) 62.9",
    },
)
LANGUAGE = _rows(
    list(TASKS),
    {
        "majority": "50.9 23.1 50.0 50.0 50.0 50.0 18.8 0.0 32.7 33.0 33.8 49.5 52.7 81.2 0.0 -",
        "zero-shot": "83.6 35.0 80.8 79.5 67.6 51.4 32.0 2.0 50.8 51.7 49.5 50.8 51.3 61.9 49.7 -3.2",
        "pouf": "89.4(0.0) 44.9(1.6) 86.4(0.9) 86.0(5.6) 78.1(7.8) 80.8(0.1) 36.9(15.1) 1.5(0.1) "
        "55.0(2.3) 56.3(3.4) 64.0(0.2) 68.2(4.0) 64.5(2.5) 81.2(0.1) 53.8(0.1) 20.9(9.3)",
        "fine-tuning": "81.4(3.8) 43.9(2.0) 76.9(5.9) 75.8(3.2) 72.0(3.8) 90.8(1.8) 88.8(2.1) 33.9(14.3) "
        "45.8(6.4) 47.8(6.8) 48.4(4.8) 60.2(6.5) 54.4(3.9) 76.6(2.5) 60.7(4.3) 53.5(8.5)",
        "in-context": "84.8(1.3) 30.6(0.9) 80.5(1.7) 87.4(0.8) 63.8(2.1) 53.6(1.0) 26.2(2.4) -1.5(2.4) "
        "52.0(0.7) 53.4(0.6) 47.1(0.6) 53.8(0.4) 60.4(1.4) 45.7(6.0) 36.1(5.2) 14.3(2.8)",
        "lm-bff": "92.6(0.5) 50.6(1.4) 86.6(2.2) 90.2(1.2) 87.0(1.1) 92.3(0.8) 87.5(3.2) 18.7(8.8) "
        "70.7(1.3) 72.0(1.2) 79.7(1.5) 69.2(1.9) 68.7(2.3) 77.8(2.0) 69.8(1.8) 73.5(5.1)",
        "lm-bff-pouf": "93.2(0.0) 53.6(0.2) 87.6(0.2) 91.8(0.2) 88.0(0.2) 92.9(0.1) 90.1(0.1) 20.6(0.6) "
        "73.8(1.1) 74.9(0.1) 80.0(0.2) 76.3(0.3) 70.5(0.6) 81.8(0.7) 69.0(1.0) 82.1(0.1)",
    },
)
ABLATION = _rows(
    ["office31 average", "RTE"],
    {
        "exact": "86.1(0.2) 58.0(5.5)", "sinkhorn": "86.5(0.2) 63.3(6.0)", "no-transport": "83.3(0.4) 56.9(1.5)",
        "no-information": "84.2(0.2) 58.4(1.3)", "exponential": "87.6(0.5) 61.3(6.3)", "default": "88.0(0.9) 64.5(2.5)",
    },
)  # fmt: skip
UNSEEN = _rows(
    [
        "office31:webcam seen", "office31:webcam unseen", "office31:webcam>amazon seen",
        "office31:webcam>amazon unseen", "office31:amazon seen", "office31:amazon unseen",
        "office31:amazon>webcam seen", "office31:amazon>webcam unseen",
    ],
    {
        "zero-shot": "65.2 87.5 76.5 83.0 76.5 83.0 65.2 87.5",
        "seen": "85.1 92.8 83.6 82.7 84.1 81.7 81.1 89.4",
        "seen+unseen": "75.5 95.7 79.6 85.8 80.6 87.2 72.2 93.1",
    },
)  # fmt: skip
LAMBDAS = ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "1.0")
LAMBDA = _rows(
    ["office31:webcam"],
    dict(zip(LAMBDAS, "87.5 88.3 90.6 91.7 90.8 89.2 90.6 89.8 88.9 91.6".split(), strict=True)),
)
COST = _rows(
    ["parameters", "total", "seconds per step"],
    {"pouf-prompt": "2049 149622785 0.4", "pouf-full": "149620737 149620737 1.8"},
)


IMAGE_SEEDS = (0, 1, 2)


class Row(NamedTuple):
    """A column of a method, over seeds. A figure is None where no seed has one."""

    column: str
    method: str
    seeds: int
    steps: int
    last: Figure | None
    chosen: Figure | None
    oracle: Figure | None
    dev: Figure | None
    paper: Figure | None
    failed: tuple[str, ...]
    differs: str = ""  # how the paper's figure was made, where that is not so here


@dataclass(frozen=True)
class Table:
    about: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = IMAGE_SEEDS
    figures: Mapping[tuple[str, str], Figure] = field(default_factory=dict)  # the paper's own, by column and method
    extra: tuple[str, ...] = ()  # tasks beyond the paper's
    kind: Kind | None = None  # of model: its methods can be chosen beyond the paper's
    percent: bool = True

    @property
    def all_tasks(self) -> tuple[str, ...]:
        return (*self.tasks, *self.extra)

    @property
    def all_methods(self) -> tuple[str, ...]:
        """The paper's, and all others that suit the kind of model."""
        return (*self.methods, *(n for n, m in METHODS.items() if self.kind in m.kinds and n not in self.methods))

    def seeds_of(self, task: str) -> tuple[int, ...]:
        """A language task has its own seeds, in whatever table it is."""
        return SEEDS if task in TASKS else self.seeds

    def cells(
        self, name: str, tasks: Sequence[str], methods: Sequence[str], seeds: Sequence[int] | None = None
    ) -> list[Cell]:
        return [Cell(name, t, m, seed) for t in tasks for m in methods for seed in (seeds or self.seeds_of(t))]

    def rows(self, results: Sequence[Result], setting: Setting) -> list[Row]:
        """Means over seeds, and an average over the domains of each data set that has several."""
        by_row: dict[tuple[str, str], list[Result]] = {}
        for result in results:
            for column in result.scores or (result.cell.task,):
                by_row.setdefault((column, result.cell.method), []).append(result)
        rows = [self._row(column, method, group, setting) for (column, method), group in by_row.items()]
        if self.percent:
            rows += [self._row(*key, group, setting) for key, group in _averages(by_row).items()]
        return rows

    def _row(self, column: str, method: str, results: Sequence[Result], setting: Setting) -> Row:
        scores = {result.cell.seed: result.scores[column] for result in results if not result.error}
        task = results[0].cell.task
        last, chosen, oracle, dev = (self._figure([s[i] for s in scores.values()]) for i in range(4))
        comparable = _comparable(setting, task) and set(scores) == set(self.seeds_of(task))
        figure = self.figures.get((column, method)) if comparable else None
        steps = max((int(result.facts.get("steps", 0)) for result in results), default=0)
        failed = tuple(f"seed {result.cell.seed}: {result.error}" for result in results if result.error)
        differs = _differs(method, setting) if figure is not None and task in TASKS else ""
        return Row(column, method, len(scores), steps, last, chosen, oracle, dev, figure, failed, differs)

    def _figure(self, values: Sequence[float | None]) -> Figure | None:
        found = [100 * value if self.percent else value for value in values if value is not None]
        if not found or len(found) < len(values):
            return None
        return Figure(statistics.mean(found), statistics.stdev(found) if len(found) > 1 else None)


def _averages(by_row: Mapping[tuple[str, str], list[Result]]) -> dict[tuple[str, str], list[Result]]:
    """Of each seed, over the domains of a data set. Where some are missing the column says so."""
    groups: dict[tuple[str, str], dict[str, dict[int, Result]]] = {}
    for (column, method), results in by_row.items():
        by_seed = {result.cell.seed: result for result in results if not result.error}
        if ":" in column and " " not in column and by_seed:
            groups.setdefault((column.split(":")[0], method), {})[column] = by_seed
    averages: dict[tuple[str, str], list[Result]] = {}
    for (name, method), columns in groups.items():
        first, *others = columns.values()
        seeds = [seed for seed in first if all(seed in by_seed for by_seed in others)]
        if others and seeds:
            average = f"{name} average" + f" of {len(columns)}" * (len(columns) < len(IMAGE_SETS[name].domains))
            scores = {seed: _mean([by_seed[seed].scores[c] for c, by_seed in columns.items()]) for seed in seeds}
            averages[average, method] = [first[seed]._replace(scores={average: scores[seed]}) for seed in seeds]
    return averages


def _mean(scores: Sequence[Score]) -> Score:
    """None where one of them has none."""
    return Score(*(None if None in way else statistics.mean(way) for way in zip(*scores, strict=True)))  # type: ignore[arg-type]


ABLATIONS: dict[str, dict[str, Any]] = {
    "exact": {"objective.plan": "exact"},
    "sinkhorn": {"objective.plan": "sinkhorn"},
    "no-transport": {"objective.transport": 0.0},
    "no-information": {"objective.information": 0.0},
    "exponential": {"objective.cost": "exponential"},
    "default": {},
}


def _comparable(setting: Setting, task: str) -> bool:
    """Whether the paper's figures are of the same model and setting; how it is computed makes no difference."""
    changed = any(not name.startswith("compute.") for name in setting.changes)
    same_texts = not setting.limit and setting.unlabelled == "kshot"
    return papers_model(task, setting.model) and not changed and (same_texts or task not in TASKS)


def _differs(method: str, setting: Setting) -> str:
    """What Gao et al. did for a few-shot figure that the paper quotes, and this table did not."""
    missing = []
    if method in GRID_METHODS and not setting.grid:
        missing.append("the best on D_dev of nine batch sizes and rates for each seed (here one)")
    if method == "lm-bff" and not setting.demo_filter:
        missing.append("demonstrations filtered by similarity (here drawn from all)")
    return f"the paper's figure is Gao et al.'s: {', and '.join(missing)}" if missing else ""


TABLES: dict[str, Table] = {
    "images": Table(
        "Table 1: images, CLIP", tuple(image_tasks("office31", "office-home", "domainnet")),
        ("zero-shot", "tent", "upl", "pouf-prompt", "pouf-full", "coop"), figures=IMAGES,
        extra=tuple(image_tasks("office-caltech", "pacs")), kind="image",
    ),
    "language": Table(
        "Table 2: language, masked language models", tuple(TASKS),
        ("majority", "zero-shot", "pouf", "fine-tuning", "in-context", "lm-bff", "lm-bff-pouf"), SEEDS, LANGUAGE,
        kind="cloze",
    ),
    "ablation": Table(
        "Table 3: parts of the objective", (*image_tasks("office31"), "RTE"), tuple(ABLATIONS), figures=ABLATION,
        extra=(*image_tasks("office-home", "domainnet", "office-caltech", "pacs"), *(t for t in TASKS if t != "RTE")),
    ),
    "cost": Table(
        "Table 4: parameters and time", ("office31:webcam",), ("pouf-prompt", "pouf-full"), (0,), COST,
        extra=tuple(image_tasks("office31", "office-home", "domainnet", "office-caltech", "pacs")), percent=False,
    ),
    "unseen": Table(
        "Unseen classes, in the same domain and in another",
        ("office31:webcam", "office31:webcam>amazon", "office31:amazon", "office31:amazon>webcam"),
        ("zero-shot", "seen", "seen+unseen"), figures=UNSEEN,
        extra=("office-caltech:webcam", "office-caltech:webcam>dslr", "pacs:photo", "pacs:photo>cartoon"),
    ),
    "lambda": Table(
        "The sweep over lambda", ("office31:webcam",), LAMBDAS, figures=LAMBDA,
        extra=(*image_tasks("office31", "office-home", "domainnet", "office-caltech", "pacs"), *TASKS),
    ),
}  # fmt: skip
