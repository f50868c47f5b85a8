"""Predictions of a run for new inputs, in a file or as rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.texts import Texts
from pouf.errors import InputError
from pouf.inference.cache import InMemoryFeatureCache
from pouf.inference.encode import FeatureSet, InferenceConfig
from pouf.models.text_side import warn_about_cut_texts
from pouf.parallel.process_group import alone, by_all_processes, processes
from pouf.runs.folder import Run
from pouf.runs.inputs import load_classifiers, read_inputs
from pouf.runs.predictions import Extras, Row, check_place, predict_share
from pouf.validation.names import absent_names
from pouf.validation.selective import UNKNOWN, check_rate, out_of_distribution, reliability_views, unreliable

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
    (classifier,) = _load(run, options, "zero-shot" if options.use == CORRECTED else options.use)
    return _predict(classifier, run, inputs, file, options, inference)


@by_all_processes
def _predict(
    classifier: Classifier,
    run: Run,
    inputs: Path | Sequence[str],
    file: Path | None,
    options: PredictOptions,
    inference: InferenceConfig,
) -> Predicted:
    group = processes()
    data = _read(run, classifier, inputs, options)
    if group.size > 1:
        group.check_equal(data.fingerprint(), "inputs")
    warn_about_cut_texts(classifier.backbone, data, "adapt with windows=True (--windows) to read them whole")
    together = options.use == CORRECTED or options.prior is not None
    if (together or options.abstain is not None) and inference.cache is None:
        inference = replace(inference, cache=InMemoryFeatureCache())  # what is looked at again need not be encoded
    silent = replace(inference, on_batch=None, on_start=None)
    if options.use == CORRECTED:
        classifier = classifier.with_correction(data, silent)
    if options.prior is not None:
        classifier = classifier.with_prior(options.prior, data, silent)
    by = {"advised": run.verdict.advised, "adapted": run.adapted}.get(options.use, options.use)
    replaced: dict[int, str] = {}

    def mark_unknown(encoded: FeatureSet) -> None:
        with alone():  # processes need not have equally many blocks
            far = out_of_distribution(classifier, encoded, run.verdict.near.get(by)) if options.unknown else []
        replaced.update(dict.fromkeys(far, UNKNOWN))

    flags, figures, parents = _abstained(run, classifier, data, options, inference)
    replaced.update(parents)
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


def _load(run: Run, options: PredictOptions, *uses: str) -> list[Classifier]:
    return load_classifiers(run.folder, *uses, device=options.device, trust_model=options.trust_model)


def _abstained(
    run: Run, classifier: Classifier, data: Unlabelled, options: PredictOptions, inference: InferenceConfig
) -> tuple[dict[str, set[int]], dict[str, dict[int, float]], dict[int, str]]:
    """Positions of what is likely wrong, and how reliable each prediction is, as columns, and what is answered with an
    ancestor; none if nothing abstains."""
    if options.abstain is None:
        return {}, {}, {}
    (zero_shot,) = _load(run, options, "zero-shot")
    classifier.store(inference).fill(data, reliability_views(data))
    encoded, silent = classifier.store(inference).share(data), replace(inference, on_batch=None, on_start=None)
    found = unreliable(classifier, zero_shot, data, encoded, options.abstain, silent)
    return {"abstained": set(found.left_out)}, {"reliability": found.reliability}, found.parents
