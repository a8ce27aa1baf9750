"""CPU time and host memory of a job, from what sacct says of its steps.

Slurm's accounting gathers these by step (JobAcctGatherType); a job's own line has none. A step that still runs, that
was lost with its node, or that nothing gathered says 0 or nothing: that is unknown, not 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pyarrow as pa

from almanac.tres import size_mib
from telemetry.sources.sacct_text import optional_number

COLUMNS = ("NTasks", "TotalCPU", "MaxRSS")
JOB_COLUMNS = ("cpu_time_s", "host_mem_peak_mib", "host_mem_task_peak_mib")
"""Columns of the jobs table that come from steps."""
MISSABLE_S = 60
"""A shorter step can end between two samples of memory: by default, slurmd takes one every 30 s."""

_CPU_TIME = re.compile(r"(?:(?P<d>\d{1,6})-)?(?:(?P<h>\d{1,6}):)?(?P<m>\d{1,6}):(?P<s>\d{1,2}(?:\.\d{1,6})?)")


@dataclass(frozen=True)
class StepUse:
    """What a step used. whole: "batch", "extern", or "interactive"; None for a step of srun.

    cpu_s: None unless it was gathered. task_mib: peak memory of the step's largest task, None if not gathered.
    """

    whole: str | None
    start_s: int | None
    end_s: int | None
    cpu_s: float | None
    tasks: int | None
    task_mib: float | None

    @property
    def elapsed_s(self) -> int:
        """0 for a step that has not started; a step without an end has lasted for an unknown, long time."""
        return 0 if self.start_s is None else 2**40 if self.end_s is None else self.end_s - self.start_s


def step_use(whole: str | None, start_s: int | None, end_s: int | None, value: Mapping[str, str]) -> StepUse:
    """value: a step's fields of COLUMNS. Both its figures are unknown if neither was gathered."""
    cpu_s, task_mib = parse_cpu_time(value["TotalCPU"]), size_mib(value["MaxRSS"]) or None
    return StepUse(whole, start_s, end_s, cpu_s or None, optional_number(value["NTasks"]) or None, task_mib)


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
        "host_mem_peak_mib": _together(measured) if has_memory else None,
        "host_mem_task_peak_mib": max(step.task_mib or 0.0 for step in measured) if has_memory else None,
    }


def _together(steps: Sequence[StepUse]) -> float:
    """The largest sum, MiB, over steps that ran at one time. A step that starts when another ends ran after it."""
    changes: list[tuple[int, float]] = []
    for step in steps:
        start_s, mib = step.start_s or 0, (step.task_mib or 0.0) * (step.tasks or 0)
        changes += [(start_s, mib), (max(step.end_s or 0, start_s + 1), -mib)]
    return max(accumulate(mib for _, mib in sorted(changes)))


def with_use(jobs: pa.Table, uses: Mapping[tuple[int, int], Sequence[StepUse]]) -> pa.Table:
    """The jobs with JOB_COLUMNS. uses: the steps of runs, by job_id and submit_s."""
    keys = list(zip(*(jobs[name].to_numpy().tolist() for name in ("job_id", "submit_s")), strict=True))
    found = {key: job_use(uses[key]) for key in keys if uses.get(key)}
    for name in JOB_COLUMNS:
        values = pa.array([found[key][name] if key in found else None for key in keys], pa.float64())
        place = jobs.schema.get_field_index(name)
        jobs = jobs.set_column(place, jobs.schema.field(place), values)
    return jobs
