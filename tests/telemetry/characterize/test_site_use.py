"""Use of a site, against the published figures of Earth and Helios, and against sums second by second."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.actions_config import NodeSet
from telemetry.characterize.minute_use import MinuteUse, minute_use
from telemetry.characterize.site_use import LocalTime, SiteUse, by_hour, by_month, partitions, site_use
from telemetry.sources.files import FileSource
from telemetry.store.schema import JOBS
from telemetry.store.store import ClusterStore, Store

FAR = 2**40
NO_SUBMISSIONS = pa.table({
    "slot": pa.array([], pa.int64()), "is_gpu": pa.array([], pa.bool_()), "is_one": pa.array([], pa.bool_()),
    "jobs": pa.array([], pa.int64()),
})  # fmt: skip
NO_JOBS = pa.table({"place": pa.array([], pa.string())})
DAY = 86_400
MONDAY = 1_749_427_200


def made(folder: Path, *jobs: dict[str, Any]) -> ClusterStore:
    store = Store.create(folder / "store").of("lab")
    usual = {"user": "ann", "partition": "gpu", "state": "COMPLETED", "gpu_count": 1, "node_count": 1,
             "node_list": "n1", "node_gpu_count": 4, "cpu_count": 2}  # fmt: skip
    rows = [
        {**usual, "job_id": number, "submit_s": each["start_s"], "elapsed_s": each["end_s"] - each["start_s"], **each}
        for number, each in enumerate(jobs, 1)
    ]
    store.write("jobs", pa.Table.from_pylist(rows, schema=JOBS))
    return store


@pytest.fixture(scope="module")
def earth(trace: Callable[[str], Path]) -> MinuteUse:
    rows = pd.read_parquet(trace("earth_vc_1min_may2020.parquet")).sort_values("time")
    names = sorted(rows["vc"].unique())
    busy, total = (
        np.array([rows.loc[rows["vc"] == name, column] for name in names], dtype=np.float64)
        for column in ("running_gpu_num", "total_gpu_num")
    )
    start_s = int(dt.datetime(2020, 5, 1, tzinfo=dt.UTC).timestamp())
    return MinuteUse(start_s, tuple(names), busy, total, busy[0], total.sum(axis=0))


def test_the_utilization_of_earth_in_may_is_that_of_hu_et_al(earth: MinuteUse) -> None:
    rows = {row["partition"]: row for row in partitions(earth, NO_JOBS).to_pylist()}
    mean = {name: round(rows[name]["mean_util"], 3) for name in ("vc6YE", "vcpDC", "vcLJZ", "vchbv", "vccaA")}
    assert mean == {"vc6YE": 0.903, "vcpDC": 0.910, "vcLJZ": 0.872, "vchbv": 0.411, "vccaA": 0.447}
    assert rows["vcLJZ"]["median_util"] == 1.0 and rows["vc6YE"]["gpus"] == 208
    places = LocalTime.of(earth, dt.UTC)
    hours = [row for row in by_hour(earth, places, NO_SUBMISSIONS).to_pylist() if row["weekday"] == "all"]
    shares = [row["mean_util"] for row in hours]
    assert (round(min(shares), 3), round(max(shares), 3), round(sum(shares) / 24, 3)) == (0.620, 0.696, 0.667)
    [month] = by_month(earth, places, NO_SUBMISSIONS).to_pylist()
    assert month["month"] == "2020-05" and not month["is_partial"] and round(month["mean_util"], 3) == 0.667


@pytest.fixture(scope="module")
def helios(trace: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> SiteUse:
    store = Store.create(tmp_path_factory.mktemp("helios") / "store").of("helios")
    for batch in FileSource(trace("helios_jobs_15k.parquet"), "jobs").read(-FAR, FAR):
        store.write("jobs", batch.rows)
    return site_use(store, (0, 40 * DAY), (), dt.UTC)


def rows_of(use: SiteUse, table: str, **where: object) -> list[dict[str, Any]]:
    return [row for row in use.tables[table].to_pylist() if where.items() <= row.items()]


def test_helios_jobs_have_the_shares_that_plain_sums_give(helios: SiteUse) -> None:
    [one] = rows_of(helios, "sizes", gpus_from=1)
    below_8 = rows_of(helios, "sizes", gpus_from=4)[0]["cumulative_gpu_time_share"]
    assert (round(one["share"], 3), round(one["gpu_time_share"], 3), round(1 - below_8, 3)) == (0.550, 0.033, 0.899)
    assert rows_of(helios, "run_times", kind="GPU")[0]["p50_run_s"] == 277
    done = {row["kind"]: row["share"] for row in rows_of(helios, "states", outcome="completed")}
    assert (round(1 - done["GPU"], 3), round(1 - done["CPU"], 3)) == (0.502, 0.063)
    time = {row["outcome"]: round(row["gpu_time_share"], 3) for row in rows_of(helios, "states", kind="GPU")}
    assert time == {"completed": 0.559, "canceled": 0.322, "failed": 0.119}
    [top] = rows_of(helios, "user_shares", quantity="gpu_time", top_frac=0.05)
    assert (top["users"], round(top["share"], 3)) == (6, 0.516)
    assert rows_of(helios, "user_shares", quantity="gpu_time", top_frac=1.0)[0]["users"] == 106


def test_what_the_record_does_not_know_is_left_out_and_not_zero(helios: SiteUse) -> None:
    """Helios' records name no node, and no wait."""
    assert all(row["mean_util"] is None and row["known_frac"] == 0 for row in rows_of(helios, "by_hour"))
    assert not rows_of(helios, "marquee_users")
    assert {by for by, _ in helios.implications} == {"user", "state"}


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 500), st.integers(1, 8)), max_size=8))
def test_a_minute_has_the_mean_of_its_seconds(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[int, int, int]]
) -> None:
    jobs = [
        {"start_s": MONDAY + start, "end_s": MONDAY + start + lasts, "gpu_count": gpus} for start, lasts, gpus in runs
    ]
    jobs += [{"start_s": at, "end_s": at + 1, "node_gpu_count": 100} for at in (MONDAY - 3600, MONDAY + 3600)]
    use = minute_use(made(tmp_path_factory.mktemp("seconds"), *jobs), (MONDAY, MONDAY + 600))
    level = np.zeros(600)
    for start, lasts, gpus in runs:
        level[start : start + lasts] += gpus
    assert np.allclose(use.busy.sum(axis=0), level.reshape(10, 60).mean(axis=1))
    assert np.allclose(use.share(), level.reshape(10, 60).mean(axis=1) / 100)


