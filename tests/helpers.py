"""What several tests do alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from pouf import Adaptation, Callback, Classifier, Output, Recipe, Step
from pouf.parallel.process_group import by_all_processes
from pouf.training.adaptation import run_adaptation
from pouf.training.callbacks import Callbacks
from pouf.training.plan import Plan, look_at_data, start_as_recipe_says
from pouf.training.recipe_for_data import TargetShares
from pouf.validation.diagnostics import SnapshotPredictions

TEXTS = ["the film is good", "food", "we hated the book and the very bad service", "who loved it?", "a sea", "the air"]
REVIEWS = [
    "we loved the food", "very good film", "the book is great", "we hated it", "bad service", "terrible film",
    "so so", "the service was okay",
]  # fmt: skip


@by_all_processes
def adapt(
    classifier: Any, data: Any, recipe: Recipe, *, shots: Any = None, known_shares: Any = None, cache: Any = None,
    callbacks: Any = (), **options: Any,
) -> Adaptation:  # fmt: skip
    """Adapt in place, with all settings at hand."""
    plan = Plan(data, recipe, shots, targets=TargetShares(known_shares, known_shares))
    start_as_recipe_says(classifier, recipe)
    inference = Callbacks(callbacks).watching(plan.inference(cache), "encoding")
    plan = plan.fitted(look_at_data(classifier, plan, inference))
    return run_adaptation(classifier, plan, cache=cache, callbacks=callbacks, **options)


train = adapt  # the classifier is at its last step then, whatever the verdict


class Steps(Callback):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.checkpoints: list[int] = []
        self.started: list[tuple[int, int]] = []
        self.ended: list[Adaptation] = []

    def on_start(self, recipe: Recipe, trainable: int, total: int) -> None:
        self.started.append((trainable, total))

    def on_step(self, step: Step) -> None:
        self.steps.append(step)

    def on_checkpoint(self, step: int, classifier: Classifier) -> None:
        self.checkpoints.append(step)

    def on_end(self, result: Adaptation) -> None:
        self.ended.append(result)


def weights(classifier: Classifier) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone().contiguous() for name, parameter in classifier.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def groups(present: int = 6, k: int = 6, n: int = 120, d: int = 16, spread: float = 0.2, apart: float = 0.3):
    """Vectors around the first `present` of k centres, and prototypes near all of these: (n, d), (k, d)."""
    draw = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(k, d, generator=draw), dim=1)
    features = centres[torch.arange(n) % present] + spread * torch.randn(n, d, generator=draw)
    return features, centres + apart * torch.randn(k, d, generator=draw)


def sure(labels: torch.Tensor, k: int = 4) -> torch.Tensor:
    """Predictions that are sure of these labels: (n, k)."""
    return F.one_hot(labels, k).float() * 0.9 + 0.1 / k


def seen(labels: torch.Tensor, perturbed: torch.Tensor | None = None, k: int = 4) -> SnapshotPredictions:
    changed = labels if perturbed is None else perturbed
    return SnapshotPredictions(sure(labels, k), sure(changed, k), torch.ones(len(labels)))


def output_of(folder: object, options: dict[str, Any]) -> Output:
    """The output that some of these options describe, which are taken out of them."""
    return Output(folder, **{name: options.pop(name) for name in ("resume", "overwrite", "report") if name in options})


def encoded_samples(classifier: Classifier) -> list[int]:
    """How many samples go through the encoder of inputs from here on, call by call; in its copies as well."""
    counts: list[int] = []
    model = classifier.backbone.model
    encoder = getattr(model, "vision_model", model.base_model)
    encoder.register_forward_hook(
        lambda module, given, named, output: counts.append(len(next(iter((*given, *named.values()))))), with_kwargs=True
    )
    return counts
