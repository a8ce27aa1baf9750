"""Digests: one mail about a burst of jobs, and one about a user's week."""

from __future__ import annotations

import dataclasses
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from almanac.config import AdviceSection, Config, Tier
from reports.job.rules import packaged
from reports.mail.cpu_jobs import users_to_tell
from reports.mail.digest import LISTED, render_burst, render_weekly
from reports.mail.week import (
    idle_gpu_hours,
    last_week,
    tier_gpu_hours,
    totals_of,
    week_of,
)
from slurm.states import JOB_FAILED
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

CLUSTER = "test"
NOW_S = 1_795_003_200  # Wednesday, 18 November 2026, 12:00
WEEK_S = 7 * 86_400
TIERS = (Tier("hbm40g", 40960), Tier("hbm80g", 81920))
SITE = Config(tiers=TIERS, advice=AdviceSection(headroom_mib=1024))


def row(**more: Any) -> dict[str, Any]:
    return {
        "job_id": 1, "end_s": 0, "elapsed_s": 3600.0, "gpu_count": 4, "state": "COMPLETED", "tier": "hbm80g",
        "verdict": "ok", "coverage_frac": 1.0, "mean_gpu_util_pct": 50.0,
        "hbm_peak_mib": 30_000.0, "idle_gpu_count": 0, "has_profiling_fault": False, "energy_j": 1e6, **more,
    }  # fmt: skip


def test_of_many_jobs_those_that_failed_and_those_that_wasted_most_are_named(reported: Any) -> None:
    """Twelve that failed, one with three idle GPUs, and a hundred that did well."""
    well, idle, failed = reported.build(101, 201, 1301, has_series=False)
    many = [dataclasses.replace(well, job={**well.job, "job_id": 5000 + number}) for number in range(100)]
    bad = [dataclasses.replace(failed, job={**failed.job, "job_id": 6000 + number}) for number in range(12)]
    mail = render_burst([*many, idle, *bad], reported.config).rendered
    assert mail.subject == "113 GPU jobs: 12 of 113 failed; 40 GB GPUs are enough"
    families = mail.text.split("most unused GPU-hours first\n\n")[1]
    assert re.findall(r"^(\w[\w-]*), \d GPUs? +(\d+)", families, re.MULTILINE) == [
        ("train-1", "100"), ("lonely", "1"), ("broken", "12"),
    ]  # fmt: skip
    listed = mail.text.split("Failed jobs\n\n")[1].split("\n\n")[0]
    assert re.findall(r"^\d+", listed, re.MULTILINE) == [*(str(6000 + number) for number in range(LISTED)), "2"]
    assert listed.endswith("2 more failed.") and "101 completed, 12" in mail.text
    assert len(mail.html) < 60_000


def test_a_digest_of_nothing_is_a_fault(reported: Any) -> None:
    with pytest.raises(ValueError, match="no jobs"):
        render_burst([], reported.config)


@pytest.mark.parametrize(
    ("now", "name", "first"),
    [
        ("2026-11-18T12:00", "2026-W46", "2026-11-09"),
        ("2026-11-16T00:00", "2026-W46", "2026-11-09"),
        ("2026-11-15T23:59", "2026-W45", "2026-11-02"),
        ("2027-01-06T08:00", "2026-W53", "2026-12-28"),
    ],
)
def test_the_last_whole_week_is_from_monday_to_sunday(now: str, name: str, first: str) -> None:
    now_s = int(datetime.fromisoformat(f"{now}+00:00").timestamp())
    week = last_week(now_s)
    assert (week.name, datetime.fromtimestamp(week.start_s, UTC).isoformat()) == (name, f"{first}T00:00:00+00:00")
    assert week.end_s - week.start_s == WEEK_S
    assert last_week(now_s, 1).end_s == week.start_s


def test_a_week_is_what_ended_in_it(reported: Any) -> None:
    """Of twelve jobs of alice, one a day on 4 GPUs for 15 minutes, seven ended in that week."""
    week = week_of(reported.store.of(CLUSTER), "alice", reported.config, NOW_S)
    assert week is not None
    assert (week.totals.jobs, week.totals.gpu_hours, week.totals.failed) == (7, pytest.approx(7.0), 0)
    assert week.before == (), "the first job that the store knows ended on the Thursday before"
    assert week.totals.util_pct == pytest.approx(90, abs=1)
    assert len(week.runs) == 7 and week.totals.measured_hours == pytest.approx(7.0)
    assert week.idle.jobs == 0
    assert (week.tier.jobs, week.tier.gpu_hours) == (7, pytest.approx(7.0))  # 21 of 80 GiB


