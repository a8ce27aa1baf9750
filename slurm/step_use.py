"""CPU time, host memory, and GPU memory that the steps of a job used, as Slurm's accounting has them.

Slurm gathers use by step (JobAcctGatherType); a job's own line has none. A step that still runs, that was lost with its
node, or that nothing gathered says 0 or nothing: that is unknown, not 0.

GPU memory: slurmd asks NVML or ROCm SMI for the memory of each process, if gres.conf has AutoDetect=nvml or rsmi. A
value is the sum over all GPUs and all processes of one task (Slurm's src/plugins/jobacct_gather/common/common_jag.c,
jag_common_poll_data). TRESUsageInMax has the highest sample of the largest task, one every JobAcctGatherFrequency.
TRESUsageInTot adds up the last samples of all tasks, and TRESUsageInAve divides that by their number: neither is a mean
over time. MIG instances and GPUs without support give 0 or an infinite number (ResearchComputing/Documentation, 498).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from almanac.tres import gpu_memory_mib, gpu_use_pct, size_mib
from slurm.sacct import optional_number

USAGE_COLUMNS = ("NTasks", "TotalCPU", "MaxRSS", "TRESUsageInMax")
JOB_COLUMNS = (
    "cpu_time_s", "host_mem_peak_mib", "host_mem_task_peak_mib",
    "sacct_hbm_peak_mib", "sacct_hbm_least_mib", "sacct_gpu_util_pct",
)  # fmt: skip
"""Columns of the jobs table that come from steps."""
MISSABLE_S = 60
"""A shorter step can end between two samples of memory: by default, slurmd takes one every 30 s."""

_CPU_TIME = re.compile(r"(?:(?P<d>\d{1,6})-)?(?:(?P<h>\d{1,6}):)?(?P<m>\d{1,6}):(?P<s>\d{1,2}(?:\.\d{1,6})?)")


@dataclass(frozen=True)
class StepUse:
    """CPU time and memory that a step used. whole: "batch", "extern", or "interactive"; None for a step of srun.

    cpu_s: None unless it was gathered. task_mib: peak memory of the step's largest task, None if not gathered.
    gpu_task_mib: peak GPU memory of one task on all its GPUs; 0 without a GPU process, or if not gathered; None: no
    value. gpu_task_pct: the same of utilization. gpus: None if not recorded.
    """

    whole: str | None
    start_s: int | None
    end_s: int | None
    cpu_s: float | None
    tasks: int | None
    task_mib: float | None
    nodes: int = 1
    gpus: int | None = None
    gpu_task_mib: float | None = None
    gpu_task_pct: float | None = None

    @property
    def elapsed_s(self) -> int:
        """0 for a step that has not started; a step without an end has lasted for an unknown, long time."""
        return 0 if self.start_s is None else 2**40 if self.end_s is None else self.end_s - self.start_s

    @property
    def host_mib(self) -> float:
        return (self.task_mib or 0.0) * (self.tasks or 0)

    @property
    def gpu_most_mib(self) -> float:
        """Upper bound for one GPU: all tasks that can be on one node use the same. Each node has a task at least."""
        return (self.gpu_task_mib or 0.0) * max((self.tasks or 1) - self.nodes + 1, 1)

    @property
    def gpu_least_mib(self) -> float:
        """Lower bound for the busiest GPU: the largest task is spread evenly over the GPUs of its node."""
        return (self.gpu_task_mib or 0.0) / max((self.gpus or 1) - self.nodes + 1, 1)


def step_use(whole: str | None, row: Mapping[str, Any], value: Mapping[str, str]) -> StepUse:
    """Return a step's use of CPUs, memory, and GPUs; None for each value that was not gathered.

    row: of the steps table. value: the step's fields of USAGE_COLUMNS.
    """
    cpu_s, task_mib = parse_cpu_time(value["TotalCPU"]), size_mib(value["MaxRSS"]) or None
    return StepUse(
        whole,
        row["start_s"],
        row["end_s"],
        cpu_s or None,
        optional_number(value["NTasks"]) or None,
        task_mib,
        nodes=row["node_count"] or 1,
        gpus=row["gpu_count"],
        gpu_task_mib=gpu_memory_mib(value["TRESUsageInMax"]),
        gpu_task_pct=gpu_use_pct(value["TRESUsageInMax"]),
    )


def parse_cpu_time(text: str) -> float | None:
    """Seconds of "00:12.345", "01:02:03", or "1-02:03:04"; None for any other text."""
    match = _CPU_TIME.fullmatch(text) if text.isascii() else None
    if match is None:
        return None
    days, hours, minutes = (int(match[name] or 0) for name in "dhm")
    return ((days * 24 + hours) * 60 + minutes) * 60 + float(match["s"])


def job_use(steps: Sequence[StepUse]) -> dict[str, float | None]:
    """JOB_COLUMNS of a run. steps: all of its steps; the extern step counts if it was gathered.

    cpu_time_s: user and system time of all steps; None if a step that ran is not known.
    host_mem_peak_mib: an upper estimate, as Slurm records a peak for the largest task of a step only: that peak times
    the step's tasks, of all steps that ran at one time together. seff takes the same product of one step.
    host_mem_task_peak_mib: the largest task itself; equal to the former for a job of one task.
    """
    own = [step for step in steps if step.whole != "extern"]
    has_cpu = bool(own) and all(step.cpu_s is not None or step.elapsed_s < 1 for step in own)
    cpu_s = sum(step.cpu_s or 0.0 for step in steps) if has_cpu else None
    measured = [step for step in steps if step.task_mib is not None and step.tasks is not None]
    has_memory = all(step in measured or step.elapsed_s < MISSABLE_S for step in own)
    has_memory = has_memory and any(step.whole != "extern" for step in measured)
    return {
        "cpu_time_s": cpu_s or None,
        "host_mem_peak_mib": _together(measured, [step.host_mib for step in measured]) if has_memory else None,
        "host_mem_task_peak_mib": max(step.task_mib or 0.0 for step in measured) if has_memory else None,
        **_gpu_use(steps, own),
    }


def _gpu_use(steps: Sequence[StepUse], own: Sequence[StepUse]) -> dict[str, float | None]:
    """Bounds for the peak memory of the busiest GPU, and the highest utilization of one task.

    None unless a step showed GPU memory, and none is unknown: a batch script that only starts steps shows 0. A step
    that has no GPU, or that ended between two samples, does not count.
    """
    ended = [step for step in steps if step.end_s is not None and step.tasks is not None]
    used = [step for step in ended if step.gpu_task_mib]
    silent = [step for step in ended if step.gpu_task_mib == 0]
    is_known = all(step in used or step in silent or not step.gpus or step.elapsed_s < MISSABLE_S for step in own)
    if not used or not is_known:
        return dict.fromkeys(JOB_COLUMNS[3:])
    known = [step.gpu_task_pct for step in used if step.gpu_task_pct is not None]
    return {
        "sacct_hbm_peak_mib": _together(used, [step.gpu_most_mib for step in used]),
        "sacct_hbm_least_mib": max(step.gpu_least_mib for step in used),
        "sacct_gpu_util_pct": max(known, default=None),
    }


def _together(steps: Sequence[StepUse], sizes_mib: Sequence[float]) -> float:
    """The largest sum, MiB, over steps that ran at one time. A step that starts when another ends ran after it."""
    changes: list[tuple[int, float]] = []
    for step, mib in zip(steps, sizes_mib, strict=True):
        start_s = step.start_s or 0
        changes += [(start_s, mib), (max(step.end_s or 0, start_s + 1), -mib)]
    return max(accumulate(mib for _, mib in sorted(changes)))
