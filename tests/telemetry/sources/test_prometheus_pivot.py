"""The join of counters, against a join of plain dicts; GPUs that two servers scrape count once."""

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
from telemetry.sources.exporters import FILE, presets
from telemetry.sources.pivot import Pivot
from telemetry.sources.prometheus import PrometheusSource
from telemetry.sources.prometheus_json import SeriesSamples
from telemetry.sources.series import copies, replica_of

BY_NAME = FILE.named
NAMES = ("gpu_util_pct", "hbm_used_mib", "temp_c")
START_MS, END_MS = 1000, 1012
POINT = st.tuples(st.sampled_from(["n1", "n2"]), st.integers(0, 1), st.integers(START_MS - 2, END_MS + 2))
VALUE = st.sampled_from([1.0, 50.0, np.nan, 10.0**17, -200.0])
GIVEN = st.dictionaries(st.tuples(st.sampled_from(NAMES), POINT), VALUE, max_size=25)


def samples(points: dict[tuple[str, int, int], float], order: list[tuple[str, int]]) -> SeriesSamples:
    """Samples of these points, series in the given order, each sorted by time as Prometheus gives them."""
    per = {gpu: sorted((t, v) for (h, g, t), v in points.items() if (h, g) == gpu) for gpu in order}
    flat = [pair for gpu in order for pair in per[gpu]]
    return SeriesSamples(
        [{"host": host, "gpu": str(gpu), "uuid": f"GPU-{host}-{gpu}", "job_label": "5"} for host, gpu in order],
        np.array([len(per[gpu]) for gpu in order], dtype=np.int64),
        np.array([t for t, _ in flat], dtype=np.int64),
        np.array([v for _, v in flat], dtype=np.float64),
    )


@given(GIVEN, st.permutations([("n1", 0), ("n1", 1), ("n2", 0), ("n2", 1)]))
def test_it_is_the_outer_join_of_the_values_within_limits(
    given_points: dict[tuple[str, tuple[str, int, int]], float], order: list[tuple[str, int]]
) -> None:
    counts, expected = Counts(), {}
    pivot = Pivot(FILE, "", START_MS, END_MS, counts)
    for name in NAMES:
        points = {point: value for (of, point), value in given_points.items() if of == name}
        pivot.add(BY_NAME[name], samples(points, order))
        for point, value in points.items():
            if START_MS <= point[2] < END_MS and BY_NAME[name].counter.low <= value <= BY_NAME[name].counter.high:
                expected.setdefault(point, dict.fromkeys(NAMES))[name] = value
    rows: list[dict[str, Any]] = pivot.table().to_pylist()
    assert [(row["host"], row["gpu"], row["time_ms"]) for row in rows] == sorted(expected)
    assert [{name: row[name] for name in NAMES} for row in rows] == [expected[point] for point in sorted(expected)]
    assert all((row["uuid"], row["job_label"]) == (f"GPU-{row['host']}-{row['gpu']}", 5) for row in rows)
    inside = [point for _, point in given_points if START_MS <= point[2] < END_MS]
    assert counts.seen == len(inside) == counts.kept + sum(counts.dropped.values())
    assert counts.kept == sum(value is not None for row in expected.values() for value in row.values())


def test_gaps_are_the_median_of_each_gpu() -> None:
    pivot = Pivot(FILE, "", 0, 10**6, Counts())
    times = np.array([0, 10_000, 20_000, 60_000, 0, 30_000, 60_000, 5], dtype=np.int64)
    labels = [{"host": "n1", "gpu": str(gpu)} for gpu in range(3)]
    pivot.add(BY_NAME["temp_c"], SeriesSamples(labels, np.array([4, 3, 1]), times, np.full(8, 40.0)))
    assert pivot.median_gaps_s().tolist() == [10.0, 30.0]


def test_a_change_of_layout_is_no_second_prometheus() -> None:
    """The label of the profile says what the GPU is, not who scraped it: every sample is kept, each under its own."""
    pivot = Pivot(presets()["dcgm"], "", 0, 10**6, Counts())
    card = {"Hostname": "n1", "gpu": "0", "GPU_I_ID": "7", "UUID": "GPU-a", "modelName": "A", "instance": "n1:9400"}
    labels = [{**card, "GPU_I_PROFILE": profile} for profile in ("1g.10gb", "1g.20gb")]
    times = np.array([0, 10_000, 20_000, 22_000, 32_000], dtype=np.int64)
    given = SeriesSamples(labels, np.array([3, 2]), times, np.full(5, 40.0))
    pivot.add(BY_NAME["temp_c"], given)
    rows = pivot.table().to_pylist()
    assert [(row["time_ms"], row["mig_profile"]) for row in rows] == [
        (0, "1g.10gb"), (10_000, "1g.10gb"), (20_000, "1g.10gb"), (22_000, "1g.20gb"), (32_000, "1g.20gb"),
    ]  # fmt: skip
    assert not pivot.counts.dropped


def test_a_span_that_no_key_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        Pivot(FILE, "", 0, 2**42, Counts())


