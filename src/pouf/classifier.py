"""The contract: class names and unlabelled data in, a better zero-shot classifier out, with evidence that it is better.

clf = Classifier.from_pretrained("openai/clip-vit-base-patch16", classes=["cat", "dog"])
result = clf.adapt("photos/")
print(result.verdict)
clf.predict(["a.jpg", "b.jpg"])
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pouf.base import BaseClassifier
from pouf.data.base import Unlabelled
from pouf.data.class_names import Classes
from pouf.data.inputs import Inputs
from pouf.data.labelled import Labelled, Shots, read_labelled
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
from pouf.training.adaptation import Adaptation, adapt, undone_if_refused
from pouf.training.callbacks import Callback, Callbacks
from pouf.training.plan import Plan, make_plan
from pouf.training.search import RATES, Search, TrialLog, all_combinations, search, select_step, usual_grid
from pouf.training.trainer import run_identity
from pouf.validation.diagnostics import rows_of
from pouf.validation.drift import DriftBaseline, other_names
from pouf.validation.names import absent_names

TRIALS_STATE = "trials.safetensors"
logger = logging.getLogger(__name__)


class Classifier(BaseClassifier):
    """A zero-shot classifier that can be adapted without labels: it scores inputs against one prototype per class.

    Args:
        backbone: a model from `load_backbone`, or any `Backbone` of your own.
        classes: the names, at least two; `_` is read as a space. Or, for each name, a description or several, which the
            text side reads in the place of the name: {"entity": ["a thing", "an animal or a product"], …}.
        templates: sentences with `{}` for the name; the prototype is the mean over them. Default: "a photo of a {}."
            for images, "{}" for texts and for descriptions. A masked language model has its own, in its cloze.
        model, revision: what to write into a saved run so that the backbone can be loaded again.
        temperature: T of the softmax and of the transport plan; None keeps the model's own.
    """

    def adapt(
        self,
        data: Inputs | None = None,
        *,
        method: str = "pouf",
        recipe: Recipe | str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        shots: Shots | str | Path | None = None,
        demonstrations: bool = False,
        prior: str | Sequence[float] | None = None,
        refine: bool | None = None,
        seed: int | None = None,
        max_minutes: float | None = None,
        output_dir: str | Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        report: bool = True,
        cache: FeatureCache | None = None,
        callbacks: Iterable[Callback] = (),
        command: Sequence[str] = (),
        keep_classes: Classes | str | None = None,
        keep_data: Labelled | str | Path | None = None,
    ) -> Adaptation:
        """Adapt to unlabelled data, in place. Afterwards the classifier stands where `result.verdict` says.

        Args:
            data: images, texts or vectors without labels: whatever `predict` takes.
            method: pouf, or what it is compared with, by its name in `METHODS`.
            recipe: all settings: a preset ("fast", "balanced" or "paper"), a `Recipe`, the name of one, or a TOML file;
                by default the one for this kind.
            settings: changes to it by dotted name, as {"steps": 50, "optimisation.lr": 1e-3}.
            shots: a few examples with labels to learn from as well; the data stay without.
            demonstrations: show a shot of each class beside every text, as LM-BFF does.
            prior: shares of the classes: "uniform", "estimated", "paper" (its own estimate), or known ones, one number
                per class, which the predictions then have as a whole.
            refine: a last pass over all predictions together.
            max_minutes: in the place of a recipe: the largest preset that is expected to take no longer.
            output_dir: a new folder for the run: classifier, verdict, predictions, report.
            resume: go on with the run in that folder, which was ended before its time; without one, begin it. On a CPU
                it ends with the same weights, to the bit, as if it had never been ended.
            overwrite: replace the run in that folder, once this one has come to something; what is not pouf's stays.
            report: write predictions and a report into it as well.
            cache: where features that training can't change are kept and found again; by default in memory.
            callbacks: are told of steps and checkpoints while the run goes on.
            command: the command line that repeats the run, for its manifest.
            keep_classes: names outside of the task: `result.drift` says how much of zero-shot with these is left, on
                inputs of the task or on `keep_data`. A list, a file, or "words" for ordinary ones. The setting
                `weight_pull` loses less of it.
            keep_data: labelled inputs of these names.

        Raises:
            Diverged: the loss is not finite. The classifier has the weights of the last good step, as has the run.
            KeyboardInterrupt, SystemExit: SIGINT, or SIGTERM and SIGHUP (143, 129). The state was saved after the step
                that was under way; a second SIGINT ends at once.
        """
        told, cache, writes = (
            Callbacks(callbacks).all,
            cache or InMemoryFeatureCache(),
            report and output_dir is not None,
        )
        Callbacks(told).phase("reading")
        plan = make_plan(
            self, data, cache=cache, report=writes, recipe=recipe, max_minutes=max_minutes, method=method,
            settings=settings, shots=shots, demonstrations=demonstrations, prior=prior, refine=refine, seed=seed,
        )  # fmt: skip
        if (told or logger.isEnabledFor(logging.INFO)) and (estimated := plan.estimate(self, cache, writes)):
            Callbacks(told).notify(lambda callback: callback.on_estimate(estimated))
            logger.info("%s", estimated)
        opens = partial(self._writer, output_dir, plan, command, resume, overwrite)
        with run_session(opens, told) as writer, undone_if_refused(self, told):
            plan.preparation.apply(self)
            if asks_to_shard(self, plan.recipe, init_processes(self.device)):
                shard_classifier(self)  # before anything is computed
            kept = self._kept(keep_classes, keep_data, plan, cache)
            result = adapt(
                self, plan.data, plan.recipe, shots=plan.shots, cache=cache, callbacks=told, resume=resume,
                checkpoint_dir=Path(output_dir) / CHECKPOINTS if output_dir is not None else None,
                known_shares=plan.known_shares,
            )  # fmt: skip
            result = replace(result, method=plan.method, sources=plan.sources())
            self._describe(result, plan, kept)
            if writer is not None:
                with defer_signals():
                    writer.finish(result)
            if isinstance(writer, RunWriter):
                result.files["run"] = writer.folder
            if writes and plan.data is not None:
                self._report(result, plan.data, plan.inference(self, cache), Path(str(output_dir)), told)
        for callback in told:
            callback.on_end(result)
        return result

    def search(
        self,
        data: Inputs | None,
        grid: Mapping[str, Sequence[Any]] | None = None,
        *,
        on_trial: Callable[[dict[str, Any]], None] = lambda settings: None,
        method: str = "pouf",
        recipe: Recipe | str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        shots: Shots | str | Path | None = None,
        demonstrations: bool = False,
        prior: str | Sequence[float] | None = None,
        refine: bool | None = None,
        seed: int | None = None,
        max_minutes: float | None = None,
        output_dir: str | Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        report: bool = True,
        cache: FeatureCache | None = None,
        callbacks: Iterable[Callback] = (),
        command: Sequence[str] = (),
        keep_classes: Classes | str | None = None,
        keep_data: Labelled | str | Path | None = None,
    ) -> Search:
        """Adapt with each combination of a grid, and choose among all their steps without labels.

            clf.search("photos/", grid={"optimisation.lr": [1e-7, 5e-7], "objective.information": [0.3, 1.0]})

        Args:
            grid: values to try, by dotted name of the setting; by default ⅓×, 1× and 3× the recipe's learning rate.
            on_trial: is told the settings of each trial before it starts.
            resume: go on with the search in `output_dir`: trials that came to their end are not run again.
            max_minutes: for all trials together. All else is as of `adapt`.
        """
        told, cache, writes = (
            Callbacks(callbacks).all,
            cache or InMemoryFeatureCache(),
            report and output_dir is not None,
        )
        runs = len(all_combinations(grid)) if grid is not None else len(RATES)
        plan = make_plan(
            self, data, cache=cache, report=writes, runs=max(runs, 1), recipe=recipe, max_minutes=max_minutes,
            method=method, settings=settings, shots=shots, demonstrations=demonstrations, prior=prior, refine=refine,
            seed=seed,
        )  # fmt: skip
        combinations = all_combinations(grid if grid is not None else usual_grid(plan.recipe))
        if grid is not None and "optimisation.lr" in grid:
            plan = plan._replace(recipe=plan.recipe.with_settings(keep_shares_lr_factor=1.0))
        world, log, root = init_processes(self.device), TrialLog(), None
        if output_dir is not None:
            root = Path(output_dir) / CHECKPOINTS
            first = next(iter(plan.sources().values()))
            about = run_identity(self, first, plan.shots, plan.recipe, world, plan.known_shares)
            about["the grid"] = combinations
            log = TrialLog(root / TRIALS_STATE, about, world)

        def one(classifier: BaseClassifier, changed: Recipe, number: int) -> Adaptation:
            folder = root / str(number) if root is not None else None
            plan.preparation.apply(classifier)
            return adapt(
                classifier, plan.data, changed, shots=plan.shots, cache=cache, callbacks=told, checkpoint_dir=folder,
                resume=resume, keep_tuned=False, known_shares=plan.known_shares,
            )  # fmt: skip

        opens = partial(self._writer, output_dir, plan, command, resume, overwrite, trains=False)
        with run_session(opens, told) as writer:
            kept = self._kept(keep_classes, keep_data, plan, cache)
            if resume:
                log.read()
            found = search(self, plan.recipe, combinations, one, on_trial, log, world)
            result = found.result = replace(found.result, method=plan.method, sources=plan.sources())
            inputs, inference = next(iter(plan.sources().values())), plan.inference(self, cache)
            assert result.checkpoints is not None
            if found.ranking.best is not None and found.ended_by is None:
                select_step(result, found.ranking.step, inputs, inference)
            self.__dict__ = result.classifier.__dict__  # the copy that was trained takes this one's place
            result.classifier = result.checkpoints.classifier = self
            self._describe(result, plan, kept if found.ended_by is None else None)
            if writer is not None:
                with defer_signals():
                    writer.finish_search(result, found.to_json(), found.ended_by)
            if isinstance(writer, RunWriter):
                result.files["run"] = writer.folder
            if found.ended_by is not None:
                raise found.ended_by
            if writes:
                self._report(result, inputs, inference, Path(str(output_dir)), told)
        for callback in told:
            callback.on_end(result)
        return found

    def _writer(
        self,
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
        if not init_processes(self.device).is_main:
            return ShardHolder(Path(folder), self)
        facts: dict[str, Any] = {}
        if plan.known_shares is not None:
            facts["known_shares"] = plan.known_shares.tolist()
        if self.adapted:
            facts["started_from"] = "a classifier that was adapted before"
        sources = plan.sources()
        return RunWriter(folder, self, plan.recipe, sources, plan.method, command, resume, overwrite, trains, facts)

    def _kept(
        self, names: Classes | str | None, data: Labelled | str | Path | None, plan: Plan, cache: FeatureCache
    ) -> DriftBaseline | None:
        """What is to be seen again after training, as it is now."""
        if names is None:
            if data is not None:
                raise InputError("inputs of other names, and no names: give the names that are to be kept as well")
            return None
        others = other_names(names, self)
        inputs: Labelled | Unlabelled | None = data if isinstance(data, Labelled) else plan.data
        if isinstance(data, (str, Path)):
            inputs = read_labelled(data, others, self.backbone.modality, self.columns)
        if inputs is None:
            raise InputError("no inputs to try the other names on: give some with labels")
        return DriftBaseline(self, others, inputs, plan.inference(self, cache), plan.recipe.seed)

    def _describe(self, result: Adaptation, plan: Plan, kept: DriftBaseline | None) -> None:
        """What is lost beside the task, and the model card."""
        if kept is not None:
            with result.at(result.verdict.adapted) as adapted:
                result.drift = kept.drift(adapted)
        facts = {
            "method": result.method,
            "sources": {name: len(source) for name, source in plan.sources().items()},
            "verdict": result.verdict.to_json(),
            "diagnostics": rows_of(result.verdict.diagnostics),
            "trainable": result.trainable,
            "total": result.total,
            "drift": None if result.drift is None else str(result.drift),
        }
        self.model_card = model_card(self, result.recipe, facts)

    def _report(
        self, result: Adaptation, data: Unlabelled, inference: InferenceConfig, run: Path, told: Sequence[Callback]
    ) -> None:
        """What the run advises says of the data it was adapted to, as a file and as a report.

        All processes encode; the first one writes.
        """
        Callbacks(told).phase("writing predictions and report")
        world = inference.world
        own = self.encode_share(data, inference)
        blocks = self.score_blocks(own, prototypes=self.fixed_prototypes(world))
        rows = rows_by_rank(prediction_rows(self.classes, data, blocks), world)
        if world.is_main:
            result.files["predictions"] = write_rows(run / PREDICTIONS, rows)
        else:
            deque(rows, maxlen=0)  # hand over what is asked for
        result.absent = absent_names(self, self.some_features(own, world))
        seen = before_and_after(result, data, inference)
        if world.is_main:
            note(run, absent=result.absent)
            result.files["report"] = write_report(run, data, inference=inference.alone(), comparison=seen)
