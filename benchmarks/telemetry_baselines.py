"""Baselines for the engine: a decode of the same columns, two DuckDB queries, pandas, and loops over jobs.

All but the decode compute the core summary: HBM peak, spatial and temporal imbalance, class by sample count, means, and
energy. They only add up the steps of the energy counter. The engine also checks each step, and adds the energy of a
job's two ends. The store must hold jobs on whole nodes only.
"""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from demo import BENCH_COUNTERS
from telemetry.attribution.runs import load_jobs
from telemetry.store.store import Store

# Imported where it is used: the engine does without, and its memory is measured by the same file.
if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ["host", "gpu", "mig", "time_ms", *BENCH_COUNTERS]
MEANS = [name for name in BENCH_COUNTERS if name != "energy_mj"]
PIPES = ("fp64", "fp32", "fp16", "tensor")
UNIT = ["host", "gpu", "mig"]


def decode(root: Path) -> int:
    """Read every file's columns into Arrow memory, one after the other, as the engine does: text as dictionaries."""
    rows = 0
    for path in Store.open(root).of("bench").files("telemetry"):
        rows += pq.read_table(path, columns=COLUMNS, partitioning=None, read_dictionary=["host", "mig"]).num_rows
    return rows


def allocations(root: Path) -> pa.Table:
    """One row per job and host."""
    rows = [
        (number, host, job.start_s * 1000, job.end_s * 1000)
        for number, job in enumerate(load_jobs(Store.open(root).of("bench"), 0, 2**40))
        for host in job.hosts
    ]
    return pa.table(dict(zip(("job", "host", "start_ms", "end_ms"), zip(*rows, strict=True), strict=True)))


def duckdb_core(root: Path) -> pa.Table:
    """The core summary as two plain queries; one row per job."""
    store = Store.open(root)
    paths = [str(path) for path in store.of("bench").files("telemetry")]
    with store.connect() as db:
        db.register("allocations", allocations(root))
        db.execute(f"CREATE TEMP VIEW samples AS {_SAMPLES}".replace("$paths", str(paths)))
        per_job = db.sql(_PER_JOB).to_arrow_table()
        spatial = db.sql(_SPATIAL).to_arrow_table()
        return per_job.join(spatial, "job", join_type="left outer").sort_by("job")


_PLACED = f"greatest({', '.join(f'{pipe}_active_frac' for pipe in PIPES)}) > 0"
_SAMPLES = """
SELECT a.job, t.* FROM read_parquet($paths, hive_partitioning=false) t
ASOF JOIN allocations a ON t.host = a.host AND t.time_ms >= a.start_ms WHERE t.time_ms < a.end_ms
"""
_ABOVE = ", ".join(
    f"count(*) FILTER ({_PLACED} AND ({pipe}_active_frac > dram_active_frac OR dram_active_frac = 0)) AS above_{pipe}"
    for pipe in PIPES
)
_SHARES = ", ".join(f"sum(above_{pipe}) / nullif(sum(placed), 0) AS {pipe}" for pipe in PIPES)
_AVERAGES = ", ".join(f"avg({name}) AS {name}" for name in MEANS)
_PER_JOB = f"""
WITH stepped AS (
  SELECT *, lag(energy_mj) OVER (PARTITION BY job, host, gpu, mig ORDER BY time_ms) AS before_mj FROM samples),
per_gpu AS (
  SELECT job, {_AVERAGES}, max(hbm_used_mib) AS peak,
         CASE WHEN max(gpu_util_pct) > 0 THEN 1 - avg(gpu_util_pct) / max(gpu_util_pct) ELSE 0 END AS temporal,
         sum(CASE WHEN energy_mj >= before_mj THEN energy_mj - before_mj
                  WHEN before_mj IS NOT NULL THEN energy_mj END) / 1000 AS energy,
         count(*) FILTER ({_PLACED}) AS placed, {_ABOVE}
  FROM stepped GROUP BY job, host, gpu, mig)
SELECT job, {_AVERAGES}, max(peak) AS peak, max(temporal) AS temporal, sum(energy) AS energy, {_SHARES}
FROM per_gpu GROUP BY job
"""
_SPATIAL = """
WITH means AS (
  SELECT job, time_ms // 60000 AS minute, avg(gpu_util_pct) AS util FROM samples GROUP BY job, minute, host, gpu, mig),
windows AS (
  SELECT job, CASE WHEN max(util) > 0 THEN 1 - sum(util) / (count(*) * max(util)) ELSE 0 END AS spatial,
         count(*) AS gpus, max(count(*)) OVER (PARTITION BY job) AS most_gpus
  FROM means GROUP BY job, minute)
SELECT job, avg(spatial) FILTER (2 * gpus > most_gpus) AS spatial FROM windows GROUP BY job
"""


