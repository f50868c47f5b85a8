"""Checkpoints: what a classifier was at some steps of its run, to look at, to choose from and to go back to."""

from __future__ import annotations

import logging
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from pouf.base import BaseClassifier, State
from pouf.data.base import Subset, Unlabelled
from pouf.data.perturb import perturbation
from pouf.inference import InferenceConfig
from pouf.tuners import Tuner
from pouf.validation.diagnostics import Diagnostics, SnapshotPredictions, diagnose, share
from pouf.validation.selectors import Choice, choose, votes

SAMPLE = 512  # inputs that checkpoints are judged on
PERTURBED = 256  # of these, which are also seen slightly changed
logger = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """A step of a run: 0 is before training. What was corrected after it is a checkpoint of its own."""

    step: int
    postprocessed: bool = False


ZERO_SHOT = Checkpoint(0)


class Checkpoints:
    """Weights and state of a classifier at some steps, with what it predicted there for a sample of the data.

    All predictions are kept. Weights wait on disk, and of these only what the choice can still need: those it started
    from, the best so far, and the last.

    Args:
        classifier: as it is before training.
        sample: what the predictions are of.
        steps: how long the run is to be.
        folder: where weights are kept; a temporary one by default. It goes with this object.
    """

    def __init__(
        self,
        classifier: BaseClassifier,
        sample: Sample,
        steps: int,
        folder: Path | None = None,
    ) -> None:
        self.classifier, self.sample, self.steps = classifier, sample, steps
        self.folder = folder or Path(tempfile.mkdtemp(prefix="pouf-checkpoints-"))
        self.tuner: Tuner | None = None
        self.predictions: dict[Checkpoint, SnapshotPredictions] = {}
        self.states: dict[Checkpoint, State] = {}
        self.here = ZERO_SHOT  # where the classifier stands
        # The weights go when the last one who could ask for them goes.
        weakref.finalize(self, shutil.rmtree, self.folder, True)

    def take_zero_shot(self) -> None:
        """Before anything is tuned."""
        self.states[ZERO_SHOT] = self.classifier.state()
        self.predictions[ZERO_SHOT] = self.sample.look(self.classifier, touched=False)

    def begin(self, tuner: Tuner) -> None:
        """Keep the weights that training starts from."""
        self.tuner = tuner
        size = sum(p.numel() * p.element_size() for p in tuner.parameters.values())
        if size > 2**20:
            logger.info("checkpoints take up to %s in %s", _size(3 * size), self.folder)
        self._write(0)

    def take(self, step: int) -> None:
        """The classifier as it stands now, after so many steps."""
        assert self.tuner is not None
        here = Checkpoint(step)
        if step > 0:
            self._write(step)
            self.here, self.states[here] = here, self.classifier.state()
            self.predictions[here] = self.sample.look(self.classifier, self.tuner.touches_inputs)
            self._forget(step)

    def take_postprocessed(self, step: int) -> None:
        """The same step, with the correction that the classifier has now."""
        here = Checkpoint(step, True)
        touched = self.tuner is not None and self.tuner.touches_inputs and step > 0
        self.here, self.states[here] = here, self.classifier.state()
        self.predictions[here] = self.sample.look(self.classifier, touched)

    @property
    def last(self) -> Checkpoint:
        return max(self.states)

    def of(self, step: int) -> Checkpoint:
        """A step as it is to be used: corrected, where it was."""
        corrected = Checkpoint(step, True)
        return corrected if corrected in self.states else Checkpoint(step)

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint) -> None:
        """Put the classifier back to where it was."""
        self.classifier.set_state(self.states[checkpoint])
        self.here = checkpoint
        if self.tuner is not None:
            tensors = load_file(self._file(checkpoint.step))
            for name, parameter in self.tuner.parameters.items():
                parameter.copy_(tensors[name])

    @contextmanager
    def at(self, checkpoint: Checkpoint) -> Iterator[BaseClassifier]:
        """The classifier as it was there, for a while."""
        before = self.here
        self.restore(checkpoint)
        try:
            yield self.classifier
        finally:
            self.restore(before)

    def choose(self) -> Choice:
        """The step to believe, by the predictions of training alone, among those whose weights are there."""
        trained = {
            place.step: seen.probabilities for place, seen in self.predictions.items() if not place.postprocessed
        }
        return choose(trained, self.sample.features, {place.step for place in self.states})

    def diagnose(self, checkpoint: Checkpoint, convergence: float = 1.0) -> Diagnostics:
        """Of a checkpoint against zero-shot."""
        return diagnose(self.predictions[ZERO_SHOT], self.predictions[checkpoint], convergence)

    def _forget(self, latest: int) -> None:
        """Drop the weights of all but the start, the best so far and the latest."""
        seen = {place.step: each.probabilities for place, each in self.predictions.items()}
        ensemble = votes(seen, self.steps)
        best = latest
        if ensemble is not None:
            kept = [place.step for place in self.states if place.step > 0]
            best = max(kept, key=lambda step: (share(seen[step].argmax(1) == ensemble), step))
        for place in list(self.states):
            if place.step not in (0, best, latest):
                del self.states[place]
                self._file(place.step).unlink()

    def _write(self, step: int) -> None:
        assert self.tuner is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: p.detach().cpu().contiguous() for name, p in self.tuner.parameters.items()}
        save_file(tensors, self._file(step))

    def _file(self, step: int) -> Path:
        return self.folder / f"{step}.safetensors"


class Sample:
    """Some inputs, the same for the same data and seed, and what a classifier says of them."""

    def __init__(self, classifier: BaseClassifier, data: Unlabelled, seed: int, inference: InferenceConfig) -> None:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        by_content = data.content_order()
        self.inputs = Subset(data, [by_content[int(place)] for place in order[:SAMPLE]])
        self.few = Subset(self.inputs, range(min(PERTURBED, len(self.inputs))))
        self.perturb = perturbation(data.modality)
        self.inference = replace(inference, on_batch=None)
        self.before = classifier.encode(self.inputs, self.inference)
        self.before_perturbed = classifier.encode(self.few, self.inference, transform=self.perturb)
        self.features = self.before.features
        # The changed ones stand for the first of the others: what can't be read must not shift them.
        self.both = sum(place < len(self.few) for place in self.before.indices)

    def look(self, classifier: BaseClassifier, touched: bool) -> SnapshotPredictions:
        """What the classifier says now; where its features have been touched they are computed anew."""
        seen, changed = self.before, self.before_perturbed
        if touched:
            fresh = replace(self.inference, cache=None)
            seen = classifier.encode(self.inputs, fresh)
            changed = classifier.encode(self.few, fresh, transform=self.perturb)
        probabilities = [classifier.log_probabilities(each).exp() for each in (seen, changed)]
        return SnapshotPredictions(probabilities[0], probabilities[1][: self.both], classifier.nearness(seen))


def _size(n: float) -> str:
    return f"{n / 2**30:.1f} GB" if n >= 2**30 else f"{n / 2**20:.0f} MB"
