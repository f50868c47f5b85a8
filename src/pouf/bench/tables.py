"""The paper's tables: which cells they are made of, and how they look as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pouf import METHODS
from pouf.bench import paper
from pouf.bench.cells import ABLATIONS, Cell, Score, Setting
from pouf.bench.grid import Outcome
from pouf.bench.images import IMAGE_SETS, image_tasks
from pouf.bench.language import GRID_METHODS, SEEDS, TASKS
from pouf.bench.paper import Figure
from pouf.files import write_text
from pouf.recipe import Kind

IMAGE_SEEDS = (0, 1, 2)
PEEKS = "oracle (peeks at labels)"
DEV = "best on D_dev (needs labels)"
MARK = "†"
DIFFERS = "‡"
UNLABELLED = {
    "kshot": "the seed's 16 per class, as the paper's (kshot)",
    "train": "the whole training set (train), which is not the paper's setting",
}


class Spread(NamedTuple):
    mean: float
    std: float


@dataclass(frozen=True)
class Table:
    about: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = IMAGE_SEEDS
    figures: Mapping[tuple[str, str], Figure] = field(default_factory=dict)  # the paper's own, by column and method
    extra: tuple[str, ...] = ()  # tasks beyond the paper's
    kind: Kind | None = None  # of model: its methods can be asked for beyond the paper's
    percent: bool = True

    @property
    def all_methods(self) -> tuple[str, ...]:
        """The paper's, and all others that suit the kind of model."""
        return (
            *self.methods,
            *(name for name, m in METHODS.items() if self.kind in m.kinds and name not in self.methods),
        )

    def seeds_of(self, task: str) -> tuple[int, ...]:
        """A language task has its own seeds, in whatever table it is."""
        return SEEDS if task in TASKS else self.seeds

    def cells(
        self, name: str, tasks: Sequence[str], methods: Sequence[str], seeds: Sequence[int] | None = None
    ) -> list[Cell]:
        return [
            Cell(name, task, method, seed)
            for task in tasks
            for method in methods
            for seed in (seeds or self.seeds_of(task))
        ]


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


class Entry(NamedTuple):
    """A column of a method over seeds."""

    column: str
    method: str
    n: int
    steps: int
    last: Spread
    chosen: Spread
    oracle: Spread
    dev: Spread
    paper: Figure | None
    failed: tuple[str, ...]
    differs: str = ""  # how the paper's figure was made, where that is not so here


def entries(table: Table, outcomes: Sequence[Outcome], setting: Setting) -> list[Entry]:
    """Means over seeds, and an average over the domains of each data set that has several."""
    scores: dict[tuple[str, str], dict[int, Score]] = {}  # by column and method, of each seed
    failed: dict[tuple[str, str], list[str]] = {}
    steps: dict[tuple[str, str], int] = {}
    task_of: dict[str, str] = {}
    for cell, result, error, _ in outcomes:
        for column, score in (result.scores if result is not None else {cell.task: None}).items():
            place = column, cell.method
            task_of[column] = cell.task
            of_seeds = scores.setdefault(place, {})
            if score is not None and result is not None:
                of_seeds[cell.seed] = score
                steps[place] = max(steps.get(place, 0), int(result.facts.get("steps", 0)))
            else:
                failed.setdefault(place, []).append(f"seed {cell.seed}: {error}")
    if table.percent:
        for (column, method), (average, length) in _averages(scores, steps).items():
            scores[column, method], steps[column, method] = average, length
    rows = []
    for (column, method), of_seeds in scores.items():
        task = task_of.get(column, column)  # an average is of images
        same = _comparable(setting, task) and set(of_seeds) == set(table.seeds_of(task))
        last, chosen, oracle, dev = (_spread([s[i] for s in of_seeds.values()], table.percent) for i in range(4))
        figure = table.figures.get((column, method)) if same else None
        told = tuple(failed.get((column, method), ()))
        length = steps.get((column, method), 0)
        differs = _differs(method, setting) if figure is not None and task in TASKS else ""
        rows.append(Entry(column, method, len(of_seeds), length, last, chosen, oracle, dev, figure, told, differs))
    return rows


