"""Alarms: silent on a good run, raised by bad ones, each saying what was seen and what to do."""

import pytest
import torch
from helpers import seen

from pouf.validation.diagnostics import RULES, SnapshotPredictions, alarms, diagnose, kappa

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


def test_every_rule_can_be_told_to_people() -> None:
    before = seen(torch.arange(N) % K)
    for rule in RULES:
        message = rule.message.format(d=diagnose(before, before))
        assert message and "{" not in message and rule.name not in ("restless", "estranged")


def test_kappa_is_one_for_the_same_even_where_there_is_one_class() -> None:
    ones = torch.ones(9, dtype=torch.long)
    assert kappa(ones, ones) == 1.0 and kappa(torch.arange(9) % 3, torch.arange(9) % 3) == 1.0
    assert kappa(torch.arange(4) % 2, torch.tensor([0, 0, 1, 1])) == pytest.approx(0)
    assert kappa(ones, torch.zeros(9, dtype=torch.long)) == pytest.approx(0)
