"""Between two trainings: what has ended since is known to the next advice, by a model that has not seen it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from advisor.duration.features import NUMBERS, submission_of
from advisor.evaluation.replay import observed_history
from advisor.service import Trained, advise, train
from almanac.config import Config
from almanac.records import Request

TRAINED_S = 1_750_000_000
NOW_S = TRAINED_S + 86_400
REQUEST = Request(user="u1", job_name="fama-run9", gpu_count=1, constraints="gpu&hbm80g")


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
    before, after = (advise(REQUEST, each, trained, config, NOW_S) for each in (site_history, history))
    assert before.duration and before.duration.model_s and after.duration and after.duration.model_s
    for name in ("duration_s", "model_s", "rolling_s"):
        was, is_now = getattr(before.duration, name), getattr(after.duration, name)
        assert abs(np.log(is_now / 100)) < abs(np.log(was / 100)), name
    job = submission_of(REQUEST, config.tiers)
    place = NUMBERS.index("user_log_runs")
    known = [
        observed_history(["u1"], each, NOW_S, trained.site).known_at_submit(job) for each in (site_history, history)
    ]
    more = np.expm1(known[1].features[place]) - np.expm1(known[0].features[place])
    assert more == pytest.approx(12)


def test_the_bound_rests_on_the_runs_since_its_calibration(
    site_history: pd.DataFrame, config: Config, trained: Trained
) -> None:
    highest_mib = float(site_history["hbm_peak_mib"].max()) + 1000
    history = appended(site_history, TRAINED_S + 3600, hbm_peak_mib=highest_mib)
    before, after = (advise(REQUEST, each, trained, config, NOW_S).evidence for each in (site_history, history))
    assert before and after
    assert after.runs == before.runs + 12
    assert after.newest_peaks_mib == pytest.approx([highest_mib] * len(before.newest_peaks_mib))
    assert max(before.newest_peaks_mib) <= highest_mib - 999


def test_what_ends_later_is_not_known_yet(site_history: pd.DataFrame, config: Config, trained: Trained) -> None:
    later = appended(site_history, NOW_S, hbm_peak_mib=79_000.0, elapsed_s=1e6)
    later.loc[later["job_id"] >= 10_000, ["start_s", "submit_s"]] = NOW_S + 1
    assert advise(REQUEST, later, trained, config, NOW_S) == advise(REQUEST, site_history, trained, config, NOW_S)
