"""Means weigh the time between samples, not their number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from small_sites import OPEN

from almanac.config import Config
from telemetry.attribution.allocations import JobRun
from telemetry.metrics.runs import RowRuns
from telemetry.metrics.weights import Weights

START_S = 1_741_046_400  # midnight UTC
QUICK = examples(0.06)


def metrics(run: Any, times_s: Any, values: Any, config: Config = OPEN, **columns: Any) -> dict[str, Any]:
    """Metrics of one GPU with GPU_UTIL `values`, times in s after START_S, for a job until the next full half hour."""
    time_ms = (1000 * (START_S + np.asarray(times_s, float))).astype(np.int64)
    frame = pd.DataFrame({"host": "n1", "gpu": 0, "mig": "", "time_ms": time_ms, "gpu_util_pct": values, **columns})
    length_s = 1800 * (1 + int(np.max(times_s)) // 1800)
    rows, _ = run(frame, [JobRun(1, START_S, START_S, START_S + length_s, 1, ("n1",))], config=config)
    row: dict[str, Any] = rows[1]
    return row


def of(times_s: list[float], interval_s: float = 10) -> list[float]:
    """Weights of one run of samples, in s."""
    time_ms = (1000 * np.array(times_s)).astype(np.int64)
    found = Weights.of(RowRuns.of_lengths(np.array([len(time_ms)])), time_ms, np.array([1000.0 * interval_s]))
    extra = dict(zip(found.rows.tolist(), found.extra.tolist(), strict=True))
    return [round(interval_s * (1 + extra.get(row, 0.0)), 9) for row in range(len(time_ms))]


@pytest.mark.parametrize("from_s", [0, 900, 1800], ids=["within an hour", "across an hour", "at an hour"])
def test_idle_every_second_and_then_busy_every_minute_is_half_busy(run: Any, from_s: int) -> None:
    """1800 samples of 0 and 30 of 100: by number 1.6%."""
    times = from_s + np.concatenate([np.arange(0, 1800, 1), np.arange(1800, 3600, 60)])
    row = metrics(run, times, np.repeat([0.0, 100.0], [1800, 30]))
    assert row["mean_gpu_util_pct"] == pytest.approx(50, abs=1e-9)
    assert row["temporal_imbalance"] == pytest.approx(0.5, abs=1e-9)


def test_a_change_of_the_interval_within_an_hour_leaves_the_job_usable(run: Any) -> None:
    times = np.concatenate([np.arange(0, 1800, 1), np.arange(1800, 3600, 60)])
    row = metrics(run, times, np.repeat([0.0, 100.0], [1800, 30]), Config())
    assert (row["verdict"], row["mean_gpu_util_pct"]) == ("ok", pytest.approx(50, abs=1e-9))


@pytest.mark.parametrize(
    ("times_s", "expected"),
    [
        ([0, 10, 20, 30], [10, 10, 10, 10]),
        ([0, 10.4, 20.2, 30], [10, 10, 10, 10]),
        ([0, 60, 120], [60, 60, 60]),
        ([100], [10]),
        ([0, 1200], [1200, 1200]),
        ([0, 10, 20, 620, 630], [10, 10, 20, 10, 10]),
        ([0, 10, 20, 620], [10, 10, 20, 20]),
        ([0, 600, 610, 620], [20, 10, 10, 10]),
        ([0, 1, 2, 62, 122], [1, 1, 60, 60, 60]),
    ],
    ids=["even", "jitter", "another interval", "lone", "two", "hole", "hole last", "hole first", "new interval"],
)
def test_a_sample_weighs_the_time_to_the_next_but_does_not_fill_a_gap(
    times_s: list[float], expected: list[float]
) -> None:
    assert of(times_s) == expected


def test_a_hole_is_not_filled_with_the_sample_before_it(run: Any) -> None:
    """90 samples of 100, 30 minutes of nothing, 90 of 0: half, and not 3/4."""
    times = np.concatenate([np.arange(0, 900, 10), np.arange(2700, 3600, 10)])
    row = metrics(run, times, np.repeat([100.0, 0.0], 90))
    assert row["mean_gpu_util_pct"] == pytest.approx(100 * (900 + 10) / (1800 + 10), rel=1e-12)


@given(seed=st.integers(0, 10**6), step_s=st.sampled_from([1, 7, 30, 60, 300]))
@QUICK
def test_the_mean_of_even_samples_is_the_plain_mean(run: Any, seed: int, step_s: int) -> None:
    rng = np.random.default_rng(seed)
    times = np.arange(rng.integers(0, step_s), 5000, step_s)
    values = rng.uniform(0, 100, len(times)).astype("f4")
    row = metrics(run, times, values)
    assert row["mean_gpu_util_pct"] == pytest.approx(float(np.mean(values, dtype="f8")), rel=1e-9)


def test_a_missing_value_takes_its_weight_with_it(run: Any) -> None:
    """Every 1 s for 10 s, then every 10 s. Power is known in four samples. One of them weighs 1 s."""
    times = [*range(10), *range(10, 60, 10)]
    power = [np.nan] * 9 + [100.0, np.nan, np.nan, 200.0, 200.0, 200.0]
    row = metrics(run, times, 50.0, power_w=power, temp_c=np.nan)
    assert row["mean_power_w"] == pytest.approx((100 * 1 + 200 * 30) / 31, rel=1e-12)
    assert (row["mean_gpu_util_pct"], row["mean_temp_c"]) == (pytest.approx(50, rel=1e-12), None)
