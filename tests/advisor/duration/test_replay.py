"""Past and pending jobs: a past one is predicted as of its submission, a pending one with the runs known now."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import pytest

from advisor.duration.features import NUMBERS, submission_of, submissions
from advisor.duration.replay import observed_history, recorded_requests, replay_durations
from advisor.duration.service import priorities_of
from advisor.priority import Overrun
from advisor.service import Trained, advise, train
from almanac.config import Config, Tier
from almanac.records import JobRequest

NOW_S = 1_750_000_000
FIRST_S = NOW_S - 60 * 86400


def test_a_replay_of_starts_sees_what_a_waiting_job_sees(site_history: pd.DataFrame) -> None:
    starts_s = site_history["start_s"].to_numpy("float64")
    rows = np.arange(200, len(site_history), 97)
    replay, jobs = replay_durations(site_history, rows), submissions(site_history)
    for place, row in enumerate(rows):
        job, now_s = jobs[row], int(starts_s[row])
        known = observed_history([job.user], site_history, now_s, None).known(job, now_s)
        assert np.array_equal(np.array(known.features), replay.at_start.numbers[place], equal_nan=True)


def test_a_job_without_gpus_has_no_site_factor(trained: Trained, site_history: pd.DataFrame, config: Config) -> None:
    assert priorities_of([JobRequest("u1", submit_s=NOW_S)], site_history, trained, config, NOW_S) == [None]
    assert priorities_of([], site_history, trained, config, NOW_S) == []


def test_the_jobs_of_a_user_who_overruns_rank_as_if_they_took_longer(
    trained: Trained, site_history: pd.DataFrame, config: Config
) -> None:
    requests = [JobRequest(user, "famb-run1", "ml", gpu_count=2, cpu_count=32, submit_s=NOW_S) for user in ("u1", "u2")]
    plain = priorities_of(requests, site_history, trained, config, NOW_S)
    told = priorities_of(requests, site_history, trained, config, NOW_S, {"u1": Overrun(1.0, 3.0), "u2": Overrun()})
    assert [each.is_cautious for each in told if each] == [True, False]
    assert told[1] == plain[1]


TRAINED_S = 1_750_000_000
ASKED_S = TRAINED_S + 86_400
REQUEST = JobRequest(user="u1", job_name="fama-run9", gpu_count=1, constraints="gpu&hbm80g")


@pytest.fixture(scope="module")
def trained(site_history: pd.DataFrame, config: Config) -> Trained:
    """Yesterday."""
    return train(site_history, config, TRAINED_S)


def runs(site_history: pd.DataFrame, first_end_s: int, **more: Any) -> pd.DataFrame:
    """Twelve more runs of the family, 100 s of 30,000 MiB each unless they say, that end a minute apart."""
    like = site_history[(site_history["user"] == "u1") & (site_history["gpu_count"] == 1)].iloc[[-1] * 12]
    end_s = first_end_s + 60 * np.arange(12)
    new = {"job_id": 10_000 + np.arange(12), "end_s": end_s, "start_s": end_s - 100, "submit_s": end_s - 110}
    told = {"elapsed_s": 100.0, "state": "COMPLETED", "hbm_peak_mib": 30_000.0, **more}
    return like.assign(**new, **told)


def appended(site_history: pd.DataFrame, first_end_s: int, **more: Any) -> pd.DataFrame:
    return pd.concat([site_history, runs(site_history, first_end_s, **more)], ignore_index=True)


def test_the_model_is_asked_with_the_runs_since_its_training(
    site_history: pd.DataFrame, config: Config, trained: Trained
) -> None:
    assert trained.model is not None
    history = appended(site_history, TRAINED_S + 3600)
    before, after = (advise(REQUEST, each, trained, config, ASKED_S) for each in (site_history, history))
    assert before.duration and before.duration.model_s and after.duration and after.duration.model_s
    for name in ("duration_s", "model_s", "rolling_s"):
        was, is_now = getattr(before.duration, name), getattr(after.duration, name)
        assert abs(np.log(is_now / 100)) < abs(np.log(was / 100)), name
    job = submission_of(REQUEST, config.tiers)
    place = NUMBERS.index("user_log_runs")
    known = [observed_history(["u1"], each, ASKED_S, trained.site).known(job) for each in (site_history, history)]
    more = np.expm1(known[1].features[place]) - np.expm1(known[0].features[place])
    assert more == pytest.approx(12)


def test_the_bound_rests_on_the_runs_since_its_calibration(
    site_history: pd.DataFrame, config: Config, trained: Trained
) -> None:
    highest_mib = float(site_history["hbm_peak_mib"].max()) + 1000
    history = appended(site_history, TRAINED_S + 3600, hbm_peak_mib=highest_mib)
    before, after = (advise(REQUEST, each, trained, config, ASKED_S).evidence for each in (site_history, history))
    assert before and after
    assert after.runs == before.runs + 12
    assert after.newest_peaks_mib == pytest.approx([highest_mib] * len(before.newest_peaks_mib))
    assert max(before.newest_peaks_mib) <= highest_mib - 999


def test_what_ends_later_is_not_known_yet(site_history: pd.DataFrame, config: Config, trained: Trained) -> None:
    later = appended(site_history, ASKED_S, hbm_peak_mib=79_000.0, elapsed_s=1e6)
    later.loc[later["job_id"] >= 10_000, ["start_s", "submit_s"]] = ASKED_S + 1
    assert advise(REQUEST, later, trained, config, ASKED_S) == advise(REQUEST, site_history, trained, config, ASKED_S)


TIERS = (Tier("hbm40g", 40960, constraint="hbm40g"), Tier("hbm80g", 81920, constraint="hbm80g"))
EXPECTED = JobRequest(
    user="ann", job_name="x", partition="all", constraints="hbm80g", gpu_count=2, submit_s=7, time_limit_s=60
)


def request_of(**changes: Any) -> JobRequest:
    row = {
        "user": "ann", "name": "x", "account": "", "partition": "all", "qos": "", "constraints": "hbm80g",
        "gpu_count": 2, "node_count": 1, "cpu_count": 1, "submit_s": 7, "time_limit_s": 60.0, "is_array": False,
        "tier": "hbm80g", "gpu_type_req": None, **changes,
    }  # fmt: skip
    return recorded_requests(pd.DataFrame([row]), TIERS)[0]


def test_a_type_that_was_asked_for_stays() -> None:
    """Such a request is not rewritten for another tier: the back-test must not say that it would be."""
    assert request_of() == EXPECTED
    assert request_of(gpu_type_req="") == EXPECTED
    assert request_of(gpu_type_req="a100") == dataclasses.replace(EXPECTED, gpu_type="a100")


def test_the_recorded_tier_counts_where_the_type_has_become_a_tiers() -> None:
    tiers = (*TIERS, Tier("old", 16384, gres="v100"))
    row = pd.DataFrame([{**dataclasses.asdict(EXPECTED), "name": "x", "tier": "hbm80g", "gpu_type_req": "v100"}])
    (found,) = recorded_requests(row, tiers)
    assert (found.gpu_type, found.constraints) == ("", "hbm80g")
