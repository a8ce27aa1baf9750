"""Nothing that is unknown at submit time, and nothing of the future, may change a prediction by one bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from advisor.duration.features import submission_of, submissions
from advisor.duration.replay import DurationReplay, observed_history, replay_durations
from advisor.duration.service import priorities_of
from advisor.memory.backtest import replay_tiers
from advisor.memory.decide import bound_of, calibrate
from advisor.memory.peak_store import remember_peaks, replay_peaks
from advisor.service import Trained, advise, train
from almanac.config import Config
from almanac.records import JobRequest

UNKNOWN_AT_SUBMIT = {
    "start_s": 60, "end_s": 5000, "elapsed_s": 12345.0, "state": "FAILED", "hbm_peak_mib": 99999.0,
    "gpu_type": "other", "verdict": "short",
}  # fmt: skip
KNOWN_WHEN_SUBMITTED = (
    "user", "account", "partition", "qos", "name", "name_key", "tier", "constraints", "gpu_count", "node_count",
    "cpu_count", "time_limit_s", "is_array",
)  # fmt: skip


def moment(history: pd.DataFrame) -> int:
    return int(history["submit_s"].quantile(0.6))


def altered_after(history: pd.DataFrame, moment_s: int) -> pd.DataFrame:
    """Alter, column by column, what could not be known at moment_s.

    Jobs submitted later are scrambled; starts and ends after it move, fall away, or become those of a part of a job.
    """
    changed = history.copy()
    rng = np.random.default_rng(3)
    running, later = changed["end_s"] >= moment_s, changed["submit_s"] >= moment_s
    for column, value in UNKNOWN_AT_SUBMIT.items():
        if column not in ("start_s", "end_s"):
            changed.loc[running, column] = value
    pending = changed["start_s"] >= moment_s
    changed.loc[running, "end_s"] += UNKNOWN_AT_SUBMIT["end_s"]
    changed.loc[pending, "start_s"] += UNKNOWN_AT_SUBMIT["start_s"]
    changed["end_s"] = changed["end_s"].astype("float64").where(~running | (rng.random(len(changed)) < 0.5))
    changed.loc[running & (rng.random(len(changed)) < 0.2), "state"] = "REQUEUED"
    for column in KNOWN_WHEN_SUBMITTED:
        if column in changed:
            changed.loc[later, column] = rng.permutation(changed.loc[later, column].to_numpy())
    return changed


def test_replayed_features_and_estimates_before_a_moment_do_not_know_what_comes_after(
    site_history: pd.DataFrame, past: DurationReplay
) -> None:
    before = (site_history["submit_s"] < moment(site_history)).to_numpy()
    past = past.select(before)
    other = replay_durations(altered_after(site_history, moment(site_history))).select(before)
    assert np.array_equal(past.features.numbers, other.features.numbers, equal_nan=True)
    assert np.array_equal(past.features.categories, other.features.categories)
    assert np.array_equal(past.rolling_s, other.rolling_s, equal_nan=True)
    assert (past.features.number("user_running") > 0).any(), "jobs that still run are looked at"


def test_what_is_known_at_a_start_does_not_know_what_comes_after(
    site_history: pd.DataFrame, past: DurationReplay
) -> None:
    started = (site_history["start_s"] < moment(site_history)).to_numpy()
    other = replay_durations(altered_after(site_history, moment(site_history)))
    assert np.array_equal(past.at_start.numbers[started], other.at_start.numbers[started], equal_nan=True)
    assert (past.at_start.number("user_log_runs") > past.features.number("user_log_runs")).any(), "they see later ends"


@pytest.mark.parametrize("column", UNKNOWN_AT_SUBMIT)
def test_each_unknown_column_alone_changes_nothing_before(
    site_history: pd.DataFrame, past: DurationReplay, column: str
) -> None:
    before = (site_history["submit_s"] < moment(site_history)).to_numpy()
    changed = site_history.copy()
    other = altered_after(site_history, moment(site_history))
    late = (other[column] != other[column]) | (other[column] != site_history[column])
    changed[column] = changed[column].astype(other[column].dtype)
    changed.loc[late, column] = other.loc[late, column]
    altered = replay_durations(changed).select(before)
    assert np.array_equal(past.select(before).features.numbers, altered.features.numbers, equal_nan=True)


def test_a_model_trained_at_a_moment_does_not_know_what_comes_after(site_history: pd.DataFrame, config: Config) -> None:
    moment_s = moment(site_history)
    plain = train(site_history, config, moment_s)
    other = train(altered_after(site_history, moment_s), config, moment_s)
    assert plain.model is not None and plain.model == other.model
    assert plain.calibration == other.calibration
    assert plain.gpu_time_quantiles_s == other.gpu_time_quantiles_s


def test_memory_bounds_before_a_moment_do_not_know_what_comes_after(site_history: pd.DataFrame, config: Config) -> None:
    moment_s = moment(site_history)
    sides = []
    for history in (site_history, altered_after(site_history, moment_s)):
        ended = history[history["end_s"].notna()].astype({"end_s": "int64"})
        cases = list(replay_peaks(ended.reset_index(drop=True), config.advice, config.tiers))
        known = [case for case in cases if case.submission.submit_s < moment_s]
        sides.append({int(ended["job_id"].iloc[case.row]): case.evidence for case in known})
    assert sides[0] == sides[1]


def test_replayed_tier_advice_before_a_moment_does_not_know_what_comes_after(
    site_history: pd.DataFrame, config: Config
) -> None:
    config = dataclasses.replace(config, advice=dataclasses.replace(config.advice, risk=0.05))
    moment_s = moment(site_history)
    sides = []
    for history in (site_history, altered_after(site_history, moment_s)):
        outcomes = replay_tiers(history, config)
        sides.append(outcomes[outcomes["submit_s"] < moment_s].set_index("row")[["move", "advised", "bound_mib"]])
    assert (sides[0]["move"] != "").any()
    pd.testing.assert_frame_equal(sides[0], sides[1], check_exact=True)


def test_a_waiting_job_ranks_by_what_is_known_now(trained: Trained, site_history: pd.DataFrame, config: Config) -> None:
    """By the runs since its submission, by none after now, and from then on as a job submitted now."""
    changed, first_s = 0, int(site_history["submit_s"].min())
    for number in range(10, 22):
        submit_s = first_s + number * 86_400
        now_s = submit_s + 60 * 3600
        request = JobRequest(f"u{number % 12}", "famb-run1", "ml", gpu_count=2, cpu_count=32, submit_s=submit_s)
        (waiting,) = priorities_of([request], site_history, trained, config, now_s)
        assert priorities_of([request], altered_after(site_history, now_s), trained, config, now_s) == [waiting]
        alone = advise(request, site_history, trained, config, submit_s).priority
        assert priorities_of([request], site_history, trained, config, submit_s) == [alone]
        changed += waiting != alone
    assert changed > 8


@pytest.mark.parametrize("column", UNKNOWN_AT_SUBMIT)
def test_a_jobs_own_outcome_is_no_feature_of_it(site_history: pd.DataFrame, past: DurationReplay, column: str) -> None:
    row = len(site_history) // 2
    changed = site_history.copy()
    value = UNKNOWN_AT_SUBMIT[column]
    changed.loc[row, column] = changed.loc[row, column] + value if column in ("start_s", "end_s") else value
    other = replay_durations(changed)
    assert np.array_equal(past.features.numbers[row], other.features.numbers[row], equal_nan=True)
    assert past.rolling_s[row] == other.rolling_s[row] or np.isnan(past.rolling_s[row])


def test_a_live_request_sees_what_the_replay_saw(site_history: pd.DataFrame, past: DurationReplay) -> None:
    """Training and serving share one path: the numbers agree to the last bit, from the user's own rows alone."""
    for row in range(200, len(site_history), 97):
        job = submissions(site_history)[row]
        own = site_history[site_history["user"] == job.user]
        known = observed_history([job.user], own, job.submit_s, None).known(job)
        assert np.array_equal(np.array(known.features), past.features.numbers[row], equal_nan=True)
        if known.rolling is not None and not known.rolling.case.startswith("site"):
            assert known.rolling.duration_s == past.rolling_s[row]


