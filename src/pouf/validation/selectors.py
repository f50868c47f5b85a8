"""Choosing a step without labels: snapshots along a run, and which of them to believe.

What resembles the training loss favours over-training. The choice here is agreement with an ensemble of snapshots (as
EnsV does): errors that come and go are outvoted. Two second opinions look at the features instead.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pouf.losses.prior import share_of_classes
from pouf.validation.diagnostics import Diagnostics, SnapshotPredictions, diagnose, kappa

SAMPLE = 512  # inputs that snapshots are judged on
PERTURBED = 256  # of these, which are also seen slightly changed


class Snapshot(NamedTuple):
    """What is known of a step without labels."""

    step: int  # 0 is zero-shot
    agreement: float  # share of inputs on which it says what the snapshots that vote say together
    neighbourhood: float  # soft neighbourhood density of its predictions: higher where neighbours agree surely
    clustering: float  # adjusted mutual information with a clustering of the features before training
    effective_classes: float  # exp H(mean p)
    agreement_with_zero_shot: float


class Choice(NamedTuple):
    step: int
    snapshots: list[Snapshot]
    settled: float  # agreement beyond chance (kappa) of the run's last two thirds with its end, at the lowest

    @property
    def chosen(self) -> Snapshot:
        return next(snapshot for snapshot in self.snapshots if snapshot.step == self.step)


@dataclass
class Snapshots:
    """Weights and predictions of some steps of a run. The weights wait on disk."""

    parameters: dict[str, nn.Parameter]  # what is trained
    features: Tensor  # (n, d), of the sample before training
    look: Callable[[bool], SnapshotPredictions] | None = (
        None  # what the classifier says of the sample now; False: before training
    )
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="pouf-snapshots-")))
    seen: dict[int, SnapshotPredictions] = field(default_factory=dict)  # by step

    def __post_init__(self) -> None:
        # The weights go when the last one who could ask for them goes.
        weakref.finalize(self, shutil.rmtree, self.folder, True)

    def take(self, step: int) -> None:
        assert self.look is not None
        tensors = {name: p.detach().cpu().contiguous().clone() for name, p in self.parameters.items()}
        save_file(tensors, self.folder / f"{step}.safetensors")
        self.seen[step] = self.look(step > 0)

    @torch.no_grad()
    def restore(self, step: int) -> None:
        """Put the weights of a step back into the classifier."""
        tensors = load_file(self.folder / f"{step}.safetensors")
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])

    def choose(self) -> Choice:
        return choose({step: seen.probabilities for step, seen in self.seen.items()}, self.features)

    def diagnostics(self, step: int) -> Diagnostics:
        """Of a step against zero-shot."""
        return diagnose(self.seen[0], self.seen[step])


def snapshot_steps(steps: int, count: int) -> list[int]:
    """0, the last step, and others between them at equal distances: count + 1 in all where there are enough steps."""
    return sorted({round(i * steps / count) for i in range(count + 1)}) if count else []


def choose(predictions: dict[int, Tensor], features: Tensor) -> Choice:
    """The step that agrees most with the mean prediction of the run's second half; of equals the latest.

    The first half has no vote: a run that gets better all along would be pulled back to its middle by its beginnings.
    """
    last = max(predictions)
    ensemble = ensemble_labels([seen for step, seen in predictions.items() if 2 * step >= last])
    clusters = cluster(features, next(iter(predictions.values())).shape[1])
    first = next(iter(predictions.values())).argmax(1)
    judged = []
    for step, probabilities in predictions.items():
        labels = probabilities.argmax(1)
        judged.append(
            Snapshot(
                step=step,
                agreement=_share(labels == ensemble),
                neighbourhood=soft_neighbourhood_density(probabilities),
                clustering=cluster_agreement(labels, clusters),
                effective_classes=share_of_classes(probabilities.mean(0)) * probabilities.shape[1],
                agreement_with_zero_shot=_share(labels == first),
            )
        )
    best = max(judged, key=lambda snapshot: (snapshot.agreement, snapshot.step))
    late = [seen.argmax(1) for step, seen in predictions.items() if last <= 3 * step < 3 * last]
    settled = min((kappa(labels, predictions[last].argmax(1)) for labels in late), default=1.0)
    return Choice(best.step, judged, settled)


def ensemble_labels(predictions: Sequence[Tensor]) -> Tensor:
    """What all say together: (n, k) each -> (n,)."""
    return torch.stack(list(predictions)).mean(0).argmax(1)


def soft_neighbourhood_density(probabilities: Tensor, temperature: float = 0.05) -> float:
    """Mean entropy of each input's similarities to the others' predictions (SND, ICCV 2021): (n, k) -> nats.

    It is high where predictions form dense groups and low where they are scattered.
    """
    if len(probabilities) < 2:
        return 0.0  # no neighbours
    unit = F.normalize(probabilities.float(), dim=1)
    near = unit @ unit.T / temperature
    near.fill_diagonal_(-torch.inf)
    log_p = near.log_softmax(1)
    log_p.fill_diagonal_(0)
    p = near.softmax(1)
    return float(-(p * log_p).sum(1).mean())


def cluster(features: Tensor, k: int) -> Tensor:
    """(n, d) -> (n,), k-means groups of features of length 1; the same for the same features."""
    from sklearn.cluster import KMeans

    unit = F.normalize(features.float(), dim=1).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fewer different inputs than classes: then there are fewer groups
        groups = KMeans(min(k, len(unit)), n_init=3, random_state=0).fit(unit).labels_
    return torch.from_numpy(groups).long()


def cluster_agreement(labels: Tensor, clusters: Tensor) -> float:
    """Adjusted mutual information of predictions and clusters: 1 where they are the same but for names, 0 by chance."""
    from sklearn.metrics import adjusted_mutual_info_score

    return float(adjusted_mutual_info_score(labels.numpy(), clusters.numpy()))


def _share(same: Tensor) -> float:
    return same.double().mean().item()
