"""Checkpoints: the weights and predictions of a classifier at some steps, to choose from and to go back to."""

from __future__ import annotations

import copy
import logging
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.labels import Teacher
from pouf.files import drop, hidden_name, read_tensors, temporary_folder, write_tensors
from pouf.inference.cache import FeatureCache
from pouf.parallel.fsdp import gather_weights, is_main, load_weights
from pouf.parallel.process_group import processes
from pouf.postprocess import POSTPROCESSORS, Postprocessor
from pouf.postprocess.clusters import names_agreement
from pouf.tuners import Tuner
from pouf.validation.diagnostics import Diagnostics, SnapshotPredictions, diagnose, share, spread_of, teacher_facts
from pouf.validation.names import NamesFit, check_names
from pouf.validation.rules import FEW_INPUTS
from pouf.validation.selectors import Choice, Sample, choose, votes

STATE = "state.safetensors"  # that a run resumes from, beside the weights that it names
MIN_PER_CLASS = 5  # inputs, for clusters that say anything about the names
MIN_REPORTED_MOVE = 0.02  # share of the predictions that moved away from a class
logger = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """A step of a run: 0 is before training. What was corrected after it is a checkpoint of its own."""

    step: int
    postprocessed: bool = False


ZERO_SHOT = Checkpoint(0)