def test_two_hosts_of_one_short_name_do_not_become_one() -> None:
    counts = Counts()
    pivot = Pivot(FILE, "", 0, 10**6, counts)
    hosts = ("n1.a.example", "n1.b.example", "n2.a.example")
    times = np.array([0, 10_000] * 3, dtype=np.int64)
    for name in ("temp_c", "gpu_util_pct"):
        labels = [{"host": host, "gpu": "0"} for host in hosts]
        pivot.add(BY_NAME[name], SeriesSamples(labels, np.array([2, 2, 2]), times, np.arange(40.0, 46.0)))
    found = [(row["host"], row["temp_c"]) for row in pivot.table().to_pylist()]
    assert found == [(hosts[0], 40.0), (hosts[0], 41.0), (hosts[1], 42.0), (hosts[1], 43.0), ("n2", 44.0), ("n2", 45.0)]
    assert dict(counts.notes) == {"with its domain: several hosts share the short name": 1} and not counts.dropped


DCGM = presets()["dcgm"]
OLD = {
    "DCGM_FI_DEV_GPU_UTIL": 95.0, "DCGM_FI_DEV_FB_USED": 30_000.0, "DCGM_FI_DEV_FB_FREE": 51_000.0,
    "DCGM_FI_DEV_FB_RESERVED": 920.0, "DCGM_FI_DEV_POWER_USAGE": 301.5,
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 1e9, "DCGM_FI_DEV_GPU_TEMP": 61.0,
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.93, "DCGM_FI_PROF_SM_ACTIVE": 0.88, "DCGM_FI_PROF_PIPE_FP64_ACTIVE": 0.0,
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": 0.1, "DCGM_FI_PROF_PIPE_FP16_ACTIVE": 0.05,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.22, "DCGM_FI_PROF_DRAM_ACTIVE": 0.41,
    "DCGM_FI_PROF_NVLINK_TX_BYTES": 1e9, "DCGM_FI_PROF_NVLINK_RX_BYTES": 2e9,
    "DCGM_FI_PROF_PCIE_TX_BYTES": 2e9, "DCGM_FI_PROF_PCIE_RX_BYTES": 3e9,
}  # fmt: skip
NEW = {
    "DCGM_FI_DEV_GPU_UTIL_RATIO": 0.95, "DCGM_FI_DEV_FB_USED_BYTES": 30_000.0 * 2**20,
    "DCGM_FI_DEV_FB_FREE_BYTES": 51_000.0 * 2**20, "DCGM_FI_DEV_FB_CAPACITY_BYTES": 81_920.0 * 2**20,
    "DCGM_FI_DEV_BOARD_POWER_WATTS": 301.5, "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL": 1e6,
    "DCGM_FI_DEV_GPU_TEMP_CELSIUS": 61.0, "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO": 0.93,
    "DCGM_FI_PROF_SM_UTIL_RATIO": 0.88, "DCGM_FI_PROF_FP64_UTIL_RATIO": 0.0, "DCGM_FI_PROF_FP32_UTIL_RATIO": 0.1,
    "DCGM_FI_PROF_FP16_UTIL_RATIO": 0.05, "DCGM_FI_PROF_TENSOR_UTIL_RATIO": 0.22,
    "DCGM_FI_PROF_DRAM_UTIL_RATIO": 0.41, "DCGM_FI_PROF_NVLINK_TX_BYTES": 1e9, "DCGM_FI_PROF_NVLINK_RX_BYTES": 2e9,
    "DCGM_FI_PROF_PCIE_TX_BYTES": 2e9, "DCGM_FI_PROF_PCIE_RX_BYTES": 3e9,
}  # fmt: skip
OURS = {
    "gpu_util_pct": 95, "hbm_used_mib": 30_000, "hbm_total_mib": 81_920, "power_w": 301.5, "energy_mj": 1e9,
    "temp_c": 61, "gr_engine_active_frac": 0.93, "sm_active_frac": 0.88, "fp64_active_frac": 0, "fp32_active_frac": 0.1,
    "fp16_active_frac": 0.05, "tensor_active_frac": 0.22, "dram_active_frac": 0.41, "nvlink_tx_bytes_s": 1e9,
    "nvlink_rx_bytes_s": 2e9, "pcie_tx_bytes_s": 2e9, "pcie_rx_bytes_s": 3e9,
}  # fmt: skip


def generation(names: dict[str, float], host_label: str, host: str, times: list[int]) -> dict[str, SeriesSamples]:
    driver = "DCGM_FI_SYSTEM_DRIVER_VERSION" if names is NEW else "DCGM_FI_DRIVER_VERSION"
    labels = {host_label: host, "gpu": "0", "UUID": f"GPU-{host}", driver: "580.0", "hpc_job": "7"}
    time_ms, length = np.array(times, dtype=np.int64), np.array([len(times)])
    return {name: SeriesSamples([labels], length, time_ms, np.full(len(times), value)) for name, value in names.items()}


