"""Predictions of a run for new inputs, as rows or in a file."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.class_names import Taxonomy
from pouf.data.texts import Texts
from pouf.errors import InputError, optional
from pouf.files import atomic_write, check_writable
from pouf.inference.cache import InMemoryFeatureCache
from pouf.inference.encode import FITTED_ON, FeatureSet, InferenceConfig, Predictions, in_order, share_skipped
from pouf.models.text_side import warn_about_cut_texts
from pouf.parallel.process_group import alone, by_all_processes, launched_as_main, processes, started_processes
from pouf.runs.folder import Run, load_classifiers, read_inputs
from pouf.validation.names import absent_names
from pouf.validation.selective import UNKNOWN, check_rate, out_of_distribution, reliability_views, unreliable

Row = dict[str, Any]
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # beginnings of what spreadsheets compute


class Extras(NamedTuple):
    """Further columns of a table of predictions."""

    replaced: Mapping[int, str] = {}  # written instead of the class, by position of the sample
    flags: Mapping[str, Collection[int]] = {}  # columns of true and false: the positions where it is true
    figures: Mapping[str, Mapping[int, float]] = {}  # further columns, by name and position
    probabilities: bool = False  # one column per class
    safe_csv: bool = False  # of CSV files: `'` before values that a spreadsheet would take for a formula


NOTHING = Extras()


def prediction_rows(
    classes: Sequence[str], data: Unlabelled, blocks: Iterable[Predictions], extras: Extras = NOTHING
) -> Iterator[Row]:
    """One row per sample: its name or its text, the class, its probability, the runner-up and its probability.

    Where names are paths, also the parent of the class, with the sum of the probabilities below it.
    """
    names, taxonomy = data.display_columns(), Taxonomy.from_names(classes)
    ancestors = list(taxonomy.members) if taxonomy is not None else []
    every = [f"p_{name}" for name in (*classes, *ancestors)]
    for block in blocks:
        probabilities = block.log_probabilities.exp()
        sums = probabilities[:, :0] if taxonomy is None else taxonomy.sums(probabilities)
        best = probabilities.topk(2, dim=1)
        rows = zip(block.indices, best.values.tolist(), best.indices.tolist(), probabilities, sums, strict=True)
        for index, p, k, all_of, above in rows:
            row: Row = {name: values[index] for name, values in names.items()}
            row |= {
                "class": extras.replaced.get(index, classes[k[0]]), "probability": round(p[0], 6),
                "runner_up": classes[k[1]], "runner_up_probability": round(p[1], 6),
            }  # fmt: skip
            if taxonomy is not None:
                parent = taxonomy.parent(classes[k[0]])
                total = None if parent is None else round(float(above[ancestors.index(parent)]), 6)
                row |= {"parent": parent or "", "parent_probability": total}
            row |= {name: index in where for name, where in extras.flags.items()}
            row |= {name: round(values[index], 6) for name, values in extras.figures.items()}
            if extras.probabilities:
                row |= {n: round(v, 6) for n, v in zip(every, all_of.tolist() + above.tolist(), strict=True)}
            yield row


def _without_formulas(row: Row) -> Row:
    return {n: f"'{v}" if isinstance(v, str) and v.startswith(FORMULAS) else v for n, v in row.items()}


def _write_csv(file: Path, rows: Iterator[Row]) -> None:
    first = list(islice(rows, 1))
    with file.open("w", encoding="utf-8", newline="") as stream:
        if first:
            writer = csv.DictWriter(stream, fieldnames=list(first[0]))
            writer.writeheader()
            writer.writerows(chain(first, rows))


def _write_json_lines(file: Path, rows: Iterator[Row]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_parquet(file: Path, rows: Iterator[Row]) -> None:
    pyarrow = optional("pyarrow", "parquet", "a Parquet file")
    parquet = optional("pyarrow.parquet", "parquet", "a Parquet file")
    writer = None
    while group := list(islice(rows, ROWS)):
        table = pyarrow.Table.from_pylist(group, schema=writer.schema if writer is not None else None)
        writer = writer or parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


ROWS = 8192  # of Parquet, written together
WRITERS: dict[str, Callable[[Path, Iterator[Row]], None]] = {
    ".csv": _write_csv,
    ".jsonl": _write_json_lines,
    ".parquet": _write_parquet,
}


def check_place(file: Path, overwrite: bool = False) -> None:
    """An error where predictions can't be written to: before anything is computed."""
    if file.suffix.lower() not in WRITERS:
        raise InputError(f"can't write predictions to {str(file)!r}: the name must end in {' or '.join(WRITERS)}")
    if file.suffix.lower() == ".parquet":
        optional("pyarrow", "parquet", "a Parquet file")
    # The first process alone: another may look when that one has begun to write.
    if launched_as_main() and file.exists() and not overwrite:
        raise InputError(f"{str(file)!r} already exists: give overwrite=True to replace it, or choose another file")
    check_writable(file if started_processes() == 1 else file.parent / "parts")  # several may find the folder of before


