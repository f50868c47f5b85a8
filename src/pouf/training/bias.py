"""Does a masked language model find one of two classes too often? Two signs have to agree.

With two classes a share is a threshold on the margin m = log p(second) - log p(first). In the predictions, a model that
favours a class and data that hold more of it look the same. The signs look at something else:

- **words**: a text is followed by the prompt of either class ("It was great."), which moves its margin to m₋ or m₊.
  The line through (m, (m₋ + m₊)/2) meets the diagonal where a text says as much for either class, a margin that hardly
  depends on the shares; what the same words do to texts without content is taken off it. Shares follow by Saerens' EM
  on margins without this bias.
- **shape**: m is two Gaussians of one width; the threshold lies where they are as likely.

Each goes astray where the other does not (`benchmarks/shares.py`), so the threshold moves only where both want it
moved to the same side, and at most twice as far as the more cautious of them.
"""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pouf.classifier import Classifier
from pouf.data.base import Subset, Unlabelled
from pouf.data.texts import Texts
from pouf.inference.encode import InferenceConfig
from pouf.parallel.process_group import processes

MOST, FEWEST = 600, 200  # texts that are looked at
STEEPEST = 0.8  # of the line: where added words hardly count, a small error moves its crossing far
SMALLEST = 0.02  # share of a class; EM that leaves less of one has collapsed
EMPTY = ("N/A", "[text]", "the text", "this is a text", "text", ".", "...", "it", "this", "a text about something")


class Margins(NamedTuple):
    """Of some texts: (n,) as they are, and after the prompt of the first and of the second class."""

    plain: Tensor
    first: Tensor
    second: Tensor
    undecided: float  # the midpoint of what either prompt makes of texts without content


def find_bias(classifier: Classifier, data: Unlabelled, inference: InferenceConfig) -> float:
    """The margin above which a text is of the second class: 0 unless both signs speak against it, in both halves."""
    if not supports_bias_probe(classifier) or len(data) - len(data.skipped) < FEWEST:
        return 0.0
    return processes().broadcast(confirmed_bias(read_margins(classifier, data, inference)))


def confirmed_bias(margins: Margins) -> float:
    """Where both signs want the threshold, if they want it on the same side in either half of the texts too; else 0."""
    whole = agreed(by_words(margins), by_shape(margins.plain))
    for start in range(2):
        half = margins._replace(**{name: getattr(margins, name)[start::2] for name in ("plain", "first", "second")})
        fewest = FEWEST // 2
        if whole * agreed(by_words(half, fewest), by_shape(half.plain, fewest)) <= 0:
            return 0.0
    return whole


def supports_bias_probe(classifier: Classifier) -> bool:
    """Two classes of a masked language model as it is, and a template for single texts that fits several times."""
    backbone: Any = classifier.backbone
    return (
        backbone.supports_suffix
        and len(classifier.classes) == 2
        and backbone.texts.cloze.columns == ("text",)
        and classifier.demonstrations is None
        and classifier.postprocessor is None
        and all(backbone.has_room_for_suffix(backbone.texts.cloze.statement(label)) for label in range(2))
    )


def read_margins(classifier: Classifier, data: Unlabelled, inference: InferenceConfig) -> Margins:
    """Margins of at most `MOST` texts, drawn at random."""
    backbone: Any = classifier.backbone
    prototypes = classifier.fixed_prototypes()

    def margins(texts: Unlabelled) -> Tensor:
        own = classifier.log_probabilities(classifier.store(inference).share(texts), prototypes)
        return torch.cat(processes().gather_objects((own[:, 1] - own[:, 0]).double().cpu()))

    def followed(texts: Unlabelled) -> list[Tensor]:
        after = []
        for label in range(2):
            with backbone.with_suffix(backbone.texts.cloze.statement(label)):
                after.append(margins(texts))
        return after

    by_content = data.content_order()  # what is drawn must not depend on the order of a file
    there = [by_content[i] for i in range(len(data)) if by_content[i] not in data.skipped]
    some = Subset(data, sorted(random.Random(0).sample(there, min(MOST, len(there)))))
    plain, (first, second) = margins(some), followed(some)
    empty = followed(Texts(list(EMPTY)))
    return Margins(plain, first, second, float((empty[0].mean() + empty[1].mean()) / 2))


def agreed(one: float, other: float) -> float:
    """The one further from 0, but at most twice the nearer one; 0 where they lie on different sides of it."""
    near, far = sorted((one, other), key=abs)
    return math.copysign(min(abs(far), 2 * abs(near)), near) if near * far > 0 else 0.0


def by_words(margins: Margins, fewest: int = FEWEST) -> float:
    """The threshold that added words tell; 0 where they tell none."""
    if not len(margins.plain) == len(margins.first) == len(margins.second) >= fewest:
        return 0.0
    middle = (margins.first + margins.second) / 2
    slope = torch.cov(torch.stack([margins.plain, middle]))[0, 1] / margins.plain.var()
    if not slope <= STEEPEST:
        return 0.0
    crossing = (middle.mean() - slope * margins.plain.mean()) / (1 - slope)
    bias = float(crossing) - margins.undecided
    return _unless_collapsed(margins.plain, bias + by_em(margins.plain - bias))


def by_em(margins: Tensor) -> float:
    """-log π/(1-π), where π ← mean σ(m + log π/(1-π)) are the shares that explain themselves (Saerens et al., 2002)."""
    odds = torch.zeros((), dtype=margins.dtype)
    for _ in range(200):
        odds = torch.special.logit((margins + odds).sigmoid().mean(), eps=1e-3)
    return -float(odds)


def by_shape(margins: Tensor, fewest: int = FEWEST) -> float:
    """Where two Gaussians of one width, fitted to the margins (n,), are as likely; 0 where they tell nothing."""
    if len(margins) < fewest or not margins.var() > 0:
        return 0.0
    quantiles = torch.tensor([[0.1, 0.6], [0.25, 0.75], [0.4, 0.9]], dtype=margins.dtype)
    fits = [_fit(margins, margins.quantile(start)) for start in quantiles]
    return _unless_collapsed(margins, max(fits)[1])


def _fit(margins: Tensor, means: Tensor) -> tuple[float, float]:
    """Mean log-likelihood of the mixture that starts from these means (2,), ascending, and its threshold."""
    shares, width = torch.full_like(means, 0.5), margins.var()
    for _ in range(200):
        log_joint = shares.log() - (margins[:, None] - means) ** 2 / (2 * width)  # (n, 2)
        of_each = log_joint.softmax(1)
        shares = of_each.mean(0).clamp_min(1e-6)
        means = (of_each * margins[:, None]).sum(0) / of_each.sum(0).clamp_min(1e-6)
        width = (of_each * (margins[:, None] - means) ** 2).sum(1).mean().clamp_min(1e-6)
    likelihood = float((log_joint.logsumexp(1) - width.log() / 2).mean())
    apart = (means[1] - means[0]).clamp_min(1e-6)
    return likelihood, float(means.mean() + width / apart * (shares[0] / shares[1]).log())


def _unless_collapsed(margins: Tensor, threshold: float) -> float:
    """0 where the threshold leaves a class hardly a text."""
    share = float((margins > threshold).double().mean())
    return threshold if SMALLEST <= share <= 1 - SMALLEST else 0.0
