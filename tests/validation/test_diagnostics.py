"""Alarms: silent on a good run, raised by bad ones, each saying what was seen and what to do."""

import pytest
import torch
from helpers import seen

from pouf.postprocess.base import kappa
from pouf.validation.diagnostics import SnapshotPredictions, diagnose, spread_of
from pouf.validation.rules import METRICS, alarms, cautions, rows_of

K, N = 4, 60


def names_of(before: SnapshotPredictions, after: SnapshotPredictions) -> set[str]:
    return {alarm.name for alarm in alarms(diagnose(before, after))}


def test_a_good_run_raises_no_alarm_and_bad_ones_do() -> None:
    truth = torch.arange(N) % K
    start = truth.clone()
    start[:12] = (start[:12] + 1) % K
    assert names_of(seen(start), seen(truth)) == set()
    assert "collapse" in names_of(seen(start), seen(torch.zeros(N, dtype=torch.long)))
    lost = SnapshotPredictions(torch.full((N, K), 1 / K), torch.full((N, K), 1 / K), torch.ones(N))
    assert "confidence lost" in names_of(seen(start), lost)
    assert "disagrees with zero-shot" in names_of(seen(start), seen((start + 1) % K))
    assert "shifted" in names_of(seen(torch.zeros(N, dtype=torch.long)), seen(truth))
    assert "unused classes" in names_of(seen(start), seen(start % 2))
    assert "unstable" in names_of(seen(start, (start + torch.arange(N) % 2) % K), seen(truth))
    assert "overconfident" in names_of(seen(start), seen(truth, (truth + torch.arange(N) % 2) % K))


def test_a_move_of_shares_is_told_from_a_change_of_mind() -> None:
    """Where a quarter of the inputs go one way, or as many go each way; and where the shares are known to be right."""
    start = torch.arange(N) % 2
    to_the_first = torch.where(torch.arange(N) % 4 == 1, 0, start)
    symmetrised = torch.where(torch.arange(N) % 8 < 2, 1 - start, start)

    def said(after: torch.Tensor, steps: int = 50, known: bool = False) -> list[str]:
        return [each.name for each in cautions(diagnose(seen(start), seen(after), steps, known_shares=known))]

    assert said(to_the_first) == said(to_the_first, steps=0) == ["shares moved"], "trained or corrected"
    assert said(symmetrised) == said(to_the_first, known=True) == []


@pytest.mark.parametrize(
    ("agreement", "found"),
    [(0.7, ["unclear names", "shares moved"]), (0.78, ["shares moved"]), (0.82, []), (None, ["shares moved"])],
)
def test_clusters_that_agree_with_the_names_confirm_a_move_of_shares(agreement: float | None, found: list[str]) -> None:
    start = torch.arange(N) % K
    diagnostics = diagnose(seen(start), seen(torch.where(torch.arange(N) % 8 == 1, 0, start)), 50)
    assert [each.name for each in cautions(diagnostics._replace(names_agreement=agreement))] == found
    two = diagnostics._replace(names_agreement=0.9, classes=2)
    assert [each.name for each in cautions(two)] == ["shares moved"], "groups of two tell less"


@pytest.mark.parametrize(("k", "corrected", "steps", "found"), [
    (12, 0.3, 50, True), (12, 0.1, 50, False), (12, 0.3, 0, False), (4, 0.3, 50, False),
])  # fmt: skip
def test_a_run_that_leaves_zero_shot_and_its_correction_is_seen(
    k: int, corrected: float, steps: int, found: bool
) -> None:
    start = torch.arange(N) % 4
    after = torch.where(torch.arange(N) % 3 == 0, (start + 1) % 4, start)
    diagnostics = diagnose(seen(start), seen(after), steps)._replace(classes=k, corrected_changes=corrected)
    assert ("far from all that is free" in [each.name for each in cautions(diagnostics)]) == found


def test_what_can_not_be_judged_is_a_caution() -> None:
    truth = torch.arange(N) % K
    start = torch.where(torch.arange(N) % 5 == 1, (truth + 1) % K, truth)

    def said(n: int, steps: int, after: torch.Tensor) -> list[str]:
        diagnostics = diagnose(seen(start[:n]), seen(after[:n]), steps)
        assert alarms(diagnostics) == []
        return [caution.name for caution in cautions(diagnostics)]

    assert said(N, 50, truth) == said(N, 0, truth) == []
    assert said(N, 2, truth) == ["few steps"]
    assert said(20, 50, truth) == ["few inputs"]
    assert said(N, 50, start) == ["nothing changed"]
    assert said(1, 2, start) == ["few inputs", "few steps", "nothing changed"]


