"""The bound of the HBM peak: how it is laid, what it needs, and how often it is exceeded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.backtest.tier import replay_tiers, score_group
from advisor.features import submission_of
from advisor.models.calibration import Calibration, Calibrator, class_of, conformal_margin, pools_of
from advisor.models.evidence import Evidence
from advisor.models.hbm import bound_of
from advisor.models.peak_store import Case
from advisor.models.peaks import Run
from almanac.config import AdviceSection, Config
from almanac.records import Request

NOW_S = 1_750_000_000
History = Callable[[list[dict[str, Any]]], pd.DataFrame]
CONFIG = AdviceSection()


def evidence_of(peaks: list[float], scope: str = "family") -> Evidence:
    logs = tuple(math.log(peak) for peak in peaks)
    return Evidence(scope, NOW_S, len(peaks), logs, tuple(range(len(peaks))), max(peaks), max(peaks))


def calibrated(evidence: Evidence, margin: float) -> Calibration:
    return Calibration(CONFIG.risk, {pools_of(class_of(evidence))[0]: margin})


def test_the_bound_by_hand() -> None:
    evidence = evidence_of([20000.0, 22000.0, 20000.0, 22000.0, 20000.0])
    found = bound_of(evidence, calibrated(evidence, 2.0), CONFIG).bound
    spread = math.log(1.1) * math.sqrt(5 * 0.4 * 0.6 / 4)
    assert found is not None
    assert found.bound_mib == pytest.approx(22000 * math.exp(2 * spread * math.sqrt(1.2)))
    assert (found.runs, found.highest_mib, found.scope, found.risk) == (5, 22000.0, "family", 0.01)
    assert found.evidence_class == "family, steady, spread to 6%, fewer than 8 runs"


@pytest.mark.parametrize(
    ("change", "why_not"),
    [
        ({"runs": 4}, "too few runs"),
        ({"censored_mib": 40960.0}, "ran out"),
        ({"scope": "similar"}, "not calibrated"),
    ],
)
def test_what_supports_no_bound(change: dict[str, Any], why_not: str) -> None:
    evidence = evidence_of([20000.0] * 6)
    found = bound_of(dataclasses.replace(evidence, **change), calibrated(evidence, 1.0), CONFIG)
    assert (found.bound, found.why_not) == (None, why_not)


def test_no_bound_without_calibration_or_by_one_of_another_risk() -> None:
    evidence = evidence_of([20000.0] * 30)
    assert bound_of(evidence, None, CONFIG).why_not == "not calibrated"
    other = dataclasses.replace(calibrated(evidence, 1.0), risk=0.05)
    assert bound_of(evidence, other, CONFIG).why_not == "not calibrated"


def test_runs_that_differ_wildly_support_no_bound() -> None:
    evidence = evidence_of([500.0, 40000.0, 900.0, 30000.0, 700.0, 600.0])
    assert bound_of(evidence, calibrated(evidence, 1.0), CONFIG).why_not == "too wide"


@given(st.lists(st.floats(10, 80000), min_size=5, max_size=60), st.floats(0, 9))
def test_a_bound_is_never_below_a_need_that_was_seen(peaks: list[float], margin: float) -> None:
    evidence = evidence_of(peaks)
    found = bound_of(evidence, calibrated(evidence, margin), CONFIG).bound
    assert found is None or found.bound_mib >= max(peaks) * (1 - 1e-12)


def margin_of(scores: list[float], risk: float, errors: float = 0.0, families: list[int] | None = None) -> float | None:
    return conformal_margin(np.array(scores), np.array(families or range(len(scores))), risk, errors)


def test_the_conformal_quantile_by_hand() -> None:
    scores = [float(value) for value in range(1, 101)]
    assert margin_of(scores[:99], 0.01) == 99.0
    assert margin_of(scores[:99], 0.1) == 90.0
    assert margin_of(scores[:98], 0.01) is None
    assert margin_of([], 0.01) is None


def test_high_scores_of_one_family_ask_for_more_than_those_of_many() -> None:
    scores = [float(value) for value in range(1000)]
    of_many = margin_of(scores, 0.05, 1.0)
    of_one = margin_of(scores, 0.05, 1.0, [*range(960), *[960] * 40])
    assert of_many is not None
    assert of_one is not None
    assert 949 < of_many < of_one


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=300), st.floats(0.005, 0.3))
def test_at_most_the_accepted_share_of_scores_lies_above_the_margin(scores: list[float], risk: float) -> None:
    margin = margin_of(scores, risk, 0.5)
    if margin is not None:
        assert (sum(score > margin for score in scores) + 1) / (len(scores) + 1) <= risk + 1e-9


def test_wider_pools_hold_no_better_evidence() -> None:
    evidence = evidence_of([20000.0] * 30)
    *_, same_scope, any_name = pools_of(class_of(evidence))
    assert (same_scope, any_name) == ("family/0/*/..3", "names/0/*/..3")
    few = evidence_of([20000.0] * 6)
    calibration = Calibration(CONFIG.risk, {same_scope: 1.0})
    assert calibration.margin(evidence) == 1.0
    assert calibration.margin(few) is None


def outcome(evidence: Evidence, need_mib: float, number: int, is_array: bool = False) -> Case:
    request = Request(user=f"u{number}", job_name="x", gpu_count=1, is_array=is_array, submit_s=5)
    job = submission_of(request, ())
    run = Run(need_mib, need_mib, False, False, False, 81920.0, 5, 6, is_known=True)
    return Case(number, job, evidence, run)


def test_errors_of_given_bounds_make_the_next_ones_wider_and_time_heals() -> None:
    evidence = evidence_of([20000.0] * 30)
    config = AdviceSection(risk=0.1)
    calibrator = Calibrator(config)
    for number in range(200):
        calibrator.absorb(outcome(evidence, 20000 + 10 * number, number), None)
    usual = calibrator.calibration().margin(evidence)
    for number in range(5):
        calibrator.absorb(outcome(evidence, 20000.0, 300 + number), 19999.0)
    strict = calibrator.calibration().margin(evidence)
    calibrator.recover(90)
    healed = calibrator.calibration().margin(evidence)
    assert usual is not None
    assert strict is not None
    assert healed is not None
    assert strict > usual
    assert healed < strict


def test_an_array_counts_once() -> None:
    evidence = evidence_of([20000.0] * 30)
    calibrator = Calibrator(AdviceSection(risk=0.1))
    for number in range(100):
        calibrator.absorb(dataclasses.replace(outcome(evidence, 20000.0, 1, is_array=True), row=number), None)
    assert calibrator.calibration().margins == {}


def exceeded(history: pd.DataFrame, config: Config) -> tuple[int, float]:
    """Advised jobs of the newer half, and the share that exceeded the bound."""
    outcomes = replay_tiers(history, config)
    scores = score_group("new", outcomes[len(outcomes) // 2 :])
    return scores.exceeded_bound.jobs, scores.exceeded_bound.share


def test_the_stated_risk_holds_on_a_steady_site(history_of: History, config: Config) -> None:
    rng = np.random.default_rng(11)
    rows = []
    for number in range(4000):
        family = number % 25
        peak = (5000 + 2500 * family) * rng.lognormal(0, 0.02 + 0.004 * (family % 5))
        rows.append({"user": f"u{family}", "hbm_peak_mib": float(peak), "end_s": NOW_S - 900 * (4000 - number)})
    advised, share = exceeded(history_of(rows), config)
    assert advised > 1500
    assert share <= 0.0175  # three standard errors above 1% of 1,500


def test_the_stated_risk_holds_where_every_family_grows(history_of: History, config: Config) -> None:
    rng = np.random.default_rng(12)
    rows = []
    for number in range(4000):
        family, step = number % 20, number // 20
        peak = (4000 + 800 * family) * math.exp(0.006 * step) * rng.lognormal(0, 0.03)
        rows.append({"user": f"u{family}", "hbm_peak_mib": float(peak), "end_s": NOW_S - 900 * (4000 - number)})
    advised, share = exceeded(history_of(rows), config)
    assert advised > 1000
    assert share <= 0.02


def test_a_site_that_changes_at_once_is_followed(history_of: History, config: Config) -> None:
    """From the middle on, every twentieth run needs half as much again: the risk holds once that is known."""
    rng = np.random.default_rng(5)
    rows = []
    for number in range(6000):
        factor = 1.5 if number > 2000 and rng.random() < 0.05 else 1.0
        peak = (5000 + 500 * (number % 25)) * factor * rng.lognormal(0, 0.02)
        rows.append({"user": f"u{number % 25}", "hbm_peak_mib": float(peak), "end_s": NOW_S - 900 * (6000 - number)})
    _, share = exceeded(history_of(rows), config)
    assert share <= 0.015
