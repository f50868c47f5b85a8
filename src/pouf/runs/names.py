"""What the files of a run folder are called."""

from __future__ import annotations

from pouf.model_card import README
from pouf.saving import BEFORE, CARD, CHECKPOINTS, SAVED

VERDICT, PREDICTIONS, TRIALS, PLAN = "verdict.json", "predictions.csv", "search.json", "plan.json"
RECIPE, CLASSES, METRICS, MANIFEST, SKIPPED = "recipe.toml", "classes.txt", "metrics.jsonl", "run.json", "skipped.jsonl"
DESCRIPTIONS = "classes.json"  # where the classes have descriptions, in the place of classes.txt
# But for the parts of a classifier, which its card lists. What people write (review.csv, answers.csv) is theirs.
WRITTEN_BY_POUF = (
    CARD, SAVED, MANIFEST, VERDICT, RECIPE, CLASSES, DESCRIPTIONS, METRICS, SKIPPED, PREDICTIONS, TRIALS, PLAN, README,
    "last", "chosen", "report.html", "review.html", "review.json", "tensorboard", "onnx", "merged",
)  # fmt: skip

__all__ = [
    "BEFORE", "CARD", "CHECKPOINTS", "CLASSES", "DESCRIPTIONS", "MANIFEST", "METRICS", "PLAN", "PREDICTIONS", "README",
    "RECIPE", "SKIPPED", "TRIALS", "VERDICT", "WRITTEN_BY_POUF",
]  # fmt: skip
