"""What the engine is measured against: a decode of the same columns, an idiomatic pandas version, loops over jobs.

Both others compute the core summary: HBM peak, spatial and temporal imbalance, class by sample count, means, energy.
"""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from telemetry.attribution.runs import load_jobs
from telemetry.demo_site.shape import BENCH_COUNTERS
from telemetry.store.store import Store

# Imported where it is used: the engine does without, and its memory is measured by the same file.
if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ["host", "gpu", "mig", "time_ms", *BENCH_COUNTERS]
MEANS = [name for name in BENCH_COUNTERS if name != "energy_mj"]
PIPES = ("fp64", "fp32", "fp16", "tensor")
UNIT = ["host", "gpu", "mig"]


def decode(root: Path) -> int:
    """Read every file's columns into Arrow memory, one after the other."""
    rows = 0
    for path in Store.open(root).of("bench").files("telemetry"):
        rows += pq.read_table(path, columns=COLUMNS, partitioning=None).num_rows
    return rows


def load(root: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """All samples, and one row per job and host."""
    import pandas as pd

    store = Store.open(root)
    paths = store.of("bench").files("telemetry")
    frame = pd.concat([pd.read_parquet(path, columns=COLUMNS) for path in map(str, paths)], ignore_index=True)
    rows = [
        (number, host, job.start_s * 1000, job.end_s * 1000)
        for number, job in enumerate(load_jobs(store.of("bench"), 0, 2**40))
        for host in job.hosts
    ]
    return frame, pd.DataFrame(rows, columns=["job", "host", "start_ms", "end_ms"])


def pandas_core(root: Path) -> int:
    """The core summary as one would write it in pandas; returns jobs."""
    import pandas as pd

    frame, allocations = load(root)
    merged = pd.merge_asof(
        frame.sort_values("time_ms"),
        allocations.sort_values("start_ms"),
        left_on="time_ms",
        right_on="start_ms",
        by="host",
    )
    merged = merged[merged["time_ms"] < merged["end_ms"]]
    gpu = merged.groupby(["job", *UNIT], observed=True)
    per_gpu = gpu[MEANS].mean()
    per_gpu["temporal"] = 1 - per_gpu["gpu_util_pct"] / gpu["gpu_util_pct"].max()
    steps = gpu["energy_mj"].diff()
    used = steps.where(steps >= 0, merged["energy_mj"]).where(steps.notna())
    window = merged["time_ms"] // 60_000
    totals = merged.groupby(["job", window, *UNIT])["gpu_util_pct"].sum()
    windows = totals.groupby(level=[0, 1]).agg(["sum", "max", "count"])
    spatial = (1 - windows["sum"] / (windows["count"] * windows["max"])).fillna(0)
    placed = merged[(merged[[f"{pipe}_active_frac" for pipe in PIPES]] > 0).any(axis=1)]
    shares = {
        pipe: (placed[f"{pipe}_active_frac"] > placed["dram_active_frac"]).groupby(placed["job"]).mean()
        for pipe in PIPES
    }
    per_job = per_gpu[MEANS].groupby(level=0).mean()
    per_job = per_job.assign(
        peak=merged.groupby("job")["hbm_used_mib"].max(),
        temporal=per_gpu["temporal"].groupby(level=0).max(),
        spatial=spatial.groupby(level=0).mean(),
        energy=used.groupby(merged["job"]).sum(),
        **shares,
    )
    return len(per_job)


def loops(root: Path, number: int) -> dict[str, float]:
    """Wall seconds that all jobs would take one by one, without loading, extrapolated from `number` drawn ones."""
    frame, allocations = load(root)
    jobs = sorted(allocations["job"].unique())
    chosen = random.Random(1).sample(jobs, min(number, len(jobs)))
    started = time.perf_counter()
    for job in chosen:
        _one_job(frame, allocations[allocations["job"] == job])
    return {"jobs": len(chosen), "wall_s": (time.perf_counter() - started) * len(jobs) / len(chosen)}


def _one_job(frame: pd.DataFrame, mine: pd.DataFrame) -> dict[str, Any]:
    """The core summary of one job: its rows are looked for in the whole frame."""
    start, end = mine["start_ms"].iloc[0], mine["end_ms"].iloc[0]
    within = (frame["time_ms"] >= start) & (frame["time_ms"] < end)
    samples = frame[within & frame["host"].isin(mine["host"])]
    gpus: list[dict[str, float]] = []
    totals: dict[int, list[float]] = {}
    for _, gpu in samples.groupby(UNIT):
        ordered = gpu.sort_values("time_ms")
        found = {name: float(ordered[name].mean()) for name in MEANS}
        highest = float(ordered["gpu_util_pct"].max())
        found["peak"] = float(ordered["hbm_used_mib"].max())
        found["temporal"] = 1 - found["gpu_util_pct"] / highest if highest else 0.0
        readings = ordered["energy_mj"].to_list()
        pairs = itertools.pairwise(readings)
        found["energy"] = sum(later - earlier if later >= earlier else later for earlier, later in pairs)
        gpus.append(found)
        for window, total in ordered.groupby(ordered["time_ms"] // 60_000)["gpu_util_pct"].sum().items():
            totals.setdefault(window, []).append(float(total))
    each = [1 - sum(total) / (len(gpus) * max(total)) if max(total) else 0.0 for total in totals.values()]
    placed = samples[(samples[[f"{pipe}_active_frac" for pipe in PIPES]] > 0).any(axis=1)]
    job: dict[str, Any] = {name: float(np.mean([gpu[name] for gpu in gpus])) for name in MEANS if gpus}
    job |= {f"class_{pipe}": (placed[f"{pipe}_active_frac"] > placed["dram_active_frac"]).mean() for pipe in PIPES}
    job["peak"] = max((gpu["peak"] for gpu in gpus), default=None)
    job["temporal"] = max((gpu["temporal"] for gpu in gpus), default=None)
    job["energy"] = sum(gpu["energy"] for gpu in gpus)
    job["spatial"] = sum(each) / len(each) if each else None
    return job
