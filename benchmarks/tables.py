"""The tables in benchmarks/results/tables, each by the command of `pouf bench run` that it prints.

    python benchmarks/tables.py --work WORK                                   # on the stand-ins, which it makes
    python benchmarks/tables.py --work WORK --texts ../shared/data/text --model ../shared/models/minilm-mlm

Cells that are finished stay in WORK and are never computed again, so that it can be stopped at any time; a table is
written to benchmarks/results/tables once all of its cells are there.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pouf import EMBEDDED
from pouf.bench.run import TableRun, run_table
from pouf.bench.standins import LM, make_data
from pouf.bench.tables import Setting

RESULTS = Path(__file__).parent / "results" / "tables"
SINGLE = ("SST-2", "SST-5", "MR", "Subj", "TREC", "CoLA")
PAIRS = ("RTE", "MRPC", "STS-B")
OFFICE = tuple(f"office31:{domain}" for domain in ("amazon", "dslr", "webcam"))
ONE_SEED = (0,)

# 50 steps where the paper has 1,000: the rate is the highest of LM-BFF's grid for all rows. Only the last step is
# judged, since 16 draws of demonstrations make each evaluation as long as the training; "language-stops" has five
# evaluations of the rows without demonstrations.
SHORT = {"steps": 50, "optimisation.lr": 5e-5, "snapshots": 0}
UNSUPERVISED = ("majority", "zero-shot", "pouf")
FEW_SHOT = ("majority", "zero-shot", "fine-tuning", "in-context", "lm-bff", "lm-bff-pouf")


SETTING = ("changes", "limit", "unlabelled")  # of the options, what all cells share


class Run(NamedTuple):
    """A table in benchmarks/results/tables, and the options that make it."""

    name: str
    table: str
    data: Path
    model: str
    options: dict[str, Any]

    def command(self) -> str:
        words = [f"--{name} {','.join(map(str, value)) if isinstance(value, tuple) else value}"
                 for name, value in self.options.items() if name != "changes"]  # fmt: skip
        words += [f"--set {name}={value}" for name, value in self.options.get("changes", {}).items()]
        return " ".join([f"pouf bench run {self.table} --data {self.data} --model {self.model}", *words])

    def run(self, out: Path, jobs: int) -> TableRun:
        options = dict(self.options)
        shared = {name: options.pop(name) for name in SETTING if name in options}
        setting = Setting(str(self.data), self.model, **shared)
        return run_table(self.table, setting, out, jobs=jobs, resume=True, **options)


def on_standins(data: Path) -> Iterator[Run]:
    quick = {"changes": {"steps": 60}, "seeds": ONE_SEED}
    yield Run("cost", "cost", data, EMBEDDED, {})
    yield Run("lambda", "lambda", data, EMBEDDED, quick)
    yield Run("unseen", "unseen", data, EMBEDDED, {"changes": {"steps": 30}, "seeds": ONE_SEED})
    yield Run("ablation", "ablation", data, EMBEDDED, quick | {"tasks": OFFICE})
    yield Run("language", "language", data, str(data / LM), {"changes": {"steps": 4}, "seeds": (42,)})
    yield Run("images", "images", data, EMBEDDED, {"changes": {"steps": 60}})


def on_real_texts(data: Path, model: str) -> Iterator[Run]:
    shared = {"seeds": (42, 21), "changes": SHORT}
    unsupervised = shared | {"methods": UNSUPERVISED, "limit": 200}
    yield Run("language", "language", data, model, unsupervised | {"tasks": SINGLE})
    yield Run("language-pairs", "language", data, model, unsupervised | {"tasks": PAIRS})
    # What dropout changes, and the paper's own steps and rate, where 50 steps at five times the rate do harm.
    sst2 = unsupervised | {"tasks": ("SST-2",)}
    no_dropout = {"changes": SHORT | {"optimisation.dropout": False}, "methods": ("pouf",)}
    yield Run("language-no-dropout", "language", data, model, sst2 | no_dropout)
    own_steps = {"tasks": ("SST-2", "TREC"), "seeds": (42,), "changes": {"snapshots": 5}}
    yield Run("language-paper", "language", data, model, unsupervised | own_steps)
    nine = shared | {"tasks": SINGLE + PAIRS}
    checkpoints = {"changes": SHORT | {"snapshots": 5}, "methods": ("pouf", "fine-tuning"), "limit": 60}
    yield Run("language-stops", "language", data, model, nine | checkpoints)
    # An evaluation with demonstrations reads 16 inputs per text.
    yield Run("language-few-shot", "language", data, model, nine | {"methods": FEW_SHOT, "limit": 40})
    whole = {"methods": ("pouf",), "unlabelled": "train", "limit": 100}
    yield Run("language-train", "language", data, model, nine | whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for stand-ins and cells")
    parser.add_argument("--texts", type=Path, help="folder of the real language tasks; without it, the stand-ins")
    parser.add_argument("--model", help="masked language model for them")
    parser.add_argument("--only", default="", help="regular expression: names of tables")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    if args.texts is not None:
        runs, where = on_real_texts(args.texts, args.model), "real"
    else:
        data = args.work / "data"
        if not data.is_dir():
            make_data(data)
        runs, where = on_standins(data), "standins"
    for run in runs:
        if not re.search(args.only, run.name):
            continue
        print(run.command(), flush=True)
        out = args.work / where / run.name
        result = run.run(out, args.jobs)
        if result.failed:
            print(f"{len(result.failed)} cells failed, the first: {result.failed[0].error}")
            continue
        (RESULTS / where).mkdir(parents=True, exist_ok=True)
        for file in result.files:
            if file.suffix in (".md", ".svg"):
                shutil.copy(file, RESULTS / where / f"{run.name}{file.suffix}")


if __name__ == "__main__":
    main()
