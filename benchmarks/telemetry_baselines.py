"""What the engine is measured against: a decode of the same columns, an idiomatic pandas version, loops over jobs."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from telemetry.runs import load_jobs
from telemetry.sources.generated.shape import BENCH_COUNTERS
from telemetry.store import Store

COLUMNS = ["host", "gpu", "mig", "time_ms", *BENCH_COUNTERS]
MEANS = [name for name in BENCH_COUNTERS if name != "energy_mj"]
PIPES = ("fp64", "fp32", "fp16", "tensor")


def decode(root: Path) -> int:
    """Read every file's columns into Arrow memory, one after the other."""
    rows = 0
    for path in Store.open(root).files("telemetry", "bench"):
        rows += pq.read_table(path, columns=COLUMNS, partitioning=None).num_rows
    return rows


def load(root: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """All samples, and one row per job and host."""
    store = Store.open(root)
    paths = store.files("telemetry", "bench")
    frame = pd.concat([pd.read_parquet(path, columns=COLUMNS) for path in map(str, paths)], ignore_index=True)
    rows = [
        (number, host, job.start_s * 1000, job.end_s * 1000)
        for number, job in enumerate(load_jobs(store, "bench", 0, 2**40))
        for host in job.hosts
    ]
    return frame, pd.DataFrame(rows, columns=["job", "host", "start_ms", "end_ms"])


def pandas_core(root: Path) -> int:
    """The core summary as one would write it in pandas."""
    frame, claims = load(root)
    merged = pd.merge_asof(
        frame.sort_values("time_ms"),
        claims.sort_values("start_ms"),
        left_on="time_ms",
        right_on="start_ms",
        by="host",
    )
    merged = merged[merged["time_ms"] < merged["end_ms"]]
    gpu = merged.groupby(["job", "host", "gpu", "mig"], observed=True)
    per_gpu = gpu[MEANS].mean()
    per_gpu["hbm_peak_mib"] = gpu["hbm_used_mib"].max()
    per_gpu["temporal"] = 1 - per_gpu["gpu_util_pct"] / gpu["gpu_util_pct"].max()
    steps = gpu["energy_mj"].diff()
    per_gpu["energy_mj"] = (
        steps.where(steps >= 0, merged["energy_mj"])
        .where(steps.notna())
        .groupby([merged[key] for key in ("job", "host", "gpu", "mig")])
        .sum()
    )
    window = merged["time_ms"] // 60_000
    totals = merged.groupby(["job", window, "host", "gpu", "mig"])["gpu_util_pct"].sum()
    windows = totals.groupby(level=[0, 1]).agg(["sum", "max", "count"])
    spatial = (1 - windows["sum"] / (windows["count"] * windows["max"])).fillna(0).groupby(level=0).mean()
    placed = merged[(merged[[f"{pipe}_active_frac" for pipe in PIPES]] > 0).any(axis=1)]
    shares = {
        pipe: (placed[f"{pipe}_active_frac"] > placed["dram_active_frac"]).groupby(placed["job"]).mean()
        for pipe in PIPES
    }
    per_job = per_gpu.groupby(level=0).mean().assign(spatial=spatial, **shares)
    return len(per_job)


def loops(root: Path, number: int) -> float:
    """Wall seconds that all jobs would take one by one, from a sample of them."""
    frame, claims = load(root)
    jobs = sorted(claims["job"].unique())
    chosen = random.Random(1).sample(jobs, min(number, len(jobs)))
    started = time.perf_counter()
    for job in chosen:
        _one_job(frame, claims[claims["job"] == job])
    return (time.perf_counter() - started) * len(jobs) / len(chosen)


def _one_job(frame: pd.DataFrame, mine: pd.DataFrame) -> dict[str, float]:
    start, end = mine["start_ms"].iloc[0], mine["end_ms"].iloc[0]
    within = (frame["time_ms"] >= start) & (frame["time_ms"] < end)
    samples = frame[within & frame["host"].isin(mine["host"])]
    peaks, temporal, energy, totals = [], [], 0.0, {}
    for _, gpu in samples.groupby(["host", "gpu"]):
        ordered = gpu.sort_values("time_ms")
        peaks.append(ordered["hbm_used_mib"].max())
        highest = ordered["gpu_util_pct"].max()
        temporal.append(1 - ordered["gpu_util_pct"].mean() / highest if highest else 0.0)
        energy += float(np.clip(ordered["energy_mj"].diff(), 0, None).sum())
        for window, value in zip(ordered["time_ms"] // 60_000, ordered["gpu_util_pct"], strict=True):
            totals.setdefault(window, []).append(value)
    return {"peak": max(peaks, default=0.0), "temporal": max(temporal, default=0.0), "energy": energy}
