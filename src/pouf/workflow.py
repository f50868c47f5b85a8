"""One call of `Classifier.adapt` or `Classifier.search`: plan, run folder, training, report."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pouf.classifier import Classifier
from pouf.data.base import Unlabelled
from pouf.data.inputs import Inputs
from pouf.data.labels import Labelled, read_labelled
from pouf.errors import InputError
from pouf.inference.cache import InMemoryFeatureCache
from pouf.inference.encode import FeatureSet, InferenceConfig
from pouf.interruption import handle_signals
from pouf.model_card import model_card
from pouf.models.text_side import warn_about_cut_texts
from pouf.options import AdaptOptions, Output
from pouf.parallel.process_group import alone, by_all_processes, processes
from pouf.recipe import Recipe, full_name
from pouf.reporting.html import compare_before_and_after, write_report
from pouf.runs.folder import PREDICTIONS, REPORT, update_manifest
from pouf.runs.predict import prediction_rows, rows_by_rank, write_rows
from pouf.runs.run_folder import RunFolder, check_new
from pouf.training import search as searching
from pouf.training.adaptation import Adaptation, run_adaptation
from pouf.training.callbacks import Callback, Callbacks
from pouf.training.plan import Plan, draft_plan
from pouf.training.search import RATES, Search, TrialLog, all_combinations, select_step, usual_grid
from pouf.training.trainer import run_identity
from pouf.validation.evaluation import LabelledScore, score
from pouf.validation.names import DriftBaseline, absent_names, other_names
from pouf.validation.rules import rows_of
from pouf.validation.selective import unreliable

TRIALS_STATE = "trials.safetensors"
logger = logging.getLogger(__name__)


class RunContext:
    """What surrounds a run: where it is written, and the callbacks."""

    def __init__(self, options: AdaptOptions) -> None:
        given = options.output
        self.output = Output(given) if isinstance(given, (str, Path)) else given
        self.report = self.output is not None and self.output.report
        self.keep, self.command, self.cache = options.keep, options.command, options.cache or InMemoryFeatureCache()
        self.callbacks = Callbacks(options.callbacks).all

    def inference(self, plan: Plan) -> InferenceConfig:
        return Callbacks(self.callbacks).watching(plan.inference(self.cache), "encoding")

    def open(self, classifier: Classifier, plan: Plan, trains: bool) -> AbstractContextManager[RunFolder | None]:
        """The folder to write into; none where nothing is written."""
        if self.output is None:
            return nullcontext(None)
        facts: dict[str, Any] = {}
        if plan.targets.known is not None:
            facts["known_shares"] = plan.targets.known.tolist()
        if classifier.adapted:
            facts["started_from"] = "a classifier that was adapted before"
        return RunFolder.open(self.output, classifier, plan, self.command, trains, facts)

    def adapt(self, classifier: Classifier, plan: Plan, run: RunFolder | None, **options: Any) -> Adaptation:
        """Train a classifier that is prepared.

        Args:
            options: as of `run_adaptation`.
        """
        written = run.callbacks() if run is not None else []
        resume = self.output is not None and self.output.resume
        return run_adaptation(
            classifier, plan, cache=self.cache, callbacks=[*written, *self.callbacks], resume=resume, **options
        )


class Outcome(NamedTuple):
    """The result of training."""

    result: Adaptation  # of a search, that of the chosen trial
    search: Search | None = None


@by_all_processes
def adapt(classifier: Classifier, data: Inputs | None, options: AdaptOptions) -> Adaptation:
    """See `Classifier.adapt`."""
    context = RunContext(options)
    Callbacks(context.callbacks).phase("reading")
    draft = draft_plan(classifier, data, options, cache=context.cache, report=context.report)
    if context.output is not None and processes().is_main:  # before anything long
        check_new(context.output.folder, context.output.resume, context.output.overwrite)
    _estimate(draft, classifier, context)

    def train(run: RunFolder | None) -> Outcome:
        folder = run.checkpoint_dir if run is not None else None
        return Outcome(context.adapt(prepared, plan, run, checkpoint_dir=folder))

    with _ended_in_order(context.callbacks):
        prepared, plan = draft.complete(classifier, context.inference(draft))
        if plan.data is not None:
            warn_about_cut_texts(prepared.backbone, plan.data, "windows=True (--windows) reads them whole")
        result = _run(prepared, plan, plan.data, context, train).result
    Callbacks(context.callbacks).notify(lambda callback: callback.on_end(result))
    return result


@by_all_processes
def search(
    classifier: Classifier,
    data: Inputs | None,
    grid: Mapping[str, Sequence[Any]] | None,
    on_trial: Callable[[dict[str, Any]], None],
    options: AdaptOptions,
) -> Search:
    """See `Classifier.search`."""
    context = RunContext(options)
    runs = len(all_combinations(grid)) if grid is not None else len(RATES)
    plan = draft_plan(classifier, data, options, cache=context.cache, report=context.report, runs=max(runs, 1))
    combinations = all_combinations(grid if grid is not None else usual_grid(plan.recipe))
    if grid is not None and "optimisation.lr" in map(full_name, grid):
        plan = replace(plan, recipe=plan.recipe.with_settings(keep_shares_lr_factor=1.0))
    inputs = plan.inputs
    assert inputs is not None

    def train(run: RunFolder | None) -> Outcome:
        root = run.checkpoint_dir if run is not None else None

        def one(changed: Recipe, number: int) -> Adaptation:
            trial = replace(plan, recipe=changed)
            prepared, completed = trial.complete(classifier, context.inference(trial))
            folder = root / str(number) if root is not None else None
            return context.adapt(prepared, completed, run, checkpoint_dir=folder, keep_tuned=False)

        log = TrialLog()
        if root is not None:
            about = run_identity(classifier, plan)
            log = TrialLog(root / TRIALS_STATE, about | {"the grid": combinations})
        if context.output is not None and context.output.resume:
            log.read()
        found = searching.search(plan.recipe, combinations, one, on_trial, log)
        if found.ranking.best is not None and found.ended_by is None:
            found.result = select_step(found.result, found.ranking.step, inputs, plan.inference(context.cache))
        return Outcome(found.result, found)

    with _ended_in_order(context.callbacks):
        result, found = _run(classifier, plan, inputs, context, train, trains=False)
    Callbacks(context.callbacks).notify(lambda callback: callback.on_end(result))
    assert found is not None
    found.result = result
    return found


def _run(
    classifier: Classifier,
    plan: Plan,
    inputs: Unlabelled | None,
    context: RunContext,
    train: Callable[[RunFolder | None], Outcome],
    trains: bool = True,
) -> Outcome:
    """Train and write the result, with drift, model card, predictions and report.

    Args:
        inputs: what predictions and report are of.
        trains: it is this classifier that is trained; a search trains others.
    """
    with context.open(classifier, plan, trains) as run:
        baseline = _drift_baseline(classifier, plan, context)
        outcome = train(run)
        trials = outcome.search.to_json() if outcome.search is not None else None
        ended_by = outcome.search.ended_by if outcome.search is not None else None
        result = _with_drift_and_card(outcome.result, baseline if ended_by is None else None)
        if run is not None:
            run.write(result, trials, ended_by)
        if ended_by is not None:
            raise ended_by
        if run is not None:
            files = {"run": ""}
            if inputs is not None and context.report:
                _report(result, inputs, plan, run, context)
                files |= {"predictions": PREDICTIONS, "report": REPORT}
            run.commit()
            if processes().is_main:
                result.files.update({name: run.folder / file for name, file in files.items()})
    return Outcome(result, outcome.search)


@contextmanager
def _ended_in_order(callbacks: list[Callback]) -> Iterator[None]:
    """While open, signals end a run between two steps; callbacks are called with whatever error ends it."""
    with handle_signals():
        try:
            yield
        except BaseException as error:
            Callbacks(callbacks).broke_off(error)
            raise


def _estimate(plan: Plan, classifier: Classifier, context: RunContext) -> None:
    """Before anything long: how long it will take, where anyone listens."""
    if context.callbacks or logger.isEnabledFor(logging.INFO):
        estimated = plan.estimate(classifier, context.cache, context.report)
        if estimated is not None:
            Callbacks(context.callbacks).notify(lambda callback: callback.on_estimate(estimated))
            logger.info("%s", estimated)


def evaluate(
    classifier: Classifier, inputs: Inputs, labels: Sequence[str | int], text_column: str | None
) -> LabelledScore:
    """See `Classifier.evaluate`."""
    return score(classifier, classifier.data(inputs, text_column), labels)


def reliable(
    classifier: Classifier, data: Unlabelled, encoded: FeatureSet, rate: float, zero_shot: Classifier | None
) -> list[bool]:
    """Of each prediction, whether to give it: see `Classifier.predict`."""
    inference = InferenceConfig(cache=InMemoryFeatureCache())
    left_out, *_ = unreliable(classifier, zero_shot or classifier, data, encoded, rate, inference)
    return [index not in left_out for index in encoded.indices]


def _drift_baseline(classifier: Classifier, plan: Plan, context: RunContext) -> DriftBaseline | None:
    """Predictions among other names before training, if drift is to be measured."""
    if context.keep is None:
        return None
    data, others = context.keep.data, other_names(context.keep.names, classifier)
    inputs: Labelled | Unlabelled | None = data if isinstance(data, Labelled) else plan.data
    if isinstance(data, (str, Path)):
        inputs = read_labelled(data, others, classifier.backbone.modality, classifier.columns)
    if inputs is None:
        raise InputError("no inputs to try the other names on: give some with labels")
    return DriftBaseline(classifier, others, inputs, plan.inference(context.cache), plan.recipe.seed)


def _with_drift_and_card(result: Adaptation, baseline: DriftBaseline | None) -> Adaptation:
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


def _report(result: Adaptation, data: Unlabelled, plan: Plan, run: RunFolder, context: RunContext) -> None:
    """What the run advises says of the data it was adapted to, as a file and as a report.

    All processes encode; the first one writes.
    """
    Callbacks(context.callbacks).phase("writing predictions and report")
    classifier = result.at("advised")
    inference = plan.inference(context.cache)
    own = classifier.store(inference).share(data)
    blocks = classifier.score_blocks(own, prototypes=classifier.fixed_prototypes())
    rows = rows_by_rank(prediction_rows(classifier.classes, data, blocks))
    if processes().is_main:
        write_rows(run.unfinished / PREDICTIONS, rows)
    else:
        deque(rows, maxlen=0)  # send what the first process asks for
    result.absent = absent_names(classifier, classifier.store(inference).some(own))
    comparison = compare_before_and_after(result, data, inference)
    if processes().is_main:
        update_manifest(run.unfinished, absent=result.absent)
        silent = replace(inference, on_batch=None, on_start=None)
        with alone():
            write_report(run.unfinished, data, inference=silent, comparison=comparison)
    result.at("advised")  # sharded weights are those again
