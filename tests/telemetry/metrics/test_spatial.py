"""Means weigh the time between samples; spatial imbalance stands lost samples and other scrape intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy_reference import papers_spatial_imbalance
from profiles import examples
from small_sites import OPEN

from almanac.config import Config
from telemetry.attribution.allocations import JobRun
from telemetry.metrics.arrays import RowRuns
from telemetry.metrics.use import SampleWeights

START_S = 1_741_046_400 - 1800  # half an hour before midnight UTC
QUICK = examples(0.12)
SAMPLES_OF_ONE_GPU = "spatial_imbalance: too few windows with samples of most GPUs"


def gpu(host: str, number: int, times_s: Any, value: Any = 95.0, mig: str = "") -> pd.DataFrame:
    """Samples of one GPU, times in s after START_S; under MIG of the graphics engine."""
    times_ms = (1000 * (START_S + np.asarray(times_s, float))).astype(np.int64)
    frame = pd.DataFrame({"host": host, "gpu": number, "mig": mig, "time_ms": times_ms, "gpu_util_pct": np.nan})
    name, factor = ("gr_engine_active_frac", 0.01) if mig else ("gpu_util_pct", 1.0)
    return frame.assign(**{name: factor * np.broadcast_to(np.asarray(value, float), len(times_ms))})


def job(length_s: int, gpus: int, *hosts: str) -> JobRun:
    return JobRun(1, START_S, START_S, START_S + length_s, gpus, hosts)


def found(run: Any, frames: list[pd.DataFrame], task: JobRun, config: Config = OPEN, **given: Any) -> dict[str, Any]:
    rows, _ = run(pd.concat(frames, ignore_index=True), [task], config=config, **given)
    row: dict[str, Any] = rows[1]
    return row


@pytest.mark.parametrize("gpus", [1, 4])
def test_an_exporter_that_dies_is_no_imbalance(run: Any, gpus: int) -> None:
    """Two nodes at 95%; one is silent after 15 of 60 minutes. By the paper's sums: 45/60 * 1/2 = 0.375."""
    frames = [gpu("n1", n, np.arange(0, 3600, 10)) for n in range(gpus)]
    frames += [gpu("n2", n, np.arange(0, 900, 10)) for n in range(gpus)]
    task = job(3600, 2 * gpus, "n1", "n2")
    row = found(run, frames, task, Config())
    assert row["spatial_imbalance"] == pytest.approx(0, abs=1e-9)
    assert row["spatial_windows"] == 15


def test_windows_widen_to_the_longest_scrape_interval_of_the_job(run: Any) -> None:
    """Scrapes every 300 s, four minutes apart: no minute has both GPUs, but every five minutes do."""
    frames = [gpu("n1", 0, np.arange(10, 3600, 300), 80), gpu("n2", 0, np.arange(250, 3600, 300), 40)]
    row = found(run, frames, job(3600, 2, "n1", "n2"), Config())
    assert (row["spatial_imbalance"], row["spatial_windows"]) == (0.25, 12)


def test_a_gpu_that_reads_zero_is_idle_and_counts(run: Any) -> None:
    frames = [gpu("n1", 0, np.arange(0, 600, 10)), gpu("n1", 1, np.arange(0, 600, 10), 0)]
    row = found(run, frames, job(600, 2, "n1"))
    assert (row["spatial_imbalance"], row["idle_gpus"]) == (0.5, ["n1:1"])


def test_windows_with_half_of_the_gpus_or_fewer_are_left_out_and_too_few_others_say_nothing(run: Any) -> None:
    """Four GPUs. Two of them are idle, and silent after 20 of 60 minutes, or after 10."""
    busy = [gpu("n1", n, np.arange(0, 3600, 10)) for n in range(2)]
    idle = [gpu("n2", n, np.arange(0, 1200, 10), 0) for n in range(2)]
    row = found(run, busy + idle, job(3600, 4, "n1", "n2"), Config())
    assert (row["spatial_imbalance"], row["spatial_windows"]) == (0.5, 20)
    short = [frame[frame.time_ms < 1000 * (START_S + 600)] for frame in idle]
    row = found(run, busy + short, job(3600, 4, "n1", "n2"), Config())
    assert (row["verdict"], row["spatial_imbalance"], row["spatial_windows"]) == ("ok", None, 10)
    assert SAMPLES_OF_ONE_GPU in row["reasons"]


@dataclass(frozen=True)
class ConstantSite:
    """A job whose GPUs all have the same activity. is_whole: no sample is lost."""

    frames: list[pd.DataFrame]
    task: JobRun
    is_whole: bool


