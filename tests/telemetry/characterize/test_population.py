"""Jobs in a table, jobs left out of it, and laws that hold for any jobs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from scipy.stats import spearmanr

from almanac.config import Config, Tier
from almanac.errors import StoreError
from telemetry.characterize import study
from telemetry.characterize.relations import COUNTERS
from telemetry.characterize.study import (
    POPULATION,
    TABLES,
    characterize,
    jobs_within,
    load_population,
    population_of,
    select,
)
from telemetry.characterize.table import contents, write_tables
from telemetry.store.schema import TABLES as SCHEMAS
from telemetry.store.store import Store

Any_ = Any


def test_each_job_that_is_left_out_counts_once_by_its_first_reason(job: Any_, results: Any_) -> None:
    one_gpu = {"reasons": ["spatial_imbalance: one GPU", "class_fp64: no FP64 counter"]}
    jobs = [
        job(spatial_imbalance=0.5, mean_gpu_util_pct=50.0),
        job(verdict="short", spatial_imbalance=0.5, mean_gpu_util_pct=50.0),
        job(verdict="ok", state="REQUEUED", spatial_imbalance=0.5, mean_gpu_util_pct=50.0),
        job(verdict=None),
        job(**one_gpu),
        job(spatial_imbalance=0.5),
    ]
    result = results(jobs)["fig06_spatial_shares"]
    assert result.jobs == 1
    assert result.left_out == {
        "gpu_util_pct: not known": 1,
        "not summarised": 1,
        "part of a job that was requeued or resized": 1,
        "spatial_imbalance: one GPU": 1,
        "verdict: short": 1,
    }


def test_a_job_whose_profiling_counters_failed_is_in_no_table_of_them(job: Any_, results: Any_) -> None:
    zeros = {f"mean_{pipe}_active_frac": 0.0 for pipe in ("fp64", "fp32", "fp16", "tensor")}
    found = results([job(**zeros, mean_gpu_util_pct=90.0, has_profiling_fault=True)])
    assert found["fig02_pipe_mix"].jobs == 0
    assert found["fig02_pipe_mix"].why_empty == "profiling counters read 0 while GPU_UTIL was high"
    assert found["fig01_gpu_util"].jobs == 1


def test_no_jobs_give_empty_tables_that_say_so() -> None:
    for jobs in (pd.DataFrame(), pd.DataFrame({"job_id": []})):
        found = characterize(population_of(jobs), Config())
        assert {result.why_empty for name, result in found.items() if name != "headline"} == {"there are no jobs"}
        assert all(result.rows.schema.names == result.table.schema.names for result in found.values())
        assert set(found["headline"].rows["site_value"].to_pylist()) == {None}


def test_a_metric_that_no_job_has_leaves_its_table_empty_with_the_jobs_own_reason(job: Any_, results: Any_) -> None:
    jobs = [
        job(reasons=["energy_j: no energy counter"], class_fp64="memory"),
        job(verdict="short"),
        job(verdict="short"),
    ]
    found = results(jobs)
    assert found["fig05_energy"].rows.num_rows == 0
    assert found["fig05_energy"].why_empty == "energy_j: no energy counter"
    assert found["fig01_job_size"].rows.num_rows == 10


def test_a_frame_may_lack_columns(job: Any_) -> None:
    frame = pd.DataFrame([job(), job()])[["job_id", "submit_s", "verdict", "gpu_count", "elapsed_s"]]
    found = characterize(population_of(frame), Config())
    assert found["fig01_duration"].jobs == 2
    assert found["fig04_intensity"].why_empty == "gpu_model: not known"


def test_a_frame_may_hold_whole_numbers_as_floats_and_nan(job: Any_) -> None:
    frame = pd.DataFrame([job(class_fp64="memory", placed_samples_fp64=3, compute_sample_frac_fp64=0.5), job()])
    found = characterize(population_of(frame), Config())["fig04_class_shares"].rows.to_pylist()
    assert (found[1]["counted_in"], found[1]["jobs"], found[1]["compute_share"]) == ("samples", 1, 0.5)


def test_contents_say_who_is_in_and_who_is_not(job: Any_, results: Any_) -> None:
    lines = contents(results([job(), job(verdict="idle")])).to_pylist()
    of_sizes = [(row["jobs"], row["left_out_because"]) for row in lines if row["table"] == "fig01_job_size"]
    assert of_sizes == [(1, None), (1, "verdict: idle")]


def test_files_hold_the_rows_as_parquet_and_csv(job: Any_, results: Any_, tmp_path: Any) -> None:
    found = results([job(tier='=HYPERLINK("x")', hbm_peak_mib=1.0, hbm_peak_frac=0.5, hbm_capacity_mib=2.0), job()])
    folder = tmp_path / "a" / "b"
    written = write_tables(found, folder)
    assert len(written) == 2 * (len(TABLES) + 2)
    assert {path.name for path in folder.iterdir()} == {path.name for path in written}
    shares = pq.read_table(folder / "fig03_hbm_peak_shares.parquet")
    assert shares.to_pylist() == found["fig03_hbm_peak_shares"].rows.to_pylist()
    assert shares.schema.metadata[b"almanac.left_out"] == b'{"hbm_peak_mib: not known": 1}'
    text = (folder / "fig03_hbm_peak_shares.csv").read_text()
    assert text.splitlines()[0] == ",".join(shares.column_names)
    assert '"\'=HYPERLINK(""x"")",False,2.0,all,1,' in text
    write_tables(found, folder)


def test_a_folder_that_cannot_be_written_is_named(job: Any_, results: Any_, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/x"):
        write_tables(results([job()]), tmp_path / "file" / "x")


def test_the_documentation_names_every_table_and_column() -> None:
    page = (Path(__file__).parents[3] / "docs" / "characterize.md").read_text(encoding="utf-8")
    headline = characterize(population_of(pd.DataFrame()), Config())["headline"].table
    for table in (*TABLES, headline):
        assert table.name in page, table.name
        for column in table.schema.names:
            # The mean and the quantiles of a value stand there once, as the value.
            value = re.sub(r"^(mean|p\d+)_", "", column)
            assert f"`{column}`" in page or f"`{value}`" in page, f"{table.name}: {column}"
    assert all(f"`{name}`" in page for name in contents({}).column_names)


def test_only_columns_that_a_table_reads_are_copied(job: Any_) -> None:
    """A million jobs, with every column copied for every table, took 4.3 GB."""
    assert not {"coverage_frac", "flops_fp64", "nvlink_bytes", "pipes_used"} & set(POPULATION.names)
    jobs = population_of(pd.DataFrame([job(reasons=["energy_j: no energy counter"], idle_gpus=["n1:0"])])).jobs
    for table in TABLES:
        read = {*table.needs, *table.needs_any, *table.reads}
        assert set(select(jobs, table).jobs.columns) == read <= set(jobs.columns), table.name
    assert not any(isinstance(value, (list, np.ndarray)) for value in jobs.iloc[0])


def test_of_a_large_span_an_even_sample_is_drawn_the_same_each_time(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    jobs = [
        {"job_id": number, "submit_s": 1000, "start_s": 1000, "end_s": 2000, "gpu_count": 1 + number % 2}
        for number in range(4000)
    ]
    store.of("c").write("jobs", pa.Table.from_pylist(jobs, schema=SCHEMAS["jobs"].schema))
    assert len(load_population(store.of("c"))) == 4000
    assert len(load_population(store.of("c"), at_most=4000)) == 4000
    sample = load_population(store.of("c"), at_most=1000)
    assert 850 < len(sample) < 1150
    assert 0.4 < (sample.jobs["gpu_count"] == 1).mean() < 0.6
    assert sample.jobs.equals(load_population(store.of("c"), 1000, 1001, at_most=1000).jobs)
    assert len(load_population(store.of("c"), 1001, 2000, at_most=1000)) == 0


def test_tables_do_not_depend_on_how_many_jobs_are_read_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Store.create(tmp_path / "store").of("c")
    rng = np.random.default_rng(1)
    number = 5000
    keys = {"job_id": rng.permutation(number), "submit_s": np.full(number, 1000)}
    times = {"start_s": np.full(number, 1000), "end_s": rng.integers(1200, 10**5, number)}
    store.write("jobs", pa.table({**keys, **times, "gpu_count": rng.integers(1, 9, number)}))
    is_known = rng.random(number) < 0.7
    bins = [rng.integers(0, 9, 32).tolist() if known else None for known in is_known]
    metrics = {
        "verdict": np.where(rng.random(number) < 0.9, "ok", "short"),
        "reasons": [["energy_j: no energy counter"] if known else [] for known in is_known],
        "gpu_model": np.where(rng.random(number) < 0.5, "A100-40", "A100-80"),
        "hbm_capacity_mib": rng.uniform(0, 1, number),
        "has_profiling_fault": rng.random(number) < 0.1,
        "intensity_bins_fp64": bins,
        "mean_gpu_util_pct": rng.uniform(0, 100, number),
    }
    store.write("job_metrics", pa.table({**keys, **metrics}))
    at_once = characterize(load_population(store), Config())
    monkeypatch.setattr(study, "_JOBS_AT_ONCE", 2048)
    in_parts = characterize(load_population(store), Config())
    for name, result in at_once.items():
        assert result.rows.equals(in_parts[name].rows), name
        assert (result.jobs, result.left_out) == (in_parts[name].jobs, in_parts[name].left_out)
    is_used = is_known & (metrics["verdict"] == "ok") & ~metrics["has_profiling_fault"]
    counted = sum(sum(bins[place] or []) for place in np.flatnonzero(is_used))
    assert sum(at_once["fig04_intensity"].rows["samples"].to_pylist()) == counted > 0
    assert at_once["fig05_energy"].left_out["energy_j: no energy counter"] > 0


def test_more_jobs_than_the_memory_limit_allows_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Store.create(tmp_path / "store", memory_limit_mib=1300).of("c")
    jobs = [{"job_id": n, "submit_s": 1000, "start_s": 1000, "end_s": 2000, "gpu_count": 1} for n in range(5)]
    store.write("jobs", pa.Table.from_pylist(jobs))
    assert jobs_within(1300) > 1_000_000
    monkeypatch.setattr(study, "_BYTES_A_JOB", 2**28)
    assert jobs_within(1300) == 4
    with pytest.raises(
        StoreError, match=r"tables of 5 jobs take about 1,500 MiB .*memory_limit_mib \(1300\)"
    ) as caught:
        load_population(store)
    assert "choose a shorter span" in caught.value.hint
    assert len(load_population(store, at_most=4)) <= 5


PIPES = ("fp64", "fp32", "fp16", "tensor")
SITE = Config(tiers=(Tier(name="hbm80g", capacity_mib=81920, constraint="hbm80g"),))
SLOW = examples(0.05)


def some_jobs(seed: int, number: int) -> pa.Table:
    """Jobs of every kind: each metric missing in some, several verdicts, tiers and models."""
    rng = np.random.default_rng(seed)

    def real(high: float = 1.0, missing: float = 0.15) -> list[float | None]:
        return [None if rng.random() < missing else float(value) for value in rng.uniform(0, high, number)]

    def word(*words: str | None) -> list[str | None]:
        return [words[n] for n in rng.integers(0, len(words), number)]

    columns: dict[str, Any] = {
        name: real() for name in POPULATION.names if pa.types.is_floating(POPULATION.field(name).type)
    }
    columns |= {f"intensity_bins_{pipe}": [rng.integers(0, 9, 32).tolist() for _ in range(number)] for pipe in PIPES}
    columns |= {f"class_{pipe}": word("compute", "memory", None) for pipe in PIPES}
    columns |= {
        "job_id": rng.permutation(number).tolist(), "submit_s": [0] * number,
        "verdict": word("ok", "ok", "ok", "ok", "short", "idle"),
        "state": word("COMPLETED", "FAILED", "REQUEUED", None), "tier": word("hbm80g", "hbm40g", None),
        "gpu_model": word("A100-40", "A100-80", None), "job_class": word("compute", "memory", None),
        "main_pipe": word(*PIPES), "is_preallocated": [[True, False, None][n] for n in rng.integers(0, 3, number)],
        "idle_gpus": [[] for _ in range(number)], "gpu_count": rng.integers(1, 600, number).tolist(),
        "elapsed_s": rng.integers(180, 10**5, number).tolist(), "samples": rng.integers(1, 1000, number).tolist(),
        "mean_gpu_util_pct": real(100.0),
    }  # fmt: skip
    columns["gpus_seen"] = columns["gpu_count"]
    return pa.table([pa.array(columns.get(f.name, [None] * number), f.type) for f in POPULATION], schema=POPULATION)


@SLOW
@given(seed=st.integers(0, 1000), number=st.integers(1, 120))
def test_the_order_of_the_jobs_changes_nothing(seed: int, number: int) -> None:
    jobs = some_jobs(seed, number)
    shuffled = jobs.take(np.random.default_rng(seed + 1).permutation(number))
    once, again = characterize(population_of(jobs), SITE), characterize(population_of(shuffled.to_pandas()), SITE)
    for name, result in once.items():
        assert result.rows.equals(again[name].rows), name
        assert (result.jobs, result.left_out) == (again[name].jobs, again[name].left_out)


# Over which columns the shares of a table add up to 1, and the column in which they do.
WHOLE = {
    "fig01_job_size": ([], "share"),
    "fig02_pipe_mix": (["rule"], "share"),
    "fig03_hbm_peak": (["tier", "hbm_capacity_mib", "reserved"], "share"),
    "sec06_idle_gpus": (["gpu_count"], "share"),
    "fig04_intensity": (["pipe", "gpu_model"], "share"),
    "fig06_spatial_by_util": (["gpu_util_from_pct"], "share"),
    "fig07_temporal_by_util": (["gpu_util_from_pct"], "share"),
}


@SLOW
@given(seed=st.integers(0, 1000), number=st.integers(30, 150))
def test_shares_add_up_and_groups_hold_every_job(seed: int, number: int) -> None:
    found = characterize(population_of(some_jobs(seed, number)), SITE)
    for name, (keys, column) in WHOLE.items():
        frame = found[name].rows.to_pandas()
        totals = frame.assign(whole=0).groupby(["whole", *keys], dropna=False)[column].sum()
        assert totals.to_numpy() == pytest.approx(1.0, abs=1e-12), name
    for name in ("fig01_job_size", "fig01_duration", "fig03_hbm_peak", "fig06_spatial_shares", "fig10_heatmap"):
        assert sum(found[name].rows["jobs"].to_pylist()) == found[name].jobs, name
    classes = found["fig04_class_shares"].rows.to_pandas()
    assert (classes["compute_share"] + classes["memory_share"]).to_numpy() == pytest.approx(1.0)


@SLOW
@given(seed=st.integers(0, 1000), number=st.integers(40, 150))
def test_the_spearman_matrix_is_symmetric_with_ones_and_scipys_pair_by_pair(seed: int, number: int) -> None:
    jobs = some_jobs(seed, number)
    result = characterize(population_of(jobs), SITE)["fig11_spearman"]
    long = result.rows.to_pandas()
    matrix = long.pivot(index="counter_a", columns="counter_b", values="spearman")
    assert matrix.shape == (len(COUNTERS), len(COUNTERS))
    assert np.array_equal(matrix.to_numpy(), matrix.to_numpy().T)
    assert np.diag(matrix.to_numpy()) == pytest.approx(1.0)
    frame = jobs.to_pandas()
    frame = frame[(frame["verdict"] == "ok") & (frame["state"] != "REQUEUED")]
    for a, b in (("mean_gpu_util_pct", "energy_power_w"), ("mean_temp_c", "mean_power_w")):
        both = frame[[a, b]].dropna()
        (row,) = long[(long["counter_a"] == a) & (long["counter_b"] == b)].itertuples()
        assert row.jobs == len(both)
        assert row.spearman == pytest.approx(spearmanr(both[a], both[b]).statistic, abs=1e-12)