@pytest.mark.parametrize(
    ("first_s", "before", "said"),
    [
        (-9 * WEEK_S, [0, 0, 0, 4], "8 GPU-hours, 8.0 times the average of the 4 weeks before."),
        (-4 * WEEK_S, [0, 0, 0, 4], "8 GPU-hours, 8.0 times the average of the 4 weeks before."),
        (-4 * WEEK_S + 1, [0, 0, 4], "8 GPU-hours, 6.0 times the average of the 3 weeks before."),
        (-WEEK_S, [4], "8 GPU-hours, 2.0 times the week before."),
        (-WEEK_S + 1, [], "8 GPU-hours."),
    ],
)
def test_weeks_of_which_the_store_knows_nothing_are_not_counted_as_empty(
    tmp_path: Path, first_s: int, before: list[float], said: str
) -> None:
    """alice ran 4 GPU-hours in the week before and 8 in the week; bob's job, long before it or not, ended first."""
    store, week = Store.create(tmp_path), last_week(NOW_S)
    ran = [
        {"job_id": gpus, "user": user, "state": "COMPLETED", "submit_s": end_s - 4000, "start_s": end_s - 3600,
         "end_s": end_s, "elapsed_s": 3600, "gpu_count": gpus}
        for user, end_s, gpus in (("bob", week.start_s + first_s, 1), ("alice", week.start_s - 3600, 4),
                                  ("alice", week.start_s + 7200, 8))
    ]  # fmt: skip
    still_pending = {"job_id": 9, "user": "bob", "state": "PENDING", "submit_s": week.start_s - 6 * WEEK_S}
    store.of(CLUSTER).write("jobs", pa.Table.from_pylist([*ran, still_pending], TABLES["jobs"].schema))
    found = week_of(store.of(CLUSTER), "alice", Config(), NOW_S)
    digest = render_weekly(store.of(CLUSTER), "alice", Config(), NOW_S)
    assert found is not None and digest is not None
    mail = digest.rendered
    assert [totals.gpu_hours for _, totals in found.before] == before
    assert said in " ".join(mail.text.split())
    assert ("Earlier weeks" in mail.text) == bool(before)


def test_a_weekly_mail_is_of_the_week_and_not_of_the_day(reported: Any) -> None:
    first = render_weekly(reported.store.of(CLUSTER), "alice", reported.config, NOW_S)
    assert first == render_weekly(reported.store.of(CLUSTER), "alice", reported.config, NOW_S + 3 * 86_400)


def test_without_a_job_there_is_no_weekly_mail(reported: Any) -> None:
    assert render_weekly(reported.store.of(CLUSTER), "nobody", reported.config, NOW_S) is None
    assert render_weekly(reported.store.of(CLUSTER), "alice", reported.config, NOW_S + 3 * WEEK_S) is None


def test_another_user_s_jobs_are_in_no_digest_of_mine(reported: Any) -> None:
    mine = render_weekly(reported.store.of(CLUSTER), "bob", reported.config, NOW_S + WEEK_S)
    assert mine is not None and "train" not in mine.rendered.text and "other-" in mine.rendered.text


@pytest.mark.parametrize(
    ("changes", "hours"),
    [
        ({}, 0),
        ({"idle_gpu_count": 3}, 3),
        ({"idle_gpu_count": None}, 0),
        ({"idle_gpu_count": 3, "coverage_frac": 0.89}, 0),
        ({"idle_gpu_count": 3, "has_profiling_fault": True}, 0),
        ({"verdict": "idle"}, 4),
        ({"verdict": "idle", "elapsed_s": 179.0}, 0),
        ({"verdict": "low coverage", "idle_gpu_count": 3}, 0),
        ({"elapsed_s": None, "idle_gpu_count": 3}, 0),
    ],
)
def test_idle_gpu_hours(changes: dict[str, Any], hours: float) -> None:
    assert idle_gpu_hours(row(**changes)) == pytest.approx(hours)


