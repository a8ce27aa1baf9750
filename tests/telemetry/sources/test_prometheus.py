"""Rows and counts of one read, from the recorded answers of a real Prometheus 2.42."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from almanac.config import Prometheus
from telemetry.sources.base import RowBatch
from telemetry.sources.exporters import presets
from telemetry.sources.prometheus import PrometheusSource
from telemetry.sources.prometheus_queries import MOST_HOSTS, host_matchers
from telemetry.store.schema import TELEMETRY

HOUR_S = 1_790_002_800
SINCE_S, UNTIL_S = HOUR_S - 60, HOUR_S + 120


def read(url: str, exporter: str, **options: Any) -> list[RowBatch]:
    source = PrometheusSource(Prometheus(url=url, exporter=exporter, **options), clock=lambda: UNTIL_S + 3600)
    return list(source.read(SINCE_S, UNTIL_S))


@pytest.fixture
def dcgm(replay: Callable[[str], Any]) -> list[RowBatch]:
    return read(replay("dcgm").url, "dcgm")


@pytest.fixture
def jobstats(replay: Callable[[str], Any]) -> list[RowBatch]:
    return read(replay("jobstats").url, "jobstats")


def rows(batches: list[RowBatch], host: str, gpu: int) -> list[dict[str, Any]]:
    return [
        row
        for batch in batches
        for row in batch.rows.to_pylist()
        if (row["host"], row["gpu"]) == (host, gpu)
    ]  # fmt: skip


def test_batches_are_cut_at_the_hour_and_move_the_watermark_behind_their_newest_sample(dcgm: list[RowBatch]) -> None:
    assert [batch.watermark_s for batch in dcgm] == [HOUR_S - 9, UNTIL_S - 9], "a scrape every 10 s"
    assert all(batch.table == "telemetry" and batch.rows.schema.equals(TELEMETRY) for batch in dcgm)


def test_a_sample_on_a_border_is_in_exactly_one_batch(dcgm: list[RowBatch]) -> None:
    times = [row["time_ms"] for row in rows(dcgm, "n1", 0)]
    assert times == [s * 1000 for s in range(SINCE_S, UNTIL_S, 10)]
    assert HOUR_S * 1000 in [row["time_ms"] for row in dcgm[1].rows.to_pylist()]


def test_the_counters_of_a_scrape_are_one_row(dcgm: list[RowBatch]) -> None:
    first = rows(dcgm, "n1", 0)[0]
    wanted = {"uuid": "GPU-a", "model": "NVIDIA A100-SXM4-40GB", "job_label": 101, "mig": "", "gpu_util_pct": 50.0}
    assert {key: first[key] for key in wanted} == wanted
    assert (first["hbm_used_mib"], first["hbm_total_mib"]) == (1000.0, 40000.0)
    assert first["tensor_active_frac"] is None


def test_times_keep_their_milliseconds(dcgm: list[RowBatch]) -> None:
    assert {row["time_ms"] % 10_000 for row in rows(dcgm, "n2", 0)} == {123}


def test_nan_infinity_and_impossible_values_become_null_and_are_counted(dcgm: list[RowBatch]) -> None:
    assert [row["gpu_util_pct"] for row in rows(dcgm, "n1", 0)][:6] == [50, 51, None, None, None, 55]
    assert dcgm[0].counts.dropped["not a number: DCGM_FI_DEV_GPU_UTIL"] == 2
    assert dcgm[0].counts.dropped["unit mismatch: DCGM_FI_DEV_GPU_UTIL"] == 1
    assert dcgm[0].counts.examples["unit mismatch: DCGM_FI_DEV_GPU_UTIL"] == "120 (expected: 1 to 100)"


def test_a_mig_instance_is_a_gpu_of_its_own(dcgm: list[RowBatch]) -> None:
    found = rows(dcgm, "n1", 1)
    assert {row["mig"] for row in found} == {"3"}
    assert [row["hbm_total_mib"] for row in found][:6] == [4800.0] * 5 + [None]
    assert {row["mig_profile"] for row in found} == {"1g.5gb"}
    assert {row["mig_profile"] for row in rows(dcgm, "n1", 0)} == {None}


def test_hostname_is_cut_and_both_spellings_are_read(dcgm: list[RowBatch]) -> None:
    assert {row["host"] for batch in dcgm for row in batch.rows.to_pylist()} == {"n1", "n2"}


def test_job_labels(dcgm: list[RowBatch]) -> None:
    """ "0" is no job; a label that is no number is noted; two jobs at once on one GPU give the GPU to neither."""
    labels = {gpu: {row["job_label"] for row in rows(dcgm, "n2", gpu)} for gpu in (0, 1, 2)}
    assert labels == {0: {None}, 1: {None}, 2: {None}}
    assert dcgm[0].counts.notes["job label is no job id"] == 1
    assert dcgm[0].counts.dropped["several jobs on one GPU at once"] == 6
    assert [row["hbm_used_mib"] for row in rows(dcgm, "n2", 2)] == [40.0] * 18


def test_labels_that_look_like_the_answer_s_own_structure_forge_nothing(dcgm: list[RowBatch]) -> None:
    found = rows(dcgm, "n2", 1)
    assert [row["hbm_used_mib"] for row in found] == [30.0] * 18
    assert {row["uuid"] for row in found} == {'GPU-"},"values":[['}
    assert "\n" not in "".join(dcgm[0].counts.examples.values())


def test_a_series_without_host_is_dropped_with_an_example(dcgm: list[RowBatch]) -> None:
    assert sum(batch.counts.dropped["no host label"] for batch in dcgm) == 18
    assert "GPU-f" in dcgm[0].counts.examples["no host label"]


def test_nothing_is_lost_silently(dcgm: list[RowBatch], jobstats: list[RowBatch]) -> None:
    for batch in (*dcgm, *jobstats):
        assert batch.counts.seen == batch.counts.kept + sum(batch.counts.dropped.values())
    values = sum(batch.rows[name].length() - batch.rows[name].null_count
                 for batch in dcgm for name in ("gpu_util_pct", "hbm_used_mib"))  # fmt: skip
    free = sum(batch.counts.kept for batch in dcgm) - values
    assert (sum(batch.counts.seen for batch in dcgm), free) == (18 * 9 + 5, 18 + 5)


def test_rows_are_sorted_and_unique(dcgm: list[RowBatch]) -> None:
    for batch in dcgm:
        keys = [(row["host"], row["gpu"], row["mig"], row["time_ms"]) for row in batch.rows.to_pylist()]
        assert keys == sorted(set(keys))


def test_jobstats_names_units_and_both_ways_to_name_a_job(jobstats: list[RowBatch]) -> None:
    card, newer = rows(jobstats, "d1", 1), rows(jobstats, "d1", 2)
    first = card[0]
    assert (first["gpu_util_pct"], first["hbm_used_mib"], first["hbm_total_mib"]) == (70.0, 1024.0, 40960.0)
    assert first["power_w"] == pytest.approx(123.456)
    assert [row["job_label"] for row in card] == [555] * 10 + [None] * 8
    assert {row["job_label"] for row in newer} == {556}
    assert {row["uuid"] for row in newer} == {"GPU-k"}


def test_jobstats_shows_the_activity_of_a_mig_instance_as_a_fraction(jobstats: list[RowBatch]) -> None:
    """Its exporter names the metric in percent, but gives 0 to 1. It has no duty cycle of an instance."""
    shown = [(row["mig"], row["gr_engine_active_frac"], row["gpu_util_pct"]) for row in rows(jobstats, "d1", 3)]
    assert shown == [("7", 0.25, None)] * 18


def test_the_scrape_interval_is_discovered(replay: Callable[[str], Any]) -> None:
    source = PrometheusSource(Prometheus(url=replay("dcgm").url), clock=lambda: UNTIL_S + 3600)
    assert source.scrape_interval_s is None
    batches = list(source.read(SINCE_S, UNTIL_S))
    assert source.scrape_interval_s == 10.0
    assert batches[0].rows.schema.metadata == {b"scrape_interval_s": b"10"}


def test_the_newest_samples_are_left_for_the_next_run(replay: Callable[[str], Any]) -> None:
    stub = replay("dcgm")
    source = PrometheusSource(Prometheus(url=stub.url, delay_s=60), clock=lambda: UNTIL_S + 59.0)
    assert list(source.read(UNTIL_S - 1, UNTIL_S + 10)) == []
    assert stub.paths == []


def test_a_full_answer_is_no_nan(dcgm: list[RowBatch]) -> None:
    for batch in dcgm:
        for name in TELEMETRY.names:
            assert not any(isinstance(v, float) and math.isnan(v) for v in batch.rows[name].to_pylist())


@pytest.mark.parametrize(
    ("host", "is_read"),
    [("n1", True), ("N1", True), ("n1.cluster.example", True), ("n1:9400", True), ("", True), ("n10", False),
     ("xn1", False), ("n3", False)],
)  # fmt: skip
def test_a_query_for_some_nodes_reads_their_names_as_exporters_write_them(host: str, is_read: bool) -> None:
    """A series without the label may have the other one."""
    matchers = host_matchers(presets()["dcgm"], ["n1", "n2.cluster.example"])
    labels, patterns = zip(*(matcher.split("=~", 1) for matcher in matchers), strict=True)
    assert labels == ("Hostname", "hostname")
    # Prometheus takes a pattern as anchored, and Python's syntax is the same here.
    assert all(bool(re.fullmatch(pattern.strip('"'), host)) is is_read for pattern in patterns)


def test_a_name_that_is_no_hosts_or_too_many_of_them_narrow_no_query() -> None:
    exporter = presets()["jobstats"]
    assert host_matchers(exporter, ["n1", 'n2"} or up{x="']) == host_matchers(exporter, []) == ()
    assert host_matchers(exporter, [f"n{n}" for n in range(MOST_HOSTS + 1)]) == ()