def test_a_node_counts_30_days_around_its_jobs_and_once_in_two_partitions(tmp_path: Path) -> None:
    gpu_jobs = ((0, "n[1-2]", 2, "a"), (0, "n1", 1, "b"), (60, "n1", 1, "a"), (62, "n3", 1, "c"))
    jobs = [
        {"start_s": MONDAY + day * DAY, "end_s": MONDAY + day * DAY + 60, "node_list": nodes, "node_count": count,
         "gpu_count": 4 * count, "partition": name}
        for day, nodes, count, name in (*gpu_jobs, *((day, "c1", 0, "cpu") for day in range(1, 60, 5)))
    ]  # fmt: skip
    store = made(tmp_path, *jobs)
    use = minute_use(store, (MONDAY + 3 * DAY, MONDAY + 5 * DAY))
    assert use.partitions == ("a", "b") and use.capacity[:, 0].tolist() == [8, 4]
    assert use.site_capacity[0] == 8
    later = minute_use(store, (MONDAY + 40 * DAY, MONDAY + 41 * DAY))
    assert later.partitions == ("a", "c") and later.capacity[:, 0].tolist() == [4, 4], "n2 is gone, n3 comes"


def test_counts_of_power_runs_and_silences_change_what_is_known(tmp_path: Path) -> None:
    jobs = [{"start_s": MONDAY + day * DAY, "end_s": MONDAY + day * DAY + 60, "node_list": "n[1-4]", "node_count": 4}
            for day in (0, 1, 2, 12)]  # fmt: skip
    store = made(tmp_path, *jobs)
    counts = {"node_set": "all", "time_s": MONDAY + DAY, "total": 2, "active": 0, "wanted": 0, "asleep": 0}
    store.write("node_counts", pa.Table.from_pylist([counts]))
    use = minute_use(store, (MONDAY, MONDAY + 12 * DAY), (NodeSet("all", partition="gpu"),))
    assert use.is_counted and use.site_capacity[1] == 16
    assert use.site_capacity[1440] == 8, "2 of 4 nodes were usable"
    assert np.isnan(use.share()[5 * 1440]), "no job for ten days: accounting was lost"