@st.composite
def constant_sites(draw: st.DrawFn) -> ConstantSite:
    """Each GPU has its own interval, phase, jitter, hole, and loss; a node may have no sample at all."""
    value, is_mig, is_whole = draw(st.floats(1, 100)), draw(st.booleans()), draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    length_s, nodes = draw(st.integers(120, 4000)), draw(st.integers(1, 4))
    frames = []
    for number in range(draw(st.integers(2, 6))):
        step_s = draw(st.integers(1, 60) if is_whole else st.sampled_from([1, 7, 10, 30, 60, 90, 300]))
        times = np.arange(draw(st.floats(0, 1)) * step_s, length_s, step_s)
        times = np.minimum(times + rng.uniform(0, draw(st.floats(0, 0.2)) * step_s, len(times)), length_s - 0.001)
        hole_s, hole_length_s = draw(st.integers(0, length_s)), draw(st.integers(0, length_s))
        kept = rng.random(len(times)) < draw(st.floats(0.2, 1))
        kept &= (times <= hole_s) | (times >= hole_s + hole_length_s)
        kept |= is_whole
        if len(kept):
            kept[rng.integers(len(kept))] = True
        host, index = f"n{number % nodes}", number // nodes
        frames.append(gpu(host, index, times[kept], value, str(number + 1) if is_mig else ""))
    nodes = min(nodes, len(frames))
    silent = 0 if is_whole else -(-len(frames) // nodes)  # as many GPUs as the largest node
    hosts = [f"n{number}" for number in range(nodes + (silent > 0))]
    return ConstantSite(frames, job(length_s, len(frames) + silent, *hosts), is_whole)


@given(site=constant_sites())
@QUICK
def test_gpus_of_equal_constant_activity_are_even_under_any_gaps_intervals_and_phases(
    run: Any, site: ConstantSite
) -> None:
    config = Config() if site.is_whole else OPEN
    row = found(run, site.frames, site.task, config)
    seen = sum(len(frame) > 0 for frame in site.frames)
    imbalance = row["spatial_imbalance"]
    assert row["gpus_seen"] == seen
    assert (row["temporal_imbalance"] or 0) == pytest.approx(0, abs=1e-6)
    assert imbalance == pytest.approx(0, abs=1e-9) if imbalance is not None else not site.is_whole or seen < 2
    cut = found(run, site.frames, site.task, config, stored=False)
    assert cut["spatial_windows"] == row["spatial_windows"]
    assert (cut["spatial_imbalance"] or 0) == pytest.approx(imbalance or 0, rel=1e-12, abs=1e-12)


@given(seed=st.integers(0, 10**6), gpus=st.integers(2, 6))
@QUICK
def test_whole_data_of_equal_intervals_give_the_papers_value(run: Any, seed: int, gpus: int) -> None:
    rng = np.random.default_rng(seed)
    times = np.arange(0, 3600, 10)
    values = [np.round(rng.beta(0.4, 0.4, len(times)) * 100) for _ in range(gpus)]
    frames = [gpu("n1", n, times, its) for n, its in enumerate(values)]
    expected = papers_spatial_imbalance([(1000 * (START_S + times), its) for its in values], 60_000)
    row = found(run, frames, job(3600, gpus, "n1"))
    assert row["spatial_imbalance"] == pytest.approx(expected, rel=1e-9)


WEIGHTS_START_S = 1_741_046_400  # midnight UTC
QUICKEST = examples(0.06)


def metrics(run: Any, times_s: Any, values: Any, config: Config = OPEN, **columns: Any) -> dict[str, Any]:
    """Metrics of one GPU with GPU_UTIL `values`, times_s after the start, for a job until the next full half hour."""
    time_ms = (1000 * (WEIGHTS_START_S + np.asarray(times_s, float))).astype(np.int64)
    frame = pd.DataFrame({"host": "n1", "gpu": 0, "mig": "", "time_ms": time_ms, "gpu_util_pct": values, **columns})
    length_s = 1800 * (1 + int(np.max(times_s)) // 1800)
    rows, _ = run(
        frame, [JobRun(1, WEIGHTS_START_S, WEIGHTS_START_S, WEIGHTS_START_S + length_s, 1, ("n1",))], config=config
    )
    row: dict[str, Any] = rows[1]
    return row


def of(times_s: list[float], interval_s: float = 10) -> list[float]:
    """Weights of one run of samples, in s."""
    time_ms = (1000 * np.array(times_s)).astype(np.int64)
    found = SampleWeights.of(RowRuns.of_lengths(np.array([len(time_ms)])), time_ms, np.array([1000.0 * interval_s]))
    extra = dict(zip(found.rows.tolist(), found.extra.tolist(), strict=True))
    return [round(interval_s * (1 + extra.get(row, 0.0)), 9) for row in range(len(time_ms))]


@pytest.mark.parametrize("from_s", [0, 900, 1800], ids=["within an hour", "across an hour", "at an hour"])
def test_idle_every_second_and_then_busy_every_minute_is_half_busy(run: Any, from_s: int) -> None:
    """1800 samples of 0 and 30 of 100: by number 1.6%."""
    times = from_s + np.concatenate([np.arange(0, 1800, 1), np.arange(1800, 3600, 60)])
    row = metrics(run, times, np.repeat([0.0, 100.0], [1800, 30]))
    assert row["mean_gpu_util_pct"] == pytest.approx(50, abs=1e-9)
    assert row["temporal_imbalance"] == pytest.approx(0.5, abs=1e-9)


def test_a_sample_weighs_the_time_to_the_next_but_does_not_fill_a_gap() -> None:
    for times_s, expected in [
        ([0, 10, 20, 30], [10, 10, 10, 10]), ([0, 10.4, 20.2, 30], [10, 10, 10, 10]), ([0, 60, 120], [60, 60, 60]),
        ([100], [10]), ([0, 1200], [1200, 1200]), ([0, 10, 20, 620, 630], [10, 10, 20, 10, 10]),
        ([0, 10, 20, 620], [10, 10, 20, 20]), ([0, 600, 610, 620], [20, 10, 10, 10]),
        ([0, 1, 2, 62, 122], [1, 1, 60, 60, 60]),
    ]:  # fmt: skip
        assert of(times_s) == expected


@given(seed=st.integers(0, 10**6), step_s=st.sampled_from([1, 7, 30, 60, 300]))
@QUICKEST
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