def _differs(method: str, setting: Setting) -> str:
    """What Gao et al. did for a few-shot figure that the paper quotes, and this table did not."""
    missing = []
    if method in GRID_METHODS and not setting.grid:
        missing.append("the best on D_dev of nine batch sizes and rates for each seed (here one: --grid paper)")
    if method == "lm-bff" and not setting.demo_filter:
        missing.append("demonstrations filtered by similarity (here drawn from all: --demo-filter)")
    return f"the paper's figure is Gao et al.'s: {', and '.join(missing)}" if missing else ""


def _comparable(setting: Setting, task: str) -> bool:
    """Whether the paper's figures are of the same model and setting; how it is computed makes no difference."""
    changed = any(not name.startswith("compute.") for name in setting.changes)
    same_texts = not setting.limit and setting.unlabelled == "kshot"
    return paper.papers_model(task, setting.model) and not changed and (same_texts or task not in TASKS)


def _averages(
    scores: Mapping[tuple[str, str], dict[int, Score]], steps: Mapping[tuple[str, str], int]
) -> dict[tuple[str, str], tuple[dict[int, Score], int]]:
    """Of each seed over the domains of a data set. Where some are missing the column says so."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for column, method in scores:
        if ":" in column and " " not in column and scores[column, method]:
            groups.setdefault((column.split(":")[0], method), []).append((column, method))
    averages = {}
    for (name, method), members in groups.items():
        seeds = [seed for seed in scores[members[0]] if all(seed in scores[member] for member in members)]
        if len(members) > 1 and seeds:
            partial = "" if len(members) == len(IMAGE_SETS[name].domains) else f" of {len(members)}"
            of_seeds = {seed: _mean_score([scores[member][seed] for member in members]) for seed in seeds}
            averages[f"{name} average{partial}", method] = of_seeds, max(steps.get(member, 0) for member in members)
    return averages


def _mean_score(scores: Sequence[Score]) -> Score:
    def mean(values: Sequence[float | None]) -> float | None:
        there = [value for value in values if value is not None]
        return statistics.mean(there) if len(there) == len(values) else None

    return Score(
        statistics.mean(s.last for s in scores), mean([s.chosen for s in scores]), mean([s.oracle for s in scores])
    )


def _spread(values: Sequence[float | None], percent: bool) -> Spread:
    """Not a number where there is none."""
    there = [100 * value if percent else value for value in values if value is not None]
    if not there or len(there) < len(values):
        return Spread(float("nan"), float("nan"))
    return Spread(statistics.mean(there), statistics.stdev(there) if len(there) > 1 else float("nan"))


def _shown(spread: Spread, percent: bool, none: str = "failed") -> str:
    mean, std = spread
    if mean != mean:
        return none
    if not percent:
        return _whole(mean)
    return f"{mean:.1f}" + (f" ({std:.1f})" if std == std else "")


def _whole(value: float) -> str:
    """149,620,737 as it is, a part of a second to the thousandth."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3f}".rstrip("0")


def _papers(row: Entry, percent: bool) -> str:
    """The paper's figure, marked where it was made in another way."""
    if row.paper is None:
        return ""
    mean, std = row.paper
    return _shown(Spread(mean, float("nan") if std is None else std), percent) + DIFFERS * bool(row.differs)


def _footnotes(rows: Sequence[Entry]) -> list[str]:
    return list(dict.fromkeys(f"{DIFFERS} {row.method}: {row.differs}." for row in rows if row.differs))


def uses_labels(method: str) -> bool:
    return method in METHODS and METHODS[method].needs_shots


def few_shot(method: str) -> bool:
    """The paper's second category. Majority is in the first, although it knows the labels of the training set."""
    return uses_labels(method) and method != "majority"


