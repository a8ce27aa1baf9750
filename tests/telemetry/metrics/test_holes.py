"""Jobs whose monitoring loses samples in every way at once: no figure blames the user for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest

from almanac.config import Config
from telemetry.attribution.allocations import JobRun

START_S = 1_741_046_400 - 5400  # ninety minutes before midnight UTC
JOBS = 60
FAULTS = ("zero", "spike", "frozen", "caught up", "reset", "dip", "lost")


@dataclass(frozen=True)
class Truth:
    """What the job really did. coverage: the mean over its GPUs."""

    job: JobRun
    util_pct: float
    energy_j: float
    coverage: float
    frames: list[pd.DataFrame]


def draw_job(rng: np.random.Generator, number: int) -> Truth:
    """A job that works evenly, idles, or begins to work late. Each of its nodes loses samples in its own way."""
    length_s, nodes, gpus = int(rng.integers(900, 6000)), int(rng.integers(1, 5)), int(rng.choice([1, 2, 4]))
    start_s = START_S + int(rng.integers(0, 4000))
    idle_frac = rng.choice([0.0, 0.55, 1.0], p=[0.6, 0.25, 0.15])
    is_idle = np.arange(length_s) < idle_frac * length_s
    util_pct, power_w = np.where(is_idle, 0.0, 90.0), np.where(is_idle, 60.0, 320.0)
    used_mj = 1000 * np.concatenate([[0.0], np.cumsum(power_w)])
    frames, coverage = [], []
    for node in range(nodes):
        step_s, loss = int(rng.choice([10, 30, 60])), rng.choice([0.0, 0.1, 0.4])
        hole_s = np.sort(rng.uniform(0, length_s, 2)) * rng.choice([0, 1], p=[0.7, 0.3])
        for gpu in range(gpus):
            times = np.arange(rng.uniform(0, step_s), length_s, step_s)
            times = np.minimum(times + rng.uniform(0, 0.1 * step_s, len(times)), length_s - 0.001)
            kept = (rng.random(len(times)) >= loss) & ((times < hole_s[0]) | (times >= hole_s[1]))
            times = times[kept]
            coverage.append(min(1.0, len(times) * step_s / length_s))
            counter = rng.uniform(1e10, 1e12) + np.interp(times, np.arange(length_s + 1), used_mj)
            columns = {"host": f"j{number}n{node}", "gpu": gpu, "mig": "", "uuid": f"GPU-{number}-{node}-{gpu}"}
            frame = pd.DataFrame({"time_ms": (1000 * (start_s + times)).astype(np.int64)}).assign(**columns)
            at = times.astype(int)
            frames.append(frame.assign(energy_mj=faulty(rng, counter), gpu_util_pct=util_pct[at], power_w=power_w[at]))
    job = JobRun(
        number, start_s, start_s, start_s + length_s, nodes * gpus, tuple(f"j{number}n{n}" for n in range(nodes))
    )
    energy_j = nodes * gpus * used_mj[-1] / 1000
    return Truth(job, float(util_pct.mean()), energy_j, float(np.mean(coverage)), frames)


def faulty(rng: np.random.Generator, counter: np.ndarray) -> np.ndarray:
    """The counter with one fault, or without any."""
    if len(counter) < 8 or rng.random() < 0.4:
        return counter
    found, first = counter.copy(), int(rng.integers(1, len(counter) - 2))
    last = int(rng.integers(first + 1, len(counter)))
    kind = rng.choice(FAULTS)
    if kind in ("zero", "spike"):
        found[first] = 0.0 if kind == "zero" else 9e15
    elif kind in ("frozen", "caught up"):
        found[first:last] = found[first]
        found[last:] -= found[last] - found[first] if kind == "frozen" else 0.0
    elif kind == "reset":
        found[first:] -= found[first] - 1000
    elif kind == "dip":
        found[first : first + 3] -= 0.9 * found[first]
    else:
        found[first:last] = np.nan
    return found


@pytest.mark.parametrize("seed", [11, 12])
def test_lost_samples_blame_nobody(run: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = [draw_job(rng, number) for number in range(JOBS)]
    frame = pd.concat([part for truth in drawn for part in truth.frames], ignore_index=True)
    rows, _ = run(frame.sample(frac=1.0, random_state=seed), [truth.job for truth in drawn], config=Config())
    errors = []
    for number, truth in enumerate(drawn):
        row = rows[number]
        assert row["coverage_frac"] == pytest.approx(truth.coverage, abs=0.08), truth.job
        assert row["spatial_imbalance"] is None or row["spatial_imbalance"] < 0.3, truth.job
        if truth.util_pct:
            assert row["verdict"] != "idle", truth.job
        if truth.util_pct == 90 and row["verdict"] == "ok":
            assert row["mean_gpu_util_pct"] == pytest.approx(90, rel=1e-9), truth.job
            assert (row["temporal_imbalance"], row["idle_gpus"]) == (pytest.approx(0, abs=1e-9), []), truth.job
        if row["energy_j"] is not None:
            errors.append(abs(row["energy_j"] / truth.energy_j - 1))
            assert row["energy_power_w"] < 500
            assert 0 < row["energy_measured_frac"] <= 1
    assert len(errors) > JOBS / 2
    assert np.quantile(errors, 0.5) < 0.02
    assert np.quantile(errors, 0.9) < 0.1
    assert {row["verdict"] for row in rows.values()} <= {"ok", "idle", "low coverage", "no telemetry"}
