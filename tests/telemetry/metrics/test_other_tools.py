"""Figures of other tools as docs/other-tools.md has them, and the metrics that need each counter."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from small_sites import side_by_side

from telemetry.attribution.allocations import JobRun
from telemetry.counters import COUNTERS

PAGE = Path(__file__).parents[3] / "docs" / "other-tools.md"
START_S = 1_741_046_400  # a full minute


def rows_below(heading: str) -> list[list[str]]:
    """The cells of the page's table whose first column has this heading."""
    _, _, after = PAGE.read_text(encoding="utf-8").partition(f"\n| {heading} |")
    lines = after.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def samples() -> pd.DataFrame:
    """The page's first table: a sample every 15 s. Memory is at its highest in the second one."""
    rows: list[dict[str, Any]] = []
    for gpu, utils, peak_mib, total_mib in rows_below("GPU"):
        for place, util in enumerate(utils.split(", ")):
            used = float(peak_mib) if place == 1 else float(peak_mib) / 2
            rows.append(
                {"host": "n1", "gpu": int(gpu), "time_ms": (START_S + 15 * place) * 1000, "gpu_util_pct": float(util),
                 "hbm_used_mib": used, "hbm_total_mib": float(total_mib)}
            )  # fmt: skip
    return pd.DataFrame(rows)


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"[0-9]+\.[0-9]+", text)]


def test_the_page_has_the_figures_of_its_sample_table(samples: pd.DataFrame, run: Callable[..., Any]) -> None:
    jobs, _ = run(samples, [JobRun(1, START_S, START_S, START_S + 60, 4, ("n1",))])
    job = jobs[1]
    by_gpu = samples.groupby("gpu")
    # jobstats.py: avg_over_time of the duty cycle by GPU, their mean; max_over_time of memory, sums over GPUs.
    jobstats_util = by_gpu["gpu_util_pct"].mean().mean()
    jobstats_memory = by_gpu["hbm_used_mib"].max().sum() / by_gpu["hbm_total_mib"].max().sum()
    # omnistat/inspect/compute.py, gauge_stats: the population's deviation divided by its mean, over all samples.
    pooled = samples["gpu_util_pct"].to_numpy()
    cv = float(np.std(pooled) / abs(np.mean(pooled)))
    found = {row[0]: row[1:] for row in rows_below("figure")}
    assert [numbers(cell) for cell in found["utilization"]] == [
        [job["mean_gpu_util_pct"]], [jobstats_util], [float(np.mean(pooled))]
    ]  # fmt: skip
    assert [numbers(cell) for cell in found["memory"]] == [
        [round(100 * job["hbm_peak_frac"], 1)], [round(100 * jobstats_memory, 1)], []
    ]  # fmt: skip
    assert [numbers(cell) for cell in found["unevenness"]] == [
        [round(job["spatial_imbalance"], 3), round(job["temporal_imbalance"], 3)], [], [round(cv, 3)]
    ]  # fmt: skip


def test_the_tensor_ridge_of_the_a100_lies_16_times_as_high_as_the_authors() -> None:
    """docs/characterize.md says so: the notebooks take 19.5e12 flop/s as the peak of the tensor pipe."""
    from almanac.hardware import gpu_models

    ours = gpu_models()["A100-40"].tensor_flops
    assert ours == 16 * 19.5e12
    page = (PAGE.parent / "characterize.md").read_text(encoding="utf-8")
    assert "312e12" in page and "19.5e12" in page and "16 times" in page


FEEDS_START_S, SAMPLES = 1_741_046_400, 120
TYPICAL = {"gpu_util_pct": 80.0, "hbm_used_mib": 20_000.0, "hbm_total_mib": 40_960.0, "power_w": 300.0, "temp_c": 50.0}


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    """Two GPUs of one job, every counter known."""
    rng = np.random.default_rng(1)
    gpus = []
    for gpu in range(2):
        rows = pd.DataFrame(
            {"host": "n1", "gpu": gpu, "mig": "", "time_ms": FEEDS_START_S * 1000 + np.arange(SAMPLES) * 10_000}
        )
        for counter in COUNTERS:
            rows[counter.column] = TYPICAL.get(counter.column, 0.5) * (1 + 0.1 * rng.random(SAMPLES))
        gpus.append(rows.assign(energy_mj=1e9 + np.arange(SAMPLES) * 3e6))
    return pd.concat(gpus, ignore_index=True)


def test_a_counter_feeds_what_is_null_without_it(run: Any, frame: pd.DataFrame) -> None:
    job = JobRun(1, FEEDS_START_S, FEEDS_START_S, FEEDS_START_S + SAMPLES * 10, 2, ("n1",))
    frames = [frame, *(frame.assign(**{counter.column: np.nan}) for counter in COUNTERS)]
    rows = [row for row, _ in side_by_side(run, [(each, job) for each in frames])]
    lost = [{name for name in row.keys() - {"mig_profile", "gpu_errors"} if row[name] is None} for row in rows]
    assert lost[0] == set()
    for counter, names in zip(COUNTERS, lost[1:], strict=True):
        # Null without an error, too.
        assert names - {f"mean_{counter.column}"} == set(counter.feeds) - {"gpu_errors"}, counter.column