def _columns(rows: Sequence[Entry]) -> tuple[list[str], list[str]]:
    return list(dict.fromkeys(row.column for row in rows)), list(dict.fromkeys(row.method for row in rows))


def _best(rows: Sequence[Entry], column: str, category: bool) -> set[str]:
    """The best of a column, among those with shots or those without: all that are shown as equal."""
    there = [row for row in rows if row.column == column and row.n and few_shot(row.method) == category]
    most = max((round(row.last.mean, 3) for row in there), default=0.0)
    return {row.method for row in there if round(row.last.mean, 3) == most} if len(there) > 1 else set()


def _name(method: str) -> str:
    return f"{method} {MARK}" if uses_labels(method) else method


def _wide(table: Table, rows: Sequence[Entry], bold: str) -> tuple[list[str], list[list[str]]]:
    """Methods down, tasks across, last step; the best of a category in bold, the paper's in brackets."""
    columns, methods = _columns(rows)
    by_place = {(row.column, row.method): row for row in rows}
    body = []
    for method in methods:
        cells = []
        for column in columns:
            row = by_place.get((column, method))
            text = _shown(row.last, table.percent) if row is not None else "–"
            if table.percent and method in _best(rows, column, few_shot(method)):
                text = bold.format(text)
            papers = _papers(row, table.percent) if row is not None else ""
            cells.append(text + (f" [{papers}]" if papers else ""))
        body.append([_name(method), *cells])
    return ["", *columns], body


def _long(table: Table, rows: Sequence[Entry]) -> tuple[list[str], list[list[str]]]:
    """One line for each task and method, with the ways to stop side by side."""
    dev = _has_dev(rows)
    header = ["task", "method", "seeds", "steps", "last step", "chosen without labels", *[DEV] * dev, PEEKS, "paper",
              "failed"]  # fmt: skip
    body = [
        [
            row.column, _name(row.method), str(row.n), f"{row.steps:,}", _shown(row.last, table.percent),
            _shown(row.chosen, table.percent, none := "–" if row.n else "failed"),
            *[_shown(row.dev, table.percent, "–")] * dev, _shown(row.oracle, table.percent, none),
            _papers(row, table.percent), "; ".join(row.failed),
        ]
        for row in rows
    ]  # fmt: skip
    return header, body


def _has_dev(rows: Sequence[Entry]) -> bool:
    return any(row.dev.mean == row.dev.mean for row in rows)


def _model(name: str) -> str:
    """Its name on the hub, or that of its folder: where it lies on this machine is nobody's business."""
    return Path(name).resolve().name if Path(name).is_dir() else name


def described(rows: Sequence[Entry], setting: Setting) -> str:
    """The model, the number of steps, and what else the figures depend on."""
    lengths = sorted({row.steps for row in rows if row.steps})
    told = [f"Model {_model(setting.model)}", f"{' and '.join(f'{n:,}' for n in lengths) or 'no'} steps"]
    if any(row.column in TASKS for row in rows):
        told.append(f"unlabelled texts: {UNLABELLED[setting.unlabelled]}")
    if setting.limit:
        told.append(f"judged on {setting.limit:,} test texts at most, drawn once and the same for all rows")
    if setting.grid:
        told.append(
            f"{' and '.join(GRID_METHODS)}: the best on D_dev of batch sizes 2, 4, 8 and rates 1e-5, 2e-5, 5e-5"
        )
    if setting.demo_filter:
        told.append(f"demonstrations from the half of each class most like the text, by {_model(setting.demo_filter)}")
    if setting.changes:
        told.append("changed: " + ", ".join(f"{name}={value}" for name, value in setting.changes.items()))
    return "; ".join(told) + "."


