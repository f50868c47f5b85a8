"""The contract: class names and unlabelled data in, a better zero-shot classifier out, with evidence that it is better.

clf = Classifier.from_pretrained("openai/clip-vit-base-patch16", classes=["cat", "dog"])
result = clf.adapt("photos/")
print(result.verdict)
clf.predict(["a.jpg", "b.jpg"])
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pouf.base import BaseClassifier
from pouf.data.base import Unlabelled
from pouf.data.cache import FeatureCache, RunMemory
from pouf.data.class_names import Classes
from pouf.data.inputs import Inputs
from pouf.data.labelled import Labelled, Shots, read_labelled, read_shots
from pouf.distributed import join
from pouf.errors import InputError, one_of
from pouf.files import drop
from pouf.inference import InferenceConfig
from pouf.interruption import catching, held
from pouf.model_card import model_card
from pouf.recipe import Recipe
from pouf.reporting.html import write_report
from pouf.runs.folder import CHECKPOINTS, PREDICTIONS, RunWriter, note
from pouf.runs.predictions import in_turns, prediction_rows, write_rows
from pouf.training.adaptation import Adaptation, adapt
from pouf.training.callbacks import Callback, Callbacks
from pouf.training.estimate import Estimate, estimate, largest_preset
from pouf.training.methods import METHODS, Method
from pouf.training.search import Search, TrialLog, all_combinations, search, stand_at, usual_grid
from pouf.validation.drift import KeptNames, other_names
from pouf.validation.names import absent_names

TRIALS_STATE = "trials.safetensors"
logger = logging.getLogger(__name__)


class Classifier(BaseClassifier):
    """A zero-shot classifier that can be adapted without labels. See `BaseClassifier` for its arguments."""

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
            overwrite: delete the run in that folder, but for labels of a review.
            report: write predictions and a report into it as well.
            cache: where features that training can't change are kept and found again; by default in memory.
            callbacks: are told of steps and checkpoints while the run goes on.
            command: the command line that repeats the run, for its manifest.
            keep_classes: names outside of the task: `result.drift` says how much of zero-shot with these is left, on
                inputs of the task or on `keep_data`. A list, a file, or "words" for ordinary ones. The setting `anchor`
                loses less of it.
            keep_data: labelled inputs of these names.

        Raises:
            Diverged: the loss is not finite. The classifier has the weights of the last good step, as has the run.
            KeyboardInterrupt, SystemExit: SIGINT, or SIGTERM and SIGHUP (143, 129). The state was saved after the step
                that was under way; a second SIGINT ends at once.
        """
        told, writer, cache = list(callbacks), None, cache or RunMemory()
        Callbacks(told).phase("reading")
        data, writes = self._unlabelled(data), report and output_dir is not None

        def plan_with(recipe: Recipe | str | Path | None) -> _Plan:
            return self._plan(data, method, recipe, settings, shots, demonstrations, prior, refine, seed)

        if max_minutes is not None:
            if recipe is not None:
                raise InputError("a recipe and a limit of minutes: give one of them, since the limit chooses a preset")
            fitting = largest_preset(lambda name: plan_with(name).estimate(self, cache, writes), max_minutes)
            recipe = join(self.device).gather_objects(fitting)[0]
        plan = plan_with(recipe)
        if (told or logger.isEnabledFor(logging.INFO)) and (estimated := plan.estimate(self, cache, writes)):
            Callbacks(told).tell(lambda callback: callback.on_estimate(estimated))
            logger.info("%s", estimated)
        if output_dir is not None and join(self.device).is_first:
            writer = RunWriter(output_dir, self, plan.recipe, plan.sources(), plan.method, command, resume, overwrite)
            told.insert(0, writer)
        result, kept = None, None
        with catching():
            try:
                kept = self._kept(keep_classes, keep_data, plan, cache)
                result = adapt(
                    self, plan.data, plan.recipe, shots=plan.shots, cache=cache, callbacks=told, resume=resume,
                    checkpoint_dir=Path(output_dir) / CHECKPOINTS if output_dir is not None else None,
                )  # fmt: skip
                result = replace(result, method=plan.method)
                if kept is not None:
                    with result.at(result.verdict.adapted) as adapted:
                        result.drift = kept.drift(adapted)
                self.model_card = _describe(self, result, plan)
                if writer is not None:
                    with held():
                        writer.finish(result)
            except BaseException as error:
                if result is not None and result.checkpoints is not None:
                    result.checkpoints.retain()  # the run can go on from them
                if writer is not None:
                    with held():
                        writer.give_up(error)
                Callbacks(told).broke_off(error)
                raise
            if output_dir is not None and report and plan.data is not None:
                Callbacks(told).phase("writing predictions and report")
                self._use(result, plan.data, cache, Path(output_dir))
            if writer is not None:
                result.files["run"] = writer.folder
                writer.close()
        for callback in told:
            callback.on_end(result)
        return result

    def search(
        self,
        data: Inputs | None,
        grid: Mapping[str, Sequence[Any]] | None = None,
        *,
        on_trial: Callable[[dict[str, Any]], None] = lambda settings: None,
        output_dir: str | Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        report: bool = True,
        cache: FeatureCache | None = None,
        callbacks: Iterable[Callback] = (),
        command: Sequence[str] = (),
        keep_classes: Classes | str | None = None,
        keep_data: Labelled | str | Path | None = None,
        **options: Any,
    ) -> Search:
        """Adapt with each combination of a grid, and choose among all their steps without labels.

            clf.search("photos/", grid={"optimisation.lr": [1e-7, 5e-7], "objective.information": [0.3, 1.0]})

        Args:
            grid: values to try, by dotted name of the setting; by default ⅓×, 1× and 3× the recipe's learning rate.
            on_trial: is told the settings of each trial before it starts.
            resume: go on with the search in `output_dir`: trials that came to their end are not run again.
            options: all else that `adapt` takes.
        """
        plan, told, cache = self._plan(data, **options), list(callbacks), cache or RunMemory()
        world = join(self.device)
        combinations = all_combinations(grid if grid is not None else usual_grid(plan.recipe))
        if grid is not None and "optimisation.lr" in grid:
            plan = plan._replace(recipe=plan.recipe.with_settings(keep_shares_rate=1.0))
        writer, log, root = None, TrialLog(), None
        if output_dir is not None:
            root = Path(output_dir) / CHECKPOINTS
            log = TrialLog(root / TRIALS_STATE, [plan.recipe.flat(), combinations], world)
            if world.is_first:
                writer = RunWriter(
                    output_dir, self, plan.recipe, plan.sources(), plan.method, command, resume, overwrite
                )

        def one(classifier: BaseClassifier, recipe: Recipe, number: int) -> Adaptation:
            folder = root / str(number) if root is not None else None
            return adapt(
                classifier, plan.data, recipe, shots=plan.shots, cache=cache, callbacks=told, checkpoint_dir=folder,
                resume=resume,
            )  # fmt: skip

        kept = None
        with catching():
            try:
                kept = self._kept(keep_classes, keep_data, plan, cache)
                if resume:
                    log.read()
                found = search(self, plan.recipe, combinations, one, on_trial, log)
            except BaseException as error:
                if writer is not None:
                    writer.stop(error)
                Callbacks(told).broke_off(error)
                raise
            result = found.result = replace(found.result, method=plan.method)
            inputs = next(iter(plan.sources().values()))
            assert result.checkpoints is not None
            if found.ranking.best is not None and found.ended_by is None:
                stand_at(result, found.ranking.step, inputs, InferenceConfig(cache=cache, world=world))
            self.__dict__ = result.classifier.__dict__  # the copy that was trained takes this one's place
            result.classifier = result.checkpoints.classifier = self
            if kept is not None and found.ended_by is None:
                with result.at(result.verdict.adapted) as adapted:
                    result.drift = kept.drift(adapted)
            self.model_card = _describe(self, result, plan)
            if writer is not None:
                with held():
                    writer.finish_search(result, found.to_json(), found.ended_by)
                result.files["run"] = writer.folder
            if found.ended_by is not None:
                if root is not None:
                    result.checkpoints.retain()
                Callbacks(told).broke_off(found.ended_by)
                raise found.ended_by
            if report and output_dir is not None:
                Callbacks(told).phase("writing predictions and report")
                self._use(result, inputs, cache, Path(output_dir))
            if writer is not None:
                writer.close()
                weakref.finalize(result.checkpoints, drop, writer.folder / CHECKPOINTS)  # the folders of all trials
        for callback in told:
            callback.on_end(result)
        return found

    def _plan(
        self,
        data: Inputs | None,
        method: str = "pouf",
        recipe: Recipe | str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        shots: Shots | str | Path | None = None,
        demonstrations: bool = False,
        prior: str | Sequence[float] | None = None,
        refine: bool | None = None,
        seed: int | None = None,
    ) -> _Plan:
        """Every decision that is taken before training, in one place."""
        chosen: Method = one_of("method", method, METHODS)
        changes = dict(settings or {})
        if changes.get("steps") and chosen.settings.get("steps") == 0:
            raise InputError(f"method {method!r} trains nothing: leave the steps out, or set postprocess in a recipe")
        if refine is not None:
            changes |= {"postprocess": "refinement" if refine else "none", "keep_shares": 0}
        if isinstance(prior, str):
            changes |= {"objective.prior": prior, "keep_shares": 0}
        if seed is not None:
            changes["seed"] = seed
        if "optimisation.lr" in changes:  # what was asked for is what is done
            changes.setdefault("keep_shares_rate", 1.0)
        settled = chosen.recipe(self.kind, recipe, changes)
        unlabelled = self._unlabelled(data)
        if isinstance(shots, (str, Path)):
            shots = read_shots(shots, self.classes, self.backbone.modality, self.columns)
        chosen.check(method, self.kind, shots)
        if shots is not None and settled.steps and settled.objective.labels == 0:
            settled = settled.with_settings({"objective.labels": 1.0})
        if demonstrations:
            if shots is None or self.backbone.cloze is None:
                raise InputError("demonstrations are shots in a template: give shots, and a template with [MASK]")
            chosen = replace(chosen, demonstrations="after")
        if unlabelled is None and shots is None:
            raise InputError("nothing to learn from: give unlabelled data, labelled shots, or both")
        chosen.equip(self, shots, settled.seed)
        if prior is not None and not isinstance(prior, str):
            self.set_prior(prior)
            trains = settled.steps and settled.objective.needs_unlabelled
            few = len(self.classes) <= settled.keep_shares  # then shares are all that refinement would move
            if trains and (settled.postprocess == "none" or few) and refine is None:
                # Training pulls towards known shares; these offsets see to it that it ends there.
                settled = settled.with_settings(postprocess="shares")
        learns_from_shots_alone = chosen.needs_shots and not settled.objective.needs_unlabelled
        learns = shots if settled.steps and settled.objective.labels else None
        # A recipe that leaves the paper's losses out is told by its own name.
        own = method == "pouf" and isinstance(recipe, (str, Path)) and not settled.objective.needs_unlabelled
        told = Path(str(recipe)).stem if own else method
        return _Plan(None if learns_from_shots_alone and shots is not None else unlabelled, settled, learns, told)

    def _kept(
        self, names: Classes | str | None, data: Labelled | str | Path | None, plan: _Plan, cache: FeatureCache
    ) -> KeptNames | None:
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
        compute, world = plan.recipe.compute, join(self.device)
        inference = InferenceConfig(compute.chunk or 64, compute.workers, cache, world=world)
        return KeptNames(self, others, inputs, inference, plan.recipe.seed)

    def _unlabelled(self, data: Inputs | None) -> Unlabelled | None:
        if isinstance(data, str) and self.backbone.modality == "text":
            raise InputError(f"one text is nothing to adapt to; a file is given as Path({data[:40]!r})")
        return None if data is None else self.data(data)

    def _use(self, result: Adaptation, data: Unlabelled, cache: FeatureCache | None, run: Path) -> None:
        """What the run advises says of the data it was adapted to, as a file and as a report.

        All processes encode; the first one writes, and looks at the few inputs of the report alone.
        """
        compute, world = result.recipe.compute, join(self.device)
        inference = InferenceConfig(compute.chunk or 64, compute.workers, cache, world=world)
        own = self.encode_share(data, inference)
        rows = in_turns(prediction_rows(self.classes, data, self.score_blocks(own)), world)
        some = self.some_features(own, world)
        if not world.is_first:
            deque(rows, maxlen=0)  # hand over what is asked for
            return
        result.files["predictions"] = write_rows(run / PREDICTIONS, rows)
        result.absent = absent_names(self, some)
        note(run, absent=result.absent)
        result.files["report"] = write_report(run, data, inference=inference.alone(), result=result)


