"""The contract: class names and unlabelled data in, a better zero-shot classifier out, with evidence that it is better.

clf = Classifier.from_pretrained("openai/clip-vit-base-patch16", classes=["cat", "dog"])
result = clf.adapt("photos/")
print(result.verdict)
clf.predict(["a.jpg", "b.jpg"])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pouf.base import BaseClassifier
from pouf.data.base import Unlabelled
from pouf.data.cache import FeatureCache
from pouf.data.inputs import Inputs
from pouf.data.labelled import Shots, read_shots
from pouf.distributed import join
from pouf.errors import InputError, one_of
from pouf.inference import InferenceConfig
from pouf.recipe import Recipe
from pouf.reporting.html import write_report
from pouf.runs.folder import CHECKPOINTS, PREDICTIONS, RunWriter, check_new, write_json
from pouf.runs.predictions import write_predictions
from pouf.training.adaptation import Adaptation, adapt
from pouf.training.callbacks import Callback
from pouf.training.methods import METHODS, Method
from pouf.training.search import Search, all_combinations, search, stand_at, usual_grid

TRIALS = "search.json"


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
        output_dir: str | Path | None = None,
        report: bool = True,
        cache: FeatureCache | None = None,
        callbacks: Iterable[Callback] = (),
        command: Sequence[str] = (),
    ) -> Adaptation:
        """Adapt to unlabelled data, in place. Afterwards the classifier stands where `result.verdict` says.

        Args:
            data: images, texts or vectors without labels: whatever `predict` takes.
            method: pouf, or what it is compared with, by its name in `METHODS`.
            recipe: all settings: a `Recipe`, the name of one, or a TOML file; by default the one for this kind.
            settings: changes to it by dotted name, as {"steps": 50, "optimisation.lr": 1e-3}.
            shots: a few examples with labels to learn from as well; the data stay without.
            demonstrations: show a shot of each class beside every text, as LM-BFF does.
            prior: shares of the classes: "uniform", "estimated", "paper" (its own estimate), or known ones, one number
                per class, which the predictions then have as a whole.
            refine: a last pass over all predictions together.
            output_dir: a new folder for the run: classifier, verdict, predictions, report.
            report: write predictions and a report into it as well.
            cache: where features that training can't change are kept and found again.
            callbacks: are told of steps and checkpoints while the run goes on.
            command: the command line that repeats the run, for its manifest.

        Raises:
            Diverged: the loss is not finite. The classifier has the weights of the last good step, as has the run.
        """
        plan = self._plan(data, method, recipe, settings, shots, demonstrations, prior, refine, seed)
        told, writer = list(callbacks), None
        if output_dir is not None and join(self.device).is_first:
            writer = RunWriter(output_dir, self, plan.recipe, plan.sources(), method, command)
            told.insert(0, writer)
        try:
            result = adapt(
                self, plan.data, plan.recipe, shots=plan.shots, cache=cache, callbacks=told,
                checkpoint_dir=writer.folder / CHECKPOINTS if writer is not None else None,
            )  # fmt: skip
        except BaseException as error:
            if writer is not None:
                writer.give_up(error)
            raise
        result = replace(result, method=method)
        if writer is not None:
            writer.finish(result)
            result.files["run"] = writer.folder
            if report and plan.data is not None:
                self._use(result, plan.data, cache)
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
        report: bool = True,
        cache: FeatureCache | None = None,
        callbacks: Iterable[Callback] = (),
        command: Sequence[str] = (),
        **options: Any,
    ) -> Search:
        """Adapt with each combination of a grid, and choose among all their steps without labels.

            clf.search("photos/", grid={"optimisation.lr": [1e-7, 5e-7], "objective.information": [0.3, 1.0]})

        Args:
            grid: values to try, by dotted name of the setting; by default ⅓×, 1× and 3× the recipe's learning rate.
            on_trial: is told the settings of each trial before it starts.
            options: all else that `adapt` takes.
        """
        plan, told = self._plan(data, **options), list(callbacks)
        method = options.get("method", "pouf")
        folder = check_new(output_dir) if output_dir is not None else None
        first = join(self.device).is_first
        combinations = all_combinations(grid if grid is not None else usual_grid(plan.recipe))

        def one(classifier: BaseClassifier, recipe: Recipe) -> Adaptation:
            return adapt(classifier, plan.data, recipe, shots=plan.shots, cache=cache, callbacks=told)

        found = search(self, plan.recipe, combinations, one, on_trial)
        result = found.result = replace(found.result, method=method)
        inputs = next(iter(plan.sources().values()))
        assert result.checkpoints is not None
        if found.ranking.best is not None and not found.interrupted:
            stand_at(result, found.ranking.step, inputs, InferenceConfig(cache=cache, world=join(self.device)))
        self.__dict__ = result.classifier.__dict__  # the copy that was trained takes this one's place
        result.classifier = result.checkpoints.classifier = self
        if folder is not None and first:
            writer = RunWriter(folder, self, result.recipe, plan.sources(), method, command)
            for step in result.history:
                writer.on_step(step)
            writer.finish(result, "interrupted" if found.interrupted else "finished")
            write_json(folder / TRIALS, found.to_json())
            result.files["run"] = folder
            if report and not found.interrupted:
                self._use(result, inputs, cache)
        if found.interrupted:
            raise KeyboardInterrupt
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
            changes["postprocess"] = "refinement" if refine else "none"
        if isinstance(prior, str):
            changes["objective.prior"] = prior
        if seed is not None:
            changes["seed"] = seed
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
            if trains and settled.postprocess == "none" and refine is None:
                # Training pulls towards known shares and overshoots; these offsets end it there.
                settled = settled.with_settings(postprocess="sinkhorn")
        learns_from_shots_alone = chosen.needs_shots and not settled.objective.needs_unlabelled
        learns = shots if settled.steps and settled.objective.labels else None
        return _Plan(None if learns_from_shots_alone and shots is not None else unlabelled, settled, learns)

    def _unlabelled(self, data: Inputs | None) -> Unlabelled | None:
        if isinstance(data, str) and self.backbone.modality == "text":
            raise InputError(f"one text is nothing to adapt to; a file is given as Path({data[:40]!r})")
        return None if data is None else self.data(data)

    def _use(self, result: Adaptation, data: Unlabelled, cache: FeatureCache | None) -> None:
        """What the run advises says of the data it was adapted to, as a file and as a report."""
        compute = result.recipe.compute
        inference = InferenceConfig(compute.chunk or 64, compute.workers, cache)
        run = result.files["run"]
        encoded = self.encode(data, inference)
        result.files["predictions"] = write_predictions(
            run / PREDICTIONS, self.classes, data, self.score_blocks(encoded)
        )
        result.files["report"] = write_report(run, data, inference=inference, result=result)


class _Plan(NamedTuple):
    """What is to be done."""

    data: Unlabelled | None
    recipe: Recipe
    shots: Shots | None

    def sources(self) -> dict[str, Unlabelled]:
        """What is learned from, by what to call it."""
        both = {"data": self.data, "shots": self.shots.inputs if self.shots is not None else None}
        return {name: source for name, source in both.items() if source is not None}