def markdown(table: Table, rows: Sequence[Entry], setting: Setting) -> str:
    def lines(header: list[str], body: list[list[str]]) -> str:
        told = [header, ["---"] * len(header), *body]
        return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in told)

    about = ["Last step, mean (standard deviation) over seeds."]
    if table.percent:
        about.append("The best is bold, of those without shots and of those with.")
    if any(row.paper is not None for row in rows):
        about.append("The paper's own figure is in brackets.")
    if any(uses_labels(row.method) for row in rows):
        about.append(f"{MARK} uses labels.")
    parts = [f"# {table.about}", described(rows, setting), " ".join(about), lines(*_wide(table, rows, "**{}**"))]
    parts += _footnotes(rows)
    if table.percent:
        parts += [_where_to_stop(rows), lines(*_long(table, rows))]
    failed = [f"- {row.column}, {row.method}: {error}" for row in rows for error in row.failed]
    if failed:
        parts += ["Failed, and tried again by the next run:", "\n".join(failed)]
    return "\n\n".join(parts) + "\n"


def _where_to_stop(rows: Sequence[Entry]) -> str:
    dev = (
        f"*{DEV}* takes the snapshot that is best on as many other labelled texts as the shots: so the paper's figures "
        "for language were chosen, without shots as well. "
    )
    return (
        "Where to stop: the last step and the choice without labels need none; that choice is what `pouf adapt` would "
        "use, zero-shot where an alarm speaks against the run. "
        + (dev if _has_dev(rows) else "")
        + f"The *{PEEKS}* takes the best snapshot by the labels of the test, which nobody has: so the paper's figures "
        "for images were chosen. It is there to show what is lost without them."
    )


def as_csv(table: Table, rows: Sequence[Entry], setting: Setting) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream)
    ways = ("last", "chosen", "dev_needs_labels", "oracle_peeks_at_labels")
    numbers = [f"{way}_{part}" for way in ways for part in ("mean", "std")]
    writer.writerow(
        [
            "task",
            "method",
            "uses_labels",
            "seeds",
            *numbers,
            "paper",
            "paper_std",
            "model",
            "steps",
            "unlabelled",
            "paper_differs",
        ]
    )
    for row in rows:
        values = [value for spread in (row.last, row.chosen, row.dev, row.oracle) for value in spread]
        told = ["" if value != value else f"{value:.4f}" for value in values]
        figure = row.paper or (None, None)
        papers = ["" if value is None else value for value in figure]
        unlabelled = setting.unlabelled if row.column in TASKS else ""
        writer.writerow([row.column, row.method, "yes" if uses_labels(row.method) else "no", row.n, *told, *papers,
                         _model(setting.model), row.steps, unlabelled, row.differs])  # fmt: skip
    return stream.getvalue()


def latex(table: Table, rows: Sequence[Entry], setting: Setting) -> str:
    header, body = _wide(table, rows, r"\textbf{{{}}}")
    caption = " ".join([f"{table.about}. {described(rows, setting)}", *_footnotes(rows)])
    lines = [
        "% needs \\usepackage{booktabs}", r"\begin{table}[t]", r"\centering", rf"\caption{{{_tex(caption)}}}",
        rf"\begin{{tabular}}{{l{'c' * (len(header) - 1)}}}", r"\toprule",
        " & ".join(map(_tex, header)) + r" \\", r"\midrule",
        *(" & ".join(_tex(cell) for cell in line) + r" \\" for line in body),
        r"\bottomrule", r"\end{tabular}", r"\end{table}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _tex(text: str) -> str:
    for character in "&%_#":
        text = text.replace(character, f"\\{character}")
    text = text.replace(">", "$>$").replace("–", "--").replace(f" {MARK}", r"$^\dagger$")
    return text.replace(DIFFERS, r"$^\ddagger$")


def write_tables(folder: Path, name: str, rows: Sequence[Entry], setting: Setting) -> list[Path]:
    table = TABLES[name]
    made = []
    for suffix, render in ((".md", markdown), (".csv", as_csv), (".tex", latex)):
        file = folder / f"{name}{suffix}"
        write_text(file, render(table, rows, setting))
        made.append(file)
    return made
