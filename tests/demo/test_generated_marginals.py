"""The generated site against the published numbers of Cankur et al., measured from its rows and job table.

Nothing here looks into the plan: samples are joined to jobs by host and time as on a real site. Scrapes are three
minutes apart instead of ten seconds, so that 20,000 jobs are measured in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
from ClusterShell.NodeSet import NodeSet

from demo import Faults, SiteShape, jobs_table, plan_site
from demo.source import telemetry_by_hour

PIPES = ["fp64_active_frac", "fp32_active_frac", "fp16_active_frac", "tensor_active_frac"]
COUNTERS = ("gpu_util_pct", "hbm_used_mib", "power_w", "dram_active_frac", *PIPES)
TOLERANCE = 0.03  # 3 percentage points


@dataclass
class _Sums:
    """Running sums over samples, per GPU of a job (unit) and per job."""

    count: np.ndarray
    total: dict[str, np.ndarray]
    highest: dict[str, np.ndarray]
    compute: np.ndarray
    memory: np.ndarray


def _measure(jobs: pd.DataFrame, tables) -> pd.DataFrame:
    """Job means of each counter, HBM peak, idle GPUs and the majority class of the samples."""
    held = jobs[jobs.node_list.notna()].explode("hosts")
    held["host_number"] = held.hosts.str[3:].astype(int)
    held = held.sort_values(["host_number", "start_s"])
    start_key = held.host_number.to_numpy() * 10**10 + held.start_s.to_numpy()
    units = len(held) * 4
    sums = _Sums(
        np.zeros(units),
        {name: np.zeros(units) for name in COUNTERS},
        {name: np.zeros(units) for name in ("gpu_util_pct", "hbm_used_mib")},
        np.zeros(len(held)),
        np.zeros(len(held)),
    )
    for table in tables:
        _add(sums, table, start_key)
    return _per_job(held, sums)


def _add(sums: _Sums, table, start_key: np.ndarray) -> None:
    hosts = table["host"].combine_chunks().dictionary_encode()
    numbers = np.array([int(host[3:]) for host in hosts.dictionary.to_pylist()], dtype=np.int64)
    if not len(numbers):
        return
    key = numbers[hosts.indices.to_numpy()] * 10**10 + table["time_ms"].to_numpy() // 1000
    place = np.searchsorted(start_key, key, side="right") - 1
    unit = place * 4 + table["gpu"].to_numpy()
    values = {name: table[name].to_numpy().astype(float) for name in COUNTERS}
    sums.count += np.bincount(unit, minlength=len(sums.count))
    for name in COUNTERS:
        sums.total[name] += np.bincount(unit, values[name], minlength=len(sums.count))
    for name, highest in sums.highest.items():
        np.maximum.at(highest, unit, values[name])
    kept = sum(values[name] for name in PIPES) > 0
    is_compute = values["fp64_active_frac"] > values["dram_active_frac"]
    sums.compute += np.bincount(place[kept & is_compute], minlength=len(sums.compute))
    sums.memory += np.bincount(place[kept & ~is_compute], minlength=len(sums.memory))


def _per_job(held: pd.DataFrame, sums: _Sums) -> pd.DataFrame:
    gpus = pd.DataFrame({name: total / np.maximum(sums.count, 1) for name, total in sums.total.items()})
    gpus["peak_mib"] = sums.highest["hbm_used_mib"]
    gpus["is_never_used"] = sums.highest["gpu_util_pct"] == 0
    keys = held[["job_id", "submit_s"]].reset_index(drop=True)
    for column in keys:
        gpus[column] = np.repeat(keys[column].to_numpy(), 4)
    by = ["job_id", "submit_s"]
    rules = dict.fromkeys(COUNTERS, "mean") | {"peak_mib": "max", "is_never_used": "sum"}
    per_job = gpus.groupby(by).agg(rules)
    classes = keys.assign(compute=sums.compute, memory=sums.memory).groupby(by).sum()
    return per_job.join(classes)


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    """The jobs that the paper's filters leave (II-C), with their telemetry."""
    shape = SiteShape(seed=5, days=20_000 / 700, interval_s=180, counters=COUNTERS, faults=Faults(0.0, 0.0))
    plan = plan_site(shape)
    jobs = jobs_table(plan).to_pandas()
    jobs["hosts"] = [list(NodeSet(text)) if isinstance(text, str) else [] for text in jobs.node_list]
    hours = (rows for _, rows in telemetry_by_hour(plan, shape.start_s, shape.end_s))
    table = jobs.set_index(["job_id", "submit_s"]).join(_measure(jobs, hours))
    ended = table[table.end_s.notna() & table.start_s.notna()]
    return ended[(ended.elapsed_s >= 180) & (ended.account != "nstaff") & (ended.gpu_util_pct >= 1)]


