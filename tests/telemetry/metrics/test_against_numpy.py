"""The engine agrees with an independent implementation, on faulty data and real counters, in any order."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import telemetry.metrics.partials
from telemetry.attribution.allocations import JobRun
from telemetry.sources.files import FileSource

START_S = 1_741_046_400 - 3_000  # fifty minutes before midnight UTC
SPAN_S = 3 * 3600
FRACTIONS = [f"{name}_active_frac" for name in ("gr_engine", "sm", "fp64", "fp32", "fp16", "tensor", "dram")]
RATES = ["nvlink_tx_bytes_s", "nvlink_rx_bytes_s", "pcie_tx_bytes_s", "pcie_rx_bytes_s"]


def gpu_rows(rng: np.random.Generator, host: str, gpu: int) -> pd.DataFrame:
    """One GPU's samples every 10 s across midnight: idle spells, gaps, nulls, a reset of the energy counter."""
    times = START_S * 1000 + np.arange(0, SPAN_S * 1000, 10_000) + int(rng.integers(0, 9_000))
    number = len(times)
    busy = rng.random(number) > 0.3
    frame = pd.DataFrame({"host": host, "gpu": gpu, "mig": "", "time_ms": times})
    frame["gpu_util_pct"] = np.round(rng.uniform(0, 100, number) * busy).astype("f4")
    for name in FRACTIONS:
        frame[name] = (np.round(rng.beta(0.4, 2, number), 3) * (rng.random(number) > 0.2)).astype("f4")
    for name in RATES:
        frame[name] = np.round(rng.lognormal(18, 3, number))
    frame["hbm_used_mib"] = np.round(np.abs(np.cumsum(rng.normal(0, 300, number)))).astype("f4")
    frame["power_w"] = rng.uniform(50, 400, number).astype("f4")
    frame["temp_c"] = np.round(rng.normal(50, 9, number)).astype("f4")
    energy = np.cumsum(np.round(rng.uniform(5e5, 4e6, number))) + 3e11
    reset = int(rng.integers(10, number))
    energy[reset:] -= energy[reset] - 1000 if gpu % 2 else 0
    frame["energy_mj"] = energy
    for name in [*FRACTIONS, *RATES, "gpu_util_pct", "hbm_used_mib", "energy_mj"]:
        frame.loc[rng.random(number) < 0.03, name] = np.nan
    # A clock that falls while the pipes work: the mean of the products is not the product of the means.
    other, busy = np.random.default_rng(gpu), frame["tensor_active_frac"].fillna(0)
    frame["sm_clock_mhz"] = np.round(1410 - 600 * other.random(number) * busy).astype("f4")
    frame.loc[other.random(number) < 0.03, "sm_clock_mhz"] = np.nan
    return frame[rng.random(number) > 0.05]


@pytest.fixture(scope="module")
def site() -> tuple[pd.DataFrame, list[JobRun]]:
    """Two nodes; n1 runs one job across midnight and two more back to back, n2 belongs to a two-node job at times."""
    rng = np.random.default_rng(7)
    hosts = [(host, gpu) for host in ("n1", "n2") for gpu in range(4)]
    frame = pd.concat([gpu_rows(rng, host, gpu) for host, gpu in hosts], ignore_index=True)
    frame.loc[(frame.host == "n2") & (frame.gpu == 3), ["gpu_util_pct", *FRACTIONS[:2]]] = np.float32(0)
    cuts = [START_S, START_S + 5003, START_S + 5004, START_S + 9001, START_S + SPAN_S]
    jobs = [
        JobRun(1, cuts[0], cuts[0], cuts[1], 4, ("n1",)),
        JobRun(2, cuts[0], cuts[0], cuts[1], 4, ("n2",)),
        JobRun(3, cuts[2], cuts[2], cuts[3], 8, ("n1", "n2")),
        JobRun(4, cuts[3], cuts[3], cuts[4], 4, ("n1",)),
        JobRun(5, cuts[3], cuts[3], cuts[3] + 60, 4, ("n2",)),
    ]
    return frame, jobs


