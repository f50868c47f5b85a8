"""The alarms and cautions: the quantity, its limit, and the message."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from pouf.postprocess.clusters import MIN_AGREEMENT
from pouf.validation.diagnostics import Diagnostics


class Finding(NamedTuple):
    """An alarm or a caution."""

    name: str
    message: str  # for people: what was found and what it may mean
    advice: str = ""  # a sentence on what to do


class Metric(NamedTuple):
    """A row of `METRICS`: a quantity, and the finding that is reported where it crosses its limit.

    After an alarm zero-shot is used. A caution is reported with the verdict, and changes nothing about what is used.
    """

    label: str  # of the quantity; it may have several rows, one for each finding
    fields: tuple[str, str]  # of `Diagnostics`, for zero-shot and adapted, as reports show them; "" for none
    name: str = ""  # of the finding; a row without one is only displayed
    level: Literal["alarm", "caution"] = "alarm"
    limit: float = 0.0
    condition: Callable[[Diagnostics, float], bool] = lambda d, limit: False  # given the limit
    rule: str = ""  # the condition in words; {limit} is filled in
    message: str = ""  # of the finding; {d.…} are filled in
    advice: str = ""

    def fires(self, diagnostics: Diagnostics) -> bool:
        return self.condition(diagnostics, self.limit)

    @property
    def condition_in_words(self) -> str:
        return self.rule.format(limit=self.limit)


NOT_SHOWN = ("", "")
OTHER_NAMES = "Are these the classes in the data? If so, try other words for them, or another template."
SLOWER = "Try a smaller learning rate."
FEW_INPUTS = 30
FEW_CLASSES = 10  # among hundreds, nearly every change is a move from class to class
NAMES_FIT = "sets of random words that are less near to the inputs than the class names"
IN_USE = "classes in use (exp H of the mean prediction)"
TEACHER = "share of inputs on which the teacher agrees"
TEACHER_ADVICE = "Look at some of its answers, and adapt without it, or with another."
CONFIDENCE = "mean probability of the predicted class"
SURVIVAL = "share of predictions that survive a small change of the input"
AGREEMENT = "share of inputs on which both agree"
# The plainest first: the verdict quotes the first alarm, and its advice. What speaks against zero-shot itself comes
# before what speaks against the run, which can't be better than what it started from. How the limits were set: see
# docs/trust.md, whose tables are made from this one.
METRICS = (
    Metric(
        "spread of the features' directions",
        NOT_SHOWN,
        "constant features",
        limit=1e-5,  # rounding in half precision gives less, the narrowest models 1e-3 and more
        condition=lambda d, limit: d.inputs > 1 and d.feature_spread < limit,
        rule="below {limit}, as where the model's weights are zeros",
        message="the model's features of all {d.inputs} inputs that were looked at have the same direction, so that it "
        "can't tell them apart: either the inputs are all the same, or the model is broken",
        advice="Look at some of the inputs, and download the model again.",
    ),
    Metric(
        NAMES_FIT,
        NOT_SHOWN,
        "unfitting names",
        limit=0.05,
        condition=lambda d, limit: d.names_near < limit and d.names_span < 0.5,
        rule="below {limit:.0%}, and below half in how well they tell the inputs apart",
        message="random words fit these inputs better than the class names: only {d.names_near:.0%} of such sets are "
        "less near to the inputs, {d.names_span:.0%} tell them less apart. The worst fit: {d.names_worst}",
        advice=OTHER_NAMES,
    ),
    Metric(TEACHER, ("teacher_zero_shot", "teacher_adapted")),
    Metric(
        "classes in the teacher's answers (exp H), as a share of those in zero-shot's",
        NOT_SHOWN,
        "teacher of few classes",
        limit=0.5,
        condition=lambda d, limit: d.teacher_inputs >= FEW_INPUTS and d.teacher_usage < limit,
        rule="below {limit}, from 30 answers on",
        message="the teacher uses few of the classes, {d.teacher_usage:.0%} as many as zero-shot",
        advice=TEACHER_ADVICE,
    ),
    Metric(
        "agreement (kappa) of the teacher with the clusters that its answers make of the features",
        NOT_SHOWN,
        "teacher without pattern",
        limit=0.15,
        condition=lambda d, limit: d.teacher_inputs >= FEW_INPUTS and max(d.teacher_clusters, d.teacher_kappa) < limit,
        rule="below {limit}, as its agreement with zero-shot, from 30 answers on",
        message="the teacher's answers look like noise: they agree with zero-shot on {d.teacher_zero_shot:.0%} of "
        "{d.teacher_inputs} inputs (kappa {d.teacher_kappa:.2f}), and inputs that it gives one class are no more alike "
        "than others (kappa {d.teacher_clusters:.2f})",
        advice=TEACHER_ADVICE,
    ),
    Metric(
        "pairs of classes that teacher and zero-shot have the other way round",
        NOT_SHOWN,
        "teacher swaps classes",
        condition=lambda d, limit: bool(d.teacher_swapped),
        rule="any, with at least 8 such inputs, and a kappa of 0.5 or more once the two are exchanged",
        message="the teacher seems to swap the classes {d.teacher_swapped}: most inputs of each are the other's by "
        "zero-shot",
        advice="Look at some of its answers about these two classes.",
    ),
    Metric(
        SURVIVAL,
        ("stability_before", "stability_after"),
        "unstable",
        limit=0.68,
        condition=lambda d, limit: d.perturbed >= FEW_INPUTS and d.stability_before + 2 * _standard_error(d) < limit,
        rule="zero-shot's more than two standard errors below {limit:.0%}",
        message="zero-shot itself is unreliable here: only {d.stability_before:.0%} of its predictions survive a small "
        "change of the input",
        advice="The model may not be able to read inputs of this kind, or the class names may not fit them: try "
        "another model, or other names and templates.",
    ),
    Metric(
        IN_USE,
        ("effective_before", "effective_after"),
        "collapse",
        limit=0.5,
        condition=lambda d, limit: d.effective_after < limit * d.effective_before,
        rule="below {limit:.0%} of zero-shot's",
        message="predictions use {d.effective_after:.1f} of {d.classes} classes, zero-shot used "
        "{d.effective_before:.1f}: the run has collapsed",
        advice=SLOWER,
    ),
    Metric(
        CONFIDENCE,
        ("confidence_before", "confidence_after"),
        "confidence lost",
        limit=0.5,
        condition=lambda d, limit: d.confidence_after < limit * d.confidence_before,
        rule="below {limit:.0%} of zero-shot's",
        message="the mean probability of the predicted class fell from {d.confidence_before:.2f} to "
        "{d.confidence_after:.2f}: the run has lost what the model knew",
        advice=SLOWER,
    ),
    Metric(AGREEMENT, ("", "agreement")),
    Metric(
        "agreement beyond chance (Cohen's kappa)",
        ("", "kappa"),
        "disagrees with zero-shot",
        limit=0.2,
        condition=lambda d, limit: d.kappa < limit,
        rule="below {limit}",
        message="zero-shot and adapted agree on {d.agreement:.0%} of the inputs, by chance it would be {d.chance:.0%}: "
        "either zero-shot is near chance, or the run has gone astray",
        advice="Try a smaller learning rate, or a model and class names that fit these inputs better.",
    ),
    Metric(
        "agreement of the run's last two thirds with its end (kappa)",
        ("", "convergence"),
        "not converged",
        limit=0.7,
        condition=lambda d, limit: d.convergence < limit,
        rule="below {limit} at some checkpoint",
        message="predictions have not converged: late in the run they still changed so much that their agreement with "
        "its end is a kappa of only {d.convergence:.2f}",
        advice=SLOWER,
    ),
    Metric(
        "net change of the class shares",
        ("", "shift"),
        "shifted",
        limit=0.5,
        condition=lambda d, limit: d.shift > limit,
        rule="above {limit:.0%}",
        message="{d.shift:.0%} of the predicted shares moved to other classes",
    ),
    Metric(
        "share of classes given to no input",
        ("unused_before", "unused_after"),
        "unused classes",
        limit=0.3,
        condition=lambda d, limit: d.unused_after > d.unused_before + limit,
        rule="more than {limit} above zero-shot's",
        message="{d.unused_after:.0%} of the classes are given to no input, {d.unused_before:.0%} before",
    ),
    Metric(
        CONFIDENCE,
        ("confidence_before", "confidence_after"),
        "overconfident",
        limit=0.4,
        condition=lambda d, limit: d.confidence_after - d.stability_after > limit,
        rule="more than {limit} above the share of predictions that survive a small change",
        message="a mean probability of {d.confidence_after:.2f} for the predicted class, but only "
        "{d.stability_after:.0%} of the predictions survive a small change of the input",
    ),
    Metric(
        "agreement (kappa) of zero-shot with the clusters that its predictions make of the features",
        NOT_SHOWN,
        "unclear names",
        "caution",
        limit=0.75,  # topics as animals, films as cats and dogs: 0.5 at most
        condition=lambda d, limit: (
            d.names_agreement is not None and d.names_agreement < (limit if d.classes > 2 else limit - 0.25)
        ),
        rule="below {limit}, with two classes 0.25 lower, from five inputs a class on",
        message="the model is unsure what these names mean here (mean confidence {d.confidence_before:.0%}, and a "
        "kappa of {d.names_agreement:.2f} with the groups of inputs that it makes), or many of the named classes are "
        "not there",
        advice="Describe each class in a few words, and compare wordings with `pouf names`; leave out classes that are "
        "not in the data.",
    ),
    Metric(
        "share of predictions that moved from some classes to others",
        NOT_SHOWN,
        "shares moved",
        "caution",
        limit=0.1,
        condition=lambda d, limit: (
            (d.classes <= FEW_CLASSES and not d.known_shares)
            and (bool(d.overpredicted) or (d.moved > limit and d.one_sided > 0.8 and not _clusters_agree(d)))
        ),
        rule=f"above {{limit:.0%}} and four fifths of all changes, with at most {FEW_CLASSES} classes whose "
        f"proportions are not known, unless with more than two the kappa of names and clusters is {MIN_AGREEMENT} or "
        "more; always where zero-shot was found to predict a class too often",
        message="{d.moved:.0%} of the predictions moved from some classes to others, and hardly any the other way: "
        "either zero-shot favoured the ones, or the others were given shares that the data do not have, which look the "
        "same without labels",
        advice="If you know the class proportions, give them as the prior; if not, 20 answers to `pouf review` will "
        "tell.",
    ),
    Metric(
        NAMES_FIT,
        NOT_SHOWN,
        "unreliable names",
        "caution",
        limit=0.5,
        condition=lambda d, limit: 0.05 <= d.names_near < limit and d.names_span < limit,
        rule="below {limit:.0%}, as in how well they tell the inputs apart",
        message="the class names fit these inputs no better than random words do: {d.names_near:.0%} of such sets are "
        "less near to the inputs, {d.names_span:.0%} tell them less apart. The worst fit: {d.names_worst}",
        advice=OTHER_NAMES,
    ),
    Metric(
        "share of inputs on which the run differs from zero-shot and from zero-shot corrected without training",
        NOT_SHOWN,
        "far from all that is free",
        "caution",
        limit=0.2,
        condition=lambda d, limit: (
            d.steps > 0 and d.classes > FEW_CLASSES and min(d.changed, d.corrected_changes) > limit
        ),
        rule=f"both above {{limit:.0%}}, with more than {FEW_CLASSES} classes",
        message="training moved predictions away from zero-shot ({d.changed:.0%}) and from zero-shot corrected by the "
        "clusters of the features ({d.corrected_changes:.0%}): with many classes, tuned weights may unlearn what tells "
        "them apart",
        advice="Compare with `--preset fast` and `pouf predict --use corrected`.",
    ),
    Metric(
        "agreement of the predictions with a clustering of the inputs",
        NOT_SHOWN,
        "second opinion fell",
        "caution",
        limit=0.02,
        condition=lambda d, limit: d.opinion_fell > limit and d.agreement < 1.0,
        rule="fell by more than {limit} from zero-shot to the end of the run, and rose at no checkpoint on the way",
        message="agreement of the predictions with a clustering of the inputs fell all along the run, by "
        "{d.opinion_fell:.2f}",
        advice="Fewer steps or a smaller learning rate may do less harm.",
    ),
    Metric(
        "inputs",
        NOT_SHOWN,
        "few inputs",
        "caution",
        limit=FEW_INPUTS,
        condition=lambda d, limit: d.inputs < limit,
        rule="fewer than {limit}",
        message="too few inputs ({d.inputs}) to adapt to or to judge by",
        advice=f"Give at least {FEW_INPUTS}, better hundreds.",
    ),
    Metric(
        "steps",
        NOT_SHOWN,
        "few steps",
        "caution",
        limit=10,
        condition=lambda d, limit: 0 < d.steps < limit,
        rule="fewer than {limit}",
        message="too few steps ({d.steps}) to judge by",
    ),
    Metric(
        "mutual information of inputs and zero-shot's predictions",
        NOT_SHOWN,
        "uninformative",
        "caution",
        limit=0.01,
        condition=lambda d, limit: d.inputs >= FEW_INPUTS and d.information_before < limit,
        rule="below {limit:.0%} of log k, as with random weights",
        message="zero-shot says nearly the same of every input (mutual information of inputs and predictions: "
        "{d.information_before:.1%} of its maximum)",
        advice="Are the model's weights trained, and is more than one class in the data?",
    ),
    Metric(
        AGREEMENT,
        ("", "agreement"),
        "nothing changed",
        "caution",
        limit=1.0,
        condition=lambda d, limit: d.agreement == limit and d.moved == 0,
        rule="all of them",
        message="adaptation changed no prediction of the {d.inputs} inputs that were looked at",
        advice="If you know the class proportions, give them as the prior.",
    ),
)


def rows_of(diagnostics: Diagnostics | None) -> list[tuple[str, str, str, str]]:
    """The diagnostics as a table for reports: label, zero-shot, adapted, and limits in words."""
    displayed = {} if diagnostics is None else {row.label: row.fields for row in METRICS if row.fields != NOT_SHOWN}
    rows = []
    for label, fields in displayed.items():
        if label == TEACHER and diagnostics is not None and not diagnostics.teacher_inputs:
            continue
        before, after = (f"{getattr(diagnostics, name):.2f}" if name else "" for name in fields)
        limits = (f"{row.level}: {row.condition_in_words}" for row in METRICS if row.label == label and row.name)
        rows.append((label, before, after, "; ".join(limits)))
    return rows


def rules_in_markdown(level: str) -> str:
    """The alarms, or the cautions, as the table that docs/trust.md shows."""
    rows = [
        f"| {row.name} | {row.label} | {row.condition_in_words} |" for row in METRICS if row.name and row.level == level
    ]
    return "\n".join([f"| {level} | metric | limit |", "|---|---|---|", *rows])


def alarms(diagnostics: Diagnostics) -> list[Finding]:
    """What speaks against the adapted classifier."""
    return _findings(diagnostics, "alarm")


def cautions(diagnostics: Diagnostics) -> list[Finding]:
    """What leaves open whether the adapted classifier is any better."""
    return _findings(diagnostics, "caution")


def _findings(diagnostics: Diagnostics, level: str) -> list[Finding]:
    return [
        Finding(row.name, row.message.format(d=diagnostics), row.advice)
        for row in METRICS
        if row.name and row.level == level and row.fires(diagnostics)
    ]


def _clusters_agree(d: Diagnostics) -> bool:
    """The clusters of more than two classes tell shares without labels; two groups need not be the two classes."""
    return d.classes > 2 and d.names_agreement is not None and d.names_agreement >= MIN_AGREEMENT


def _standard_error(d: Diagnostics) -> float:
    """Of the stability before: in a small sample a low one may be chance."""
    return math.sqrt(d.stability_before * (1 - d.stability_before) / d.perturbed)
