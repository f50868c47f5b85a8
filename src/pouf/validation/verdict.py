"""Which state of a run to use, and why; found without labels."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pouf.errors import Diverged
from pouf.saving import Use
from pouf.validation.checkpoints import ZERO_SHOT, Checkpoints
from pouf.validation.diagnostics import Alarm, Diagnostics, alarms
from pouf.validation.selectors import Choice, Snapshot


@dataclass(frozen=True)
class Verdict:
    """What a run says of itself; `print(verdict)` says it to people."""

    advised: Use  # zero-shot, chosen or last
    message: str
    trusted: bool  # nothing speaks against the adapted model
    chosen: int | None = None  # the step, where one was chosen
    last: int | None = None
    alarms: list[Alarm] = field(default_factory=list)  # of the chosen step, or of the last where the run ended badly
    diagnostics: Diagnostics | None = None  # of the same step
    snapshots: list[Snapshot] = field(default_factory=list)
    near: dict[str, float] = field(default_factory=dict)  # cosine with a prototype that 99 of 100 inputs reach, by use

    def __str__(self) -> str:
        return self.message

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "alarms": [alarm._asdict() for alarm in self.alarms],
            "diagnostics": self.diagnostics._asdict() if self.diagnostics is not None else None,
            "snapshots": [snapshot._asdict() for snapshot in self.snapshots],
        }

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Verdict:
        diagnostics = Diagnostics(**facts["diagnostics"]) if facts["diagnostics"] is not None else None
        found = [Alarm(**alarm) for alarm in facts["alarms"]]
        snapshots = [Snapshot(**snapshot) for snapshot in facts["snapshots"]]
        return cls(**facts | {"diagnostics": diagnostics, "alarms": found, "snapshots": snapshots})


def assess(checkpoints: Checkpoints, choice: Choice | None = None) -> Verdict:
    """The step to use, unless an alarm speaks against it or against how the run ended.

    Args:
        choice: what was chosen before, alone or among several runs; by default it is made now.
    """
    trained = checkpoints.tuner is not None
    choice = choice or checkpoints.choose()
    last = checkpoints.last
    # A run that ended badly was on its way there before. A choice of zero-shot, too, is told by how the run ended.
    at_the_end = checkpoints.diagnose(last, choice.convergence)
    found = alarms(at_the_end)
    chosen = last if choice.step == last.step else ZERO_SHOT if choice.step == 0 else checkpoints.of(choice.step)
    diagnostics = at_the_end
    if not found and chosen != ZERO_SHOT:
        found = alarms(checkpoints.diagnose(chosen))
        diagnostics = checkpoints.diagnose(chosen, choice.convergence)
    advised: Use = "zero-shot" if found or chosen == ZERO_SHOT else "last" if chosen == last else "chosen"
    places = {"zero-shot": ZERO_SHOT, "chosen": chosen, "last": last}
    near = {use: checkpoints.predictions[place].nearness.quantile(0.01).item() for use, place in places.items()}
    if advised == "zero-shot":
        message = _mistrust(found)
    elif trained:
        message = f"No alarm. Step {choice.step} of {last.step} was chosen without labels and is used."
    else:
        message = "No alarm. Nothing was trained; predictions are corrected as a whole."
    return Verdict(
        advised, message, advised != "zero-shot", choice.step, last.step, found, diagnostics, choice.snapshots, near
    )


def _mistrust(found: list[Alarm]) -> str:
    why, advice = "no later step agrees as well with the rest of the run as zero-shot itself", ""
    if found:
        first, *others = found
        also = f" (also: {', '.join(alarm.name for alarm in others)})" if others else ""
        why, advice = first.message + also, f" {first.advice}" if first.advice else ""
    return f"Do not trust the adapted model: {why}. Zero-shot is used instead.{advice}"


def not_judged(trained: bool) -> Verdict:
    """Of a run without checkpoints."""
    if trained:
        message = "Not judged: this run kept no checkpoints, so no step was chosen and no alarm could be raised."
        return Verdict("last", message, False)
    return Verdict("last", "Nothing was trained.", True)


def broken_off(error: BaseException) -> Verdict:
    """Of a run that did not come to its end."""
    if isinstance(error, Diverged):
        return Verdict("zero-shot", f"{error} Zero-shot is used instead.", False)
    why = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    message = f"The run has not come to its end ({why}), so nothing speaks for it or against it."
    return Verdict("last", message, False)
