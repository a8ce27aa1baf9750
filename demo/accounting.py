"""The generated site without GPU telemetry: its jobs, with the GPU memory that Slurm's accounting has of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from demo.shape import GPUS_PER_NODE
from demo.site import SitePlan, jobs_table, truth_table
from demo.users import IDLE

MISSED = 0.01
"""Most of a peak that slurmd's samples, one every 30 s, miss in these jobs."""
DRIVER_MIB = 400.0
"""Memory of a GPU that belongs to no process."""


def accounted_jobs(plan: SitePlan, gpus_per_node: int = 1) -> pa.Table:
    """Return accounting as jobs_table, with gres/gpumem and gres/gpuutil of one task on each node.

    gpus_per_node: 1 for a site whose nodes have one GPU each: Slurm then knows the peak of each GPU. 4: the task's sum
    over its GPUs, which are used alike.
    """
    jobs, truth = jobs_table(plan), truth_table(plan)
    keys = {key: n for n, key in enumerate(zip(*(truth[k].to_pylist() for k in ("job_id", "submit_s")), strict=True))}
    at = np.array([keys[key] for key in zip(*(jobs[k].to_pylist() for k in ("job_id", "submit_s")), strict=True)])
    rng = np.random.default_rng([plan.shape.seed, 41])
    peak_mib = truth["hbm_peak_mib"].to_numpy()[at] * (1 - rng.uniform(0, MISSED, len(at))) - DRIVER_MIB
    is_busy = truth["role"].to_numpy()[at] != IDLE
    unknown = (jobs["end_s"].is_null().to_numpy()) | (jobs["start_s"].is_null().to_numpy()) | ~is_busy | (peak_mib <= 0)
    figures = {
        "gpu_count": jobs["gpu_count"].to_numpy() * gpus_per_node // GPUS_PER_NODE,
        "gpu_count_req": jobs["gpu_count_req"].to_numpy() * gpus_per_node // GPUS_PER_NODE,
        "sacct_hbm_peak_mib": pa.array(peak_mib * gpus_per_node, mask=unknown),
        "sacct_hbm_least_mib": pa.array(peak_mib, mask=unknown),
        "sacct_gpu_util_pct": pa.array(rng.uniform(40, 100, len(at)), mask=unknown),
        "gpu_memory_mib": pa.array(truth["capacity_mib"].to_numpy()[at]),
    }
    for name, values in figures.items():
        place = jobs.schema.get_field_index(name)
        jobs = jobs.set_column(place, jobs.schema.field(place), pa.array(values).cast(jobs.schema.field(place).type))
    return jobs
