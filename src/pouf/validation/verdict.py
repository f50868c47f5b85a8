"""Which state of a run to use, and why; found without labels."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from pouf.errors import Diverged
from pouf.recipe import Recipe
from pouf.saving import Use
from pouf.validation.checkpoints import ZERO_SHOT, Checkpoints
from pouf.validation.diagnostics import Diagnostics
from pouf.validation.review import ReviewResult
from pouf.validation.rules import Finding, alarms, cautions
from pouf.validation.selectors import Choice, Snapshot, opinion_fell

ONLY_LABELS = "whether it beats zero-shot, only labels can show: `pouf review`"

UNVERIFIED = "Unverified: no warning signs, and no labels."

MIN_REPORTED_CHANGE = 0.05  # share of the predictions

ADAPTED_BEFORE = "Zero-shot here is the classifier that this run started from, which was adapted before."


@dataclass(frozen=True)
class Verdict:
    """What a run says of itself; `print(verdict)` says it to people."""

    advised: Use  # zero-shot, chosen or last
    message: str
    trusted: bool  # nothing speaks against the adapted model: neither an alarm nor a caution
    chosen: int | None = None  # the step, where one was chosen
    last: int | None = None
    alarms: list[Finding] = field(default_factory=list)  # of the chosen step, or of the last where the run ended badly
    cautions: list[Finding] = field(default_factory=list)  # these do not change what is advised
    diagnostics: Diagnostics | None = None  # of the same step
    snapshots: list[Snapshot] = field(default_factory=list)
    started_adapted: bool = False  # zero-shot here is the classifier that the run started from, adapted before
    near: dict[str, float] = field(default_factory=dict)  # cosine with a prototype that 99 of 100 inputs reach, by use
    review: ReviewResult | None = None  # what labels said, once some were given

    def __str__(self) -> str:
        return self.headline if self.review is None else f"{self.headline} {self.review}"

    @property
    def headline(self) -> str:
        """The message; once labels have confirmed the run it is no longer unverified."""
        if self.level != "confirmed":
            return self.message
        return self.message.replace(UNVERIFIED, "Confirmed by labels.").replace(f"; {ONLY_LABELS}", "")

    @property
    def level(self) -> Literal["alarm", "caution", "unverified", "confirmed"]:
        """How loudly to say it. What labels say counts for more than what was guessed without them, and nothing
        else confirms a run."""
        if self.review is not None and self.review.better is not None:
            used = "zero-shot" if self.advised == "zero-shot" else "adapted"
            return "confirmed" if self.review.better == used else "alarm"
        return "unverified" if self.trusted else "alarm" if self.advised == "zero-shot" else "caution"

    @property
    def adapted(self) -> Use:
        """What stands for the adapted model, trusted or not: the chosen step, or the last where that is zero-shot."""
        return "last" if self.chosen in (0, None, self.last) else "chosen"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "alarms": [alarm._asdict() for alarm in self.alarms],
            "cautions": [caution._asdict() for caution in self.cautions],
            "diagnostics": self.diagnostics._asdict() if self.diagnostics is not None else None,
            "snapshots": [snapshot._asdict() for snapshot in self.snapshots],
            "review": self.review.to_json() if self.review is not None else None,
        }


def assess(checkpoints: Checkpoints, choice: Choice | None = None) -> Verdict:
    """The step to use, unless an alarm speaks against it or against how the run ended.

    Args:
        choice: what was chosen before, alone or among several runs; by default it is made now.
    """
    trained = checkpoints.tuner is not None
    choice = choice or checkpoints.choose()
    last = checkpoints.last
    # A run that ended badly was on its way there before. A choice of zero-shot, too, is explained by how the run ended.
    at_the_end = checkpoints.diagnose(last, choice.convergence)
    found = alarms(at_the_end)
    chosen = last if choice.step == last.step else ZERO_SHOT if choice.step == 0 else checkpoints.at_step(choice.step)
    diagnostics = at_the_end
    if not found and chosen != ZERO_SHOT:
        found = alarms(checkpoints.diagnose(chosen))
        diagnostics = checkpoints.diagnose(chosen, choice.convergence)
    advised: Use = "zero-shot" if found or chosen == ZERO_SHOT else "last" if chosen == last else "chosen"
    places = {"zero-shot": ZERO_SHOT, "chosen": chosen, "last": last}
    near = {use: checkpoints.predictions[place].nearness.quantile(0.01).item() for use, place in places.items()}
    diagnostics = diagnostics._replace(opinion_fell=opinion_fell(choice.snapshots))
    open_questions = cautions(diagnostics)
    if advised == "zero-shot":
        message = _mistrust(found, open_questions)
    else:
        what = f"step {choice.step} of {last.step}, picked without labels"
        message = _use(what if trained else "zero-shot with corrected predictions; nothing was trained", open_questions)
        if not trained and torch.equal(*(checkpoints.predictions[at].probabilities for at in (ZERO_SHOT, last))):
            why, advice = _explain(open_questions)
            message = f"Caution: {why}. Using zero-shot as it is.{advice}"
        if diagnostics.overpredicted:
            message = f"{message} {_less_often(diagnostics)}"
    if advised != "zero-shot" and diagnostics.corrected_changes >= MIN_REPORTED_CHANGE:
        message = (
            f"{message} Zero-shot, corrected without training, differs on {diagnostics.corrected_changes:.0%} of the "
            "inputs: `pouf predict --use corrected`."
        )
    if diagnostics.largest_class:
        message = f"{message} {_open_shares(diagnostics)}"
    if diagnostics.teacher_inputs:
        message = f"{message} {_three_states(diagnostics)}"
    if checkpoints.started_adapted:
        message = f"{message} {ADAPTED_BEFORE}"
    return Verdict(
        advised, message, not found and not open_questions and advised != "zero-shot", choice.step, last.step, found,
        open_questions, diagnostics, choice.snapshots, checkpoints.started_adapted, near,
    )  # fmt: skip


def _use(what: str, found: list[Finding]) -> str:
    """No warning sign is no evidence of a gain: only labels are."""
    if not found:
        return f"{UNVERIFIED} Using {what}; {ONLY_LABELS}."
    why, advice = _explain(found)
    return f"Caution: {why}.{advice} Using {what}; {ONLY_LABELS}."


def _open_shares(found: Diagnostics) -> str:
    origin = "without that bias" if found.overpredicted else "as zero-shot has it"
    return (
        f"Shares of two classes can't be found without labels. Kept: {found.largest_share:.0%} "
        f"{found.largest_class!r}, {origin}. If they are about equal, {found.uniform_changes:.0%} of the predictions "
        "change: `--prior uniform` (no new training: `pouf predict --prior uniform`, "
        '`result.with_prior("uniform")`). If you don\'t know: 50 answers, `pouf review`.'
    )


def _three_states(found: Diagnostics) -> str:
    """Who agrees with whom."""
    return (
        f"Of the {found.teacher_inputs} inputs looked at that the teacher answered, it agrees with zero-shot on "
        f"{found.teacher_zero_shot:.0%} and with the adapted model on {found.teacher_adapted:.0%}; zero-shot and "
        f"adapted agree on {found.agreement:.0%} of all."
    )


def _less_often(found: Diagnostics) -> str:
    return (
        f"Zero-shot seems to find {found.overpredicted!r} too often: {found.moved:.0%} of the predictions moved away "
        "from it. If you know the class proportions, give them as the prior."
    )


def _mistrust(found: list[Finding], less: list[Finding]) -> str:
    why, advice = "no later step agrees as well with the rest of the run as zero-shot itself", ""
    # What is wrong with zero-shot itself explains the rest.
    causes = [finding for finding in less if finding.name == "uninformative"]
    if found and found[0].name == "constant features":
        causes = []  # it has a cause of its own
    if found:
        why, advice = _explain(causes + found + [finding for finding in less if finding not in causes])
    return f"Do not trust the adapted model: {why}. Zero-shot is used instead.{advice}"


def _explain(found: list[Finding]) -> tuple[str, str]:
    """The first in full, the others by name; and what to do about the first."""
    first, *others = found
    also = f" (also: {', '.join(each.name for each in others)})" if others else ""
    return first.message + also, f" {first.advice}" if first.advice else ""


def not_judged(recipe: Recipe) -> Verdict:
    """Of a run without checkpoints."""
    why = "the data are a stream, which can't be looked at again along the way"
    if recipe.pseudo_labels:
        why = "this method learns from the surest predictions alone and at no other input"
    elif not recipe.objective.needs_unlabelled:
        why = "this method learns from labelled shots alone, and no unlabelled input was there to judge it by"
    elif recipe.snapshots == 0:
        why = "snapshots = 0 in the recipe, so there were no checkpoints to choose from or to compare"
    message = f"Not judged: {why}. Using the last step; {ONLY_LABELS}."
    return Verdict("last", message, False)


def nothing_to_judge() -> Verdict:
    """Of zero-shot itself."""
    return Verdict("last", "Nothing was trained.", True)


def failed_verdict(error: BaseException) -> Verdict:
    """Of a run that did not come to its end."""
    if isinstance(error, Diverged):
        return Verdict("zero-shot", f"{error} Zero-shot is used instead.", False)
    why = "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"
    message = f"The run has not come to its end ({why}), so nothing speaks for it or against it."
    return Verdict("last", message, False)
