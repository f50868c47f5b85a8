"""Names: whether those of the classes fit the data, which occur, and predictions among names outside of the task."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Subset, Unlabelled
from pouf.data.class_names import Classes, class_set, normalise_name, read_classes
from pouf.data.labels import Labelled
from pouf.errors import InputError
from pouf.inference.encode import FITTED_ON, FeatureSet, InferenceConfig
from pouf.losses.objective import gated_shares
from pouf.postprocess.clusters import names_agreement, sharpened
from pouf.postprocess.gaussians import too_unsure
from pouf.validation.diagnostics import share

logger = logging.getLogger(__name__)
WORD_SETS = 300  # of words, that the names are compared with
MAX_PROMPTS = 300  # that words are encoded in, in all
MIN_WORDS = 100  # words that a model must tell apart
MAX_LISTED = 3  # names, or pairs of names
MIN_INPUTS = 30  # fewer tell nothing
MAX_INPUTS = 512  # of the task, that wordings are compared on, and drift


class NamesFit(NamedTuple):
    """Where the class names stand among sets of as many ordinary words: shares of those sets that do worse."""

    nearness: float  # by the mean over inputs of the largest cosine
    span: float  # by the share of the features' variance that lies within the span of the prototypes
    worst: list[str]  # names whose nearest inputs are the least near


class Wording(NamedTuple):
    """How one wording of the classes fits inputs without labels."""

    agreement: float  # kappa of predictions with the groups of inputs that they make: the higher, the better it fits
    confidence: float  # mean probability of the predicted class, at T <= 0.05
    nearness: float | None  # share of sets of ordinary words that are less near to the inputs
    confused: list[tuple[str, str]]  # pairs of classes that the model tells apart the least


@torch.no_grad()
def judge_wording(classifier: Classifier, data: Unlabelled, inference: InferenceConfig) -> Wording:
    """Before anything is trained: whether the model knows what the names mean in these inputs, 512 of them at most."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:MAX_INPUTS].sort().values
    encoded = classifier.encode(Subset(data, order.tolist()), inference)
    if len(encoded.indices) < MIN_INPUTS:
        raise InputError(f"{len(encoded.indices)} inputs tell too little about names: give at least {MIN_INPUTS}")
    scores = classifier.scores(encoded)
    p = sharpened(scores)[1].softmax(1).cpu()
    fit = check_names(classifier, encoded.features)
    return Wording(
        names_agreement(encoded.features.to(scores.logits.device), scores), float(p.max(1).values.mean()),
        fit.nearness if fit is not None else None, _confused(p, classifier.classes),
    )  # fmt: skip


