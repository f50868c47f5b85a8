"""A table as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from pouf.bench.cells import uses_labels
from pouf.bench.tables import TABLES, Figure, Row, Setting, Table
from pouf.bench.tasks import GRID_METHODS, TASKS
from pouf.files import write_text

ORACLE = "oracle (peeks at labels)"
DEV = "best on D_dev (needs labels)"
USES_LABELS = "†"
DIFFERS = "‡"
UNLABELLED = {
    "kshot": "the seed's 16 per class, as the paper's (kshot)",
    "train": "the whole training set (train), which is not the paper's setting",
}
Grid = list[list[str]]  # the header first; bold as in Markdown


def write_tables(folder: Path, name: str, rows: Sequence[Row], setting: Setting) -> list[Path]:
    renderers = {".md": markdown, ".csv": as_csv, ".tex": latex}
    for suffix, render in renderers.items():
        write_text(folder / f"{name}{suffix}", render(TABLES[name], rows, setting))
    return [folder / f"{name}{suffix}" for suffix in renderers]


def markdown(table: Table, rows: Sequence[Row], setting: Setting) -> str:
    about = ["Last step, mean (standard deviation) over seeds."]
    if table.percent:
        about.append("The best is bold, of those without shots and of those with.")
    if any(row.paper is not None for row in rows):
        about.append("The paper's own figure is in brackets.")
    if any(uses_labels(row.method) for row in rows):
        about.append(f"{USES_LABELS} uses labels.")
    parts = [f"# {table.about}", caption(rows, setting), " ".join(about), _lines(_wide(table, rows))]
    parts += _footnotes(rows)
    if table.percent:
        parts += [_where_to_stop(rows), _lines(_long(table, rows))]
    failed = [f"- {row.column}, {row.method}: {error}" for row in rows for error in row.failed]
    if failed:
        parts += ["Failed, and tried again by the next run:", "\n".join(failed)]
    return "\n\n".join(parts) + "\n"


def as_csv(table: Table, rows: Sequence[Row], setting: Setting) -> str:
    records = [_record(row, setting) for row in rows]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, records[0])
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()


def latex(table: Table, rows: Sequence[Row], setting: Setting) -> str:
    header, *body = [" & ".join(map(_tex, line)) + r" \\" for line in _wide(table, rows)]
    text = " ".join([f"{table.about}. {caption(rows, setting)}", *_footnotes(rows)])
    columns = "c" * len({row.column for row in rows})
    lines = [
        "% needs \\usepackage{booktabs}", r"\begin{table}[t]", r"\centering", rf"\caption{{{_tex(text)}}}",
        rf"\begin{{tabular}}{{l{columns}}}", r"\toprule", header, r"\midrule", *body, r"\bottomrule", r"\end{tabular}",
        r"\end{table}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def caption(rows: Sequence[Row], setting: Setting) -> str:
    """The model, the number of steps, and what else the figures depend on."""
    lengths = sorted({row.steps for row in rows if row.steps})
    parts = [f"Model {_model(setting.model)}", f"{' and '.join(f'{n:,}' for n in lengths) or 'no'} steps"]
    if any(row.column in TASKS for row in rows):
        parts.append(f"unlabelled texts: {UNLABELLED[setting.unlabelled]}")
    if setting.limit:
        parts.append(f"judged on {setting.limit:,} test texts at most, drawn once and the same for all rows")
    if setting.grid:
        parts.append(
            f"{' and '.join(GRID_METHODS)}: the best on D_dev of batch sizes 2, 4, 8 and rates 1e-5, 2e-5, 5e-5"
        )
    if setting.demo_filter:
        parts.append(f"demonstrations from the half of each class most like the text, by {_model(setting.demo_filter)}")
    if setting.changes:
        parts.append("changed: " + ", ".join(f"{name}={value}" for name, value in setting.changes.items()))
    return "; ".join(parts) + "."


def is_few_shot(method: str) -> bool:
    """The paper's second category. Majority is in the first, although it needs the labels of the training set."""
    return uses_labels(method) and method != "majority"


def _wide(table: Table, rows: Sequence[Row]) -> Grid:
    """Methods down, tasks across, last step; the best of a category in bold, the paper's in brackets."""
    columns = list(dict.fromkeys(row.column for row in rows))
    by_key = {(row.column, row.method): row for row in rows}
    grid = [["", *columns]]
    for method in dict.fromkeys(row.method for row in rows):
        line = [_name(method)]
        for column in columns:
            row = by_key.get((column, method))
            text = "–" if row is None else _format(row.last, table.percent)
            if table.percent and method in _best(rows, column, is_few_shot(method)):
                text = f"**{text}**"
            line.append(text + (f" [{_papers(row, table.percent)}]" if row is not None and row.paper else ""))
        grid.append(line)
    return grid