def own_part(file: Path) -> Path:
    """The file that this process writes: `file` itself, or its part of a folder of that name.

    A folder of Parquet files is one table to pandas, DuckDB and Spark; so are CSV and JSON lines to the latter two.
    """
    group = processes()
    own = file / f"part-{group.rank:05}-of-{group.size:05}{file.suffix}" if group.size > 1 else file
    if group.size > 1 and group.is_main:
        # What an earlier run left, alone or with more processes.
        for old in [file] if file.is_file() else file.glob("part-*"):
            old.unlink()
    group.gather_objects(0)  # no process writes before that is done
    check_writable(own)
    return own


def rows_by_rank(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows of all processes in the order of their ranks, on each of them, some thousands in memory at a time."""
    group = processes()
    if group.size == 1:
        yield from rows
        return
    for rank in range(group.size):
        while block := group.broadcast(list(islice(rows, ROWS)) if rank == group.rank else [], rank):
            yield from block


def write_rows(file: Path, rows: Iterator[Row], safe_csv: bool = False) -> Path:
    """Write the rows to a file, in the format that its ending names."""
    write = WRITERS[file.suffix.lower()]
    with atomic_write(file) as partial:
        write(partial, map(_without_formulas, rows) if safe_csv and file.suffix.lower() == ".csv" else rows)
    return file


class Share(NamedTuple):
    """Results of the predictions of all processes."""

    n: int
    sample: FeatureSet  # some features of all processes
    rows: list[Row]  # of all processes, where no file was written


def predict_share(
    file: Path | None,
    classifier: Classifier,
    data: Unlabelled,
    inference: InferenceConfig,
    extras: Extras = NOTHING,
    on_features: Callable[[FeatureSet], None] = lambda encoded: None,
) -> Share:
    """Each process predicts its share of the data, and writes it to its own file: no process has all in memory.

    Args:
        file: one process writes it, several write a folder of that name. None collects the rows instead.
        on_features: called with the features of each block before its rows are written; may add to the extras.
    """
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    chosen, some, count = set(order[:FITTED_ON].tolist()), [], 0

    def blocks() -> Iterator[Predictions]:
        nonlocal count
        prototypes = classifier.fixed_prototypes()
        for encoded in classifier.store(inference).blocks(data):
            count += len(encoded.indices)
            some.append(encoded.only(chosen))
            on_features(encoded)
            yield from classifier.score_blocks(encoded, prototypes)
        if not count and processes().size == 1:
            data.check_readable()

    own = own_part(file) if file is not None else None
    rows = prediction_rows(classifier.classes, data, blocks(), extras)
    begun = list(islice(rows, 1))  # by all processes at once: they share the prompts
    rows, collected = chain(begun, rows), list[Row]()
    if own is None:
        collected = list(rows_by_rank(rows))
    elif begun:
        write_rows(own, rows, extras.safe_csv)
    n = share_skipped(data, count)
    if not n:
        data.check_readable()
    return Share(n, classifier.store(inference).some(in_order(some)), collected)


CORRECTED = "corrected"


@dataclass(frozen=True)
class PredictOptions:
    """What to predict with, and what to write beside the classes.

    Args:
        use: advised (by the run), zero-shot or adapted; of its steps, last or chosen; or corrected: zero-shot, whose
            predictions for these inputs are corrected together without training.
        prior: shares of the classes in the inputs: "uniform", or one per class.
        abstain: mark what is likely wrong, so that at most this share of the rest is.
        unknown: predict `unknown` for inputs that are far from all prototypes.
        probabilities: a column for each class.
        safe_csv: `'` before names that a spreadsheet would take for formulas.
        overwrite: replace the file if it is there.
        text_column, id_column: of a table; names with commas between them.
    """

    use: str = "advised"
    abstain: float | None = None
    unknown: bool = False
    probabilities: bool = False
    safe_csv: bool = False
    overwrite: bool = False
    text_column: str | None = None
    id_column: str | None = None
    device: str = "cpu"
    trust_model: bool = False
    prior: str | Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.abstain is not None:
            check_rate(self.abstain)


class Predicted(NamedTuple):
    """What was predicted, by all processes together."""

    n: int
    rows: list[Row]  # the predictions, where no file was written
    by: str  # zero-shot, last or chosen
    skipped: Mapping[str, str]  # id → why it can't be read
    absent: list[str]  # names that no input seems to bear
    counts: dict[str, int]  # how many are marked, by `abstained` and `unknown`
    is_main: bool

    def to_json(self) -> dict[str, Any]:
        unreadable = [{"id": name, "reason": why} for name, why in self.skipped.items()]
        return {"n": self.n, "skipped": len(unreadable), "used": self.by, "absent": self.absent, **self.counts,
                "unreadable": unreadable, "predictions": self.rows}  # fmt: skip


def predict(
    run: Run,
    inputs: Path | Sequence[str],
    file: Path | None = None,
    options: PredictOptions | None = None,
    inference: InferenceConfig | None = None,
) -> Predicted:
    """Classify inputs: texts, or images, texts or vectors at a path.

    Args:
        file: predictions are written here, as CSV, JSON lines or Parquet; of several processes, each writes its part.
            None collects them as rows.
    """
    options, inference = options or PredictOptions(), inference or InferenceConfig()
    if file is not None:
        check_place(file, options.overwrite)
    uses = ["zero-shot" if options.use == CORRECTED else options.use]
    uses += ["zero-shot"] * (options.abstain is not None)
    classifier, *zero_shot = load_classifiers(
        run.folder, *uses, device=options.device, trust_model=options.trust_model
    )  # fmt: skip
    return _predict(classifier, zero_shot, run, inputs, file, options, inference)


@by_all_processes
def _predict(
    classifier: Classifier,
    zero_shot: Sequence[Classifier],
    run: Run,
    inputs: Path | Sequence[str],
    file: Path | None,
    options: PredictOptions,
    inference: InferenceConfig,
) -> Predicted:
    """The same with the classifier loaded, and zero-shot where some predictions are to be left out."""
    group = processes()
    data = _read(run, classifier, inputs, options)
    if group.size > 1:
        group.check_equal(data.fingerprint(), "inputs")
    warn_about_cut_texts(classifier.backbone, data, "adapt with windows=True (--windows) to read them whole")
    if (options.use == CORRECTED or options.prior is not None or zero_shot) and inference.cache is None:
        inference = replace(inference, cache=InMemoryFeatureCache())  # what is looked at again need not be encoded
    silent = replace(inference, on_batch=None, on_start=None)
    if options.use == CORRECTED:
        classifier = classifier.with_correction(data, silent)
    if options.prior is not None:
        classifier = classifier.with_prior(options.prior, data, silent)
    by = {"advised": run.verdict.advised, "adapted": run.adapted}.get(options.use, options.use)
    replaced: dict[int, str] = {}  # by an ancestor, or by "unknown"
    flags: dict[str, set[int]] = {}
    figures: dict[str, dict[int, float]] = {}
    if options.abstain is not None:
        store = classifier.store(inference)
        store.fill(data, reliability_views(data))
        found = unreliable(classifier, zero_shot[0], data, store.share(data), options.abstain, silent)
        flags, figures = {"abstained": set(found.left_out)}, {"reliability": found.reliability}
        replaced.update(found.parents)

    def mark_unknown(encoded: FeatureSet) -> None:
        with alone():  # processes need not have equally many blocks
            far = out_of_distribution(classifier, encoded, run.verdict.near.get(by)) if options.unknown else []
        replaced.update(dict.fromkeys(far, UNKNOWN))

    extras = Extras(replaced, flags, figures, options.probabilities, options.safe_csv)
    share = predict_share(file, classifier, data, inference, extras, mark_unknown)
    counts = {name: len(rows) for name, rows in flags.items()}
    if options.unknown:
        counts["unknown"] = list(replaced.values()).count(UNKNOWN)
    counts = {name: sum(group.gather_objects(count)) for name, count in counts.items()}
    skipped = {data.ids[i]: data.skipped[i] for i in sorted(data.skipped)}
    absent = absent_names(classifier, share.sample)
    return Predicted(share.n, share.rows, by, skipped, absent, counts, group.is_main)


def _read(run: Run, classifier: Classifier, inputs: Path | Sequence[str], options: PredictOptions) -> Unlabelled:
    """Data at a path, or texts; where a sample is a pair, a text has two parts with a tab between them."""
    if isinstance(inputs, Path):
        return read_inputs(run, classifier, inputs, options.text_column, options.id_column)
    modality, parts = classifier.backbone.modality, len(classifier.columns)
    if modality != "text":
        raise InputError(f"this model reads {modality}s, and {inputs[0]!r} is neither a file nor a folder")
    pairs = [tuple(text.split("\t")) for text in inputs]
    if parts > 1 and any(len(pair) != parts for pair in pairs):
        raise InputError("this model reads pairs of texts: give both with a tab between them")
    return Texts(pairs if parts > 1 else list(inputs), source="the texts given")