@pytest.mark.parametrize(
    ("changes", "hours"),
    [
        ({}, 4),
        ({"hbm_peak_mib": 39_152.0}, 4),  # 2% more is 39,935; 40 GiB less 1 GiB is 39,936
        ({"hbm_peak_mib": 39_153.0}, 0),
        ({"state": "CANCELLED by 1000"}, 4),
        ({"state": "FAILED"}, 0),
        ({"state": ""}, 0),
        ({"elapsed_s": 179.0}, 0),
        ({"elapsed_s": None}, 0),
        ({"idle_gpu_count": 3}, 1),  # the other three are saved as idle GPUs
        ({"verdict": "idle"}, 0),
        ({"hbm_peak_mib": None}, 0),
        ({"tier": "hbm40g"}, 0),
        ({"tier": None}, 0),
        ({"tier": "gone"}, 0),
    ],
)
def test_gpu_hours_on_a_larger_tier_than_needed(changes: dict[str, Any], hours: float) -> None:
    assert tier_gpu_hours(row(**changes), SITE) == pytest.approx(hours)


def test_what_is_not_known_is_not_counted_as_zero() -> None:
    known, unknown = row(gpu_count=1), row(gpu_count=3, mean_gpu_util_pct=None, energy_j=None, state="TIMEOUT")
    totals = totals_of([known, unknown])
    assert (totals.gpu_hours, totals.util_pct, totals.energy_j, totals.failed) == (4, 50, 1e6, 1)
    assert totals_of([unknown]).util_pct is None and totals_of([unknown]).energy_j is None
    assert totals_of([row(gpu_count=1), row(gpu_count=3, mean_gpu_util_pct=10.0)]).util_pct == pytest.approx(20)


def test_only_ends_that_the_rules_call_failed_count_as_failed_and_none_by_a_node() -> None:
    states = ["FAILED", "TIMEOUT", "NODE_FAIL", "COMPLETED", "CANCELLED by 1000", "PREEMPTED", "REVOKED", ""]
    assert totals_of([row(state=state) for state in states]).failed == 2
    names = ("failed", "timeout", "host_memory_full", "node_failed")
    said = [rule.when["state"] for rule in packaged().rules if rule.name in names]
    assert {state for each in said for state in each.get("one_of", [each.get("is")])} == set(JOB_FAILED)


def test_jobs_without_gpus_are_one_entry_for_each_fault_of_the_user_alone(tmp_path: Path) -> None:
    store, week = Store.create(tmp_path).of(CLUSTER), last_week(NOW_S)
    row = {
        "state": "COMPLETED", "submit_s": week.start_s, "start_s": week.start_s, "end_s": week.start_s + 36_000,
        "elapsed_s": 36_000, "gpu_count": 0, "gpu_count_req": 0, "node_count": 1, "cpu_count": 8, "node_cpu_count": 64,
        "node_memory_mib": 262_144, "node_threads": 1, "host_mem_peak_mib": 1000.0, "host_mem_alloc_mib": 8192.0,
    }  # fmt: skip
    hostile = "<b>\x1b[31m\r\nBcc: eve@example.org"
    jobs = [
        *(row | {"job_id": number, "user": "ann", "name": hostile, "cpu_time_s": 36_000.0} for number in (1, 2, 3)),
        row | {"job_id": 4, "user": "ann", "cpu_time_s": 100.0, "name": hostile},
        row | {"job_id": 77, "user": "bob", "cpu_time_s": 100.0, "cpu_count": 64},
        row | {"job_id": 5, "user": "cat", "cpu_time_s": 280_000.0},
    ]
    store.write("jobs", pa.Table.from_pylist(jobs, TABLES["jobs"].schema))
    digest = render_weekly(store, "ann", Config(), NOW_S)
    assert digest is not None
    mail, text = digest.rendered, " ".join(digest.rendered.text.split())
    assert mail.subject == f"Your CPU week {week.name}: if your program is serial, ask for one CPU"
    assert "3 jobs; 210 CPU-hours not used. Job 3: It kept 1 of 8 CPUs busy on average" in text
    assert "1 job; 80 CPU-hours not used. Job 4: It kept less than 0.01 of 8 CPUs busy" in text
    for content in (mail.text, mail.html):
        assert "77" not in content and "<b>\x1b" not in content and "eve@" not in content
    assert render_weekly(store, "cat", Config(), NOW_S) is None, "nothing to change"
    assert users_to_tell(store, Config(), week) == {"ann", "bob"}
    gpu = row | {"job_id": 6, "user": "ann", "gpu_count": 1, "gpu_count_req": 1, "cpu_time_s": 36_000.0}
    store.write("jobs", pa.Table.from_pylist([gpu], TABLES["jobs"].schema))
    both = render_weekly(store, "ann", Config(), NOW_S)
    assert both is not None and "Your GPU week" in both.rendered.subject
    assert "Your jobs without GPUs" in both.rendered.text and "3 jobs; 210 CPU-hours" in both.rendered.text
