"""CPU time and host memory of generated runs, as sacct would have them. Draws of its own: nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from demo.jobs import Jobs
from demo.profile import Bools, Floats, Ints
from demo.schedule import ScheduledRuns
from demo.shape import SiteShape

NODE_MIB = 256_000
"""Of each node; a shared job gets its GPUs' share."""


def host_columns(
    shape: SiteShape, jobs: Jobs, runs: ScheduledRuns, seen: Ints, cpus: Ints, elapsed_s: Ints, is_ended: Bools
) -> dict[str, pa.Array[Any]]:
    """Columns of the jobs table for the runs `seen`; unknown for what has not ended, and for one run in 50.

    cpus, elapsed_s, is_ended: of each of them.
    """
    rng = np.random.default_rng([shape.seed, 29])
    families, number = int(jobs.family.max(initial=-1)) + 1, len(runs)
    # Mostly low, a few high. Drawn, not fitted: the studies behind the site's other figures say nothing of CPUs.
    cpu_share: Floats = rng.beta(1.2, 6.0, families)
    memory_share: Floats = rng.beta(1.5, 6.0, families)
    noise = np.exp(rng.normal(0, 0.05, (2, number)))
    is_lost = rng.random(number) < 0.02
    job = runs.job[seen]
    family = jobs.family[job]
    gpu_share = jobs.gpus[job] / (jobs.nodes[job] * shape.gpus_per_node)
    alloc_mib = NODE_MIB * jobs.nodes[job] * gpu_share
    peak_mib = np.minimum(memory_share[family] * noise[0][seen], 1.0) * alloc_mib
    cpu_s = np.minimum(cpu_share[family] * noise[1][seen], 1.0) * cpus * elapsed_s
    unknown = ~is_ended | is_lost[seen] | (elapsed_s <= 0) | (jobs.gpus[job] <= 0)
    return {
        "cpu_time_s": pa.array(np.round(cpu_s, 3), mask=unknown),
        "host_mem_alloc_mib": pa.array(alloc_mib, mask=elapsed_s <= 0),
        "host_mem_peak_mib": pa.array(np.round(peak_mib), mask=unknown),
        "host_mem_task_peak_mib": pa.array(np.round(peak_mib / jobs.nodes[job]), mask=unknown),
    }
