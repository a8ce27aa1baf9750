"""The bound of the HBM peak: what counts as evidence, how it is laid, and how often it is exceeded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.features import submission_of
from advisor.models.hbm import Calibration, backtest_bound, bound_of, conformal_quantile, student_t_quantile
from advisor.models.peaks import Evidence, Peak, evidence_now
from almanac.config import AdviceSection, Config
from almanac.records import Request

NOW_S = 1_750_000_000
History = Callable[[list[dict[str, Any]]], pd.DataFrame]


def evidence_of(history: pd.DataFrame, config: Config, name: str = "train-9", **request: Any) -> Evidence:
    job = submission_of(Request(user="ann", job_name=name, gpu_count=4, submit_s=NOW_S, **request), config.tiers)
    return evidence_now(job, history, config.advice, config.tiers)


def test_the_bound_without_calibration_is_students_t_on_the_highest_peak(history_of: History, config: Config) -> None:
    peaks = [20000.0, 21000.0, 22000.0, 20500.0, 21500.0]
    evidence = evidence_of(history_of([{"hbm_peak_mib": peak} for peak in peaks]), config)
    bound = bound_of(evidence, None, config.advice)
    assert bound is not None
    # sd of the logs is 0.0377, below the floor of 0.05; t(0.99, 4) = 3.7469; sqrt(1 + 1/5) = 1.0954
    assert bound.bound_mib == pytest.approx(22000 * math.exp(3.74695 * 0.05 * math.sqrt(1.2)), rel=1e-5)
    assert (bound.method, bound.runs, bound.highest_mib, bound.scope) == ("student-t", 5, 22000.0, "family")


def test_students_t_against_the_table() -> None:
    assert student_t_quantile(0.99, 4) == pytest.approx(3.7469, abs=1e-4)


def test_conformal_quantile_by_hand() -> None:
    scores = [float(value) for value in range(1, 100)]
    assert conformal_quantile(scores, 0.01) == 99.0
    assert conformal_quantile(scores, 0.1) == 90.0
    assert conformal_quantile(scores[:98], 0.01) is None


def test_too_few_runs_support_no_bound(history_of: History, config: Config) -> None:
    evidence = evidence_of(history_of([{} for _ in range(config.advice.min_runs - 1)]), config)
    assert bound_of(evidence, None, config.advice) is None


def test_preallocated_and_unjudged_runs_are_set_aside_and_counted(history_of: History, config: Config) -> None:
    rows: list[dict[str, Any]] = [{} for _ in range(5)]
    rows += [{"hbm_peak_mib": math.nan, "hbm_evidence": "preallocated"}] * 3
    rows += [{"hbm_peak_mib": math.nan, "hbm_evidence": "none", "verdict": "low coverage"}] * 2
    evidence = evidence_of(history_of(rows), config)
    assert len(evidence.peaks) == 5
    assert evidence.set_aside == {"preallocated memory": 3, "low coverage": 2}


@pytest.mark.parametrize(("state", "share"), [("COMPLETED", 0.985), ("FAILED", 0.92)])
def test_a_run_near_its_capacity_may_have_been_cut_off(
    history_of: History, config: Config, state: str, share: float
) -> None:
    rows: list[dict[str, Any]] = [{"hbm_peak_mib": 30000.0, "hbm_capacity_mib": 40960.0, "tier": "hbm40g"}] * 8
    rows += [{"hbm_peak_mib": 40960 * share, "hbm_capacity_mib": 40960.0, "tier": "hbm40g", "state": state}]
    bound = bound_of(evidence_of(history_of(rows), config), None, config.advice)
    assert bound is not None
    assert bound.bound_mib > 40960


def test_runs_that_differ_wildly_support_no_bound(history_of: History, config: Config) -> None:
    rows = [{"hbm_peak_mib": peak} for peak in (500.0, 40000.0, 900.0, 30000.0, 700.0, 600.0)]
    assert bound_of(evidence_of(history_of(rows), config), None, config.advice) is None


def test_old_runs_are_forgotten(history_of: History, config: Config) -> None:
    old = NOW_S - (config.advice.history_days + 1) * 86400
    evidence = evidence_of(history_of([{"end_s": old + number} for number in range(9)]), config)
    assert evidence.peaks == ()


@given(st.lists(st.floats(10, 80000), min_size=5, max_size=20), st.lists(st.floats(-3, 9), max_size=300))
def test_a_bound_is_never_below_a_peak_that_was_seen(peaks: list[float], scores: list[float]) -> None:
    evidence = Evidence(tuple(Peak(peak, False, 81920.0, n, n) for n, peak in enumerate(peaks)), "family", NOW_S)
    calibration = Calibration({f"family/{spread}/2": tuple(sorted(scores)) for spread in range(3)})
    bound = bound_of(evidence, calibration, AdviceSection())
    assert bound is None or bound.bound_mib >= max(peaks)


def test_growth_extends_the_line_to_now() -> None:
    day = 86400
    rising = tuple(Peak(10000 * math.exp(0.05 * n), False, 81920.0, n * day, n * day + 60) for n in range(8))
    assert Evidence(rising, "family", 9 * day).growth == pytest.approx(0.1)
    assert Evidence(rising, "family", 7 * day).growth == 0
    falling = tuple(Peak(10000 * math.exp(-0.05 * n), False, 81920.0, n * day, n * day + 60) for n in range(8))
    assert Evidence(falling, "family", 9 * day).growth == 0
    assert Evidence(rising, "family", 900 * day).growth == pytest.approx(math.log(2))


def test_the_stated_risk_holds_on_a_steady_site(history_of: History, config: Config) -> None:
    rng = np.random.default_rng(11)
    rows = []
    for number in range(4000):
        family = number % 25
        peak = (5000 + 2500 * family) * rng.lognormal(0, 0.02 + 0.004 * (family % 5))
        rows.append({"user": f"u{family}", "hbm_peak_mib": float(peak), "end_s": NOW_S - 200 * (4000 - number)})
    scores = backtest_bound(history_of(rows), config)
    assert scores.advised > 1500
    assert scores.exceed_share <= 0.018  # three standard errors above 1% of 1,600
    assert scores.mean_slack < 1.3


def test_the_stated_risk_about_holds_where_every_family_grows(history_of: History, config: Config) -> None:
    rng = np.random.default_rng(12)
    rows = []
    for number in range(3000):
        family, step = number % 20, number // 20
        peak = (4000 + 800 * family) * math.exp(0.006 * step) * rng.lognormal(0, 0.03)
        rows.append({"user": f"u{family}", "hbm_peak_mib": float(peak), "end_s": NOW_S - 300 * (3000 - number)})
    scores = backtest_bound(history_of(rows), config)
    assert scores.advised > 1000
    assert scores.exceed_share <= 0.02


def test_runs_that_agree_are_not_judged_by_those_that_do_not(history_of: History, config: Config) -> None:
    """3% of all runs need twice the memory; most evidence has not seen one yet, and must not look safe for it."""
    rng = np.random.default_rng(5)
    rows = []
    for number in range(4000):
        family, factor = number % 25, 2.0 if rng.random() < 0.03 else 1.0
        peak = (5000 + 500 * family) * factor * rng.lognormal(0, 0.02)
        rows.append({"user": f"u{family}", "hbm_peak_mib": float(peak), "end_s": NOW_S - 200 * (4000 - number)})
    scores = backtest_bound(history_of(rows), config)
    assert scores.advised > 1000
    assert scores.exceed_share <= 0.0175


def test_runs_of_other_names_support_a_bound_only_where_calibrated(history_of: History, config: Config) -> None:
    evidence = evidence_of(history_of([{}] * 9), config, name="something else")
    assert evidence.scope == "shape"
    assert bound_of(evidence, None, config.advice) is None
    calibrated = Calibration({"shape/0/1": tuple([0.0] * 90 + [2.0] * 10)})
    bound = bound_of(evidence, calibrated, config.advice)
    assert bound is not None
    assert (bound.scope, bound.method) == ("shape", "calibrated")
    assert bound.bound_mib == pytest.approx(20000 * math.exp(2.0 * 0.05 * math.sqrt(1 + 1 / 9)))
