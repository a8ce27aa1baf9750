"""What counts as evidence of a job's memory, and at least how much."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.features import submission_of
from advisor.models.evidence import Evidence
from advisor.models.peak_store import evidence_now, is_similar
from almanac.config import Config
from almanac.records import Request

NOW_S = 1_750_000_000
DAY_S = 86_400
History = Callable[[list[dict[str, Any]]], pd.DataFrame]
SMALL = {"hbm_capacity_mib": 40960.0, "tier": "hbm40g"}


def evidence_of(history: pd.DataFrame, config: Config, name: str = "train-9", **request: Any) -> Evidence:
    job = submission_of(Request(user="ann", job_name=name, gpu_count=4, submit_s=NOW_S, **request), config.tiers)
    return evidence_now(job, history, config.advice, config.tiers)


def test_preallocated_and_unjudged_runs_are_set_aside_and_counted(history_of: History, config: Config) -> None:
    rows: list[dict[str, Any]] = [{} for _ in range(5)]
    rows += [{"hbm_peak_mib": math.nan, "hbm_evidence": "preallocated"}] * 3
    rows += [{"hbm_peak_mib": math.nan, "hbm_evidence": "none", "verdict": "low coverage"}] * 2
    evidence = evidence_of(history_of(rows), config)
    assert evidence.runs == 5
    assert evidence.set_aside == {"preallocated memory": 3, "low coverage": 2}


def test_a_family_that_preallocates_learns_nothing_from_the_users_others(history_of: History, config: Config) -> None:
    rows: list[dict[str, Any]] = [{"name": "other"}] * 9
    reserved = {"name": "jax", "hbm_peak_mib": math.nan, "hbm_evidence": "preallocated"}
    assert evidence_of(history_of(rows), config, name="other-jax").runs == 9
    silent = evidence_of(history_of([*rows, {**reserved, "name": "other-jax"}]), config, name="other-jax")
    assert silent.runs == 0
    assert silent.set_aside == {"preallocated memory": 1}


@pytest.mark.parametrize(
    ("state", "share", "is_cut_off"),
    [("COMPLETED", 0.985, True), ("COMPLETED", 0.92, False), ("FAILED", 0.92, True), ("FAILED", 0.85, False)],
)
def test_a_run_near_its_capacity_may_have_been_cut_off(
    history_of: History, config: Config, state: str, share: float, is_cut_off: bool
) -> None:
    rows: list[dict[str, Any]] = [{**SMALL, "hbm_peak_mib": 30000.0}] * 8
    rows += [{**SMALL, "hbm_peak_mib": 40960 * share, "state": state}]
    evidence = evidence_of(history_of(rows), config)
    assert evidence.censored_mib == (40960 if is_cut_off else None)
    assert evidence.supports_bound(config.advice.min_runs) == (not is_cut_off)


def test_a_run_on_more_memory_shows_what_was_cut_off(history_of: History, config: Config) -> None:
    rows: list[dict[str, Any]] = [{**SMALL, "hbm_peak_mib": 40900.0, "state": "FAILED"}, {"hbm_peak_mib": 55000.0}]
    evidence = evidence_of(history_of(rows), config)
    assert evidence.censored_mib is None
    assert evidence.least_mib == pytest.approx(55000 * (1 + config.advice.spike_margin))


def test_a_failed_runs_peak_is_a_least_need_and_no_run(history_of: History, config: Config) -> None:
    evidence = evidence_of(history_of([{}] * 6 + [{"hbm_peak_mib": 26000.0, "state": "FAILED"}]), config)
    assert evidence.runs == 6
    assert evidence.highest_mib == 20000
    assert evidence.least_mib == pytest.approx(26000 * 1.02)
    assert evidence.set_aside == {"failed before its end": 1}


@pytest.mark.parametrize(
    ("peak_mib", "evidence", "is_oom"),
    [(math.nan, "none", True), (60000.0, "telemetry", True), (20000.0, "telemetry", False)],
)
def test_failed_then_success_on_a_larger_tier(
    history_of: History, config: Config, peak_mib: float, evidence: str, is_oom: bool
) -> None:
    failed = {**SMALL, "hbm_peak_mib": 25000.0, "state": "FAILED"}
    found = evidence_of(history_of([failed, {"hbm_peak_mib": peak_mib, "hbm_evidence": evidence}]), config)
    assert (found.oom is not None) == is_oom
    if found.oom:
        assert (found.oom.capacity_mib, found.oom.is_after_move) == (40960, False)


def test_a_death_on_a_smaller_tier_than_before_pauses_the_family_and_no_other(
    history_of: History, config: Config
) -> None:
    rows: list[dict[str, Any]] = [{}] * 6 + [{**SMALL, "hbm_peak_mib": 40500.0, "state": "FAILED"}]
    days = config.advice.pause_days
    assert evidence_of(history_of(rows), config).is_paused(days)
    assert not evidence_of(history_of(rows), config, name="something else").is_paused(days)
    old = {"end_s": NOW_S - (days + 1) * DAY_S}
    earlier = [{**row, **old} for row in rows]
    assert not evidence_of(history_of(earlier), config).is_paused(days)


def test_names_that_begin_alike_are_one_kin(history_of: History, config: Config) -> None:
    rows: list[dict[str, Any]] = [{"name": "vasp-relax-1"}] * 4 + [
        {"name": "vasp-relax-1-v2", "hbm_peak_mib": 9000.0}
    ] * 4
    evidence = evidence_of(history_of(rows), config, name="vasp-relax-7")
    assert (evidence.runs, evidence.scope) == (8, "similar")
    assert evidence_of(history_of([*rows, rows[0]]), config, name="vasp-relax-7").scope == "family"


def test_a_users_jobs_of_other_names_say_nothing(history_of: History, config: Config) -> None:
    assert evidence_of(history_of([{}] * 9), config, name="something else").runs == 0


def test_old_runs_are_forgotten(history_of: History, config: Config) -> None:
    old = NOW_S - (config.advice.history_days + 1) * DAY_S
    assert evidence_of(history_of([{"end_s": old + number} for number in range(9)]), config).runs == 0


@given(st.text(max_size=20), st.text(max_size=20))
def test_likeness_is_mutual_and_everything_is_like_itself(one: str, other: str) -> None:
    assert is_similar(one, one)
    assert is_similar(one, other) == is_similar(other, one)


def rising(per_run: float, runs: int = 8) -> Evidence:
    newest = tuple(math.log(10000) + per_run * n for n in range(runs))
    return Evidence("family", 9 * DAY_S, runs, newest, tuple(n * DAY_S for n in range(runs)), 1.0, 1.0)


def test_growth_extends_the_line_to_now() -> None:
    # eight runs a day apart, the newest on day 7; two days later, at 5% a day
    assert rising(0.05).growth == pytest.approx(0.1)
    assert rising(-0.05).growth == 0
    assert rising(0.6).growth == pytest.approx(math.log(2))
    assert rising(0.0).growth == 0


def test_the_t_value_of_a_trend_by_hand() -> None:
    # slope 0.5 over places 0..4 of 0, 1, 0, 1, 2: correlation 0.4 * 10 / sqrt(10 * 2.8)
    evidence = Evidence("family", 0, 5, (0.0, 1.0, 0.0, 1.0, 2.0), (0, 1, 2, 3, 4))
    correlation = 4 / math.sqrt(10 * 2.8)
    assert evidence.trend == pytest.approx(correlation * math.sqrt(3 / (1 - correlation**2)))
    assert evidence.spread == pytest.approx(math.sqrt(2.8 / 4))
