"""A small generated site: its jobs are possible, its telemetry belongs to them, and it can be read in pieces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from ClusterShell.NodeSet import NodeSet

from almanac.names import name_key
from demo import (
    BENCH_COUNTERS,
    Faults,
    GeneratedSource,
    SitePlan,
    SiteShape,
    generate_jobs,
    jobs_table,
    plan_site,
    truth_table,
)
from demo.source import telemetry_by_hour
from telemetry.counters import COUNTERS
from telemetry.sources.source import Source
from telemetry.store.schema import JOBS, TELEMETRY

SMALL = SiteShape(
    seed=11, days=2, nodes_40=6, nodes_80=4, users=20, jobs_per_day=150, tier80_request_share=0.3, max_nodes=2,
    duration_scale=0.3, faults=Faults(0.0, 0.0, energy_reset_per_host_day=0.0),
)  # fmt: skip
KEY = ["host", "gpu", "mig", "time_ms"]


def hours_of(plan: SitePlan) -> list[pa.Table]:
    return [rows for _, rows in telemetry_by_hour(plan, plan.shape.start_s, plan.shape.end_s)]


def telemetry_of(plan: SitePlan) -> pa.Table:
    return pa.concat_tables(hours_of(plan))


@pytest.fixture(scope="module")
def plan():
    return plan_site(SMALL)


@pytest.fixture(scope="module")
def jobs(plan) -> pd.DataFrame:
    return jobs_table(plan).to_pandas()


@pytest.fixture(scope="module")
def hours(plan) -> list[pa.Table]:
    return hours_of(plan)


@pytest.fixture(scope="module")
def telemetry(hours) -> pa.Table:
    return pa.concat_tables(hours)


@pytest.fixture(scope="module")
def long_truth() -> pd.DataFrame:
    return truth_table(plan_site(replace(SMALL, days=20))).to_pandas()


@pytest.fixture(scope="module")
def samples(telemetry: pa.Table, jobs: pd.DataFrame) -> pd.DataFrame:
    """Samples with the job that held their host, by host and time."""
    held = jobs[jobs.start_s.notna()].copy()
    held["host"] = [list(NodeSet(text)) for text in held.node_list]
    held = held.explode("host")[["job_id", "host", "start_s", "end_s"]].astype({"start_s": "int64"})
    held["begin_ms"] = held.start_s * 1000
    rows = telemetry.drop_columns(["uuid", "model"]).to_pandas().sort_values("time_ms")
    return pd.merge_asof(rows, held.sort_values("begin_ms"), left_on="time_ms", right_on="begin_ms", by="host")


def test_same_shape_same_site(plan, telemetry: pa.Table) -> None:
    again = plan_site(SMALL)
    assert jobs_table(again).equals(jobs_table(plan))
    assert telemetry_of(again).equals(telemetry)


def test_jobs_have_the_schema_and_unique_keys(plan) -> None:
    table = jobs_table(plan)
    assert table.schema.equals(JOBS, check_metadata=True)
    frame = table.to_pandas()
    assert not frame.duplicated(["job_id", "submit_s"]).any()
    assert frame.submit_s.is_monotonic_increasing


def test_no_node_is_held_twice(jobs: pd.DataFrame) -> None:
    held = jobs[jobs.start_s.notna()].copy()
    held["host"] = [list(NodeSet(text)) for text in held.node_list]
    assert (held.host.str.len() == held.node_count).all()
    held = held.explode("host").sort_values(["host", "start_s"])
    before = held.groupby("host").end_s.shift()
    assert not (held.start_s < before).any()


def test_times_of_jobs_are_possible(jobs: pd.DataFrame) -> None:
    started = jobs[jobs.start_s.notna()]
    assert (started.start_s > started.submit_s).all()
    ended = started[started.end_s.notna()]
    assert (ended.end_s - ended.start_s == ended.elapsed_s).all()
    assert (ended.elapsed_s <= ended.time_limit_s + 60).all()
    assert (jobs[jobs.state == "TIMEOUT"].elapsed_s >= jobs[jobs.state == "TIMEOUT"].time_limit_s).all()


def test_every_ending_occurs_and_a_requeued_job_keeps_its_id() -> None:
    frame = generate_jobs(replace(SMALL, days=8)).to_pandas()
    assert {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"} <= set(frame.state)
    never_started = frame[frame.start_s.isna()]
    assert set(never_started.state) <= {"CANCELLED", "PENDING"}
    assert never_started.node_list.isna().all()
    again = frame[frame.restarts == 1]
    first = frame[frame.restarts == 0].merge(again, on="job_id")
    assert len(first) == len(again) > 0
    assert set(first.state_x) == {"NODE_FAIL"}
    assert (first.end_s_x == first.submit_s_y).all()


def test_requests_for_a_tier_run_there(jobs: pd.DataFrame) -> None:
    started = jobs[jobs.start_s.notna()]
    is_large = started.node_list.str.contains("nid008|\\[008")
    assert is_large[started.tier == "hbm80g"].all()
    assert not is_large[started.tier == "hbm40g"].any()
    unasked = is_large[started.tier.isna()]
    assert 0 < unasked.mean() < 1
    assert set(started.constraints) == {"gpu", "gpu&hbm40g", "gpu&hbm80g"}


def test_job_table_as_of_an_earlier_time(plan, jobs: pd.DataFrame) -> None:
    longest = jobs.loc[jobs.elapsed_s.idxmax()]
    now_s = int(longest.start_s + longest.elapsed_s / 2)
    frame = jobs_table(plan, now_s).to_pandas()
    assert (frame.submit_s < now_s).all()
    running = frame[frame.state == "RUNNING"]
    assert len(running)
    assert running.end_s.isna().all()
    assert (running.elapsed_s == now_s - running.start_s).all()
    assert (frame.end_s.dropna() <= now_s).all()


def test_names_of_a_family_vary_but_most_share_a_key(jobs: pd.DataFrame, plan) -> None:
    truth = truth_table(plan).to_pandas().merge(jobs, on=["job_id", "submit_s"])
    assert (truth.name_key == [name_key(name) for name in truth.name]).all()
    large = truth.groupby("family").filter(lambda rows: len(rows) >= 10)
    most_common = large.groupby("family").name_key.agg(lambda keys: keys.value_counts(normalize=True).iloc[0])
    assert most_common.median() > 0.6
    assert large.groupby("family").name.nunique().max() > 10


def test_array_tasks_share_an_array_id_and_a_submission(jobs: pd.DataFrame) -> None:
    tasks = jobs[jobs.array_job_id.notna()]
    assert len(tasks)
    groups = tasks.groupby("array_job_id")
    assert (groups.submit_s.nunique() == 1).all()
    assert not tasks.duplicated(["array_job_id", "array_task_id"]).any()


def test_run_times_repeat_within_a_family(long_truth: pd.DataFrame) -> None:
    """The spread of the logarithm within families is much smaller than over all jobs: history predicts."""
    truth = long_truth[long_truth.is_started & (long_truth.run_s > 0)]
    log_s = np.log(truth.run_s)
    within = (log_s - log_s.groupby(truth.family).transform("median")).abs().median()
    overall = (log_s - log_s.median()).abs().median()
    assert within < 0.6 * overall


def test_hours_hold_their_own_rows_in_order_without_duplicates(hours: list[pa.Table]) -> None:
    for hour, table in enumerate(hours):
        assert table.schema.equals(TELEMETRY, check_metadata=True)
        assert table.sort_by([(name, "ascending") for name in KEY]).equals(table)
        assert len(table.group_by(KEY).aggregate([])) == len(table)
        if len(table):
            times_s = table["time_ms"].to_numpy() // 1000 - SMALL.start_s
            assert times_s.min() >= hour * 3600
            assert times_s.max() < (hour + 1) * 3600


def test_every_sample_falls_into_a_job(samples: pd.DataFrame) -> None:
    assert samples.job_id.notna().all()
    ended = samples[samples.end_s.notna()]
    assert (ended.time_ms < ended.end_s * 1000).all()


def test_no_sample_of_a_job_is_missing_without_faults(samples: pd.DataFrame, jobs: pd.DataFrame) -> None:
    counts = samples.groupby("job_id").size()
    done = jobs[jobs.start_s.notna() & (jobs.restarts == 0) & ~jobs.job_id.duplicated(keep=False)].set_index("job_id")
    expected = done.elapsed_s / SMALL.interval_s * done.gpu_count
    difference = (counts.reindex(expected.index).fillna(0) - expected).abs()
    assert (difference <= done.gpu_count).all()


def test_counters_stay_within_their_limits(telemetry: pa.Table) -> None:
    for counter in COUNTERS:
        values = telemetry[counter.column].to_numpy()
        assert not np.isnan(values).any()
        assert values.min() >= counter.low
        assert values.max() <= counter.high
    assert telemetry["power_w"].to_numpy().max() <= 400


def test_peaks_in_telemetry_are_those_of_the_truth(samples: pd.DataFrame, plan) -> None:
    truth = truth_table(plan).to_pandas()
    truth = truth[truth.is_started & (truth.run_s >= 300) & (truth.role == 0)].drop_duplicates("job_id", keep=False)
    peaks = samples.groupby("job_id").hbm_used_mib.max()
    both = truth.set_index("job_id").join(peaks, how="inner")
    both = both[both.need_mib <= both.capacity_mib]
    relative = both.hbm_used_mib / both.hbm_peak_mib
    assert len(both) > 100
    assert relative.max() < 1.001
    assert (relative > 0.99).mean() > 0.97


def test_preallocated_memory_is_flat_from_the_first_sample_on(samples: pd.DataFrame, plan) -> None:
    truth = truth_table(plan).to_pandas()
    held = truth[(truth.framework >= 0) & truth.is_started & (truth.role == 0)].drop_duplicates("job_id", keep=False)
    rows = samples[samples.job_id.isin(held.job_id)]
    assert rows.job_id.nunique() > 5
    share = rows.hbm_used_mib.astype(float) / rows.hbm_total_mib
    assert set(share.round(3).unique()) <= {0.75, 0.92}
    assert (held.need_mib < 0.7 * held.capacity_mib).all()


def test_a_job_that_needs_more_than_its_gpu_fails_near_capacity() -> None:
    plan = plan_site(replace(SMALL, days=12))
    truth = truth_table(plan).to_pandas()
    starved = truth[(truth.need_mib > truth.capacity_mib) & (truth.framework < 0) & truth.is_started]
    assert len(starved)
    frame = jobs_table(plan).to_pandas().merge(starved, on=["job_id", "submit_s"])
    ended = frame[frame.end_s.notna()]
    assert set(ended.state) <= {"FAILED", "NODE_FAIL"}
    assert (ended.elapsed_s <= 900).all()
    assert np.allclose(starved.hbm_peak_mib, 0.985 * 40960)


def test_energy_is_the_integral_of_power(telemetry: pa.Table) -> None:
    rows = telemetry.select([*KEY, "power_w", "energy_mj"]).to_pandas().sort_values(KEY)
    step_s = rows.groupby(["host", "gpu"]).time_ms.diff() / 1000
    energy_j = rows.groupby(["host", "gpu"]).energy_mj.diff() / 1000
    assert (energy_j.dropna() > 0).all()
    steady = (step_s == SMALL.interval_s) & (rows.power_w > 70)
    inside = energy_j[steady] / (rows.power_w[steady] * SMALL.interval_s)
    assert inside.quantile(0.01) == pytest.approx(1, abs=1e-3)
    ends = rows.groupby(["host", "gpu"])[["energy_mj", "time_ms"]].agg(["first", "last"])
    mean_w = (ends.energy_mj["last"] - ends.energy_mj["first"]) / (ends.time_ms["last"] - ends.time_ms["first"])
    assert mean_w.between(45, 400).all()


def test_energy_may_start_again() -> None:
    table = telemetry_of(plan_site(replace(SMALL, faults=Faults(0.0, 0.0, energy_reset_per_host_day=3.0))))
    rows = table.select([*KEY, "energy_mj"]).to_pandas().sort_values(KEY)
    assert (rows.groupby(["host", "gpu"]).energy_mj.diff() < 0).sum() >= 4
    assert rows.energy_mj.min() >= 0


def test_reading_in_pieces_gives_the_same_rows(telemetry: pa.Table) -> None:
    source: Source = GeneratedSource(SMALL)
    assert source.name == "generated"
    middle_s = SMALL.start_s + 86_400 + 1234
    pieces = []
    for since_s, until_s in ((SMALL.start_s, middle_s), (middle_s, SMALL.end_s + 99)):
        batches = list(source.read(since_s, until_s))
        assert batches[0].table == "jobs"
        assert all(b.counts.seen == b.counts.kept == len(b.rows) for b in batches)
        assert batches[-1].watermark_s == min(until_s, SMALL.end_s)
        pieces += [b.rows for b in batches if b.table == "telemetry"]
    whole = pa.concat_tables(pieces)
    order = [(name, "ascending") for name in ("host", "gpu", "time_ms")]
    assert whole.sort_by(order).equals(telemetry.sort_by(order))


def test_later_reading_brings_the_jobs_that_ended_since(jobs: pd.DataFrame) -> None:
    since_s = SMALL.start_s + 86_400
    batch = next(iter(GeneratedSource(SMALL).read(since_s, SMALL.end_s)))
    expected = jobs[jobs.end_s.isna() | (jobs.end_s >= since_s)]
    assert batch.rows["job_id"].to_pylist() == expected.job_id.to_list()


def test_missing_scrapes_lose_whole_hosts(plan, telemetry: pa.Table) -> None:
    shape = replace(SMALL, faults=replace(SMALL.faults, missing_share=0.05, outage_per_host_hour=0.02))
    table = telemetry_of(plan_site(shape))
    assert 0.90 < len(table) / len(telemetry) < 0.97
    counts = table.group_by(["host", "time_ms"]).aggregate([("gpu", "count")])
    assert set(counts["gpu_count"].to_pylist()) == {4}


def test_failed_profiling_reads_zero_while_the_gpu_is_busy() -> None:
    shape = replace(SMALL, faults=replace(SMALL.faults, prof_fault_share=1.0))
    table = telemetry_of(plan_site(shape))
    busy = table["gpu_util_pct"].to_numpy() > 20
    assert busy.any()
    for name in ("sm_active_frac", "gr_engine_active_frac", "dram_active_frac", "tensor_active_frac"):
        assert table[name].to_numpy().max() == 0


def test_only_wanted_counters_are_filled() -> None:
    shape = replace(SMALL, days=0.2, counters=BENCH_COUNTERS)
    table = telemetry_of(plan_site(shape))
    assert len(BENCH_COUNTERS) == 13
    for counter in COUNTERS:
        nulls = table[counter.column].null_count
        assert nulls == (0 if counter.column in BENCH_COUNTERS else len(table))


def test_demo_is_as_large_as_it_says() -> None:
    plan = plan_site(SiteShape.demo())
    truth = truth_table(plan).to_pandas()
    rows = (truth.run_s / 10 * truth.gpus)[truth.is_started].sum()
    assert 2.5e6 < rows < 4e6
    assert 4_000 <= len(truth) <= 6_000
    assert (truth.tier == "hbm80g").mean() == pytest.approx(0.25, abs=0.03)