def _describe(classifier: BaseClassifier, result: Adaptation, plan: _Plan) -> str:
    facts = {
        "method": result.method,
        "sources": {name: len(source) for name, source in plan.sources().items()},
        "verdict": result.verdict.to_json(),
        "trainable": result.trainable,
        "total": result.total,
        "drift": None if result.drift is None else str(result.drift),
    }
    return model_card(classifier, result.recipe, facts)


class _Plan(NamedTuple):
    """What is to be done."""

    data: Unlabelled | None
    recipe: Recipe
    shots: Shots | None
    method: str  # what it is called

    def sources(self) -> dict[str, Unlabelled]:
        """What is learned from, by what to call it."""
        both = {"data": self.data, "shots": self.shots.inputs if self.shots is not None else None}
        return {name: source for name, source in both.items() if source is not None}

    def estimate(self, classifier: BaseClassifier, cache: FeatureCache, report: bool) -> Estimate | None:
        """How long it will take; None where nobody can know: streams, shots alone, nothing to train."""
        if self.data is None or self.data.streamed or not self.recipe.steps:
            return None
        compute, world = self.recipe.compute, join(classifier.device)
        inference = InferenceConfig(compute.chunk or 64, compute.workers, cache, world=world)
        return estimate(classifier, self.data, self.recipe, inference, report)
