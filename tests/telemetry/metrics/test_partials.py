"""Partials: small, exact, and mergeable in any order; chunks of files, and reductions over runs of rows."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.attribution.allocations import JobRun
from telemetry.metrics.arrays import HIGHEST, NUMBER, TOTAL, Files, RowRuns, Rows, packed, unpacked
from telemetry.metrics.engine import Prepared, complete, prepare
from telemetry.metrics.partials import (
    ALLOCATION,
    BYTES_A_ROW,
    FAMILIES,
    MetricOptions,
    Partials,
    _workers,
    compute_partials,
    map_partials,
    merge_partials,
    silent,
)
from telemetry.store.database import connect
from telemetry.store.partitions import write_sealed
from telemetry.store.store import Store

HOUR_S, START_S = 3600, 1_741_046_400 - 2 * 3600  # two hours before midnight UTC
COUNTED_MS = (-(2**60), 2**60)


def draw(hours: int = 4, gpus: int = 2, seed: int = 5) -> pd.DataFrame:
    """Samples every 30 s, of which some are unknown."""
    rng = np.random.default_rng(seed)
    frames = []
    for gpu in range(gpus):
        times = START_S * 1000 + np.arange(0, hours * HOUR_S * 1000, 30_000)
        frame = pd.DataFrame({"host": "n1", "gpu": gpu, "mig": "", "time_ms": times})
        for name in ("fp64_active_frac", "tensor_active_frac", "dram_active_frac"):
            frame[name] = rng.beta(0.4, 2, len(times)).astype("f4") * (rng.random(len(times)) > 0.3)
        frame["gpu_util_pct"] = np.round(rng.uniform(0, 100, len(times)))
        frame["hbm_used_mib"] = np.round(rng.uniform(0, 30_000, len(times)))
        frame["energy_mj"] = np.cumsum(np.round(rng.uniform(1e5, 4e6, len(times)))) % 3e9
        for name in ("energy_mj", "tensor_active_frac", "hbm_used_mib"):
            frame.loc[rng.random(len(times)) < 0.05, name] = np.nan
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def job(from_h: float, until_h: float, number: int = 1) -> JobRun:
    start_s, end_s = START_S + round(from_h * HOUR_S), START_S + round(until_h * HOUR_S)
    return JobRun(number, start_s, start_s, end_s, 2, ("n1",))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    from small_sites import telemetry

    made = Store.create(tmp_path)
    made.of("c").write("telemetry", telemetry(draw()))
    return made


def prepared(db: duckdb.DuckDBPyConnection, store: Store, *jobs: JobRun) -> Prepared:
    from small_sites import OPEN

    return prepare(db, store.of("c").files("telemetry"), jobs, [], OPEN)


def jobs_of(db: duckdb.DuckDBPyConnection, found: Prepared, partials: Partials) -> list[dict[str, Any]]:
    from small_sites import OPEN

    return complete(db, found, partials, OPEN).jobs.to_pylist()


def mapped(db: duckdb.DuckDBPyConnection, found: Prepared) -> Partials:
    return map_partials(db, found.work, silent)


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        if isinstance(value, float):
            assert other[name] == pytest.approx(value, rel=1e-12, abs=1e-9 if "growth" in name else 0), name
        else:
            assert other[name] == value, name


def test_allocations_that_overlap_each_get_their_samples(store: Store) -> None:
    """As steps of one job do: allocations of hours 0.5 to 3.5, of 1 to 2 within it, and of 1.5 to 4 across its end."""
    spans = [job(0.5, 3.5, 1), job(1, 2, 2), job(1.5, 4, 3)]
    with store.connect() as db:
        alone = [prepared(db, store, span) for span in spans]
        expected = [jobs_of(db, each, mapped(db, each))[0] for each in alone]
        tables: list[pa.Table] = []
        for number, each in enumerate(alone):
            numbers = {"allocation": [2 * number, 2 * number + 1], "job": [number] * 2}
            shifted = {name: pa.array(values, pa.int32()) for name, values in numbers.items()}
            columns = [shifted.get(name, each.work.allocations[name]) for name in each.work.allocations.column_names]
            tables.append(pa.table(columns, schema=each.work.allocations.schema))
        frames = [
            each.jobs.set_column(0, each.jobs.schema.field(0), pa.array([number], pa.int32()))
            for number, each in enumerate(alone)
        ]
        work = replace(alone[0].work, allocations=pa.concat_tables(tables))
        together = replace(alone[0], work=work, jobs=pa.concat_tables(frames))
        found = jobs_of(db, together, mapped(db, together))
    for one, other in zip(expected, found, strict=True):
        assert one["samples"] > 0
        assert_close(one, other)


def test_partials_of_files_merge_in_any_order_and_travel(store: Store) -> None:
    with store.connect() as db:
        found = prepared(db, store, job(0.2, 3.9))
        parts = [replace(chunk, paths=(path,), is_sorted=True) for chunk in found.work.chunks for path in chunk.paths]
        more = found.work.allocations, MetricOptions(), COUNTED_MS
        hours = [compute_partials(db, part, *more) for part in parts]
        whole = jobs_of(db, found, mapped(db, found))[0]
        assert len(hours) == 4
        hours = pickle.loads(pickle.dumps(hours))
        neighbors = [merge_partials(db, hours[2:]), merge_partials(db, hours[:2])]
        for parts in (neighbors, hours[::-1], [hours[place] for place in (2, 0, 3, 1)]):
            assert_close(whole, jobs_of(db, found, merge_partials(db, parts))[0])


def test_hours_without_an_allocation_are_not_read(store: Store) -> None:
    """The file of the last hour is damaged after the survey: it is not missed."""
    with store.connect() as db:
        found = prepared(db, store, job(0.5, 2.5))
        expected = jobs_of(db, found, mapped(db, found))
        store.of("c").files("telemetry")[-1].write_bytes(b"damaged")
        assert jobs_of(db, found, mapped(db, found)) == expected


@pytest.mark.parametrize("fault", ["unsorted", "twice", "another hour"])
def test_files_of_the_store_that_are_not_as_the_store_keeps_them_are_sorted_first(store: Store, fault: str) -> None:
    def write(path: Path, *parts: pa.Table) -> None:
        with path.open("w+b") as out:
            write_sealed(pa.concat_tables(parts).replace_schema_metadata(), out)

    with store.connect() as db:
        found = prepared(db, store, job(0.5, 3.5))
        expected = jobs_of(db, found, mapped(db, found))[0]
        one, other = store.of("c").files("telemetry")[:2]
        rows, more = (pq.read_table(path, partitioning=None) for path in (one, other))
        if fault == "unsorted":
            write(one, rows.take(np.random.default_rng(1).permutation(len(rows))))
        elif fault == "twice":
            twice = pa.concat_tables([rows, rows.slice(3, 5)])
            write(one, twice.sort_by([("gpu", "ascending"), ("time_ms", "ascending")]))
        else:
            write(one, rows, more.slice(0, 7))
            write(other, more.slice(7))
        again = prepared(db, store, job(0.5, 3.5))
        assert [chunk.is_sorted for chunk in again.work.chunks] == [False, True]
        assert again.seen.counted == found.seen.counted
        assert_close(expected, jobs_of(db, again, mapped(db, again))[0])


def test_no_chunks_give_no_partials(store: Store) -> None:
    with store.connect() as db:
        empty = merge_partials(db, [])
        assert [table.num_rows for table in empty.tables] == [0] * len(FAMILIES)
        assert empty.counted == 0
        assert len(empty[ALLOCATION]["sum_power_w"]) == 0


def test_tables_are_as_narrow_as_their_values_allow_and_lose_nothing() -> None:
    kinds = {**dict.fromkeys(("allocation", "few", "many"), NUMBER), **dict.fromkeys(("total", "whole"), TOTAL),
             "none": HIGHEST, "zero": TOTAL}  # fmt: skip
    given = ([0, 300, 70_000], [-1, 0, 127], [0, 2**53 + 1, 2**62], [0.1, 0.0, np.nan], [0.0, 1000.0, 2.0],
             [np.nan] * 3, [0.0] * 3)  # fmt: skip
    rows = dict(zip(kinds, map(np.array, given), strict=True))
    table = packed(kinds, rows)
    assert [str(field.type) for field in table.schema] == ["int32", "int8", "int64", "double", "int16"]
    wide = Rows(kinds, [unpacked(table)])
    for name, values in rows.items():
        np.testing.assert_array_equal(wide[name], values)
        assert wide[name].dtype == kinds[name].dtype


def test_an_hour_in_which_a_job_has_no_samples_adds_nothing(tmp_path: Path, store: Store) -> None:
    """n1 falls silent after its second hour, while n2 goes on."""
    from small_sites import telemetry

    frame = draw()
    silent = Store.create(tmp_path / "other")
    late = frame.time_ms >= (START_S + 2 * HOUR_S) * 1000
    silent.of("c").write("telemetry", telemetry(pd.concat([frame[~late], frame.assign(host="n2")])))
    with store.connect() as db:
        ends = prepared(db, store, job(0.5, 2))
        expected = jobs_of(db, ends, mapped(db, ends))[0]
        found = prepared(db, silent, job(0.5, 4))
        row = jobs_of(db, found, mapped(db, found))[0]
    same = ["samples", "hbm_max_mib", "hbm_peak_ms", "energy_resets", "spatial_imbalance", "intensity_bins_tensor"]
    same += ["compute_frac_fp64", "mean_gpu_util_pct", "hbm_growth_mib_h", "temporal_imbalance"]
    assert_close({name: expected[name] for name in same}, row)


ROWS = 400_000


@pytest.fixture
def chunks(tmp_path: Path) -> list[Files]:
    pq.write_table(pa.table({"gpu": pa.nulls(ROWS, pa.int16())}), tmp_path / "0000.parquet")
    return [Files((tmp_path / "0000.parquet",), 0, 1, is_sorted=False)] * 9


@pytest.mark.parametrize(("limit_mib", "workers"), [(64, 1), (128, 1), (256, 2), (512, 5), (2048, 8)])
def test_hours_take_at_most_half_of_the_memory(chunks: list[Files], limit_mib: int, workers: int) -> None:
    with connect([], memory_limit_mib=limit_mib, threads=8) as db:
        assert _workers(db, chunks) == workers
    assert workers == 1 or workers * ROWS * BYTES_A_ROW <= limit_mib * 2**20 / 2


def test_without_a_limit_there_are_as_many_as_threads(chunks: list[Files]) -> None:
    with connect([], threads=3) as db:
        db.execute("SET memory_limit = '100TiB'").fetchall()
        assert _workers(db, chunks) == 3
        assert _workers(db, []) == 3


VALUE = st.one_of(st.just(np.nan), st.integers(-50, 50).map(float))
KEYED = st.lists(st.tuples(st.integers(0, 3), VALUE, st.booleans()), max_size=30)


def split(keys: list[int], values: list[Any]) -> list[list[Any]]:
    """Neighbors of equal keys."""
    parts: list[list[Any]] = []
    for place, value in enumerate(values):
        if place and keys[place] == keys[place - 1]:
            parts[-1].append(value)
        else:
            parts.append([value])
    return parts


@given(KEYED)
def test_reductions(rows: list[tuple[int, float, bool]]) -> None:
    keys, values, flags = ([row[place] for row in rows] for place in range(3))
    runs = RowRuns.of(np.array(keys, int))
    parts, flagged = split(keys, values), split(keys, flags)
    known = [[value for value in part if value == value] for part in parts]
    array, flag = np.array(values, np.float32), np.array(flags, bool)
    assert runs.lengths.tolist() == [len(part) for part in parts]
    np.testing.assert_array_equal(runs.sum(array), [sum(part) for part in parts])
    np.testing.assert_array_equal(runs.sum(flag), [sum(part) for part in flagged])
    np.testing.assert_array_equal(runs.max(array), [max(part, default=np.nan) for part in known])
    np.testing.assert_array_equal(runs.min(array), [min(part, default=np.nan) for part in known])
    np.testing.assert_array_equal(runs.first(array), [part[0] for part in parts])
    np.testing.assert_array_equal(runs.last(array), [part[-1] for part in parts])
    places, kept = runs.where(flag)
    assert places.tolist() == [place for place, part in enumerate(flagged) if any(part)]
    assert kept.lengths.tolist() == [sum(part) for part in flagged if any(part)]