@pytest.fixture(scope="module")
def four_gpu_jobs(measured: pd.DataFrame) -> pd.DataFrame:
    return measured[measured.gpu_count == 4]


def test_there_are_about_20000_jobs(measured: pd.DataFrame) -> None:
    assert 17_000 < len(measured) < 20_000


def test_85_percent_of_jobs_take_one_node_and_larger_bins_fall(measured: pd.DataFrame) -> None:
    edges = [0, 4, 8, 16, 32, 512, 10_000]
    shares = pd.cut(measured.gpu_count, edges).value_counts(normalize=True, sort=False).to_list()
    assert shares[0] == pytest.approx(0.85, abs=TOLERANCE)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] > 0


def test_run_times(measured: pd.DataFrame) -> None:
    one_node = measured[measured.node_count == 1].elapsed_s
    several = measured[measured.node_count > 1].elapsed_s
    assert one_node.mean() / 60 == pytest.approx(55, abs=4)
    assert several.mean() / 3600 == pytest.approx(2, abs=0.15)
    assert measured.elapsed_s.max() <= 48 * 3600


@pytest.mark.parametrize(
    ("low", "high", "median_pct", "within"), [(1, 4, 38, 2), (5, 8, 45, 4), (33, 512, 47.5, 6), (513, 10_000, 20, 8)]
)
def test_medians_of_utilization_by_size(
    measured: pd.DataFrame, low: int, high: int, median_pct: float, within: float
) -> None:
    """The bins of larger jobs hold few families, so their medians vary more from seed to seed."""
    members = measured[measured.gpu_count.between(low, high)]
    assert members.gpu_util_pct.median() == pytest.approx(median_pct, abs=within)


def test_bands_of_utilization(measured: pd.DataFrame) -> None:
    shares = pd.cut(measured.gpu_util_pct, [0, 30, 70, 101]).value_counts(normalize=True, sort=False)
    assert shares.to_list() == pytest.approx([0.39, 0.50, 0.11], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("pipes", "share"),
    [({"fp64"}, 0.44), ({"fp64", "tensor"}, 0.18), ({"fp32"}, 0.06), ({"fp32", "tensor"}, 0.04), ({"tensor"}, 0.06)],
)  # fmt: skip
def test_combinations_of_pipes(measured: pd.DataFrame, pipes: set[str], share: float) -> None:
    is_match = pd.Series(True, index=measured.index)
    for name in PIPES:
        is_match &= (measured[name] > 0.005) == (name.removesuffix("_active_frac") in pipes)
    assert is_match.mean() == pytest.approx(share, abs=TOLERANCE)


def test_fp16_is_very_rare_but_there(measured: pd.DataFrame) -> None:
    assert 0 < (measured.fp16_active_frac > 0.005).mean() < 0.01


def test_81_percent_are_memory_bound(measured: pd.DataFrame) -> None:
    classed = measured[measured.compute + measured.memory > 0]
    assert (classed.memory >= classed.compute).mean() == pytest.approx(0.81, abs=TOLERANCE)


def test_jobs_cross_the_ridge_for_a_while(measured: pd.DataFrame) -> None:
    """The paper's jobs are classed by majority: 88% of the samples are memory-bound, but 81% of the jobs."""
    classed = measured[(measured.compute + measured.memory > 66) & (measured.memory > measured.compute)]
    share = classed.memory / (classed.memory + classed.compute)
    assert (share < 1).mean() > 0.2
    assert 0.9 < share.mean() < 0.98


def test_power_follows_utilization_no_closer_than_published(measured: pd.DataFrame) -> None:
    assert measured.gpu_util_pct.corr(measured.power_w, method="spearman") == pytest.approx(0.78, abs=0.08)


def test_12_percent_of_four_gpu_jobs_never_use_three_gpus(four_gpu_jobs: pd.DataFrame) -> None:
    assert (four_gpu_jobs.is_never_used == 3).mean() == pytest.approx(0.12, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("least", "most", "share"), [(0, 0.2, 0.12), (0, 0.5, 0.55), (0.8, 1.01, 0.20), (0.9, 1.01, 0.17)]
)
def test_hbm_peaks_of_80_gb_requests(measured: pd.DataFrame, least: float, most: float, share: float) -> None:
    asked = measured[measured.constraints == "gpu&hbm80g"]
    peak = asked.peak_mib / 81920
    assert ((peak >= least) & (peak < most)).mean() == pytest.approx(share, abs=TOLERANCE)


def test_80_gb_requests_are_four_percent(measured: pd.DataFrame) -> None:
    assert (measured.tier == "hbm80g").mean() == pytest.approx(2947 / 75703, abs=0.01)