def load(root: Path) -> pd.DataFrame:
    """All samples of jobs, each with its job."""
    import pandas as pd

    paths = Store.open(root).of("bench").files("telemetry")
    frame = pd.concat([pd.read_parquet(path, columns=COLUMNS) for path in map(str, paths)], ignore_index=True)
    merged = pd.merge_asof(
        frame.sort_values("time_ms"),
        allocations(root).to_pandas().sort_values("start_ms"),
        left_on="time_ms",
        right_on="start_ms",
        by="host",
    )
    return merged[merged["time_ms"] < merged["end_ms"]]


def pandas_core(root: Path) -> int:
    """Compute the core summary in ordinary pandas code; returns jobs."""
    merged = load(root)
    gpu = merged.groupby(["job", *UNIT], observed=True)
    per_gpu = gpu[MEANS].mean()
    per_gpu["temporal"] = 1 - per_gpu["gpu_util_pct"] / gpu["gpu_util_pct"].max()
    steps = gpu["energy_mj"].diff()
    used = steps.where(steps >= 0, merged["energy_mj"]).where(steps.notna())
    window = merged["time_ms"] // 60_000
    means = merged.groupby(["job", window, *UNIT])["gpu_util_pct"].mean()
    windows = means.groupby(level=[0, 1]).agg(["sum", "max", "count"])
    spatial = (1 - windows["sum"] / (windows["count"] * windows["max"])).fillna(0)
    placed = merged[(merged[[f"{pipe}_active_frac" for pipe in PIPES]] > 0).any(axis=1)]
    shares = {pipe: _is_compute(placed, pipe).groupby(placed["job"]).mean() for pipe in PIPES}
    per_job = per_gpu[MEANS].groupby(level=0).mean()
    per_job = per_job.assign(
        peak=merged.groupby("job")["hbm_used_mib"].max(),
        temporal=per_gpu["temporal"].groupby(level=0).max(),
        spatial=spatial.groupby(level=0).mean(),
        energy=used.groupby(merged["job"]).sum(),
        **shares,
    )
    return len(per_job)


def _is_compute(placed: pd.DataFrame, pipe: str) -> pd.Series[bool]:
    """Flags of the placed samples that are compute-bound in a pipe. Without memory traffic, all are."""
    memory = placed["dram_active_frac"]
    return (placed[f"{pipe}_active_frac"] > memory) | (memory == 0)


def loops(root: Path, number: int) -> dict[str, float]:
    """Seconds for all jobs one by one, without loading, extrapolated from `number` drawn jobs.

    As in the notebooks of perlmutter-telemetry, samples are grouped by job once, and a job looks at its own rows only.
    """
    merged = load(root)
    wall, cpu = time.perf_counter(), time.process_time()
    places = merged.groupby("job").indices
    grouped = time.perf_counter() - wall, time.process_time() - cpu
    chosen = random.Random(1).sample(sorted(places), min(number, len(places)))
    wall, cpu = time.perf_counter(), time.process_time()
    for job in chosen:
        _one_job(merged.take(places[job]))
    more = len(places) / len(chosen)
    wall_s = grouped[0] + (time.perf_counter() - wall) * more
    return {"jobs": len(chosen), "wall_s": wall_s, "cpu_s": grouped[1] + (time.process_time() - cpu) * more}


def _one_job(samples: pd.DataFrame) -> dict[str, Any]:
    """The core summary of one job from its samples."""
    gpus: list[dict[str, float]] = []
    means: dict[int, list[float]] = {}
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
        for window, mean in ordered.groupby(ordered["time_ms"] // 60_000)["gpu_util_pct"].mean().items():
            means.setdefault(window, []).append(float(mean))
    each = [1 - sum(mean) / (len(mean) * max(mean)) if max(mean) else 0.0 for mean in means.values()]
    placed = samples[(samples[[f"{pipe}_active_frac" for pipe in PIPES]] > 0).any(axis=1)]
    job: dict[str, Any] = {name: float(np.mean([gpu[name] for gpu in gpus])) for name in MEANS if gpus}
    job |= {f"class_{pipe}": _is_compute(placed, pipe).mean() for pipe in PIPES}
    job["peak"] = max((gpu["peak"] for gpu in gpus), default=None)
    job["temporal"] = max((gpu["temporal"] for gpu in gpus), default=None)
    job["energy"] = sum(gpu["energy"] for gpu in gpus)
    job["spatial"] = sum(each) / len(each) if each else None
    return job
