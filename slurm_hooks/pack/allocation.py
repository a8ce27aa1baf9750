"""What Slurm gave this job on this node: GPUs and CPUs."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from slurm_hooks.pack.processes import TASK_MARK

_TOPOLOGY = "/sys/devices/system/cpu"


def why_not(environ: Mapping[str, str]) -> str:
    """Why nothing can be packed here; "" where it can."""
    inside = environ.get(TASK_MARK, "").partition("-")[0]  # of another job where a task has submitted this one
    if inside and inside == environ.get("SLURM_JOB_ID", "0"):
        return "it is in a task of almanac-pack; expected one almanac-pack for the job, with all tasks in its list"
    # A job that is submitted inside a step of several tasks inherits SLURM_STEP_NUM_TASKS, but not SLURM_NTASKS.
    if min(number_of(environ, name) or 1 for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")) > 1:
        return "srun started several copies of it; expected one: srun -n 1 almanac-pack"
    in_step = "SLURM_STEP_NUM_NODES" in environ
    nodes = number_of(environ, "SLURM_STEP_NUM_NODES" if in_step else "SLURM_JOB_NUM_NODES") or 1
    if nodes > 1:
        return f"the job has {nodes} nodes; expected one: submit with -N 1, or use srun -N 1 -n 1 almanac-pack"
    if not gpus_of(environ):
        return "CUDA_VISIBLE_DEVICES names no GPU; expected one: submit with --gpus=1 or --gres=gpu:1"
    return ""


def number_of(environ: Mapping[str, str], name: str) -> int | None:
    """None where Slurm does not say it."""
    text = environ.get(name, "")
    return int(text) if re.fullmatch("[0-9]{1,10}", text) else None


def gpus_of(environ: Mapping[str, str]) -> list[str]:
    """Indices or UUIDs, as Slurm gave them; [] without GPUs (Slurm then says NoDevFiles, or nothing)."""
    names = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return list(
        dict.fromkeys(
            name for name in names if (name.isascii() and name.isdecimal()) or name.startswith(("GPU-", "MIG-"))
        )
    )


def is_slice(gpu: str) -> bool:
    return gpu.startswith("MIG-")


def cpu_parts(cpus: Collection[int], allocated: int, parts: int) -> list[frozenset[int]]:
    """Disjoint parts of the job's CPUs, whole cores together where that is possible; [] where nobody may be pinned.

    cpus: those that this process may use. allocated: what Slurm says it gave. Without confinement a process may use
    the whole node, and pinning would put it on CPUs of other jobs.
    """
    if not cpus or len(cpus) < parts or (allocated and len(cpus) > allocated):
        return []
    ordered = sorted(cpus, key=lambda cpu: (_core(cpu), cpu))
    edges = [len(ordered) * number // parts for number in range(parts + 1)]
    return [frozenset(ordered[low:high]) for low, high in itertools.pairwise(edges)]


def _core(cpu: int) -> int:
    """The smallest CPU of the same core."""
    try:
        text = Path(f"{_TOPOLOGY}/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
        return int(text.replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu


def threads_for(allocated: int, cpus: Collection[int], parts: Sequence[frozenset[int]], slots: int) -> int:
    """CPUs of one task, at least 1."""
    if parts:
        return min(len(part) for part in parts)
    return max(1, (allocated or len(cpus)) // slots)


def allocated_cpus(environ: Mapping[str, str]) -> int:
    """0 where Slurm does not say."""
    return number_of(environ, "SLURM_CPUS_ON_NODE") or 0


def usable_cpus() -> set[int]:
    try:
        return os.sched_getaffinity(0)
    except OSError:
        return set()
