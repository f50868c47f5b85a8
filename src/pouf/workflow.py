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
from pouf.data.class_names import Classes
from pouf.data.inputs import Inputs
from pouf.data.labelled import Labelled, read_labelled
from pouf.errors import InputError
from pouf.inference.cache import FeatureCache, InMemoryFeatureCache
from pouf.inference.encode import InferenceConfig
from pouf.interruption import defer_signals
from pouf.model_card import model_card
from pouf.parallel.fsdp import asks_to_shard, shard_classifier
from pouf.parallel.process_group import init_processes
from pouf.recipe import Recipe
from pouf.reporting.html import before_and_after, write_report
from pouf.runs.folder import note
from pouf.runs.names import CHECKPOINTS, PREDICTIONS
from pouf.runs.predictions import prediction_rows, rows_by_rank, write_rows
from pouf.runs.session import run_session
from pouf.runs.states import ShardHolder
from pouf.runs.writer import RunWriter
from pouf.training import adaptation
from pouf.training import search as searching
from pouf.training.adaptation import Adaptation, undone_if_refused
from pouf.training.callbacks import Callback, Callbacks
from pouf.training.plan import Plan, make_plan
from pouf.training.search import RATES, Search, TrialLog, all_combinations, select_step, usual_grid
from pouf.training.trainer import run_identity
from pouf.validation.drift import DriftBaseline, other_names
from pouf.validation.names import absent_names

TRIALS_STATE = "trials.safetensors"
logger = logging.getLogger(__name__)


def adapt(
    classifier: Classifier,
    data: Inputs | None,
    *,
    output_dir: str | Path | None,
    resume: bool,
    overwrite: bool,
    report: bool,
    cache: FeatureCache | None,
    callbacks: Iterable[Callback],
    command: Sequence[str],
    keep_classes: Classes | str | None,
    keep_data: Labelled | str | Path | None,
    **options: Any,
) -> Adaptation:
    """See `Classifier.adapt`; `options` are those of `make_plan`."""
    told, cache, writes = (
        Callbacks(callbacks).all,
        cache or InMemoryFeatureCache(),
        report and output_dir is not None,
    )
    Callbacks(told).phase("reading")
    plan = make_plan(classifier, data, cache=cache, report=writes, **options)
    if (told or logger.isEnabledFor(logging.INFO)) and (estimated := plan.estimate(classifier, cache, writes)):
        Callbacks(told).notify(lambda callback: callback.on_estimate(estimated))
        logger.info("%s", estimated)
    opens = partial(_writer, classifier, output_dir, plan, command, resume, overwrite)
    with run_session(opens, told) as writer, undone_if_refused(classifier, told):
        plan.preparation.apply(classifier)
        if asks_to_shard(classifier, plan.recipe, init_processes(classifier.device)):
            shard_classifier(classifier)  # before anything is computed
        kept = _kept(classifier, keep_classes, keep_data, plan, cache)
        result = adaptation.adapt(
            classifier, plan.data, plan.recipe, shots=plan.shots, cache=cache, callbacks=told, resume=resume,
            checkpoint_dir=Path(output_dir) / CHECKPOINTS if output_dir is not None else None,
            known_shares=plan.known_shares,
        )  # fmt: skip
        result = replace(result, method=plan.method, sources=plan.sources())
        _describe(classifier, result, plan, kept)
        if writer is not None:
            with defer_signals():
                writer.finish(result)
        if isinstance(writer, RunWriter):
            result.files["run"] = writer.folder
        if writes and plan.data is not None:
            _report(classifier, result, plan.data, plan.inference(classifier, cache), Path(str(output_dir)), told)
    for callback in told:
        callback.on_end(result)
    return result


