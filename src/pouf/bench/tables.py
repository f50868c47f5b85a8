"""The paper's tables: which cells they are made of, and how they look as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pouf.bench import paper
from pouf.bench.cells import ABLATIONS, Cell
from pouf.bench.grid import Outcome
from pouf.bench.images import image_tasks
from pouf.bench.language import SEEDS, TASKS

IMAGE_SEEDS = (0, 1, 2)
PEEKS = "oracle (peeks at labels)"


@dataclass(frozen=True)
class Table:
    about: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = IMAGE_SEEDS
    figures: Mapping[tuple[str, str], float] = field(default_factory=dict)  # the paper's own, by column and method
    extra: tuple[str, ...] = ()  # tasks beyond the paper's
    percent: bool = True

    def cells(self, name: str, tasks: Sequence[str], methods: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
        return [Cell(name, task, method, seed) for task in tasks for method in methods for seed in seeds]


TABLES: dict[str, Table] = {
    "images": Table(
        "Table 1: images, CLIP", tuple(image_tasks("office31", "office-home", "domainnet")),
        ("zero-shot", "tent", "upl", "pouf-prompt", "pouf-full", "coop"), figures=paper.IMAGES,
        extra=tuple(image_tasks("office-caltech", "pacs")),
    ),
    "language": Table(
        "Table 2: language, masked language models", tuple(TASKS),
        ("majority", "zero-shot", "pouf", "fine-tuning", "in-context", "lm-bff", "lm-bff-pouf"), SEEDS, paper.LANGUAGE,
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
    last: tuple[float, float]  # mean and standard deviation
    chosen: tuple[float, float]
    oracle: tuple[float, float]
    paper: float | None
    failed: tuple[str, ...]


def entries(table: Table, outcomes: Sequence[Outcome], papers_model: bool) -> list[Entry]:
    """Means over seeds, and an average over the domains of each data set that has several."""
    found: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        columns = outcome.result.scores if outcome.result is not None else [outcome.cell.task]
        for column in columns:
            found.setdefault((column, outcome.cell.method), []).append(outcome)
    figures = table.figures if papers_model else {}
    scale = 100.0 if table.percent else 1.0
    rows = []
    for (column, method), seeds in found.items():
        scores = [each.result.scores[column] for each in seeds if each.result is not None]
        failed = tuple(f"seed {each.cell.seed}: {each.error}" for each in seeds if each.result is None)
        last, chosen, oracle = (_spread([scale * score[i] for score in scores]) for i in range(3))
        rows.append(Entry(column, method, len(scores), last, chosen, oracle, figures.get((column, method)), failed))
    return rows + (_averages(rows, figures) if table.percent else [])


def _averages(rows: Sequence[Entry], figures: Mapping[tuple[str, str], float]) -> list[Entry]:
    groups: dict[tuple[str, str], list[Entry]] = {}
    for row in rows:
        if ":" in row.column and " " not in row.column:
            groups.setdefault((row.column.split(":")[0], row.method), []).append(row)
    means = []
    for (name, method), members in groups.items():
        if len(members) > 1 and all(member.n for member in members):
            last, chosen, oracle = (
                (statistics.mean(getattr(member, which)[0] for member in members), float("nan"))
                for which in ("last", "chosen", "oracle")
            )
            column = f"{name} average"
            means.append(Entry(column, method, 0, last, chosen, oracle, figures.get((column, method)), ()))
    return means


def _spread(values: list[float]) -> tuple[float, float]:
    if not values:
        return float("nan"), float("nan")
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else float("nan")


def _shown(pair: tuple[float, float], percent: bool) -> str:
    mean, std = pair
    if mean != mean:
        return "failed"
    if not percent:
        return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3f}"
    return f"{mean:.1f}" + (f" ({std:.1f})" if std == std else "")


def _columns(rows: Sequence[Entry]) -> tuple[list[str], list[str]]:
    return list(dict.fromkeys(row.column for row in rows)), list(dict.fromkeys(row.method for row in rows))


def _best(rows: Sequence[Entry], column: str) -> str | None:
    there = [row for row in rows if row.column == column and row.last[0] == row.last[0]]
    return max(there, key=lambda row: row.last[0]).method if len(there) > 1 else None


def _wide(table: Table, rows: Sequence[Entry], bold: str) -> tuple[list[str], list[list[str]]]:
    """Methods down, tasks across, last step; the best in bold, the paper's in brackets where the model is the same."""
    columns, methods = _columns(rows)
    by_place = {(row.column, row.method): row for row in rows}
    body = []
    for method in methods:
        cells = []
        for column in columns:
            row = by_place.get((column, method))
            text = _shown(row.last, table.percent) if row is not None else "–"
            if table.percent and row is not None and _best(rows, column) == method:
                text = bold.format(text)
            cells.append(text + (f" [{row.paper:g}]" if row is not None and row.paper is not None else ""))
        body.append([method, *cells])
    return ["", *columns], body


