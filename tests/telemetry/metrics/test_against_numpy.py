"""The engine agrees with an independent implementation, on data with everything that goes wrong in it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from telemetry.attribution.allocations import JobRun

DAY_S = 86_400
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