def search(
    classifier: Classifier,
    data: Inputs | None,
    grid: Mapping[str, Sequence[Any]] | None,
    *,
    on_trial: Callable[[dict[str, Any]], None],
    output_dir: str | Path | None,
    resume: bool,
    overwrite: bool,
    report: bool,
    cache: FeatureCache | None,
    callbacks: Iterable[Callback],
    command: Sequence[str],
    keep_classes: Classes | str | None,
    keep_data: Labelled | str | Path | None,
    **options: Any,
) -> Search:
    """See `Classifier.search`; `options` are those of `make_plan`."""
    told, cache, writes = (
        Callbacks(callbacks).all,
        cache or InMemoryFeatureCache(),
        report and output_dir is not None,
    )
    runs = len(all_combinations(grid)) if grid is not None else len(RATES)
    plan = make_plan(classifier, data, cache=cache, report=writes, runs=max(runs, 1), **options)
    combinations = all_combinations(grid if grid is not None else usual_grid(plan.recipe))
    if grid is not None and "optimisation.lr" in grid:
        plan = plan._replace(recipe=plan.recipe.with_settings(keep_shares_lr_factor=1.0))
    world, log, root = init_processes(classifier.device), TrialLog(), None
    if output_dir is not None:
        root = Path(output_dir) / CHECKPOINTS
        first = next(iter(plan.sources().values()))
        about = run_identity(classifier, first, plan.shots, plan.recipe, world, plan.known_shares)
        about["the grid"] = combinations
        log = TrialLog(root / TRIALS_STATE, about, world)

    def one(classifier: Classifier, changed: Recipe, number: int) -> Adaptation:
        folder = root / str(number) if root is not None else None
        plan.preparation.apply(classifier)
        return adaptation.adapt(
            classifier, plan.data, changed, shots=plan.shots, cache=cache, callbacks=told, checkpoint_dir=folder,
            resume=resume, keep_tuned=False, known_shares=plan.known_shares,
        )  # fmt: skip

    opens = partial(_writer, classifier, output_dir, plan, command, resume, overwrite, trains=False)
    with run_session(opens, told) as writer:
        kept = _kept(classifier, keep_classes, keep_data, plan, cache)
        if resume:
            log.read()
        found = searching.search(classifier, plan.recipe, combinations, one, on_trial, log, world)
        result = found.result = replace(found.result, method=plan.method, sources=plan.sources())
        inputs, inference = next(iter(plan.sources().values())), plan.inference(classifier, cache)
        assert result.checkpoints is not None
        if found.ranking.best is not None and found.ended_by is None:
            select_step(result, found.ranking.step, inputs, inference)
        classifier.__dict__ = result.classifier.__dict__  # the copy that was trained takes this one's place
        result.classifier = result.checkpoints.classifier = classifier
        _describe(classifier, result, plan, kept if found.ended_by is None else None)
        if writer is not None:
            with defer_signals():
                writer.finish_search(result, found.to_json(), found.ended_by)
        if isinstance(writer, RunWriter):
            result.files["run"] = writer.folder
        if found.ended_by is not None:
            raise found.ended_by
        if writes:
            _report(classifier, result, inputs, inference, Path(str(output_dir)), told)
    for callback in told:
        callback.on_end(result)
    return found


def _writer(
    classifier: Classifier,
    folder: str | Path | None,
    plan: Plan,
    command: Sequence[str],
    resume: bool,
    overwrite: bool,
    trains: bool = True,
) -> RunWriter | ShardHolder | None:
    """Of the run folder: the first process alone writes it."""
    if folder is None:
        return None
    if not init_processes(classifier.device).is_main:
        return ShardHolder(Path(folder), classifier)
    facts: dict[str, Any] = {}
    if plan.known_shares is not None:
        facts["known_shares"] = plan.known_shares.tolist()
    if classifier.adapted:
        facts["started_from"] = "a classifier that was adapted before"
    sources = plan.sources()
    return RunWriter(folder, classifier, plan.recipe, sources, plan.method, command, resume, overwrite, trains, facts)


def _kept(
    classifier: Classifier,
    names: Classes | str | None,
    data: Labelled | str | Path | None,
    plan: Plan,
    cache: FeatureCache,
) -> DriftBaseline | None:
    """What is to be seen again after training, as it is now."""
    if names is None:
        if data is not None:
            raise InputError("inputs of other names, and no names: give the names that are to be kept as well")
        return None
    others = other_names(names, classifier)
    inputs: Labelled | Unlabelled | None = data if isinstance(data, Labelled) else plan.data
    if isinstance(data, (str, Path)):
        inputs = read_labelled(data, others, classifier.backbone.modality, classifier.columns)
    if inputs is None:
        raise InputError("no inputs to try the other names on: give some with labels")
    return DriftBaseline(classifier, others, inputs, plan.inference(classifier, cache), plan.recipe.seed)


def _describe(classifier: Classifier, result: Adaptation, plan: Plan, kept: DriftBaseline | None) -> None:
    """What is lost beside the task, and the model card."""
    if kept is not None:
        with result.at(result.verdict.adapted) as adapted:
            result.drift = kept.drift(adapted)
    facts = {
        "method": result.method,
        "sources": {name: len(source) for name, source in plan.sources().items()},
        "verdict": result.verdict.to_json(),
        "trainable": result.trainable,
        "total": result.total,
        "drift": None if result.drift is None else str(result.drift),
    }
    classifier.model_card = model_card(classifier, result.recipe, facts)


def _report(
    classifier: Classifier,
    result: Adaptation,
    data: Unlabelled,
    inference: InferenceConfig,
    run: Path,
    told: Sequence[Callback],
) -> None:
    """What the run advises says of the data it was adapted to, as a file and as a report.

    All processes encode; the first one writes.
    """
    Callbacks(told).phase("writing predictions and report")
    world = inference.world
    own = classifier.encode_share(data, inference)
    blocks = classifier.score_blocks(own, prototypes=classifier.fixed_prototypes(world))
    rows = rows_by_rank(prediction_rows(classifier.classes, data, blocks), world)
    if world.is_main:
        result.files["predictions"] = write_rows(run / PREDICTIONS, rows)
    else:
        deque(rows, maxlen=0)  # hand over what is asked for
    result.absent = absent_names(classifier, classifier.some_features(own, world))
    seen = before_and_after(result, data, inference)
    if world.is_main:
        note(run, absent=result.absent)
        result.files["report"] = write_report(run, data, inference=inference.alone(), comparison=seen)