def _long(table: Table, rows: Sequence[Entry]) -> tuple[list[str], list[list[str]]]:
    """One line for each task and method, with the three ways to stop side by side."""
    header = ["task", "method", "seeds", "last step", "chosen without labels", PEEKS, "paper", "failed"]
    body = [
        [
            row.column, row.method, str(row.n or ""), *(
                _shown(pair, table.percent) for pair in (row.last, row.chosen, row.oracle)
            ),
            "" if row.paper is None else f"{row.paper:g}", "; ".join(row.failed),
        ]
        for row in rows
    ]  # fmt: skip
    return header, body


def markdown(table: Table, rows: Sequence[Entry]) -> str:
    def lines(header: list[str], body: list[list[str]]) -> str:
        told = [header, ["---"] * len(header), *body]
        return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in told)

    parts = [f"# {table.about}", "Last step, mean (standard deviation) over seeds. The best is bold"
             + ("; the paper's own figure is in brackets." if any(row.paper is not None for row in rows) else "."),
             lines(*_wide(table, rows, "**{}**"))]  # fmt: skip
    if table.percent:
        parts += [
            f"Where to stop: the *{PEEKS}* takes the best snapshot by the target's labels, which nobody has. "
            "It is there to show what is lost without them, and it is how the paper's figures were chosen.",
            lines(*_long(table, rows)),
        ]
    failed = [f"- {row.column}, {row.method}: {error}" for row in rows for error in row.failed]
    if failed:
        parts += ["Failed, and tried again by the next run:", "\n".join(failed)]
    return "\n\n".join(parts) + "\n"


def as_csv(table: Table, rows: Sequence[Entry]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream)
    ways = ("last", "chosen", "oracle_peeks_at_labels")
    writer.writerow(
        ["task", "method", "seeds", *(f"{way}_{part}" for way in ways for part in ("mean", "std")), "paper"]
    )
    for row in rows:
        numbers = [value for pair in (row.last, row.chosen, row.oracle) for value in pair]
        told = ["" if value != value else f"{value:.4f}" for value in numbers]
        writer.writerow([row.column, row.method, row.n, *told, "" if row.paper is None else row.paper])
    return stream.getvalue()


def latex(table: Table, rows: Sequence[Entry]) -> str:
    header, body = _wide(table, rows, r"\textbf{{{}}}")
    lines = [
        "% needs \\usepackage{booktabs}", r"\begin{table}[t]", r"\centering", rf"\caption{{{_tex(table.about)}}}",
        rf"\begin{{tabular}}{{l{'c' * (len(header) - 1)}}}", r"\toprule",
        " & ".join(map(_tex, header)) + r" \\", r"\midrule",
        *(" & ".join(_tex(cell) for cell in line) + r" \\" for line in body),
        r"\bottomrule", r"\end{tabular}", r"\end{table}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _tex(text: str) -> str:
    for character in "&%_#":
        text = text.replace(character, f"\\{character}")
    return text.replace(">", "$>$").replace("–", "--")


def write_tables(folder: Path, name: str, rows: Sequence[Entry]) -> list[Path]:
    table = TABLES[name]
    made = []
    for suffix, render in ((".md", markdown), (".csv", as_csv), (".tex", latex)):
        file = folder / f"{name}{suffix}"
        file.write_text(render(table, rows), encoding="utf-8")
        made.append(file)
    return made
