"""Partials: small, exact, mergeable in any order, and computed from what allocations touch only."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from telemetry.attribution.allocations import JobRun
from telemetry.metrics.chunks import map_partials, silent
from telemetry.metrics.columns import HIGHEST, NUMBER, TOTAL, Rows, packed, unpacked
from telemetry.metrics.engine import Prepared, complete, prepare
from telemetry.metrics.options import Options
from telemetry.metrics.partials import ALLOCATION, FAMILIES, Partials, compute_partials, merge_partials
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

    return complete(db, found, partials, OPEN)[0].jobs.to_pylist()


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
            shifted = {
                "allocation": pa.array([2 * number, 2 * number + 1], pa.int32()),
                "job": pa.array([number] * 2, pa.int32()),
            }
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
        hours = [
            compute_partials(
                db,
                type(chunk)((path,), chunk.from_ms, chunk.until_ms, True),
                found.work.allocations,
                Options(),
                COUNTED_MS,
            )
            for chunk in found.work.chunks
            for path in chunk.paths
        ]
        whole = jobs_of(db, found, mapped(db, found))[0]
        assert len(hours) == 4
        hours = pickle.loads(pickle.dumps(hours))
        neighbors = [merge_partials(db, hours[2:]), merge_partials(db, hours[:2])]
        for parts in [neighbors, *permutations(hours)]:
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
    with store.connect() as db:
        found = prepared(db, store, job(0.5, 3.5))
        expected = jobs_of(db, found, mapped(db, found))[0]
        one, other = store.of("c").files("telemetry")[:2]
        rows, more = (pq.read_table(path, partitioning=None) for path in (one, other))
        if fault == "unsorted":
            pq.write_table(rows.take(np.random.default_rng(1).permutation(len(rows))), one)
        elif fault == "twice":
            pq.write_table(
                pa.concat_tables([rows, rows.slice(3, 5)]).sort_by([("gpu", "ascending"), ("time_ms", "ascending")]),
                one,
            )
        else:
            pq.write_table(pa.concat_tables([rows, more.slice(0, 7)]), one)
            pq.write_table(more.slice(7), other)
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
    kinds = {
        "allocation": NUMBER,
        "few": NUMBER,
        "many": NUMBER,
        "total": TOTAL,
        "whole": TOTAL,
        "none": HIGHEST,
        "zero": TOTAL,
    }
    rows = {
        "allocation": np.array([0, 300, 70_000]),
        "few": np.array([-1, 0, 127]),
        "many": np.array([0, 2**53 + 1, 2**62]),
        "total": np.array([0.1, 0.0, np.nan]),
        "whole": np.array([0.0, 1000.0, 2.0]),
        "none": np.full(3, np.nan),
        "zero": np.zeros(3),
    }
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
