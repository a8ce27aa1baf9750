"""What must not change a metric: the order of GPUs and rows, the files, the days, and the speed of time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import telemetry.metrics.chunks
from telemetry.attribution.allocations import JobRun

START_S = 1_741_046_400 - 1200
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
                {"host": host, "gpu": gpu, "mig": "", "time_ms": START_S * 1000 + step_ms * np.arange(number)}
            )
            for name in COUNTERS:
                frame[name] = np.round(rng.beta(0.3, 1, number), 3).astype("f4").astype("f8")
            frame["gpu_util_pct"] = np.round(100 * frame["gpu_util_pct"])
            frame["energy_mj"] = np.cumsum(np.round(1e6 * frame["energy_mj"]))
            frames.append(frame[rng.random(number) > 0.1])
    length_s = number * step_ms // 1000
    return pd.concat(frames, ignore_index=True), JobRun(1, START_S, START_S, START_S + length_s, 4, ("n1", "n2"))


def assert_close(one: dict[str, Any], other: dict[str, Any], only: tuple[str, ...] = ()) -> None:
    for name in only or set(one) - IGNORED:
        if isinstance(one[name], float):
            assert other[name] == pytest.approx(one[name], rel=1e-12, abs=1e-9 if "growth" in name else 1e-12), name
        else:
            assert other[name] == one[name], name


@given(seed=st.integers(0, 10**6))
@QUICK
def test_the_order_of_rows_and_repeated_rows_change_nothing(run: Any, seed: int) -> None:
    frame, job = draw_site(seed)
    shuffled = pd.concat([frame, frame.sample(frac=0.2, random_state=seed)]).sample(frac=1.0, random_state=seed)
    assert_close(run(frame, [job])[0][1], run(shuffled, [job], stored=False)[0][1])


@given(seed=st.integers(0, 10**6))
@QUICK
def test_of_conflicting_samples_the_greatest_count_in_the_store_and_in_unsorted_files(run: Any, seed: int) -> None:
    frame, job = draw_site(seed)
    rng = np.random.default_rng(seed)
    wrong = frame.sample(frac=0.3, random_state=seed)
    for name in COUNTERS:
        wrong[name] *= rng.choice([0.5, 1.0, 1.5, np.nan], len(wrong))
    both = pd.concat([frame, wrong])
    expected = both.groupby(["host", "gpu", "mig", "time_ms"], as_index=False).max()
    for order in (both, both[::-1], both.sample(frac=1.0, random_state=seed)):
        for stored in (True, False):
            assert_close(run(expected, [job])[0][1], run(order, [job], stored=stored)[0][1])


@given(seed=st.integers(0, 10**6))
@QUICK
def test_renumbering_gpus_and_renaming_hosts_change_nothing(run: Any, seed: int) -> None:
    frame, job = draw_site(seed)
    permuted = frame.assign(gpu=1 - frame.gpu, host=frame.host.map({"n1": "z", "n2": "a"}))
    moved = JobRun(1, job.submit_s, job.start_s, job.end_s, 4, ("a", "z"))
    assert_close(run(frame, [job])[0][1], run(permuted, [moved])[0][1])


@given(seed=st.integers(0, 10**6))
@QUICK
def test_splitting_into_days_hours_or_not_at_all_and_merging_is_the_same(run: Any, seed: int) -> None:
    frame, job = draw_site(seed)
    by_day = run(frame, [job])[0][1]
    whole = run(frame, [job], stored=False)[0][1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry.metrics.chunks, "ROWS_PER_CHUNK", 1)
        by_hour = run(frame, [job])[0][1]
    assert_close(by_day, whole)
    assert_close(by_day, by_hour)


@given(seed=st.integers(0, 10**6))
@QUICK
def test_scaling_time_changes_no_imbalance_and_no_share(run: Any, seed: int) -> None:
    """Windows scale with time: 60 s of a sample every 10 s become 120 s of one every 20 s. All within an hour."""
    from telemetry.metrics.options import Options

    same = ("temporal_imbalance", "spatial_imbalance", "compute_frac_fp64", "class_tensor", "mean_gpu_util_pct")
    frame, job = draw_site(seed, number=60)
    slow = frame.assign(time_ms=START_S * 1000 + (frame.time_ms - START_S * 1000) * 2)
    slow_job = JobRun(1, job.submit_s, job.start_s, job.start_s + 2 * job.elapsed_s, 4, job.hosts)
    found = run(slow, [slow_job], options=Options(window_ms=120_000))[0][1]
    assert_close(run(frame, [job])[0][1], found, only=same)