def _best(rows: Sequence[Row], column: str, few_shot: bool) -> set[str]:
    """The best of a column, among those with shots or those without: all that are printed as equal."""
    own = [row for row in rows if row.column == column and is_few_shot(row.method) == few_shot]
    means = {row.method: round(row.last.mean, 3) for row in own if row.last is not None}
    return {method for method, mean in means.items() if mean == max(means.values())} if len(means) > 1 else set()


def _long(table: Table, rows: Sequence[Row]) -> Grid:
    """One line for each task and method, with the ways to stop side by side."""
    dev = _has_dev(rows)
    grid = [["task", "method", "seeds", "steps", "last step", "chosen without labels", *[DEV] * dev, ORACLE, "paper",
             "failed"]]  # fmt: skip
    for row in rows:
        ways = [(row.last, "failed"), (row.chosen, ""), *[(row.dev, "–")] * dev, (row.oracle, "")]
        cells = [_format(figure, table.percent, none or ("–" if row.seeds else "failed")) for figure, none in ways]
        grid.append([
            row.column, _name(row.method), str(row.seeds), f"{row.steps:,}", *cells, _papers(row, table.percent),
            "; ".join(row.failed),
        ])  # fmt: skip
    return grid


def _record(row: Row, setting: Setting) -> dict[str, object]:
    """A line of the CSV, by column."""
    labels = "yes" if uses_labels(row.method) else "no"
    record: dict[str, object] = {"task": row.column, "method": row.method, "uses_labels": labels, "seeds": row.seeds}
    ways = {"last": row.last, "chosen": row.chosen, "dev_needs_labels": row.dev, "oracle_peeks_at_labels": row.oracle}
    for name, figure in ways.items():
        for part, value in zip(("mean", "std"), figure or (None, None), strict=True):
            record[f"{name}_{part}"] = None if value is None else f"{value:.4f}"
    record["paper"], record["paper_std"] = row.paper or (None, None)
    unlabelled = setting.unlabelled if row.column in TASKS else None
    return record | {
        "model": _model(setting.model), "steps": row.steps, "unlabelled": unlabelled, "paper_differs": row.differs,
    }  # fmt: skip


def _format(figure: Figure | None, percent: bool, none: str = "failed") -> str:
    if figure is None:
        return none
    if percent:
        return f"{figure.mean:.1f}" + (f" ({figure.std:.1f})" if figure.std is not None else "")
    # 149,620,737 as it is, a part of a second to the thousandth.
    return f"{figure.mean:,.0f}" if float(figure.mean).is_integer() else f"{figure.mean:,.3f}".rstrip("0")


def _papers(row: Row, percent: bool) -> str:
    """The paper's figure, marked where it was made in another way."""
    return "" if row.paper is None else _format(row.paper, percent) + DIFFERS * bool(row.differs)


def _footnotes(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(f"{DIFFERS} {row.method}: {row.differs}." for row in rows if row.differs))


def _name(method: str) -> str:
    return f"{method} {USES_LABELS}" if uses_labels(method) else method


def _has_dev(rows: Sequence[Row]) -> bool:
    return any(row.dev is not None for row in rows)


def _model(name: str) -> str:
    """Its name on the hub, or that of its folder without the path to it."""
    return Path(name).resolve().name if Path(name).is_dir() else name


def _lines(grid: Grid) -> str:
    lines = [grid[0], ["---"] * len(grid[0]), *grid[1:]]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _tex(text: str) -> str:
    for character in "&%_#":
        text = text.replace(character, f"\\{character}")
    text = text.replace(">", "$>$").replace("–", "--").replace(f" {USES_LABELS}", r"$^\dagger$")
    return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text.replace(DIFFERS, r"$^\ddagger$"))


def _where_to_stop(rows: Sequence[Row]) -> str:
    parts = [
        "Where to stop: the last step and the choice without labels need none; that choice is what `pouf adapt` would "
        "use, zero-shot where an alarm speaks against the run.",
        f"*{DEV}* takes the checkpoint that is best on as many other labelled texts as the shots: so the paper's "
        "figures for language were chosen, without shots as well.",
        f"The *{ORACLE}* takes the best checkpoint by the labels of the test, which nobody has: so the paper's "
        "figures for images were chosen. It is there to show what is lost without them.",
    ]
    return " ".join(part for part in parts if _has_dev(rows) or not part.startswith(f"*{DEV}"))