def pivoted(*given: dict[str, SeriesSamples]) -> tuple[list[dict[str, Any]], Counts]:
    counts = Counts()
    pivot = Pivot(DCGM, "", 0, 10**6, counts)
    for name, metric in DCGM.named.items():
        for samples in given:
            if name in samples:
                pivot.add(metric, samples[name])
    rows = pivot.table().to_pylist()
    assert counts.seen == counts.kept + sum(counts.dropped.values())
    return rows, counts


@pytest.mark.parametrize("first", [True, False])
def test_nodes_are_upgraded_one_by_one_and_in_the_middle_of_a_job(first: bool) -> None:
    """k1 has the new names from 30 s on, k2 all the time, k3 never: every scrape of each becomes a whole row."""
    old = generation(OLD, "Hostname", "k1", [0, 10_000, 20_000])
    new = generation(NEW, "hostname", "k1", [30_000, 40_000])
    others = generation(NEW, "hostname", "k2", [5_000, 15_000]), generation(OLD, "Hostname", "k3", [5_000])
    rows, counts = pivoted(*((old, new, *others) if first else (*others, new, old)))
    assert [(row["host"], row["time_ms"]) for row in rows] == [
        *(("k1", time_ms) for time_ms in range(0, 50_000, 10_000)), ("k2", 5_000), ("k2", 15_000), ("k3", 5_000),
    ]  # fmt: skip
    assert all({name: row[name] for name in OURS} == pytest.approx(OURS) for row in rows)
    assert all(row["job_label"] == 7 for row in rows) and not counts.dropped


def test_of_both_names_at_one_time_one_counts_and_nothing_is_summed() -> None:
    old, new = (generation(names, "hostname", "k1", [1000, 2000]) for names in (OLD, NEW))
    del old["DCGM_FI_DEV_POWER_USAGE"]
    new["DCGM_FI_DEV_GPU_UTIL_RATIO"] = generation({"x": 0.5}, "hostname", "k1", [1000, 2000, 3000])["x"]
    rows, counts = pivoted(old, new)
    assert [row["gpu_util_pct"] for row in rows] == [95, 95, 50]
    assert {name: rows[0][name] for name in OURS} == pytest.approx(OURS)
    assert counts.dropped["counter given under two names"] > 0


@pytest.mark.parametrize(
    ("left_out", "used", "total"),
    [(["CAPACITY"], 30_000, 81_000), (["FREE"], 30_000, 81_920), (["USED"], None, 81_920),
     (["CAPACITY", "FREE"], 30_000, None), (["CAPACITY", "USED"], None, None)],
)  # fmt: skip
def test_capacity_is_used_free_and_reserved(left_out: list[str], used: float | None, total: float | None) -> None:
    names = {name: value for name, value in NEW.items() if not any(part in name for part in left_out)}
    (row,), _ = pivoted(generation(names, "hostname", "k1", [1000]))
    assert (row["hbm_used_mib"], row["hbm_total_mib"]) == (used, total)


def test_what_is_in_use_follows_from_capacity_free_and_reserved() -> None:
    names = {**NEW, "DCGM_FI_DEV_FB_RESERVED_BYTES": 920.0 * 2**20}
    del names["DCGM_FI_DEV_FB_USED_BYTES"]
    (row,), _ = pivoted(generation(names, "hostname", "k1", [1000]))
    assert (row["hbm_used_mib"], row["hbm_total_mib"]) == (30_000, 81_920)


HOUR_S = 1_790_002_800
SINCE_S, UNTIL_S = HOUR_S - 60, HOUR_S + 120
DCGM_BY_NAME = {metric.counter.column: metric for metric in presets()["dcgm"].metrics}


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
    pivot.add(DCGM_BY_NAME["temp_c"], SeriesSamples(labels, lengths, times, np.full(len(times), 40.0)))
    return pivot


def test_an_exporter_that_starts_again_under_another_name_loses_no_sample() -> None:
    pivot = pivot_of({(("pod", "exporter-b"),): [0, 10, 20], (("pod", "exporter-a"),): [30, 40, 50]})
    assert pivot.table()["time_ms"].to_pylist() == [0, 10_000, 20_000, 30_000, 40_000, 50_000]


def test_the_same_replica_is_kept_whatever_order_the_server_gives() -> None:
    a, b = (("replica", "a"),), (("replica", "b"),)
    for order in ((a, b), (b, a)):
        times = {a: [5, 15, 25, 35], b: [0, 10, 20, 30]}
        found = pivot_of({one: times[one] for one in order}).table()["time_ms"].to_pylist()
        assert found == [5000, 15000, 25000, 35000]


def test_jobs_users_and_gpus_are_no_replicas() -> None:
    labels = {"instance": "d1:9445", "minor_number": "0", "uuid": "u", "jobid": "5", "userid": "7", "replica": "a"}
    assert replica_of(labels, presets()["jobstats"].own_labels) == (("replica", "a"),)
    labels = {"Hostname": "n1", "gpu": "0", "UUID": "u", "hpc_job": "5", "instance": "n1:9400", "__name__": "x"}
    assert replica_of(labels, presets()["dcgm"].own_labels) == (("instance", "n1:9400"),)
