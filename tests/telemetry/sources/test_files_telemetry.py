"""Import of telemetry: own columns, one row per sample, and the real 10 Hz counters of ../shared/data."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from almanac.errors import FileFormatError
from almanac.records import Counts
from telemetry.counters import COUNTERS
from telemetry.sources.file_columns import open_columns, read_blocks
from telemetry.sources.files import FileSource
from telemetry.store.schema import TELEMETRY

EVER = (-(2**40), 2**40)
NOW_S = 1_790_002_800


def read(path: Path, layout: str | None = None, span: tuple[int, int] = EVER) -> tuple[list[dict[str, Any]], Counts]:
    counts, rows = Counts(), []
    for batch in FileSource(path, "telemetry", layout, clock=lambda: NOW_S).read(*span):
        assert batch.table == "telemetry" and batch.rows.column_names == TELEMETRY.names
        counts.add(batch.counts)
        rows += batch.rows.cast(TELEMETRY).to_pylist()
    assert counts.seen == counts.kept + sum(counts.dropped.values())
    return sorted(rows, key=lambda row: (row["host"], row["gpu"], row["mig"], row["time_ms"])), counts


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def some(row: dict[str, Any]) -> dict[str, Any]:
    """The values of a row that are not null."""
    return {key: value for key, value in row.items() if value is not None}


def test_wide_csv(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv", "host,gpu,time_ms,gpu_util_pct,hbm_used_mib,note", "n1.cluster.example,0,1000,50,1024.5,x",
        "n1,0,2000,,2048,y", "n1,1,1000,120,nan,z", "n1,1,2000,5,12 GiB,z",
    )  # fmt: skip
    rows, counts = read(path)
    assert [some(row) for row in rows] == [
        {"host": "n1", "gpu": 0, "mig": "", "time_ms": 1000, "gpu_util_pct": 50.0, "hbm_used_mib": 1024.5},
        {"host": "n1", "gpu": 0, "mig": "", "time_ms": 2000, "hbm_used_mib": 2048.0},
        {"host": "n1", "gpu": 1, "mig": "", "time_ms": 2000, "gpu_util_pct": 5.0},
    ]
    assert (counts.seen, counts.kept) == (7, 4)
    assert counts.dropped == {"unit mismatch: gpu_util_pct": 1, "not a number: hbm_used_mib": 2}


@pytest.mark.parametrize("form", ["wide", "long"])
def test_a_share_a_little_above_its_limit_is_the_limit(tmp_path: Path, form: str) -> None:
    head, name = ("host,gpu,time_ms,sm_active_frac", "") if form == "wide" else (
        "timestamp,host,gpu,metric,value", "sm_active_frac,")  # fmt: skip
    lines = [f"n1,0,{at},1.0002" if form == "wide" else f"{at},n1,0,{name}1.0002" for at in (1000, 2000)]
    rows, counts = read(write(tmp_path / "t.csv", head, *lines))
    assert [row["sm_active_frac"] for row in rows] == [1.0, 1.0]
    assert not counts.dropped


def test_long_csv_of_exporter_names_and_our_own(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv", "timestamp,host,gpu,metric,value,job_label",
        "2026-01-01T00:00:00Z,n1,0,DCGM_FI_DEV_FB_USED,1000,7",
        "2026-01-01T01:00:00+01:00,n1,0,DCGM_FI_DEV_FB_FREE,39000,7", "1767225600,n1,0,gpu_util_pct,55,7",
        "1767225600000,n1,0,nvidia_gpu_power_usage_milliwatts,250000,7", "1767225600.25,n1,0,temp_c,40,7",
        "1767225600,n1,0,DCGM_FI_DEV_MEM_CLOCK,0,7", "1767225600,n1,0,gpu_util_pct,55,7",
    )  # fmt: skip
    rows, counts = read(path)
    assert [some(row) for row in rows] == [
        {"host": "n1", "gpu": 0, "mig": "", "time_ms": 1767225600000, "job_label": 7, "hbm_used_mib": 1000.0,
         "hbm_total_mib": 40000.0, "gpu_util_pct": 55.0, "power_w": 250.0},
        {"host": "n1", "gpu": 0, "mig": "", "time_ms": 1767225600250, "job_label": 7, "temp_c": 40.0},
    ]  # fmt: skip
    assert counts.dropped == {"metric not used": 1, "sample given twice": 1}


@pytest.mark.parametrize("values", [(40, 60, 50), (60, 50, 40), (50, 40, 60)])
def test_the_greatest_of_conflicting_samples_counts_in_any_order(tmp_path: Path, values: tuple[int, ...]) -> None:
    lines = [f"1767225600,n1,0,gpu_util_pct,{value}" for value in values]
    rows, counts = read(write(tmp_path / "t.csv", "timestamp,host,gpu,metric,value", *lines))
    assert [row["gpu_util_pct"] for row in rows] == [60.0]
    assert counts.dropped == {"sample given twice": 2}


GENERATIONS = {
    "n1": {"DCGM_FI_DEV_GPU_UTIL": 95, "DCGM_FI_DEV_FB_USED": 30_000, "DCGM_FI_DEV_FB_FREE": 51_920,
           "DCGM_FI_DEV_POWER_USAGE": 301.5, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 1e9},
    "n2": {"DCGM_FI_DEV_GPU_UTIL_RATIO": 0.95, "DCGM_FI_DEV_FB_USED_BYTES": 31_457_280_000,
           "DCGM_FI_DEV_FB_FREE_BYTES": 53_477_376_000, "DCGM_FI_DEV_FB_CAPACITY_BYTES": 85_899_345_920,
           "DCGM_FI_DEV_BOARD_POWER_WATTS": 301.5, "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL": 1e6},
}  # fmt: skip
OURS = {"gpu_util_pct": 95, "hbm_used_mib": 30_000, "hbm_total_mib": 81_920, "power_w": 301.5, "energy_mj": 1e9}


def long_file(path: Path, names: dict[str, dict[str, float]]) -> Path:
    lines = [f"{time_s},{host},0,{name},{value}" for host, values in names.items() for time_s in (1, 2)
             for name, value in values.items()]  # fmt: skip
    return write(path, "timestamp,host,gpu,metric,value", *lines)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_file_with_a_column_per_metric_of_dcgm(tmp_path: Path, suffix: str) -> None:
    names = sorted({name for values in GENERATIONS.values() for name in values})
    lines = [
        [host, "0", "1000", *(str(values.get(name, "")) for name in names)] for host, values in GENERATIONS.items()
    ]
    path = write(tmp_path / "t.csv", ",".join(["host", "gpu", "time_ms", *names]), *map(",".join, lines))
    if suffix == "parquet":
        table = pa.csv.read_csv(path)
        path = tmp_path / "t.parquet"
        pq.write_table(table, path)
    rows, counts = read(path)
    assert [row["host"] for row in rows] == ["n1", "n2"]
    assert all({name: row[name] for name in OURS} == pytest.approx(OURS) for row in rows)
    assert (counts.seen, counts.kept, counts.dropped, counts.notes) == (11, 11, {}, {})


def test_names_that_nothing_knows_are_counted_each_and_others_are_not_taken_for_unknown(tmp_path: Path) -> None:
    wrong = {name.replace("FI", "FX"): value for name, value in GENERATIONS["n2"].items()}
    rows, counts = read(long_file(tmp_path / "t.csv", {"n1": {**wrong, "DCGM_FI_DEV_MEM_CLOCK": 1980}}))
    assert rows == []
    assert counts.dropped == {**{f"metric not known: {name}": 2 for name in wrong}, "metric not used": 2}
    assert counts.seen == 14


def test_columns_that_look_like_metrics_and_are_not_read_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "host,gpu,time_ms,temp_c,DCGM_FI_DEV_GPU_UTIX,note", "n1,0,1000,40,95,x")
    rows, counts = read(path)
    assert (len(rows), counts.notes) == (1, {"column not known: DCGM_FI_DEV_GPU_UTIX": 1})


@pytest.mark.parametrize(("values", "is_odd"), [("0.95 1 0", True), ("0.95 2", False), ("0 1", False), ("0 0", False)])
@pytest.mark.parametrize("form", ["wide", "long"])
def test_a_utilization_that_may_be_a_ratio_is_kept_and_noted(
    tmp_path: Path, values: str, is_odd: bool, form: str
) -> None:
    head, middle = ("host,gpu,time_ms,gpu_util_pct", "") if form == "wide" else (
        "timestamp,host,gpu,metric,value", "gpu_util_pct,")  # fmt: skip
    lines = [f"n{at},0,1000,{value}" if form == "wide" else f"1,n{at},0,{middle}{value}"
             for at, value in enumerate(values.split())]  # fmt: skip
    rows, counts = read(write(tmp_path / "t.csv", head, *lines))
    assert [row["gpu_util_pct"] for row in rows] == pytest.approx([float(value) for value in values.split()])
    assert bool(counts.notes) == is_odd


def test_rows_that_cannot_be_used(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv", "host,gpu,time_ms,gpu_util_pct,hbm_used_mib", "n1,0,1000,1,2", "n1,0,noon,1,2",
        f"n1,0,{(NOW_S + 301) * 1000},1,2", "n1,0,-5,1,", ",0,1000,1,2", "n1,card0,1000,1,2", "n1;rm,0,1000,1,2",
        "n1,0,1000",
    )  # fmt: skip
    rows, counts = read(path)
    assert len(rows) == 1
    assert counts.dropped == {
        "time not understood": 3, "time in the future": 2, "no host label": 2, "gpu label is no GPU index": 2,
        "host label is no host name": 2, "wrong number of fields": 1,
    }  # fmt: skip


def test_only_the_span_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "host,gpu,time_ms,temp_c", *(f"n1,0,{n * 1000},40" for n in range(10)))
    rows, counts = read(path, span=(3, 5))
    assert ([row["time_ms"] for row in rows], counts.seen) == ([3000, 4000], 2)


def test_a_bad_byte_costs_its_row(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"host,gpu,time_ms,temp_c\nn1,0,1000,40\nn1,0,2000,41,\xff\nn1,0,3000,42\n")
    rows, counts = read(path)
    assert [row["time_ms"] for row in rows] == [1000, 3000]
    assert counts.dropped == {"wrong number of fields": 1}


@pytest.mark.parametrize("column", ["host", "gpu", "time_ms", "hbm_used_mib"])
def test_a_column_of_any_plain_type_costs_only_itself(
    tmp_path: Path, column: str, odd_columns: dict[str, pa.Array[Any]]
) -> None:
    good = {"host": ["n1", "n1"], "gpu": [0, 1], "time_ms": [1000, 2000], "hbm_used_mib": [5.0, 6.0], "temp_c": [1, 2]}
    for kind, odd in odd_columns.items():
        pq.write_table(pa.table({**good, column: odd}), tmp_path / f"{kind}.parquet")
        assert read(tmp_path / f"{kind}.parquet")[1].seen >= 2, kind


def test_one_number_too_large_costs_only_itself(tmp_path: Path) -> None:
    """Arrow converts a column as a whole, and refuses it where one number is above 2^53."""
    path = tmp_path / "t.parquet"
    rows = {"host": ["n1", "n1"], "gpu": [0, 1], "time_ms": [2**62 + 1, 2000], "hbm_used_mib": [5, 6]}
    pq.write_table(pa.table(rows), path)
    rows, counts = read(path)
    assert ([row["time_ms"] for row in rows], counts.dropped) == ([2000], {"time in the future": 1})


def test_gzip_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    with pa.output_stream(path, compression="gzip") as out:
        out.write(b"host,gpu,time_ms,temp_c\nn1,0,1000,40\n")
    assert read(path)[0][0]["temp_c"] == 40.0


def test_parquet_timestamps_and_float_labels(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    time = pa.array([1767225600_000_500], pa.timestamp("us", "UTC")).cast(pa.timestamp("us", "Europe/Berlin"))
    table = pa.table({"timestamp": time, "host": ["n1"], "gpu": [3.0], "metric": ["temp_c"], "value": ["41"]})
    pq.write_table(table, path)
    ((row,), _) = read(path)
    assert (row["gpu"], row["time_ms"], row["temp_c"]) == (3, 1767225600000, 41.0)


def test_neither_a_path_nor_the_case_of_a_column_is_a_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "gpu=7"
    folder.mkdir()
    for name, gpu in (("t[1]*.parquet", 1), ("t1x.parquet", 2)):
        table = pa.table({"GPU": [9], "host": ["n1"], "gpu": [gpu], "time_ms": [1000], "temp_c": [40.0]})
        pq.write_table(table, folder / name)
    rows, _ = read(folder / "t[1]*.parquet")
    assert [row["gpu"] for row in rows] == [1]


def test_a_job_file_is_no_telemetry(tmp_path: Path) -> None:
    path = write(tmp_path / "jobs.csv", "job_id,submit_s", "1,2")
    said = r"fit no known telemetry file: .*long \(timestamp, host, gpu, metric, value\)"
    with pytest.raises(FileFormatError, match=said):
        read(path)


ROWS = st.lists(
    st.fixed_dictionaries({
        "host": st.sampled_from(["n1", "n2"]), "gpu": st.integers(0, 3), "mig": st.sampled_from(["", "3"]),
        "time_ms": st.integers(0, NOW_S).map(lambda s: s * 1000), "uuid": st.just("GPU-a"), "model": st.just("A100"),
        "job_label": st.just(9),
        **{c.column: st.one_of(st.none(), st.integers(1, min(100, int(c.high))).map(float)) for c in COUNTERS},
        "mig_profile": st.sampled_from([None, "1g.5gb"]),
    }).map(lambda row: row if row["mig"] else {**row, "mig_profile": None}),
    max_size=5, unique_by=lambda row: (row["host"], row["gpu"], row["mig"], row["time_ms"]),
)  # fmt: skip


@mock.patch("telemetry.sources.file_columns.require_readable", new=lambda path: None)  # a process for each example
@examples(0.4)
@given(ROWS)
def test_wide_long_csv_and_parquet_give_the_same_rows(tmp_path_factory: Any, rows: list[dict[str, Any]]) -> None:
    folder = tmp_path_factory.mktemp("files")
    table = pa.Table.from_pylist(rows, schema=TELEMETRY)
    pq.write_table(table, folder / "wide.parquet")
    pa.csv.write_csv(table, folder / "wide.csv")
    labels = ("host", "gpu", "mig", "uuid", "model", "job_label", "mig_profile")
    long = [
        {"timestamp": row["time_ms"] / 1000, "metric": c.column, "value": row[c.column], **{k: row[k] for k in labels}}
        for row in rows
        for c in COUNTERS
        if row[c.column] is not None
    ]
    names = ["timestamp", "metric", "value", *labels]
    pq.write_table(pa.table({name: [row[name] for row in long] for name in names} if long else
                            {name: pa.array([], pa.string()) for name in names}), folder / "long.parquet")  # fmt: skip
    filled = [row for row in rows if any(row[c.column] is not None for c in COUNTERS)]
    expected = sorted(filled, key=lambda row: (row["host"], row["gpu"], row["mig"], row["time_ms"]))
    for name in ("wide.parquet", "wide.csv", "long.parquet"):
        assert read(folder / name)[0] == expected


def test_hosts_that_share_a_short_name_stay_apart_in_a_file(tmp_path: Path) -> None:
    lines = ("host,gpu,time_ms,temp_c", "n1.a.example,0,1000,40", "n1.b.example,0,2000,41")
    rows, counts = read(write(tmp_path / "t.csv", *lines))
    assert [row["host"] for row in rows] == ["n1.a.example", "n1.b.example"]
    assert dict(counts.notes) == {"with its domain: several hosts share the short name": 1}


VALUE = st.sampled_from([None, "", "5", " 7 ", "nan", "inf", "-1", "1e9", "0.5", "x"])
LINE = st.tuples(
    st.sampled_from(["n1", "n1.cluster.example", "n1.b.example", "N1", "n2", "", "n;1"]),
    st.sampled_from(["0", "1", "99999", "x", ""]),
    st.sampled_from(["", "3", "a b"]),
    st.sampled_from(["GPU-a", "GPU-b", ""]),
    st.sampled_from(["", "0", "7", "8", "-", "9" * 20]),
    st.sampled_from(["1000", "2000", "3000", "noon", "-1", "1e30"]),
    VALUE, VALUE, VALUE,
)  # fmt: skip


@examples(1.5)
@given(st.lists(LINE, max_size=6))
def test_rows_taken_as_they_are_equal_those_joined_from_samples(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str | None, ...]]
) -> None:
    path = tmp_path_factory.mktemp("files") / "t.parquet"
    names = ["host", "gpu", "mig", "uuid", "job_label", "time_ms", "gpu_util_pct", "hbm_used_mib", "sm_active_frac"]
    columns = [pa.array([line[at] for line in lines], pa.string()) for at in range(len(names))]
    pq.write_table(pa.table(dict(zip(names, columns, strict=True))), path)
    taken = read(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("telemetry.sources.files.rows_of", lambda *_: None)
        joined = read(path)
    assert taken == joined


@pytest.mark.data
def test_real_10_hz_counters(trace: Callable[[str], Path]) -> None:
    rows, counts = read(trace("h100_dcgm_10hz.parquet"))
    assert (len(rows), sum(counts.dropped.values())) == (126_056, 0)
    assert counts.notes == {}
    assert max(row["hbm_used_mib"] for row in rows) == 68_148
    assert {row["fp64_active_frac"] for row in rows} == {None}
    assert sum(row["sm_active_frac"] is None for row in rows) == 75
    assert {row["model"] for row in rows} == {"NVIDIA H100 80GB HBM3"}


def test_a_large_file_does_not_stay_in_memory(tmp_path: Path) -> None:
    path, rows = tmp_path / "t.parquet", 40_000
    with pq.ParquetWriter(path, pa.schema([("gpu", pa.int64()), ("value", pa.float64())]), compression="none") as out:
        for _ in range(32):
            out.write_table(pa.table({"gpu": np.arange(rows), "value": np.random.default_rng(1).random(rows)}))
    held = []
    for _ in read_blocks(open_columns(path), {"value": "c1"}, rows, Counts()):
        held.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
    assert len(held) == 32 and max(held) - min(held) < path.stat().st_size / 2