def test_a_model_that_says_the_same_of_every_input_is_told_of() -> None:
    blind = SnapshotPredictions(torch.tensor([[0.3, 0.3, 0.2, 0.2]]).repeat(N, 1), torch.zeros(0, K), torch.ones(N))
    diagnostics = diagnose(blind, seen(torch.arange(N) % K))
    assert diagnostics.information_before == pytest.approx(0, abs=1e-6)
    assert "uninformative" in {caution.name for caution in cautions(diagnostics)}
    knows = diagnose(seen(torch.arange(N) % K), seen(torch.arange(N) % K))
    assert knows.information_before > 0.7 and "uninformative" not in {caution.name for caution in cautions(knows)}


def test_constant_features_are_an_alarm_and_narrow_ones_are_not() -> None:
    torch.manual_seed(0)
    one = torch.randn(1, 64)
    good = seen(torch.arange(N) % K)

    def alarmed(features: torch.Tensor) -> bool:
        found = diagnose(good, good)._replace(feature_spread=spread_of(features), inputs=len(features))
        return "constant features" in {alarm.name for alarm in alarms(found)}

    rounded = (one * (1 + 2**-11 * torch.randn(40, 64))).half()
    assert alarmed(torch.zeros(40, 64)) and alarmed(one.repeat(40, 1)) and alarmed(rounded)
    assert alarmed(one * torch.rand(40, 1)), "the length says nothing"
    narrow = one + 0.05 * torch.randn(40, 64)  # cosines of .99, as in masked language models
    assert not alarmed(narrow) and not alarmed(torch.randn(40, 64)) and not alarmed(one)


def test_few_inputs_do_not_make_zero_shot_unstable() -> None:
    truth = torch.arange(N) % K
    shaky = (truth + torch.arange(N) % 2) % K  # half of them survive
    assert "unstable" in names_of(seen(truth, shaky), seen(truth))
    assert "unstable" not in names_of(seen(truth[:10], shaky[:10]), seen(truth[:10]))


def test_agreement_counts_beyond_chance_only() -> None:
    """With six classes a good run can leave zero-shot on half of the inputs; with two classes that is chance."""
    start, half = torch.arange(600) % 6, torch.arange(600) < 300
    moved = torch.where(half, start, (start + 1 + torch.arange(600) // 6 % 5) % 6)
    diagnostics = diagnose(seen(start, k=6), seen(moved, k=6))
    assert diagnostics.agreement == 0.5 and diagnostics.chance == pytest.approx(1 / 6, abs=0.01)
    assert diagnostics.kappa == pytest.approx(0.4, abs=0.01) and "disagrees with zero-shot" not in {
        alarm.name for alarm in alarms(diagnostics)
    }
    two = torch.arange(600) % 2
    diagnostics = diagnose(seen(two, k=2), seen(torch.where(torch.arange(600) % 4 < 2, two, 1 - two), k=2))
    assert (
        diagnostics.agreement == 0.5
        and diagnostics.kappa == pytest.approx(0)
        and "disagrees with zero-shot" in {a.name for a in alarms(diagnostics)}
    )


def test_alarms_say_what_was_seen_and_what_to_do() -> None:
    diagnostics = diagnose(seen(torch.arange(N) % K), seen(torch.zeros(N, dtype=torch.long)))
    (alarm,) = [alarm for alarm in alarms(diagnostics) if alarm.name == "collapse"]
    assert "of 4 classes, zero-shot used 4.0" in alarm.message and "smaller learning rate" in alarm.advice


def test_every_row_of_the_table_reads_as_text() -> None:
    d = diagnose(*[seen(torch.arange(N) % K)] * 2)._replace(names_agreement=0.5)
    findings = [row for row in METRICS if row.name]
    for row in findings:
        for words in (row.label, row.condition_in_words, row.message.format(d=d)):
            assert words and "{" not in words
    assert len({row.name for row in findings}) == len(findings), "a name is that of one finding"
    assert all(hasattr(d, field) for row in METRICS for field in row.fields if field)


def test_reports_show_each_quantity_once_with_all_its_limits() -> None:
    rows = rows_of(diagnose(*[seen(torch.arange(N) % K)] * 2))
    limits = {label: limit for label, _, _, limit in rows}
    assert len(limits) == len(rows) and rows_of(None) == []
    (confidence,) = (limit for label, limit in limits.items() if label.startswith("mean probability"))
    assert confidence == (
        "alarm: below 50% of zero-shot's; "
        "alarm: more than 0.4 above the share of predictions that survive a small change"
    )
    assert ("classes in use (exp H of the mean prediction)", "4.00", "4.00", "alarm: below 50% of zero-shot's") in rows


def test_kappa_is_one_for_the_same_even_where_there_is_one_class() -> None:
    ones = torch.ones(9, dtype=torch.long)
    assert kappa(ones, ones) == 1.0 and kappa(torch.arange(9) % 3, torch.arange(9) % 3) == 1.0
    assert kappa(torch.arange(4) % 2, torch.tensor([0, 0, 1, 1])) == pytest.approx(0)
    assert kappa(ones, torch.zeros(9, dtype=torch.long)) == pytest.approx(0)