def test_a_clock_that_stood_at_1970_costs_no_memory_of_50_years(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [{"start_s": start, "end_s": start + 60} for start in (100, MONDAY, MONDAY + DAY)]
    monkeypatch.setattr("telemetry.characterize.minute_use.MOST_CELLS", 3 * 1440)
    use = site_use(made(tmp_path, *jobs), (0, MONDAY + 2 * DAY), (), dt.UTC)
    assert {row["month"] for row in rows_of(use, "by_month")} == {"2025-06"}
    assert rows_of(use, "states", kind="GPU")[0]["jobs"] == 3, "the tables of jobs have all"


def test_hours_are_local_also_where_the_clock_changes(tmp_path: Path) -> None:
    """30 March 2025 in Berlin has no hour from 2 to 3."""
    first = int(dt.datetime(2025, 3, 30, tzinfo=ZoneInfo("Europe/Berlin")).timestamp())
    jobs = [{"start_s": first - 60, "end_s": first}, {"start_s": first + 3600, "end_s": first + 7200, "gpu_count": 4},
            {"start_s": first + 23 * 3600, "end_s": first + 24 * 3600}]  # fmt: skip
    use = site_use(made(tmp_path, *jobs), (first, first + 23 * 3600), (), ZoneInfo("Europe/Berlin"))
    hours = {row["hour"]: row for row in rows_of(use, "by_hour", weekday="all")}
    assert 2 not in hours and hours[1]["mean_util"] == 1.0 and hours[3]["mean_util"] == 0.0
    assert hours[1]["gpu_jobs_an_hour"] == 1.0 and rows_of(use, "by_hour", weekday="Sun")


def test_marquee_users_wait_most_and_are_not_the_largest(tmp_path: Path) -> None:
    jobs = []
    for number in range(20):
        wait = 100 * number if number < 15 else 50_000
        start = MONDAY + 10_000
        jobs.append(
            {"user": f"u{number:02}", "submit_s": start - wait, "start_s": start, "end_s": start + 60 * (1 + number)}
        )
    jobs.append({"user": "held", "submit_s": MONDAY, "eligible_s": MONDAY + 9_999, "start_s": MONDAY + 10_000,
                 "end_s": MONDAY + 10_001})  # fmt: skip
    use = site_use(made(tmp_path, *jobs), (MONDAY - 5 * DAY, MONDAY + DAY), (), dt.UTC)
    found = rows_of(use, "marquee_users")
    assert [row["user"] for row in found] == ["u09", "u08", "u07"], "the ten with the most GPU time are u10 to u19"
    assert found[0]["mean_delay_s"] == 900


def test_a_debug_partition_takes_short_failures_that_find_free_gpus(tmp_path: Path) -> None:
    short = [{"user": "a", "state": "FAILED", "start_s": MONDAY, "end_s": MONDAY + 100, "gpu_count": 3}] * 3
    long = [{"state": "TIMEOUT", "start_s": MONDAY, "end_s": MONDAY + 5000}] * 3
    use = site_use(made(tmp_path, *short, *long), (MONDAY - DAY, MONDAY + DAY), (), dt.UTC)
    said = [text for by, text in use.implications if "debug" in text]
    assert len(said) == 1 and "50.0% of the GPU jobs failed within 2 min" in said[0]
    assert "2 nodes with 4 GPUs each" in said[0] and "would start 66.7%" in said[0]
