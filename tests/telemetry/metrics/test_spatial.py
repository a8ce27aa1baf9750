"""Spatial imbalance where samples are missing, out of phase, or of different scrape intervals."""

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
from telemetry.metrics.options import Options

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


@pytest.mark.parametrize("mig", [("", ""), ("3", "4")], ids=["GPUs", "MIG"])
def test_equal_gpus_scraped_at_different_intervals_are_even(run: Any, mig: tuple[str, str]) -> None:
    """Every 1 s and every 60 s. By the paper's sums: 1 - 61/120."""
    frames = [gpu("n1", 0, np.arange(0, 3600, 1), 80, mig[0]), gpu("n2", 0, np.arange(30, 3600, 60), 80, mig[1])]
    task = job(3600, 2, "n1", "n2")
    assert found(run, frames, task, Config())["spatial_imbalance"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("phase", [5, 25, 31, 55])
def test_scrapes_out_of_phase_are_even_in_short_jobs(run: Any, phase: int) -> None:
    frames = [gpu("n1", 0, np.arange(35, 240, 60)), gpu("n2", 0, np.arange(phase, 240, 60))]
    row = found(run, frames, job(240, 2, "n1", "n2"), Config())
    assert row["spatial_imbalance"] == pytest.approx(0, abs=1e-9)


def test_windows_widen_to_the_longest_scrape_interval_of_the_job(run: Any) -> None:
    """Scrapes every 300 s, four minutes apart: no minute has both GPUs, but every five minutes do."""
    frames = [gpu("n1", 0, np.arange(10, 3600, 300), 80), gpu("n2", 0, np.arange(250, 3600, 300), 40)]
    row = found(run, frames, job(3600, 2, "n1", "n2"), Config())
    assert (row["spatial_imbalance"], row["spatial_windows"]) == (0.25, 12)


@pytest.mark.parametrize("window_s", [1, 5, 30])
def test_a_window_below_the_scrape_interval_is_widened(run: Any, window_s: int) -> None:
    frames = [gpu("n1", 0, np.arange(3, 1800, 60), 90), gpu("n2", 0, np.arange(50, 1800, 60), 90)]
    row = found(run, frames, job(1800, 2, "n1", "n2"), options=Options(window_ms=1000 * window_s))
    assert (row["spatial_imbalance"], row["spatial_windows"]) == (0.0, 30)


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


@given(site=constant_sites(), window_s=st.sampled_from([10, 60, 300]))
@QUICK
def test_gpus_of_equal_constant_activity_are_even_under_any_gaps_intervals_and_phases(
    run: Any, site: ConstantSite, window_s: int
) -> None:
    options = Options(window_ms=1000 * window_s)
    config = Config() if site.is_whole else OPEN
    row = found(run, site.frames, site.task, config, options=options)
    seen = sum(len(frame) > 0 for frame in site.frames)
    imbalance = row["spatial_imbalance"]
    assert row["gpus_seen"] == seen
    assert (row["temporal_imbalance"] or 0) == pytest.approx(0, abs=1e-6)
    assert imbalance == pytest.approx(0, abs=1e-9) if imbalance is not None else not site.is_whole or seen < 2
    cut = found(run, site.frames, site.task, config, options=options, stored=False)
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
