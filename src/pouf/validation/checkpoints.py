"""Checkpoints: what a classifier was at some steps of its run, to look at, to choose from and to go back to."""

from __future__ import annotations

import copy
import logging
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Subset, Unlabelled
from pouf.data.teacher import Teacher
from pouf.data.views import perturbation
from pouf.files import drop, hidden_name, temporary_folder, write_tensors
from pouf.inference.encode import InferenceConfig
from pouf.parallel.process_group import processes
from pouf.parallel.shards import gather_weights, is_main, load_weights
from pouf.postprocess import POSTPROCESSORS, Postprocessor
from pouf.postprocess.clusters import names_agreement
from pouf.reading import read_tensors
from pouf.tuners import Tuner
from pouf.validation.diagnostics import Diagnostics, SnapshotPredictions, diagnose, share, spread_of
from pouf.validation.names import NamesFit, check_names
from pouf.validation.rules import FEW_INPUTS
from pouf.validation.selectors import Choice, choose, votes
from pouf.validation.teaching import teacher_facts

SAMPLE = 512  # inputs that checkpoints are judged on
STATE = "state.safetensors"  # of a run that can be gone on with, beside the weights that it names
PERTURBED = 256  # of these, which are also seen slightly changed
PER_CLASS = 5  # inputs, with fewer of which clusters tell nothing
WORTH_TELLING = 0.02  # share of the predictions that moved away from a class
logger = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """A step of a run: 0 is before training. What was corrected after it is a checkpoint of its own."""

    step: int
    postprocessed: bool = False


ZERO_SHOT = Checkpoint(0)


