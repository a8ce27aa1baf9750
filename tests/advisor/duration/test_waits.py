"""Recent waits per tier and size, by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd

from advisor.duration.waits import MIN_JOBS, RECENT_DAYS, WaitQuartiles, learn_waits
from advisor.services.base import AdviceRequest
from advisor.services.wait import expected_waits, learn_site_waits
from almanac.config import Config
from almanac.records import ExpectedWait, Request

NOW_S = 1_750_000_000
History = Callable[[list[dict[str, Any]]], pd.DataFrame]


def jobs(number: int, **row: Any) -> list[dict[str, Any]]:
    """Jobs that waited 0, 10, 20, ... seconds and ended an hour ago."""
    start_s = NOW_S - 7200
    return [{"start_s": start_s, "submit_s": start_s - 10 * n, "end_s": NOW_S - 3600, **row} for n in range(number)]


def test_median_and_middle_half_per_tier_and_size(history_of: History, config: Config) -> None:
    history = history_of(jobs(11) + jobs(21, node_count=3) + jobs(MIN_JOBS - 1, tier="hbm40g"))
    waits = learn_waits(history, NOW_S)
    assert waits.expected(config.tiers, 1) == (ExpectedWait("hbm80g", 11, 50.0, 25.0, 75.0),)
    assert waits.expected(config.tiers, 3) == (ExpectedWait("hbm80g", 21, 100.0, 50.0, 150.0),)
    # no job of five nodes: those of any size speak
    assert waits.expected(config.tiers, 8)[0].jobs == 32


def test_old_jobs_those_without_a_tier_and_the_tasks_of_one_array_do_not_count(history_of: History) -> None:
    old = {"end_s": NOW_S - 86_400 * RECENT_DAYS, "start_s": NOW_S - 86_400 * (RECENT_DAYS + 1)}
    array = [{**row, "submit_s": NOW_S - 9000, "is_array": True} for row in jobs(20)]
    history = history_of([*jobs(20, **old), *jobs(20, tier=None), *array])
    assert learn_waits(history, NOW_S) == WaitQuartiles({})


def test_jobs_that_still_run_have_waited_too(config: Config) -> None:
    """They have the newest waits, and where jobs are long most of them."""
    ended, running = jobs(MIN_JOBS), jobs(2 * MIN_JOBS, submit_s=NOW_S - 14_400, end_s=math.nan, state="RUNNING")
    parts = jobs(MIN_JOBS, state="REQUEUED")
    base = {"user": "a", "name_key": "k", "tier": "hbm80g", "node_count": 1, "is_array": False, "state": "COMPLETED"}
    history = pd.DataFrame([{"job_id": n, **base, **row} for n, row in enumerate(ended + running + parts)])
    asked = AdviceRequest(Request(user="a", node_count=1), history, config)
    [[found]] = expected_waits([asked], learn_site_waits(history, NOW_S))
    assert (found.jobs, found.median_s) == (3 * MIN_JOBS, 7200.0)
