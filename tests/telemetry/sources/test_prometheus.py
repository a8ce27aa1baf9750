"""Rows and counts from the recorded answers of a real Prometheus 2.42, and the fast reader of its JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from almanac.config import Prometheus
from almanac.records import Counts
from telemetry.sources.exporters import presets
from telemetry.sources.pivot import Pivot
from telemetry.sources.prometheus import MOST_HOSTS, PrometheusSource, host_matchers
from telemetry.sources.prometheus_json import Point, SeriesSamples, parse_answer
from telemetry.sources.source import RowBatch
from telemetry.store.schema import TELEMETRY

HOUR_S = 1_790_002_800
SINCE_S, UNTIL_S = HOUR_S - 60, HOUR_S + 120


def read(url: str, exporter: str, **options: Any) -> list[RowBatch]:
    source = PrometheusSource(Prometheus(url=url, names=exporter, **options), clock=lambda: UNTIL_S + 3600)
    return list(source.read(SINCE_S, UNTIL_S))


@pytest.fixture
def dcgm(replay: Callable[[str], Any]) -> list[RowBatch]:
    return read(replay("dcgm").url, "dcgm")


@pytest.fixture
def jobstats(replay: Callable[[str], Any]) -> list[RowBatch]:
    return read(replay("jobstats").url, "jobstats")


def rows(batches: list[RowBatch], host: str, gpu: int) -> list[dict[str, Any]]:
    every = [row for batch in batches for row in batch.rows.to_pylist()]
    return [row for row in every if (row["host"], row["gpu"]) == (host, gpu)]


def test_batches_are_cut_at_the_hour_and_move_the_watermark_behind_their_newest_sample(dcgm: list[RowBatch]) -> None:
    assert [batch.watermark_s for batch in dcgm] == [HOUR_S - 9, UNTIL_S - 9], "a scrape every 10 s"
    assert all(batch.table == "telemetry" and batch.rows.schema.equals(TELEMETRY) for batch in dcgm)

    times = [row["time_ms"] for row in rows(dcgm, "n1", 0)]
    assert times == [s * 1000 for s in range(SINCE_S, UNTIL_S, 10)]
    assert HOUR_S * 1000 in [row["time_ms"] for row in dcgm[1].rows.to_pylist()], "a border is in one batch"
    assert {row["time_ms"] % 10_000 for row in rows(dcgm, "n2", 0)} == {123}


def test_the_counters_of_a_scrape_are_one_row(dcgm: list[RowBatch]) -> None:
    first = rows(dcgm, "n1", 0)[0]
    wanted = {"uuid": "GPU-a", "model": "NVIDIA A100-SXM4-40GB", "job_label": 101, "mig": "", "gpu_util_pct": 50.0}
    assert {key: first[key] for key in wanted} == wanted
    assert (first["hbm_used_mib"], first["hbm_total_mib"]) == (1000.0, 40000.0)
    assert first["tensor_active_frac"] is None


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
    assert {row["host"] for batch in dcgm for row in batch.rows.to_pylist()} == {"n1", "n2"}, "both spellings are read"
    for batch in (*dcgm, *jobstats):
        found = batch.rows.to_pylist()
        keys = [(row["host"], row["gpu"], row["mig"], row["time_ms"]) for row in found]
        assert keys == sorted(set(keys))
        assert not any(isinstance(value, float) and math.isnan(value) for row in found for value in row.values())
        assert batch.counts.seen == batch.counts.kept + sum(batch.counts.dropped.values())
    values = sum(batch.rows[name].length() - batch.rows[name].null_count
                 for batch in dcgm for name in ("gpu_util_pct", "hbm_used_mib"))  # fmt: skip
    free = sum(batch.counts.kept for batch in dcgm) - values
    assert (sum(batch.counts.seen for batch in dcgm), free) == (18 * 9 + 5, 18 + 5)


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


TIMES = st.integers(0, 4 * 10**12).map(lambda ms: ms / 1000)
VALUES = st.one_of(st.sampled_from(["NaN", "+Inf", "-Inf", "0", "1e+06", "-0"]), st.floats(allow_nan=False).map(str))
TRICKY = st.sampled_from(['"', "\\", '"__name__":"', "]]}", '},"values":[[', '{"metric":{', "\n", "é", "\x00"])
TEXTS = st.lists(st.one_of(TRICKY, st.text(max_size=5)), max_size=4).map("".join)
SERIES = st.fixed_dictionaries(
    {
        "metric": st.dictionaries(st.sampled_from(["gpu", "Hostname", "__name__", 'a"__name__', "x"]), TEXTS),
        "values": st.lists(st.tuples(TIMES, VALUES).map(list), min_size=1, max_size=4),
    }
)


def body(result: list[dict[str, Any]], *, indent: int | None = None) -> bytes:
    answer = {"status": "success", "data": {"resultType": "matrix", "result": result}}
    separators = (",", ":") if indent is None else None
    return json.dumps(answer, indent=indent, separators=separators, ensure_ascii=False).encode()


def as_numbers(result: list[dict[str, Any]]) -> list[float]:
    return [float(value) if np.isfinite(float(value)) else np.nan for one in result for _, value in one["values"]]


@given(st.lists(SERIES, max_size=4), st.sampled_from([None, 1]))
def test_labels_lengths_times_and_values_are_those_of_the_json(
    result: list[dict[str, Any]], indent: int | None
) -> None:
    samples = parse_answer(body(result, indent=indent))["data"]["result"]
    assert isinstance(samples, SeriesSamples)
    assert samples.labels == [one["metric"] for one in result]
    assert samples.lengths.tolist() == [len(one["values"]) for one in result]
    assert samples.time_ms.tolist() == [round(time * 1000) for one in result for time, _ in one["values"]]
    np.testing.assert_array_equal(samples.value, as_numbers(result))


def test_a_vector_becomes_points_and_what_is_no_result_stays_as_it_is() -> None:
    answer = {"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, "2"]}]}}
    assert parse_answer(json.dumps(answer).encode())["data"]["result"] == [Point({}, 2.0)]
    assert parse_answer(b'{"status":"success","data":{"version":"2.42"}}')["data"] == {"version": "2.42"}


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=3),
    st.sampled_from(["1e999", "NaN", 10**400, -1, "\ud800", "]]}", [], {}, [[1, "2"]]]),
)  # fmt: skip


@st.composite
def spoiled(draw: st.DrawFn) -> Any:
    """A healthy result in which one place holds something else, or is gone."""
    pairs = [[1.5, "2"], [2.5, "3"]]
    matrix = [{"metric": {"__name__": "x", "gpu": "0", "Hostname": "n1"}, "values": pairs}]
    vector = [{"metric": {"__name__": "x"}, "value": [1.5, "2"]}]
    kind = draw(st.sampled_from(["matrix", "vector", "scalar", "string"]))
    content = {"data": {"resultType": kind, "result": matrix if kind == "matrix" else vector}, "status": "success"}
    at: Any = content
    while True:
        place = draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
        if not at[place] or not isinstance(at[place], (dict, list)) or draw(st.integers(0, 3)) == 0:
            break
        at = at[place]
    if draw(st.booleans()):
        at[place] = draw(ATOMS)
    else:
        del at[place]
    return content


@examples(4)
@given(spoiled(), st.booleans())
def test_a_spoiled_answer_is_a_value_error_or_can_be_used(content: Any, is_tight: bool) -> None:
    """Whatever is taken goes through the pivot into rows."""
    text = json.dumps(content, separators=(",", ":") if is_tight else None)
    try:
        data = parse_answer(text.encode()).get("data")
    except ValueError:
        return
    found = data.get("result") if isinstance(data, dict) else None
    if isinstance(found, SeriesSamples):
        pivot = Pivot(presets()["dcgm"], "", 0, 10_000, Counts())
        pivot.add(presets()["dcgm"].named["DCGM_FI_DEV_FB_USED"], found)
        pivot.table()
        assert pivot.counts.seen == pivot.counts.kept + sum(pivot.counts.dropped.values())
    elif isinstance(found, list):
        assert all(isinstance(point, Point) and isinstance(point.value, float) for point in found)


LABELS = st.dictionaries(
    st.sampled_from(["gpu", "Hostname", "GPU_I_ID", "UUID", "modelName", "hpc_job"]),
    st.one_of(st.text(max_size=5), st.sampled_from(["0", "n1", "٣", "1e9", "-1", "9" * 30, "\ud800", "\x00"])),
)


@given(st.lists(LABELS, max_size=4))
def test_no_labels_break_a_row(labels: list[dict[str, str]]) -> None:
    result = [{"metric": {"gpu": "0", "Hostname": "n1", **each}, "values": [[1.5, "2"]]} for each in labels]
    samples = parse_answer(json.dumps({"data": {"resultType": "matrix", "result": result}}).encode())["data"]["result"]
    pivot = Pivot(presets()["dcgm"], "", 0, 10_000, Counts())
    pivot.add(presets()["dcgm"].named["DCGM_FI_DEV_FB_USED"], samples)
    assert pivot.table().num_rows <= len(labels)


def test_a_warning_after_the_series_is_kept() -> None:
    result = [{"metric": {"gpu": "0"}, "values": [[1, "2"]]}]
    text = body(result).decode()[:-1] + ',"warnings":["one store is down"]}'
    assert parse_answer(text.encode())["warnings"] == ["one store is down"]


@pytest.mark.parametrize(
    "text",
    [b"", b"<html>", b"[]", b"[" * 100_000, b"null", b'{"data":{"resultType":"vector","result":{}}}',
     b'{"metric":{"a":"b"},"values":[[1,"2"]]}]', b"\xff"],
)  # fmt: skip
def test_what_is_no_json_object_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_answer(text)


def test_a_cut_answer_is_a_value_error() -> None:
    whole = body([{"metric": {"gpu": "0"}, "values": [[1, "2"], [2, "3"]]}] * 2)
    for end in range(len(whole)):
        with pytest.raises(ValueError):
            parse_answer(whole[:end])