def test_a_live_bound_is_the_back_tests_bound(site_history: pd.DataFrame, config: Config) -> None:
    cases = list(replay_peaks(site_history, config.advice, config.tiers))
    calibration = calibrate(site_history, config.advice, config.tiers)
    for case in cases[300::101]:
        job = case.submission
        store = remember_peaks([job.user], site_history, job.submit_s, config.advice, config.tiers)
        live = store.evidence(job, job.submit_s)
        assert live == case.evidence
        assert bound_of(live, calibration, config.advice) == bound_of(case.evidence, calibration, config.advice)


def test_advice_is_a_pure_function(site_history: pd.DataFrame, config: Config) -> None:
    trained = train(site_history, config, 1_750_000_000)
    request = JobRequest(user="u1", job_name="fama-run9", gpu_count=1, constraints="gpu&hbm80g")
    before = site_history.copy()
    first = advise(request, site_history, trained, config, 1_750_000_000)
    assert advise(request, site_history, trained, config, 1_750_000_000) == first
    pd.testing.assert_frame_equal(site_history, before)
    others = advise(request, site_history[site_history["user"] == "u1"], trained, config, 1_750_000_000)
    assert others == first, "other users' rows change nothing"
    assert submission_of(dataclasses.replace(request, submit_s=5), config.tiers).submit_s == 5
