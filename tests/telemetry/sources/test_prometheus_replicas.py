"""GPUs that two Prometheus servers scrape count once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.config import Prometheus
from almanac.records import Counts
from telemetry.sources.exporters import presets
from telemetry.sources.pivot import Pivot
from telemetry.sources.prometheus import PrometheusSource
from telemetry.sources.prometheus_json import SeriesSamples
from telemetry.sources.replicas import copies, replica_of

HOUR_S = 1_790_002_800
SINCE_S, UNTIL_S = HOUR_S - 60, HOUR_S + 120
BY_NAME = {metric.counter.column: metric for metric in presets()["dcgm"].metrics}


def test_two_prometheus_servers_count_once_and_one_fills_the_gaps_of_the_other(replay: Callable[[str], Any]) -> None:
    """Recorded from a real Prometheus: fixtures/prometheus/record.py says what its servers scraped."""
    source = PrometheusSource(Prometheus(url=replay("replicas").url), clock=lambda: UNTIL_S + 3600)
    batches = list(source.read(SINCE_S, UNTIL_S))
    rows = pa.concat_tables([batch.rows for batch in batches]).to_pylist()
    of_a = [step * 10.0 for step in range(18) if not 8 <= step <= 11]
    expected = sorted([*of_a, 83.2, 93.2, 103.2])
    for gpu in (0, 1):
        mine = [row for row in rows if row["gpu"] == gpu]
        assert [row["time_ms"] / 1000 - SINCE_S for row in mine] == pytest.approx(expected)
        assert [row["gpu_util_pct"] for row in mine] == [50 + at // 10 for at in expected]
        assert [row["hbm_used_mib"] for row in mine] == [1000 + at // 10 for at in expected]
        assert [row["job_label"] for row in mine] == [77 if at >= 130 and gpu == 0 else None for at in expected]
    assert source.scrape_interval_s == pytest.approx(10)
    for batch in batches:
        assert batch.counts.seen == batch.counts.kept + sum(batch.counts.dropped.values())
    dropped = sum(batch.counts.dropped["scraped by a second Prometheus"] for batch in batches)
    assert dropped == 2 * 2 * (18 - 3), "two GPUs and two counters: server b's scrapes, without the three that fill"


@given(st.integers(0, 9_999), st.integers(0, 9_999), st.integers(60_000, 600_000))
def test_a_complete_replica_hides_the_other_at_any_phase_and_in_any_span(phase: int, other: int, end: int) -> None:
    time_ms = np.arange(phase, end, 10_000)
    copied = np.arange(other, end, 10_000)
    both = np.concatenate([time_ms, copied])
    replica = np.repeat([0, 1], [len(time_ms), len(copied)])
    order = np.argsort(both, kind="stable")
    found = copies(np.zeros(len(both), np.int64), both[order], replica[order], (0, end))
    assert (found == (replica[order] == 1)).all()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 200)), max_size=40))
def test_each_gpu_keeps_all_scrapes_of_its_first_replica(drawn: list[tuple[int, int, int]]) -> None:
    rows = np.array(sorted({(gpu, at, replica) for gpu, replica, at in drawn}), np.int64).reshape(-1, 3)
    found = copies(rows[:, 0], rows[:, 1], rows[:, 2], (0, 201))
    for gpu in range(3):
        mine = rows[:, 0] == gpu
        if mine.any():
            assert not found[mine][rows[mine, 2] == rows[mine, 2].min()].any()


def pivot_of(samples: dict[tuple[tuple[str, str], ...], list[int]]) -> Pivot:
    """GPU 0 of n1 with these scrapes (s) for each set of further labels."""
    pivot = Pivot(presets()["dcgm"], "", 0, 10**6, Counts())
    labels = [{"Hostname": "n1", "gpu": "0", "UUID": "GPU-0", **dict(more)} for more in samples]
    times = np.array([at * 1000 for series in samples.values() for at in series], np.int64)
    lengths = np.array([len(series) for series in samples.values()], np.int64)
    pivot.add(BY_NAME["temp_c"], SeriesSamples(labels, lengths, times, np.full(len(times), 40.0)))
    return pivot


def test_an_exporter_that_starts_again_under_another_name_loses_no_sample() -> None:
    pivot = pivot_of({(("pod", "exporter-b"),): [0, 10, 20], (("pod", "exporter-a"),): [30, 40, 50]})
    assert pivot.table()["time_ms"].to_pylist() == [0, 10_000, 20_000, 30_000, 40_000, 50_000]


def test_the_same_replica_is_kept_whatever_order_the_server_gives() -> None:
    a, b = (("replica", "a"),), (("replica", "b"),)
    for order in ((a, b), (b, a)):
        times = {a: [5, 15, 25, 35], b: [0, 10, 20, 30]}
        assert pivot_of({one: times[one] for one in order}).table()["time_ms"].to_pylist() == [
            5000,
            15000,
            25000,
            35000,
        ]


def test_jobs_users_and_gpus_are_no_replicas() -> None:
    labels = {"instance": "d1:9445", "minor_number": "0", "uuid": "u", "jobid": "5", "userid": "7", "replica": "a"}
    assert replica_of(labels, presets()["jobstats"].own_labels) == (("replica", "a"),)
    labels = {"Hostname": "n1", "gpu": "0", "UUID": "u", "hpc_job": "5", "instance": "n1:9400", "__name__": "x"}
    assert replica_of(labels, presets()["dcgm"].own_labels) == (("instance", "n1:9400"),)
