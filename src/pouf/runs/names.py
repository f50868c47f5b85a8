"""What the files of a run folder are called.

run/report.html, predictions.csv    for people
run/model/                          the classifier that the run advises
run/details/                        how it was made: settings, plan, steps, verdict, and the other states of the run
run/unfinished/                     while a run is under way, or can be resumed: a run folder with checkpoints
"""

from __future__ import annotations

from pouf.model_card import README
from pouf.saving import CARD, DETAILS, MODEL_FOLDER, SAVED

PREDICTIONS, REPORT, UNFINISHED, CHECKPOINTS = "predictions.csv", "report.html", "unfinished", "checkpoints"
VERDICT, TRIALS, PLAN = f"{DETAILS}/verdict.json", f"{DETAILS}/search.json", f"{DETAILS}/plan.json"
RECIPE, METRICS = f"{DETAILS}/recipe.toml", f"{DETAILS}/metrics.jsonl"
MANIFEST, SKIPPED = f"{DETAILS}/run.json", f"{DETAILS}/skipped.jsonl"
CLASSES = f"{DETAILS}/classes.txt"
DESCRIPTIONS = f"{DETAILS}/classes.json"  # where the classes have descriptions, in the place of classes.txt
REVIEW = f"{DETAILS}/review.json"
MODEL_CARD = f"{MODEL_FOLDER}/{README}"

__all__ = [
    "CARD", "CHECKPOINTS", "CLASSES", "DESCRIPTIONS", "DETAILS", "MANIFEST", "METRICS", "MODEL_CARD", "MODEL_FOLDER",
    "PLAN", "PREDICTIONS", "RECIPE", "REPORT", "REVIEW", "SAVED", "SKIPPED", "TRIALS", "UNFINISHED", "VERDICT",
]  # fmt: skip