def _confused(p: Tensor, classes: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of classes that share most probability: Σ_i p_ij p_ik over that of either alone."""
    shared = p.T @ p
    own = shared.diagonal().clamp_min(1e-9).sqrt()
    overlap = (shared / own / own[:, None]).triu(1)
    count = min(MAX_LISTED, len(classes) * (len(classes) - 1) // 2)
    positions = overlap.flatten().topk(count).indices.tolist()
    return [(classes[position // len(classes)], classes[position % len(classes)]) for position in positions]


@lru_cache(1)
def ordinary_words() -> tuple[str, ...]:
    """Common English nouns and adjectives that come with the package."""
    return tuple((resources.files("pouf") / "assets" / "words.txt").read_text(encoding="utf-8").split())


def check_names(classifier: Classifier, features: Tensor) -> NamesFit | None:
    """How well the names of a classifier fit features (n, d) of its own; None if that can't be estimated."""
    words = word_prototypes(classifier) if len(features) >= MIN_INPUTS else None
    if words is None:
        return None
    with torch.no_grad():
        return names_fit(features, classifier.prototypes().cpu(), words, classifier.classes)


@torch.no_grad()
def word_prototypes(classifier: Classifier) -> Tensor | None:
    """(m, d): ordinary words as if they were classes; None where there is no text side, or one that can't read them.

    For a masked language model these are the words of the list that are one token to it.
    """
    backbone, own = classifier.backbone, set(classifier.classes)
    if not backbone.reads_names:
        return None
    words = [word for word in ordinary_words() if word not in own]
    try:
        if backbone.reads_prompts:  # each word is several sentences
            count = max(MIN_WORDS, MAX_PROMPTS // len(classifier.templates))
            chosen = torch.randperm(len(words), generator=torch.Generator().manual_seed(0))[:count].tolist()
            words = [words[i] for i in chosen]
        found = backbone.name_prototypes([word for word in words if backbone.can_name(word)], classifier.templates)
    except Exception as error:  # a model of the user's own may know its classes and no other word
        logger.debug("ordinary words can't be read by this model: %s", error)
        return None
    found = F.normalize(found.float(), dim=1).cpu()
    # Words that a small tokenizer does not know are all one to it.
    different = torch.unique((1e3 * found).round(), dim=0, return_inverse=True)[1]
    first = {int(group): i for i, group in reversed(list(enumerate(different)))}
    return found[sorted(first.values())] if len(first) >= MIN_WORDS else None


def names_fit(features: Tensor, prototypes: Tensor, words: Tensor, classes: Sequence[str], seed: int = 0) -> NamesFit:
    """Two statistics of the names' prototypes (k, d) on features (n, d), each as its rank among sets of words (m, d).

        nearness   mean_i max_k cos(f_i, w_k)
        span       ‖centred features, projected on the span of the centred prototypes‖² / ‖centred features‖²

    Where there are many names, as many as a quarter of the words are drawn from them as well, 20 times.
    """
    x = F.normalize(features.float(), dim=1)
    named = F.normalize(prototypes.float(), dim=1)
    draw = torch.Generator().manual_seed(seed)
    size = min(len(named), len(words) // 4)
    null = _statistics(x, words, torch.stack([_some(len(words), size, draw) for _ in range(WORD_SETS)]))
    looks = 20 if size < len(named) else 1
    ours = _statistics(x, named, torch.stack([_some(len(named), size, draw) for _ in range(looks)])).mean(0)
    near, span = (null < ours).double().mean(0).tolist()
    count = max(1, len(x) // 20)
    own = (x @ named.T).topk(count, dim=0).values.mean(0)  # (k,), cosines of a name with the inputs nearest to it
    return NamesFit(near, span, [classes[k] for k in own.argsort().tolist()[:MAX_LISTED]])


def _some(n: int, size: int, draw: torch.Generator) -> Tensor:
    return torch.randperm(n, generator=draw)[:size]


def _statistics(x: Tensor, prototypes: Tensor, sets: Tensor) -> Tensor:
    """(n, d), (m, d), (s, size) positions in the prototypes -> (s, 2)."""
    sim, centred = x @ prototypes.T, x - x.mean(0)
    total = float((centred**2).sum())
    rows = []
    for indices in sets:
        own = prototypes[indices]
        basis = torch.linalg.svd(own - own.mean(0), full_matrices=False)
        directions = basis.Vh[basis.S / basis.S.max().clamp_min(1e-12) > 1e-4]
        inside = float(((centred @ directions.T) ** 2).sum())
        rows.append([float(sim[:, indices].max(1).values.mean()), inside / max(total, 1e-12)])
    return torch.tensor(rows)


@torch.no_grad()
def absent_names(classifier: Classifier, encoded: FeatureSet) -> list[str]:
    """Class names that seem not to occur: expectation maximisation gives them less than one of the inputs.

    At most 16,384 inputs are looked at; of fewer than 30 nothing is said, nor where predictions are too unsure to tell.
    """
    if len(encoded.indices) < MIN_INPUTS:
        return []
    order = torch.randperm(len(encoded.indices), generator=torch.Generator().manual_seed(0))[:FITTED_ON]
    some = FeatureSet([], encoded.features[order.sort().values])
    logits = classifier.scores(some).logits.float()
    if too_unsure(logits):
        return []
    counts = gated_shares(logits.softmax(1)) * len(order)
    return [name for name, count in zip(classifier.classes, counts.tolist(), strict=True) if count < 1]


ORDINARY_WORDS = "words"  # the list that comes with the package


class Drift(NamedTuple):
    """Predictions among names outside of the task, before and after."""

    names: int
    inputs: int
    agreement: float  # share of the inputs with the same predicted name
    accuracy_before: float | None = None  # if the inputs have labels
    accuracy_after: float | None = None

    def __str__(self) -> str:
        text = f"{self.agreement:.0%} of {self.inputs:,} inputs keep their prediction among {self.names:,} other names"
        if self.accuracy_before is None or self.accuracy_after is None:
            return text
        return f"{text}; accuracy there went from {self.accuracy_before:.1%} to {self.accuracy_after:.1%}"


def other_names(given: Classes | str, classifier: Classifier) -> tuple[str, ...]:
    """Names outside of the task: a list, a file, or "words" for ordinary words.

    For a masked language model, only those that are one token.
    """
    if not classifier.backbone.reads_names:
        raise InputError("drift on other names needs a model that encodes names: leave them out")
    if isinstance(given, str):
        names = ordinary_words() if given == ORDINARY_WORDS else read_classes(given).names
    else:
        names = class_set(given).names
    own = {normalise_name(name) for name in classifier.classes}
    left = [name for name in names if normalise_name(name) not in own and classifier.backbone.can_name(name)]
    if len(left) < 2:
        raise InputError(
            f"{len(left)} names are left without those of the task (and, for a masked language model, those of "
            "several tokens): give at least two others"
        )
    return tuple(left)


class DriftBaseline:
    """Predictions of a classifier among other names before training.

    Args:
        inputs: labelled inputs of the other names, or inputs of the task.
    """

    def __init__(
        self,
        classifier: Classifier,
        names: Sequence[str],
        inputs: Labelled | Unlabelled,
        inference: InferenceConfig,
        seed: int = 0,
    ) -> None:
        self.names, self.inference = names, inference
        self.labels = inputs.labels if isinstance(inputs, Labelled) else None
        self.inputs = inputs.inputs.with_own_skipped() if isinstance(inputs, Labelled) else _sample(inputs, seed)
        self.before = self._predict(classifier, inference)

    def drift(self, classifier: Classifier) -> Drift:
        """The drift of the classifier as it is now."""
        after = self._predict(classifier, replace(self.inference, cache=None))
        common = sorted(self.before.keys() & after.keys())
        before, now = (torch.tensor([side[i] for i in common]) for side in (self.before, after))
        right: tuple[float | None, float | None] = (None, None)
        if self.labels is not None:
            truth = torch.tensor([self.labels[i] for i in common])
            right = share(before == truth), share(now == truth)
        return Drift(len(self.names), len(common), share(before == now), *right)

    @torch.no_grad()
    def _predict(self, classifier: Classifier, inference: InferenceConfig) -> dict[int, int]:
        """Index of an input -> index of its predicted name."""
        encoded = classifier.encode(self.inputs, inference)
        features = encoded.features.to(classifier.device).float()
        best = (features @ name_prototypes(classifier, self.names).T).argmax(1)
        return dict(zip(encoded.indices, best.tolist(), strict=True))


def name_prototypes(classifier: Classifier, names: Sequence[str]) -> Tensor:
    """Prototypes of any names in the classifier's templates, with its current weights: (m, d).

    Context vectors and prototypes that were learned for the classes have no influence.
    """
    found = classifier.backbone.name_prototypes(names, classifier.templates).float()
    return F.normalize(found, dim=1) if classifier.backbone.unit_prototypes else found


def _sample(data: Unlabelled, seed: int) -> Unlabelled:
    if data.streamed:
        raise InputError("the data are a stream, which can't be read twice: give labelled inputs of other names")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:MAX_INPUTS]
    return Subset(data, sorted(order.tolist()))
