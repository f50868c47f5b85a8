"""One call of `Classifier.adapt` or `Classifier.search`: plan, run folder, training, report."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.inputs import Inputs
from pouf.data.labelled import Labelled, read_labelled
from pouf.errors import InputError
from pouf.inference.cache import FeatureCache, InMemoryFeatureCache
from pouf.inference.encode import FeatureSet, InferenceConfig
from pouf.interruption import defer_signals
from pouf.model_card import model_card
from pouf.models.windows import warn_of_cut
from pouf.options import AdaptOptions, KeepNames, Output
from pouf.parallel.fsdp import asks_to_shard, shard_classifier
from pouf.parallel.process_group import alone, by_all_processes, processes
from pouf.recipe import Recipe, full_name
from pouf.reporting.html import before_and_after, write_report
from pouf.runs.folder import note
from pouf.runs.names import CHECKPOINTS, PREDICTIONS
from pouf.runs.predictions import prediction_rows, rows_by_rank, write_rows
from pouf.runs.session import run_session
from pouf.runs.states import ShardHolder
from pouf.runs.writer import RunWriter
from pouf.training import adaptation
from pouf.training import search as searching
from pouf.training.adaptation import Adaptation
from pouf.training.callbacks import Callback, Callbacks
from pouf.training.plan import Plan, make_plan
from pouf.training.search import RATES, Search, TrialLog, all_combinations, select_step, usual_grid
from pouf.training.trainer import run_identity
from pouf.validation.diagnostics import rows_of
from pouf.validation.drift import DriftBaseline, other_names
from pouf.validation.evaluation import Score, score
from pouf.validation.names import absent_names
from pouf.validation.selective import unreliable

TRIALS_STATE = "trials.safetensors"
logger = logging.getLogger(__name__)


class RunContext:
    """What a run has context it: where it is written, and whom it calls.

    Args: as of `Classifier.adapt`.
    """

    def __init__(
        self,
        output: Output | str | Path | None,
        keep: KeepNames | None,
        callbacks: Iterable[Callback],
        cache: FeatureCache | None,
        command: Sequence[str],
    ) -> None:
        self.output = Output(output) if isinstance(output, (str, Path)) else output
        self.folder = Path(self.output.folder) if self.output is not None else None
        self.resume = self.output is not None and self.output.resume
        self.report = self.output is not None and self.output.report
        self.keep, self.command, self.cache = keep, command, cache or InMemoryFeatureCache()
        self.callbacks = Callbacks(callbacks).all


@by_all_processes
def adapt(classifier: Classifier, data: Inputs | None, options: AdaptOptions, context: RunContext) -> Adaptation:
    """See `Classifier.adapt`."""
    callbacks, cache = context.callbacks, context.cache
    Callbacks(callbacks).phase("reading")
    plan = make_plan(classifier, data, options, cache=cache, report=context.report)
    if (callbacks or logger.isEnabledFor(logging.INFO)) and (
        estimated := plan.estimate(classifier, cache, context.report)
    ):
        Callbacks(callbacks).notify(lambda callback: callback.on_estimate(estimated))
        logger.info("%s", estimated)
    if plan.data is not None:
        warn_of_cut(classifier.backbone, plan.data, "windows=True (--windows) reads them whole")
    prepared = plan.preparation.applied_to(classifier)
    with run_session(partial(_writer, prepared, plan, context), callbacks) as writer:
        if asks_to_shard(prepared, plan.recipe):
            shard_classifier(prepared)  # before anything is computed
        baseline = _drift_baseline(prepared, plan, context)
        result = adaptation.adapt(
            prepared, plan.data, plan.recipe, shots=plan.shots, cache=cache, callbacks=callbacks, resume=context.resume,
            checkpoint_dir=context.folder / CHECKPOINTS if context.folder is not None else None,
            known_shares=plan.known_shares,
        )  # fmt: skip
        result = _described(result, plan, baseline)
        if writer is not None:
            with defer_signals():
                writer.finish(result)
        if isinstance(writer, RunWriter):
            result.files["run"] = writer.folder
        if plan.data is not None:
            _report(result, plan.data, plan, context)
    Callbacks(callbacks).notify(lambda callback: callback.on_end(result))
    return result


@by_all_processes
def search(
    classifier: Classifier,
    data: Inputs | None,
    grid: Mapping[str, Sequence[Any]] | None,
    on_trial: Callable[[dict[str, Any]], None],
    options: AdaptOptions,
    context: RunContext,
) -> Search:
    """See `Classifier.search`."""
    callbacks, cache = context.callbacks, context.cache
    runs = len(all_combinations(grid)) if grid is not None else len(RATES)
    plan = make_plan(classifier, data, options, cache=cache, report=context.report, runs=max(runs, 1))
    combinations = all_combinations(grid if grid is not None else usual_grid(plan.recipe))
    if grid is not None and "optimisation.lr" in map(full_name, grid):
        plan = plan._replace(recipe=plan.recipe.with_settings(keep_shares_lr_factor=1.0))
    log, root = TrialLog(), None
    if context.folder is not None:
        root = context.folder / CHECKPOINTS
        first = next(iter(plan.sources().values()))
        about = run_identity(classifier, first, plan.shots, plan.recipe, plan.known_shares)
        about["the grid"] = combinations
        log = TrialLog(root / TRIALS_STATE, about)

    def one(changed: Recipe, number: int) -> Adaptation:
        return adaptation.adapt(
            plan.preparation.applied_to(classifier), plan.data, changed, shots=plan.shots, cache=cache,
            callbacks=callbacks, checkpoint_dir=root / str(number) if root is not None else None, resume=context.resume,
            keep_tuned=False, known_shares=plan.known_shares,
        )  # fmt: skip

    with run_session(partial(_writer, classifier, plan, context, trains=False), callbacks) as writer:
        baseline = _drift_baseline(classifier, plan, context)
        if context.resume:
            log.read()
        found = searching.search(plan.recipe, combinations, one, on_trial, log)
        inputs = next(iter(plan.sources().values()))
        if found.ranking.best is not None and found.ended_by is None:
            found.result = select_step(found.result, found.ranking.step, inputs, plan.inference(classifier, cache))
        result = found.result = _described(found.result, plan, baseline if found.ended_by is None else None)
        if writer is not None:
            with defer_signals():
                writer.finish_search(result, found.to_json(), found.ended_by)
        if isinstance(writer, RunWriter):
            result.files["run"] = writer.folder
        if found.ended_by is not None:
            raise found.ended_by
        _report(result, inputs, plan, context)
    Callbacks(callbacks).notify(lambda callback: callback.on_end(result))
    return found


def evaluate(classifier: Classifier, inputs: Inputs, labels: Sequence[str | int], text_column: str | None) -> Score:
    """See `Classifier.evaluate`."""
    return score(classifier, classifier.data(inputs, text_column), labels)


def reliable(
    classifier: Classifier, data: Unlabelled, encoded: FeatureSet, rate: float, zero_shot: Classifier | None
) -> list[bool]:
    """Of each prediction, whether to give it: see `Classifier.predict`."""
    inference = InferenceConfig(cache=InMemoryFeatureCache())
    left_out, *_ = unreliable(classifier, zero_shot or classifier, data, encoded, rate, inference)
    return [index not in left_out for index in encoded.indices]


def _writer(
    classifier: Classifier, plan: Plan, context: RunContext, trains: bool = True
) -> RunWriter | ShardHolder | None:
    """Of the run folder: the first process alone writes it."""
    if context.output is None:
        return None
    if not processes().is_main:
        return ShardHolder(Path(context.output.folder), classifier)
    facts: dict[str, Any] = {}
    if plan.known_shares is not None:
        facts["known_shares"] = plan.known_shares.tolist()
    if classifier.adapted:
        facts["started_from"] = "a classifier that was adapted before"
    return RunWriter(
        context.output.folder, classifier, plan.recipe, plan.sources(), plan.method, context.command, context.resume,
        context.output.overwrite, trains, facts,
    )  # fmt: skip


def _drift_baseline(classifier: Classifier, plan: Plan, context: RunContext) -> DriftBaseline | None:
    """Predictions among other names before training, where some are to be kept."""
    if context.keep is None:
        return None
    data, others = context.keep.data, other_names(context.keep.names, classifier)
    inputs: Labelled | Unlabelled | None = data if isinstance(data, Labelled) else plan.data
    if isinstance(data, (str, Path)):
        inputs = read_labelled(data, others, classifier.backbone.modality, classifier.columns)
    if inputs is None:
        raise InputError("no inputs to try the other names on: give some with labels")
    return DriftBaseline(classifier, others, inputs, plan.inference(classifier, context.cache), plan.recipe.seed)


def _described(result: Adaptation, plan: Plan, baseline: DriftBaseline | None) -> Adaptation:
    """With its sources, what is lost beside the task, and a model card."""
    drift = baseline.drift(result.at(result.verdict.adapted)) if baseline is not None else None
    result = replace(result, method=plan.method, sources=plan.sources(), drift=drift)
    facts = {
        "method": result.method,
        "sources": {name: len(source) for name, source in result.sources.items()},
        "verdict": result.verdict.to_json(),
        "diagnostics": rows_of(result.verdict.diagnostics),
        "trainable": result.trainable,
        "total": result.total,
        "drift": None if drift is None else str(drift),
    }
    result.classifier.model_card = model_card(result.classifier, result.recipe, facts)
    return result


def _report(result: Adaptation, data: Unlabelled, plan: Plan, context: RunContext) -> None:
    """What the run advises says of the data it was adapted to, as a file and as a report.

    All processes encode; the first one writes.
    """
    if context.folder is None or not context.report:
        return
    Callbacks(context.callbacks).phase("writing predictions and report")
    classifier = result.at("advised")
    inference = plan.inference(classifier, context.cache)
    own = classifier.encode_share(data, inference)
    blocks = classifier.score_blocks(own, prototypes=classifier.fixed_prototypes())
    rows = rows_by_rank(prediction_rows(classifier.classes, data, blocks))
    if processes().is_main:
        result.files["predictions"] = write_rows(context.folder / PREDICTIONS, rows)
    else:
        deque(rows, maxlen=0)  # send what the first process asks for
    result.absent = absent_names(classifier, classifier.some_features(own))
    comparison = before_and_after(result, data, inference)
    if processes().is_main:
        note(context.folder, absent=result.absent)
        silent = replace(inference, on_batch=None, on_start=None)
        with alone():
            result.files["report"] = write_report(context.folder, data, inference=silent, comparison=comparison)
    result.at("advised")  # sharded weights are those again
