"""The wait of a job that is submitted now, by GPU type and number of GPUs, with an interval. Pure.

Three schedules over one snapshot: likely, low, and high run times. The high one also counts jobs that wait for more
than resources (a dependency, a limit), and once more what was submitted within the last RECENT_S: as much may have been
submitted since the snapshot, by users who were given the same advice.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from advisor.waits.schedule import Probe, first_starts
from advisor.waits.view import QueueView, TypeWait, WaitingJob

RECENT_S = 600.0
"""Advice of the last 10 minutes counts as queued work."""
DEFAULT_LIMIT_S = 86_400.0
"""Time limit of the job that is asked about where no job in the queue has one."""
MAX_SIZE = 4096


def estimate_waits(view: QueueView) -> dict[tuple[str, int], TypeWait]:
    """Waits by type and number of GPUs; sizes that a type cannot hold, or not within two weeks, are left out."""
    limit_s = _typical_limit(view.waiting)
    probes = [Probe(name, size, limit_s) for name in _types(view) for size in sizes(view, name)]
    ready = [job for job in view.waiting if job.is_ready]
    likely = first_starts(view, ready, probes, lambda span: span.likely_s)
    low = first_starts(view, ready, probes, lambda span: span.low_s)
    high = first_starts(
        view, [*view.waiting, *_again(view.waiting, RECENT_S)], probes, lambda span: span.high_s
    )  # fmt: skip
    found = {}
    for probe in probes:
        if probe in likely and probe in high:
            wait_s = likely[probe]
            low_s = min(low.get(probe, wait_s), wait_s)
            wait = TypeWait(probe.gpu_type, wait_s, low_s, max(high[probe], wait_s), view.as_of_s)
            found[probe.gpu_type, probe.gpus] = wait
    return found


def _again(jobs: Iterable[WaitingJob], within_s: float) -> list[WaitingJob]:
    return [replace(job, is_ready=True) for job in jobs if 0 <= job.submitted_s < within_s]


def _types(view: QueueView) -> list[str]:
    return sorted({node.gpu_type for node in view.nodes if node.gpus > 0})


def sizes(view: QueueView, gpu_type: str) -> list[int]:
    """1, 2, 4, ... GPUs up to what the type has in service, and all of it."""
    total = min(sum(node.gpus for node in view.nodes if node.gpu_type == gpu_type), MAX_SIZE)
    found = {1 << power for power in range(total.bit_length())} | {total}
    return sorted(size for size in found if 0 < size <= total)


def _typical_limit(waiting: Sequence[WaitingJob]) -> float:
    limits_s = [job.limit_s for job in waiting if job.limit_s is not None]
    return statistics.median(limits_s) if limits_s else DEFAULT_LIMIT_S
