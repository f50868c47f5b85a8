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
from pouf.parallel.process_group import alone, by_all_processes, processes
from pouf.recipe import Recipe, full_name
from pouf.reporting.html import compare_before_and_after, write_report
from pouf.runs.folder import note
from pouf.runs.names import CHECKPOINTS, PREDICTIONS
from pouf.runs.predictions import prediction_rows, rows_by_rank, write_rows
from pouf.runs.session import run_session
from pouf.runs.states import ShardHolder
from pouf.runs.writer import RunWriter, check_new
from pouf.training import search as searching
from pouf.training.adaptation import Adaptation, run_adaptation
from pouf.training.callbacks import Callback, Callbacks
from pouf.training.plan import Plan, draft_plan, look_at_data
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

    def check_folder(self) -> None:
        """An error where the run could not be written, before anything long is computed."""
        if self.output is not None and processes().is_main:
            check_new(self.output.folder, self.output.resume, self.output.overwrite)

    def inference(self, plan: Plan) -> InferenceConfig:
        return Callbacks(self.callbacks).watching(plan.inference(self.cache), "encoding")


@by_all_processes
def adapt(classifier: Classifier, data: Inputs | None, options: AdaptOptions, context: RunContext) -> Adaptation:
    """See `Classifier.adapt`."""
    callbacks, cache = context.callbacks, context.cache
    Callbacks(callbacks).phase("reading")
    draft = draft_plan(classifier, data, options, cache=cache, report=context.report)
    context.check_folder()
    _estimate(draft, classifier, context)
    with run_session(callbacks) as session:
        prepared = draft.prepared(classifier)
        plan = draft.fitted(look_at_data(prepared, draft, context.inference(draft)))
        if plan.data is not None:
            warn_of_cut(prepared.backbone, plan.data, "windows=True (--windows) reads them whole")
        writer = session.open(partial(_writer, prepared, plan, context))
        baseline = _drift_baseline(prepared, plan, context)
        result = run_adaptation(
            prepared, plan, cache=cache, callbacks=callbacks, resume=context.resume,
            checkpoint_dir=context.folder / CHECKPOINTS if context.folder is not None else None,
        )  # fmt: skip
        result = _described(result, baseline)
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
    plan = draft_plan(classifier, data, options, cache=cache, report=context.report, runs=max(runs, 1))
    combinations = all_combinations(grid if grid is not None else usual_grid(plan.recipe))
    if grid is not None and "optimisation.lr" in map(full_name, grid):
        plan = replace(plan, recipe=plan.recipe.with_settings(keep_shares_lr_factor=1.0))
    log, root = TrialLog(), None
    first = next(iter(plan.sources().values()))
    if context.folder is not None:
        root = context.folder / CHECKPOINTS
        about = run_identity(classifier, first, plan.shots, plan.recipe, plan.targets.known)
        about["the grid"] = combinations
        log = TrialLog(root / TRIALS_STATE, about)

    def one(changed: Recipe, number: int) -> Adaptation:
        trial = replace(plan, recipe=changed)
        prepared = trial.prepared(classifier)
        return run_adaptation(
            prepared, trial.fitted(look_at_data(prepared, trial, context.inference(trial))), cache=cache,
            callbacks=callbacks, checkpoint_dir=root / str(number) if root is not None else None, resume=context.resume,
            keep_tuned=False,
        )  # fmt: skip

    with run_session(callbacks) as session:
        writer = session.open(partial(_writer, classifier, plan, context, trains=False))
        baseline = _drift_baseline(classifier, plan, context)
        if context.resume:
            log.read()
        found = searching.search(plan.recipe, combinations, one, on_trial, log)
        if found.ranking.best is not None and found.ended_by is None:
            found.result = select_step(found.result, found.ranking.step, first, plan.inference(cache))
        result = found.result = _described(found.result, baseline if found.ended_by is None else None)
        if writer is not None:
            with defer_signals():
                writer.finish_search(result, found.to_json(), found.ended_by)
        if isinstance(writer, RunWriter):
            result.files["run"] = writer.folder
        if found.ended_by is not None:
            raise found.ended_by
        _report(result, first, plan, context)
    Callbacks(callbacks).notify(lambda callback: callback.on_end(result))
    return found


def _estimate(plan: Plan, classifier: Classifier, context: RunContext) -> None:
    """Before anything long: how long it will take, where anyone listens."""
    if context.callbacks or logger.isEnabledFor(logging.INFO):
        estimated = plan.estimate(classifier, context.cache, context.report)
        if estimated is not None:
            Callbacks(context.callbacks).notify(lambda callback: callback.on_estimate(estimated))
            logger.info("%s", estimated)


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
    if plan.targets.known is not None:
        facts["known_shares"] = plan.targets.known.tolist()
    if classifier.adapted:
        facts["started_from"] = "a classifier that was adapted before"
    return RunWriter(
        context.output.folder, classifier, plan, context.command, context.resume, context.output.overwrite, trains,
        facts,
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
    return DriftBaseline(classifier, others, inputs, plan.inference(context.cache), plan.recipe.seed)


def _described(result: Adaptation, baseline: DriftBaseline | None) -> Adaptation:
    """With what is lost beside the task, and a model card."""
    drift = baseline.drift(result.at(result.verdict.adapted)) if baseline is not None else None
    result = replace(result, drift=drift)
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
    inference = plan.inference(context.cache)
    own = classifier.store(inference).share(data)
    blocks = classifier.score_blocks(own, prototypes=classifier.fixed_prototypes())
    rows = rows_by_rank(prediction_rows(classifier.classes, data, blocks))
    if processes().is_main:
        result.files["predictions"] = write_rows(context.folder / PREDICTIONS, rows)
    else:
        deque(rows, maxlen=0)  # send what the first process asks for
    result.absent = absent_names(classifier, classifier.store(inference).some(own))
    comparison = compare_before_and_after(result, data, inference)
    if processes().is_main:
        note(context.folder, absent=result.absent)
        silent = replace(inference, on_batch=None, on_start=None)
        with alone():
            result.files["report"] = write_report(context.folder, data, inference=silent, comparison=comparison)
    result.at("advised")  # sharded weights are those again