def assert_same(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    for name, value in expected.items():
        mine = found[name]
        if isinstance(value, float) and math.isnan(value):
            assert mine is None, (where, name, mine)
        elif isinstance(value, float):
            scale = 1e4 if name == "hbm_growth_mib_h" else 1.0  # a difference of large sums
            assert mine == pytest.approx(value, rel=1e-12, abs=scale * 1e-12), (where, name)
        else:
            assert mine == value, (where, name)


@pytest.mark.parametrize("stored", [True, False], ids=["store", "two unsorted files"])
def test_every_metric_agrees_to_1e_12(run: Any, site: tuple[pd.DataFrame, list[JobRun]], stored: bool) -> None:
    from numpy_reference import job_metrics

    frame, jobs = site
    given = frame if stored else frame.sample(frac=1.0, random_state=3)
    rows, _ = run(given, jobs, stored=stored)
    for job in jobs:
        units = [(host, gpu, "") for host in job.hosts for gpu in range(4)]
        expected = job_metrics(frame, job.start_s, job.end_s, units)
        assert_same(rows[job.job_id], expected, f"job {job.job_id}")


def test_the_number_of_threads_changes_nothing_beyond_1e_12(run: Any, site: tuple[pd.DataFrame, list[JobRun]]) -> None:
    one, _ = run(*site, threads=1)
    four, _ = run(*site, threads=4)
    for job_id, row in one.items():
        assert_same(four[job_id], {name: value for name, value in row.items() if value is not None}, f"job {job_id}")


LAWS_START_S = 1_741_046_400 - 1200
QUICK = examples(0.03)
COUNTERS = ("gpu_util_pct", "hbm_used_mib", "fp64_active_frac", "tensor_active_frac", "dram_active_frac", "energy_mj")
IGNORED = {"idle_gpus", "hbm_peak_ms"}


def draw_site(seed: int, step_ms: int = 10_000, number: int = 240) -> tuple[pd.DataFrame, JobRun]:
    """Two nodes of two GPUs around midnight."""
    rng = np.random.default_rng(seed)
    frames = []
    for host in ("n1", "n2"):
        for gpu in range(2):
            frame = pd.DataFrame(
                {"host": host, "gpu": gpu, "mig": "", "time_ms": LAWS_START_S * 1000 + step_ms * np.arange(number)}
            )
            for name in COUNTERS:
                frame[name] = np.round(rng.beta(0.3, 1, number), 3).astype("f4").astype("f8")
            frame["gpu_util_pct"] = np.round(100 * frame["gpu_util_pct"])
            frame["energy_mj"] = np.cumsum(np.round(1e6 * frame["energy_mj"]))
            frames.append(frame[rng.random(number) > 0.1])
    length_s = number * step_ms // 1000
    return pd.concat(frames, ignore_index=True), JobRun(
        1, LAWS_START_S, LAWS_START_S, LAWS_START_S + length_s, 4, ("n1", "n2")
    )


def assert_close(one: dict[str, Any], other: dict[str, Any], only: tuple[str, ...] = ()) -> None:
    for name in only or set(one) - IGNORED:
        if isinstance(one[name], float):
            assert other[name] == pytest.approx(one[name], rel=1e-12, abs=1e-9 if "growth" in name else 1e-12), name
        else:
            assert other[name] == one[name], name


@given(seed=st.integers(0, 10**6))
@QUICK
def test_order_repeated_rows_numbers_names_and_splits_change_nothing(run: Any, seed: int) -> None:
    """Rows in another order and twice, GPUs and hosts renamed, and days that are cut into hours or not at all."""
    frame, job = draw_site(seed)
    expected = run(frame, [job])[0][1]
    shuffled = pd.concat([frame, frame.sample(frac=0.2, random_state=seed)]).sample(frac=1.0, random_state=seed)
    permuted = frame.assign(gpu=1 - frame.gpu, host=frame.host.map({"n1": "z", "n2": "a"}))
    moved = JobRun(1, job.submit_s, job.start_s, job.end_s, 4, ("a", "z"))
    assert_close(expected, run(shuffled, [job], stored=False)[0][1])
    assert_close(expected, run(permuted, [moved])[0][1])
    assert_close(expected, run(frame, [job], stored=False)[0][1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry.metrics.partials, "ROWS_PER_CHUNK", 1)
        assert_close(expected, run(frame, [job])[0][1])


@given(seed=st.integers(0, 10**6))
@QUICK
def test_of_conflicting_samples_the_greatest_count_in_the_store_and_in_unsorted_files(run: Any, seed: int) -> None:
    frame, job = draw_site(seed)
    rng = np.random.default_rng(seed)
    wrong = frame.sample(frac=0.3, random_state=seed)
    for name in COUNTERS:
        wrong[name] *= rng.choice([0.5, 1.0, 1.5, np.nan], len(wrong))
    both = pd.concat([frame, wrong])
    expected = run(both.groupby(["host", "gpu", "mig", "time_ms"], as_index=False).max(), [job])[0][1]
    for order, stored in ((both[::-1], True), (both, False), (both.sample(frac=1.0, random_state=seed), False)):
        assert_close(expected, run(order, [job], stored=stored)[0][1])


# First and last second of run e2 (mixed traffic: GPUs 0-3 nearly idle, some counters null).
H100_START_S, END_S = 1775088787, 1775089096
PEAKS = {"fp64": 33.5e12, "fp32": 66.9e12, "fp16": 133.8e12, "tensor": 989.4e12}


@pytest.fixture(scope="module")
def frame(trace: Callable[[str], Path]) -> pd.DataFrame:
    batches = FileSource(trace("h100_dcgm_10hz.parquet"), "telemetry", None).read(H100_START_S, END_S)
    return pa.concat_tables(batch.rows for batch in batches).to_pandas()


@pytest.mark.data
def test_every_metric_of_a_real_run_agrees_to_1e_12(
    run: Any, frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy_reference

    monkeypatch.setattr(numpy_reference, "PEAKS", PEAKS)
    monkeypatch.setattr(numpy_reference, "BANDWIDTH", 3.35e12)
    rows, gpus = run(frame, [JobRun(1, H100_START_S, H100_START_S, END_S, 8, ("node0",))])
    unknown = ("fp64", "fp32", "gr_engine")  # all-null columns are objects in pandas
    given = frame.assign(**{f"{name}_active_frac": np.nan for name in unknown})
    intervals_ms = {("node0", row["gpu"], ""): 1000 * (END_S - H100_START_S) / row["expected_samples"] for row in gpus}
    units = list(intervals_ms)
    expected = numpy_reference.job_metrics(given, H100_START_S, END_S, units, intervals_ms=intervals_ms)
    for pipe in ("fp64", "fp32"):  # the engine says null, the reference an empty sum
        assert rows[1][f"flops_{pipe}"] is None and rows[1][f"intensity_bins_{pipe}"] is None
        del expected[f"flops_{pipe}"], expected[f"intensity_bins_{pipe}"], expected[f"intensity_{pipe}"]
    assert_same(rows[1], expected, "e2")