class Checkpoints:
    """Weights and correction of a classifier at some steps, with what it predicted there for a sample of the data.

    All predictions are kept. Weights wait on disk, and of these only what the choice can still need: those it started
    from, the best so far, and the last.

    Args:
        classifier: the one that is trained.
        zero_shot: a copy of it, as it is before training.
        sample: what the predictions are of.
        steps: how long the run is to be.
        without_bias: the run will be corrected by what is said of every input alike, and so it is taken away from all
            predictions that are compared: one class for all inputs agrees with nothing.
        keeps: the run will be corrected to the shares that zero-shot has with these offsets (k,), and so all
            predictions that are compared have them: shares that move along a run are not what comes of it.
        known_shares: (k,), of the classes in these data, where they are known.
        teacher: what one predicts for the data, where the run learns from it.
        folder: where weights are kept, for a run that can be gone on with, until `release`; by default a temporary one.
    """

    names: NamesFit | None = None  # how the class names fit the data, where that can be told
    corrected: Tensor | None = None  # (n,), what zero-shot predicts once it is corrected without training
    names_agreement: float | None = None  # kappa of zero-shot with clusters of the features; None for few inputs
    without_bias = False
    keeps: Tensor | None = None
    known_shares: Tensor | None = None
    started_adapted = False  # what is called zero-shot here had been adapted before this run
    teacher: Teacher | None = None
    overpredicted = ""  # the class that zero-shot was found to predict too often, where the run keeps other shares

    def __init__(
        self,
        classifier: Classifier,
        zero_shot: Classifier,
        sample: Sample,
        steps: int,
        folder: Path | None = None,
        *,
        without_bias: bool = False,
        keeps: Tensor | None = None,
        known_shares: Tensor | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.teacher = teacher
        self.trained, self.zero_shot, self.sample, self.steps = classifier, zero_shot, sample, steps
        self.without_bias, self.keeps, self.known_shares = without_bias, keeps, known_shares
        self.folder, self._released = folder or temporary_folder(), folder is None
        self.needed: set[int] = set()  # steps whose weights the saved state of the run refers to
        self.tuner: Tuner | None = None
        self.predictions: dict[Checkpoint, SnapshotPredictions] = {}
        # The correction of each whose weights are there.
        self.postprocessors: dict[Checkpoint, Postprocessor | None] = {ZERO_SHOT: zero_shot.postprocessor}
        self.offsets: dict[Checkpoint, Tensor] = {}  # of what is compared, where shares are kept
        self.latest = ZERO_SHOT  # what was looked at last
        self.started_adapted = zero_shot.adapted
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
        self._look(ZERO_SHOT, self.zero_shot, touched=False)
        self.names = check_names(self.zero_shot, self.sample.features)
        n, k = len(self.sample.features), len(self.zero_shot.classes)
        if n >= FEW_INPUTS and n >= PER_CLASS * k:
            scores, features = self.zero_shot.scores(self.sample.before), self.sample.features.to(self.zero_shot.device)
            self.names_agreement = names_agreement(features, scores)
            fit = POSTPROCESSORS["clusters" if k > 2 else "prior-correction"]
            corrected = fit(features, self.zero_shot.fixed_prototypes(), scores, self.known_shares)
            self.corrected = corrected(features, scores.logits).argmax(1).cpu()

    def begin(self, tuner: Tuner) -> None:
        """Keep the weights that training starts from."""
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
        """The classifier as it stands now, after so many steps."""
        assert self.tuner is not None
        here = Checkpoint(step)
        if step > 0:
            self._write(step)
            self.postprocessors[here] = self.trained.postprocessor
            self._look(here, self.trained, self.tuner.touches_inputs)
            self._forget(step)

    @property
    def finite(self) -> bool:
        """Whether what was seen last can be judged: weights out of all bounds predict no numbers."""
        return self.latest not in self.predictions or bool(self.predictions[self.latest].probabilities.isfinite().all())

    def take_postprocessed(self, step: int, classifier: Classifier) -> None:
        """The same step, with the correction that this classifier has."""
        here = Checkpoint(step, True)
        self.postprocessors[here] = classifier.postprocessor
        self._look(here, classifier, self.tuner is not None and self.tuner.touches_inputs and step > 0)

    def _look(self, here: Checkpoint, classifier: Classifier, touched: bool) -> None:
        """Predictions of all checkpoints are of the same inputs: what can't be read any more goes from all of them."""
        before = self.sample.before.indices
        seen = self.sample.look(classifier, touched)
        if (after := self.sample.before.indices) != before:
            rows = [before.index(index) for index in after]
            self.predictions = {place: each.only(rows) for place, each in self.predictions.items()}
            self.offsets = {}
        self.predictions[here], self.latest = seen, here

    def comparable(self, checkpoint: Checkpoint) -> SnapshotPredictions:
        """What the classifier predicted there, as the end of the run will be corrected."""
        seen = self.predictions[checkpoint]
        if checkpoint.postprocessed:
            return seen
        if self.without_bias:
            return seen.without_bias(self.known_shares)
        if self.keeps is None:
            return seen
        if checkpoint == ZERO_SHOT:
            return seen.shifted(self.keeps)
        if checkpoint not in self.offsets:
            self.offsets[checkpoint] = seen.offsets_to(self.comparable(ZERO_SHOT).shares())
        return seen.shifted(self.offsets[checkpoint])

    def state_dict(self) -> dict[str, Any]:
        """All but the weights, which are on disk."""
        predictions = [[list(place), list(seen)] for place, seen in self.predictions.items()]
        return {"predictions": predictions, "kept": [place.step for place in self.postprocessors],
                "inputs": self.sample.before.indices}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of the same run before it was interrupted, where this one has begun anew."""
        assert self.tuner is not None
        self.sample.narrow(set(state["inputs"]))
        self.predictions = {Checkpoint(*place): SnapshotPredictions(*seen) for place, seen in state["predictions"]}
        group = processes()
        self._clear(set(state["kept"]))  # the other steps will be taken again
        for step in state["kept"]:
            if not self._sharded:
                tensors = group.broadcast(self._read(step) if group.is_main else {})
                if not group.is_main:  # its weights were in a temporary folder
                    write_tensors(self._file(step), tensors)
            if step > 0:
                self.postprocessors[Checkpoint(step)] = self.trained.postprocessor
        self.latest, self.needed = self.last, set(state["kept"])

    def _clear(self, but: set[int]) -> None:
        for file in self.folder.glob("[0-9]*.safetensors"):
            if int(file.stem) not in but:
                file.unlink()

    def saved(self) -> None:
        """The state was saved: weights that only the one before referred to can go."""
        self.needed, before = {place.step for place in self.postprocessors}, self.needed
        for step in before - self.needed:
            self._file(step).unlink(missing_ok=True)

    @property
    def last(self) -> Checkpoint:
        return max(self.postprocessors)

    def of(self, step: int) -> Checkpoint:
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
        """The same, once nothing is trained any more: for the last step it is the one that was trained."""
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
        """The step to believe, by the predictions of training alone, among those whose weights are there."""
        trained = {
            place.step: self.comparable(place).probabilities for place in self.predictions if not place.postprocessed
        }
        return choose(trained, self.sample.features, {place.step for place in self.postprocessors})

    def diagnose(self, checkpoint: Checkpoint, convergence: float = 1.0) -> Diagnostics:
        """Of a checkpoint against zero-shot."""
        before, after = self.comparable(ZERO_SHOT), self.comparable(checkpoint)
        known = self.known_shares is not None
        found = diagnose(before, after, self.last.step, convergence, known, self.predictions[ZERO_SHOT])
        found = found._replace(feature_spread=spread_of(self.sample.features))
        if found.moved >= WORTH_TELLING:
            found = found._replace(overpredicted=self.overpredicted)
        if self.keeps is not None and self.keeps.numel() == 2:
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
        places = [self.sample.inputs.indices[index] for index in self.sample.before.indices]
        answers = self.teacher.probabilities[places]
        rows = answers.sum(1) > 0
        answers, classes = answers[rows], self.zero_shot.classes
        # Zero-shot as it is: with shares that come from the teacher it would agree with one who knows one class alone.
        before, after = self.predictions[ZERO_SHOT].probabilities[rows], self.comparable(checkpoint).probabilities[rows]
        found = teacher_facts(answers, before, self.sample.features[rows], classes)
        return found | ({"teacher_adapted": share(answers.argmax(1) == after.argmax(1))} if found else {})

    def _open_shares(self, seen: SnapshotPredictions) -> dict[str, Any]:
        """What of two classes nobody can tell without labels: their shares, and how much hangs on them."""
        shares = seen.shares()
        even = seen.shifted(seen.offsets_to(torch.full_like(shares, 1 / len(shares))))
        return {
            "largest_share": float(shares.max()),
            "largest_class": self.zero_shot.classes[int(shares.argmax())],
            "uniform_changes": 1 - share(seen.probabilities.argmax(1) == even.probabilities.argmax(1)),
        }

    def _forget(self, latest: int) -> None:
        """Drop the weights of all but the start, the best so far and the latest."""
        seen = {place.step: self.comparable(place).probabilities for place in self.predictions}
        ensemble = votes(seen, self.steps)
        best = latest
        if ensemble is not None:
            kept = [place.step for place in self.postprocessors if place.step > 0]
            best = max(kept, key=lambda step: (share(seen[step].argmax(1) == ensemble), step))
            best = processes().broadcast(best)  # a tie must not be broken differently
        for place in list(self.postprocessors):
            if place.step not in (0, best, latest):
                del self.postprocessors[place]
                if place.step not in self.needed:
                    self._file(place.step).unlink(missing_ok=True)

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


def sample_places(data: Unlabelled, seed: int, teacher: Teacher | None = None) -> list[int]:
    """Positions of the inputs that checkpoints are judged on; the first `PERTURBED` of them are also changed.

    As many have a teacher's answer as among all, but at least half of them, if there are so many.
    """
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    by_content = data.content_order()
    places = [by_content[int(place)] for place in order]
    answered = set(teacher.answered.nonzero().flatten().tolist()) if teacher is not None else set()
    first = [place for place in places if place in answered][: SAMPLE // 2]
    chosen = set(first)
    return (first + [place for place in places if place not in chosen])[:SAMPLE] if first else places[:SAMPLE]


class Sample:
    """Some inputs, the same for the same data and seed, and what a classifier says of them."""

    def __init__(
        self,
        classifier: Classifier,
        data: Unlabelled,
        seed: int,
        inference: InferenceConfig,
        teacher: Teacher | None = None,
    ) -> None:
        self.inputs = Subset(data, sample_places(data, seed, teacher))
        self.few = Subset(self.inputs, range(min(PERTURBED, len(self.inputs))))
        self.perturb = perturbation(data.modality)
        self.inference = inference
        self.before = classifier.encode(self.inputs, self.inference)
        self.before_perturbed = classifier.encode(self.few, self.inference, transform=self.perturb)
        # The changed ones stand for the first of the others: what can't be read must not shift them.
        self.narrow({i for i in self.before.indices if i >= len(self.few) or i in self.before_perturbed.indices})

    @property
    def features(self) -> Tensor:
        """(n, d), as they were before training."""
        return self.before.features

    def narrow(self, there: set[int]) -> None:
        """Go on with those that are still there."""
        lost = len(set(self.before.indices) - there)
        if lost:
            logger.warning("%d of the %d inputs that checkpoints are judged on can't be read any more",
                           lost, len(self.before.indices))  # fmt: skip
        self.before, self.before_perturbed = (each.only(there) for each in (self.before, self.before_perturbed))

    def look(self, classifier: Classifier, touched: bool) -> SnapshotPredictions:
        """What the classifier says now; where its features have been touched they are computed anew."""
        seen, changed = self.before, self.before_perturbed
        if touched:
            fresh = replace(self.inference, cache=None, skip_not_finite=False)
            seen = classifier.encode(self.inputs, fresh)
            changed = classifier.encode(self.few, fresh, transform=self.perturb)
            self.narrow({i for i in seen.indices if i >= len(self.few) or i in changed.indices})
            seen, changed = (each.only(set(self.before.indices)) for each in (seen, changed))
        prototypes = classifier.fixed_prototypes()
        probabilities = [classifier.log_probabilities(each, prototypes).exp() for each in (seen, changed)]
        return SnapshotPredictions(probabilities[0], probabilities[1], seen.nearness(prototypes))


def _size(n: float) -> str:
    return f"{n / 2**30:.1f} GB" if n >= 2**30 else f"{n / 2**20:.0f} MB"
