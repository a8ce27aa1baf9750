"""What a job did with its CPUs and host memory, as lines of its report."""

from __future__ import annotations

from collections.abc import Iterator

from almanac.units import counted, format_count, format_gib
from reports.job.context import JobContext
from reports.job.facts import percent

ONE_TASK_SHARE = 0.9
"""A task with so much of its job's memory is named as the job: the rest is the batch script's shell."""


def host_texts(context: JobContext) -> Iterator[tuple[str, str, str]]:
    """Name, value, and meaning of each line; no line for what Slurm's accounting did not gather."""
    use, cpus = context.cpu_use, context.job["cpu_count"]
    if use is not None and cpus:
        busy = f"{use * cpus:.2g}" if use * cpus < 10 else f"{use * cpus:,.0f}"
        asked = context.job["cpu_count_req"]
        unasked = f"; {format_count(asked)} requested" if asked and asked < cpus else ""
        yield "CPU use", percent(use), f"{busy} of {counted(cpus, 'CPU')} busy on average{unasked}"
    peak_mib, task_mib = context.job["host_mem_peak_mib"], context.job["host_mem_task_peak_mib"]
    if peak_mib is not None:
        alloc_mib = context.job["host_mem_alloc_mib"]
        share = percent(peak_mib / alloc_mib) if alloc_mib else ""
        is_one_task = task_mib is None or task_mib >= ONE_TASK_SHARE * peak_mib
        if is_one_task:
            about = f"{share} of what the job was given" if share else ""
        else:
            about = f"{f'{share} ' if share else ''}at most; the largest task used {_gib(task_mib or 0)}"
        yield "Peak host memory", f"{_gib(peak_mib)}{f' of {_gib(alloc_mib)}' if alloc_mib else ''}", about


def _gib(mib: float) -> str:
    """As on GPUs; without decimals from 100 GiB on."""
    return format_gib(mib) if mib < 100 * 1024 else f"{mib / 1024:,.0f} GiB"
