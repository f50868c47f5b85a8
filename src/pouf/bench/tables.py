"""The paper's tables: which cells they are made of, and their rows of means over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pouf import METHODS
from pouf.bench import paper
from pouf.bench.cells import ABLATIONS
from pouf.bench.images import IMAGE_SETS, image_tasks
from pouf.bench.language import GRID_METHODS, SEEDS, TASKS
from pouf.bench.paper import Figure
from pouf.bench.results import Cell, Result, Score, Setting
from pouf.recipe import Kind

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
        first = next(iter(columns.values()))
        seeds = [seed for seed in first if all(seed in by_seed for by_seed in columns.values())]
        if len(columns) > 1 and seeds:
            average = f"{name} average" + f" of {len(columns)}" * (len(columns) < len(IMAGE_SETS[name].domains))
            averages[average, method] = [
                first[seed]._replace(
                    scores={average: _mean([by_seed[seed].scores[c] for c, by_seed in columns.items()])}
                )
                for seed in seeds
            ]
    return averages


def _mean(scores: Sequence[Score]) -> Score:
    """None where one of them has none."""
    ways = [[value for value in way if value is not None] for way in zip(*scores, strict=True)]
    last, *others = (statistics.mean(way) if len(way) == len(scores) else None for way in ways)
    assert last is not None
    return Score(last, *others)


def _comparable(setting: Setting, task: str) -> bool:
    """Whether the paper's figures are of the same model and setting; how it is computed makes no difference."""
    changed = any(not name.startswith("compute.") for name in setting.changes)
    same_texts = not setting.limit and setting.unlabelled == "kshot"
    return paper.papers_model(task, setting.model) and not changed and (same_texts or task not in TASKS)


def _differs(method: str, setting: Setting) -> str:
    """What Gao et al. did for a few-shot figure that the paper quotes, and this table did not."""
    missing = []
    if method in GRID_METHODS and not setting.grid:
        missing.append("the best on D_dev of nine batch sizes and rates for each seed (here one: --grid paper)")
    if method == "lm-bff" and not setting.demo_filter:
        missing.append("demonstrations filtered by similarity (here drawn from all: --demo-filter)")
    return f"the paper's figure is Gao et al.'s: {', and '.join(missing)}" if missing else ""


TABLES: dict[str, Table] = {
    "images": Table(
        "Table 1: images, CLIP", tuple(image_tasks("office31", "office-home", "domainnet")),
        ("zero-shot", "tent", "upl", "pouf-prompt", "pouf-full", "coop"), figures=paper.IMAGES,
        extra=tuple(image_tasks("office-caltech", "pacs")), kind="image",
    ),
    "language": Table(
        "Table 2: language, masked language models", tuple(TASKS),
        ("majority", "zero-shot", "pouf", "fine-tuning", "in-context", "lm-bff", "lm-bff-pouf"), SEEDS, paper.LANGUAGE,
        kind="cloze",
    ),
    "ablation": Table(
        "Table 3: parts of the objective", (*image_tasks("office31"), "RTE"), tuple(ABLATIONS), figures=paper.ABLATION,
        extra=(*image_tasks("office-home", "domainnet", "office-caltech", "pacs"), *(t for t in TASKS if t != "RTE")),
    ),
    "cost": Table(
        "Table 4: parameters and time", ("office31:webcam",), ("pouf-prompt", "pouf-full"), (0,), paper.COST,
        extra=tuple(image_tasks("office31", "office-home", "domainnet", "office-caltech", "pacs")), percent=False,
    ),
    "unseen": Table(
        "Unseen classes, in the same domain and in another",
        ("office31:webcam", "office31:webcam>amazon", "office31:amazon", "office31:amazon>webcam"),
        ("zero-shot", "seen", "seen+unseen"), figures=paper.UNSEEN,
        extra=("office-caltech:webcam", "office-caltech:webcam>dslr", "pacs:photo", "pacs:photo>cartoon"),
    ),
    "lambda": Table(
        "The sweep over lambda", ("office31:webcam",), paper.LAMBDAS, figures=paper.LAMBDA,
        extra=(*image_tasks("office31", "office-home", "domainnet", "office-caltech", "pacs"), *TASKS),
    ),
}  # fmt: skip