class Checkpoints:
    """Weights and correction of a classifier at some steps, with what it predicted there for a sample of the data.

    All predictions stay in memory. Weights wait on disk, and of these only what the choice can still need: those before
    training, the best so far, and the last.

    Args:
        classifier: the one that is trained.
        zero_shot: a copy of it, as it is before training.
        sample: what the predictions are of.
        steps: how many the run is to have.
        without_bias: the run will be corrected for what is predicted for every input alike, and so this is removed from
            all predictions that are compared: one class for all inputs agrees with nothing.
        target_offsets: the run will be corrected to the shares that zero-shot has with these offsets (k,), and so all
            predictions that are compared have them: shares that move along a run are not its result.
        known_shares: (k,), of the classes in these data, where they are known.
        teacher: what one predicts for the data, where the run learns from it.
        folder: of the weights of a run that can be resumed, until `release`; by default a temporary one.
    """

    names: NamesFit | None = None  # how the class names fit the data, where that can be estimated
    corrected: Tensor | None = None  # (n,), predictions of zero-shot, corrected without training
    names_agreement: float | None = None  # kappa of zero-shot with clusters of the features; None for few inputs
    overpredicted = ""  # the class that zero-shot was found to predict too often, where the run has other shares

    def __init__(
        self,
        classifier: Classifier,
        zero_shot: Classifier,
        sample: Sample,
        steps: int,
        folder: Path | None = None,
        *,
        without_bias: bool = False,
        target_offsets: Tensor | None = None,
        known_shares: Tensor | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.teacher = teacher
        self.trained, self.zero_shot, self.sample, self.steps = classifier, zero_shot, sample, steps
        self.without_bias, self.target_offsets, self.known_shares = without_bias, target_offsets, known_shares
        self.folder, self._released = folder or temporary_folder(), folder is None
        self.needed: set[int] = set()  # steps with weights that the saved state of the run refers to
        self.tuner: Tuner | None = None
        self.predictions: dict[Checkpoint, SnapshotPredictions] = {}
        # The correction of each that has weights on disk.
        self.postprocessors: dict[Checkpoint, Postprocessor | None] = {ZERO_SHOT: zero_shot.postprocessor}
        self.offsets: dict[Checkpoint, Tensor] = {}  # of what is compared, where there are target offsets
        self.latest = ZERO_SHOT  # the one that was recorded last
        self.indices: list[int] = []  # of the inputs that the predictions are of
        self.started_adapted = zero_shot.adapted  # before this run
        self._added = {name: getattr(zero_shot.backbone, name) for name in zero_shot.backbone.added_by_tuners}
        if folder is None:
            weakref.finalize(self, drop, self.folder)

    def release(self, folder: Path | None = None) -> None:
        """The run can't be resumed any more, and the weights are deleted with this object.

        Args:
            folder: a new name for the folder that they wait in; by default a hidden one beside it.
        """
        if not self._released and self.folder.is_dir():
            released = folder or hidden_name(self.folder)
            self.folder.rename(released)
            self.folder = released
            weakref.finalize(self, drop, self.folder)
        self._released = True

    def take_zero_shot(self) -> None:
        """Before anything is tuned."""
        self._record(ZERO_SHOT, self.sample.predict(self.zero_shot, changed=False))
        self._record_perturbed(ZERO_SHOT, self.zero_shot)
        self.names = check_names(self.zero_shot, self.sample.features)
        n, k = len(self.sample.features), len(self.zero_shot.classes)
        if n >= FEW_INPUTS and n >= MIN_PER_CLASS * k:
            scores, features = self.zero_shot.scores(self.sample.before), self.sample.features.to(self.zero_shot.device)
            self.names_agreement = names_agreement(features, scores)
            fit = POSTPROCESSORS["clusters" if k > 2 else "prior-correction"]
            corrected = fit(features, self.zero_shot.fixed_prototypes(), scores, self.known_shares)
            self.corrected = corrected(features, scores.logits).argmax(1).cpu()

    def begin(self, tuner: Tuner) -> None:
        """Write the weights before training."""
        self.tuner = tuner
        backbone = self.trained.backbone
        self._added_by_tuner = {name: getattr(backbone, name) for name in backbone.added_by_tuners}
        if not (self.folder / STATE).is_file():  # of a process that was killed
            self._clear(set())
        size = sum(p.numel() * p.element_size() for p in tuner.parameters.values())
        if size > 2**20:
            logger.info("checkpoints take up to %s in %s", _size(3 * size), self.folder)
        self._write(0)
        self._empty(self.zero_shot)

    def take(self, step: int) -> None:
        """The weights after so many steps, and the predictions with them."""
        assert self.tuner is not None
        checkpoint = Checkpoint(step)
        if step > 0:
            self._write(step)
            self.postprocessors[checkpoint] = self.trained.postprocessor
            self._record(checkpoint, self.sample.predict(self.trained, self.tuner.touches_inputs))
            self._forget(step)

    def take_final(
        self, step: int, classifier: Classifier, postprocessed: bool, cache: FeatureCache | None = None
    ) -> None:
        """What the verdict needs of a step that it may advise: its correction, and predictions for perturbed inputs.

        Args:
            classifier: as it was at this step.
            postprocessed: it has a correction that was fitted to this step.
            cache: which may have the features at this step.
        """
        checkpoint = Checkpoint(step, postprocessed)
        if postprocessed:
            self.postprocessors[checkpoint] = classifier.postprocessor
            self._record(checkpoint, self.sample.predict(classifier, self._changed(step), cache))
        self._record_perturbed(checkpoint, classifier)

    @property
    def finite(self) -> bool:
        """Whether the latest predictions can be judged: weights that have diverged predict no numbers."""
        return self.latest not in self.predictions or bool(self.predictions[self.latest].probabilities.isfinite().all())

    def _changed(self, step: int) -> bool:
        """Whether features at this step are others than before training."""
        return self.tuner is not None and self.tuner.touches_inputs and step > 0

    def _record(self, checkpoint: Checkpoint, predictions: SnapshotPredictions) -> None:
        self._drop_unreadable()
        self.predictions[checkpoint], self.latest = predictions, checkpoint

    def _record_perturbed(self, checkpoint: Checkpoint, classifier: Classifier) -> None:
        perturbed = self.sample.predict_perturbed(classifier, self._changed(checkpoint.step))
        self._drop_unreadable()
        self.predictions[checkpoint] = self.predictions[checkpoint]._replace(perturbed=perturbed)

    def _drop_unreadable(self) -> None:
        """Predictions of all checkpoints are of the same inputs: what can't be read any more is dropped from all."""
        before, self.indices = self.indices, self.sample.before.indices
        if self.predictions and self.indices != before:
            rows = [before.index(index) for index in self.indices]
            self.predictions = {checkpoint: each.only(rows) for checkpoint, each in self.predictions.items()}
            self.offsets = {}

    def comparable(self, checkpoint: Checkpoint) -> SnapshotPredictions:
        """The predictions there, corrected as the end of the run will be."""
        found = self.predictions[checkpoint]
        if checkpoint.postprocessed:
            return found
        if self.without_bias:
            return found.without_bias(self.known_shares)
        if self.target_offsets is None:
            return found
        if checkpoint == ZERO_SHOT:
            return found.shifted(self.target_offsets)
        if checkpoint not in self.offsets:
            self.offsets[checkpoint] = found.offsets_to(self.comparable(ZERO_SHOT).shares())
        return found.shifted(self.offsets[checkpoint])

    def state_dict(self) -> dict[str, Any]:
        """All but the weights, which are on disk."""
        predictions = [[list(checkpoint), list(each)] for checkpoint, each in self.predictions.items()]
        return {"predictions": predictions, "steps": [checkpoint.step for checkpoint in self.postprocessors],
                "inputs": self.indices}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of the same run before it was interrupted, while this one is at its start."""
        assert self.tuner is not None
        self.sample.narrow(set(state["inputs"]))
        self.indices = self.sample.before.indices
        self.predictions = {Checkpoint(*key): SnapshotPredictions(*each) for key, each in state["predictions"]}
        group = processes()
        self._clear(set(state["steps"]))  # the other steps will be taken again
        for step in state["steps"]:
            if not self._sharded:
                tensors = group.broadcast(self._read(step) if group.is_main else {})
                if not group.is_main:  # its weights were in a temporary folder
                    write_tensors(self._file(step), tensors)
            if step > 0:
                self.postprocessors[Checkpoint(step)] = self.trained.postprocessor
        self.latest, self.needed = self.last, set(state["steps"])

    def _clear(self, except_steps: set[int]) -> None:
        for file in self.folder.glob("[0-9]*.safetensors"):
            if int(file.stem) not in except_steps:
                file.unlink()

    def on_saved(self) -> None:
        """The state was saved: weights that only the one before referred to are deleted."""
        self.needed, before = {checkpoint.step for checkpoint in self.postprocessors}, self.needed
        for step in before - self.needed:
            self._file(step).unlink(missing_ok=True)

    @property
    def last(self) -> Checkpoint:
        return max(self.postprocessors)

    def at_step(self, step: int) -> Checkpoint:
        """A step as it is to be used: corrected, where it was."""
        corrected = Checkpoint(step, True)
        return corrected if corrected in self.postprocessors else Checkpoint(step)

    def classifier(self, checkpoint: Checkpoint) -> Classifier:
        """The classifier as it was there, in memory of its own where it was tuned.

        Sharded weights are there once: they then are those of this checkpoint, for all classifiers of the run.
        """
        found = (self.zero_shot if checkpoint == ZERO_SHOT else self.trained).copy()
        found.postprocessor = copy.deepcopy(self.postprocessors[checkpoint])
        self._fill(found, checkpoint)
        return found

    def hand_over(self, checkpoint: Checkpoint) -> Classifier:
        """The same after training: for the last step it is the one that was trained."""
        trained, self.trained = self.trained, self.trained.copy()
        self._empty(self.trained)
        return trained if checkpoint == self.last else self.classifier(checkpoint)

    def refill(self, step: int) -> None:
        """Sharded weights are those of this step again."""
        if self._sharded:
            self._fill(self.trained, Checkpoint(step))

    @torch.no_grad()
    def _fill(self, classifier: Classifier, checkpoint: Checkpoint) -> None:
        """With the tuned weights of a checkpoint."""
        if self.tuner is None:
            return
        own = dict(classifier.named_parameters())
        if not self._sharded:
            for name, tensor in self._read(checkpoint.step).items():
                if name in own:
                    own[name].data = tensor.to(own[name])
            return
        for name, added in (self._added if checkpoint == ZERO_SHOT else self._added_by_tuner).items():
            setattr(classifier.backbone, name, added)
        for name in self.tuner.parameters.keys() & own.keys():
            if not name.startswith("backbone."):  # the backbone is there once, all else is this classifier's own
                own[name].data = own[name].data.clone()
        load_weights(classifier, self._read(checkpoint.step) if is_main() else {})

    def _empty(self, classifier: Classifier) -> None:
        """Give the memory of tuned weights back: they wait on disk."""
        for name, parameter in classifier.named_parameters():
            if self.tuner is not None and name in self.tuner.parameters and not self._sharded:
                parameter.data = parameter.data.new_empty(0)

    def choose(self) -> Choice:
        """The step to believe, by the predictions of training alone, among those with weights on disk."""
        trained = {key.step: self.comparable(key).probabilities for key in self.predictions if not key.postprocessed}
        return choose(trained, self.sample.features, {key.step for key in self.postprocessors})

    def diagnose(self, checkpoint: Checkpoint, convergence: float = 1.0) -> Diagnostics:
        """Of a checkpoint against zero-shot."""
        before, after = self.comparable(ZERO_SHOT), self.comparable(checkpoint)
        known = self.known_shares is not None
        found = diagnose(before, after, self.last.step, convergence, known, self.predictions[ZERO_SHOT])
        found = found._replace(feature_spread=spread_of(self.sample.features))
        if found.moved >= MIN_REPORTED_MOVE:
            found = found._replace(overpredicted=self.overpredicted)
        if self.target_offsets is not None and self.target_offsets.numel() == 2:
            found = found._replace(**self._open_shares(after))
        found = found._replace(names_agreement=self.names_agreement, **self._teacher_facts(checkpoint))
        if self.corrected is not None and len(self.corrected) == len(after.probabilities):
            differ = 1 - share(after.probabilities.argmax(1) == self.corrected)
            found = found._replace(corrected_changes=differ)
        if self.names is None:
            return found
        near, span, worst = self.names
        return found._replace(names_near=near, names_span=span, names_worst=", ".join(worst))

    def _teacher_facts(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Of the inputs that a teacher answered: what it has in common with zero-shot and with the checkpoint."""
        if self.teacher is None:
            return {}
        positions = [self.sample.inputs.indices[index] for index in self.sample.before.indices]
        answers = self.teacher.probabilities[positions]
        rows = answers.sum(1) > 0
        answers, classes = answers[rows], self.zero_shot.classes
        # Zero-shot as it is: with shares that come from the teacher it would agree with one who knows one class alone.
        before, after = self.predictions[ZERO_SHOT].probabilities[rows], self.comparable(checkpoint).probabilities[rows]
        found = teacher_facts(answers, before, self.sample.features[rows], classes)
        return found | ({"teacher_adapted": share(answers.argmax(1) == after.argmax(1))} if found else {})

    def _open_shares(self, found: SnapshotPredictions) -> dict[str, Any]:
        """What only labels can show of two classes: their shares, and how many predictions depend on them."""
        shares = found.shares()
        even = found.shifted(found.offsets_to(torch.full_like(shares, 1 / len(shares))))
        return {
            "largest_share": float(shares.max()),
            "largest_class": self.zero_shot.classes[int(shares.argmax())],
            "uniform_changes": 1 - share(found.probabilities.argmax(1) == even.probabilities.argmax(1)),
        }

    def _forget(self, latest: int) -> None:
        """Drop the weights of all but the start, the best so far and the latest."""
        probabilities = {key.step: self.comparable(key).probabilities for key in self.predictions}
        ensemble = votes(probabilities, self.steps)
        best = latest
        if ensemble is not None:
            steps = [key.step for key in self.postprocessors if key.step > 0]
            best = max(steps, key=lambda step: (share(probabilities[step].argmax(1) == ensemble), step))
            best = processes().broadcast(best)  # a tie must not be broken differently
        for key in list(self.postprocessors):
            if key.step not in (0, best, latest):
                del self.postprocessors[key]
                if key.step not in self.needed:
                    self._file(key.step).unlink(missing_ok=True)

    def _write(self, step: int) -> None:
        assert self.tuner is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        names = self.tuner.parameters
        tensors = gather_weights(self.trained, names) if self._sharded else names
        if not self._sharded or is_main():
            write_tensors(self._file(step), tensors)

    def _read(self, step: int) -> dict[str, Tensor]:
        return read_tensors(self._file(step), "overwrite the run")

    @property
    def _sharded(self) -> bool:
        """The weights are in the first process's folder alone, and come from there as shards."""
        return self.trained.backbone.sharded

    def _file(self, step: int) -> Path:
        return self.folder / f"{step}.safetensors"


def _size(n: float) -> str:
    return f"{n / 2**30:.1f} GB" if n >= 2**30 else f"{n / 2**20:.0f} MB"
