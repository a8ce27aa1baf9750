"""Looks at the job's memory now and then, for an early restart."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from advisor.memory.allocator import AllocatorWatch
from advisor.memory.growth import GrowthWatch, RunTime
from slurm_hooks.restart.iterations import IterationFile
from slurm_hooks.restart.memory import GpuMemory


class MemoryWatch:
    """look() at the memory at a time since the start; both predictors may say that the job outgrows it."""

    def __init__(
        self,
        read: Callable[[], GpuMemory | None],
        run_time: RunTime,
        family_peak_mib: float | None,
        iterations: IterationFile | None,
    ) -> None:
        self._read, self._run_time, self._family, self._iterations = read, run_time, family_peak_mib, iterations
        self._growth: GrowthWatch | None = None
        self._allocator: AllocatorWatch | None = None

    def look(self, since_start_s: float) -> str | None:
        """Why the job is to restart early, with figures, or None."""
        memory = self._read()
        if memory is None:
            return None
        if self._growth is None or self._allocator is None:
            self._growth = GrowthWatch(memory.capacity_mib, self._run_time, self._family)
            self._allocator = AllocatorWatch(memory.capacity_mib, self._family)
        full_s = self._growth.observe(since_start_s, memory.used_mib)
        use = f"{memory.used_mib:.0f} of {memory.capacity_mib:.0f} MiB used"
        if full_s is not None:
            return f"{use}, full in about {max(0.0, full_s - since_start_s):.0f} s"
        for iteration, last in self._iterations.new() if self._iterations else ():
            if self._allocator.observe(iteration, last):
                return f"{use}, more than the capacity predicted from the allocator's requests"
        return None


def limit_s(environ: Mapping[str, str]) -> float | None:
    """The job's time limit by SLURM_JOB_START_TIME and SLURM_JOB_END_TIME; None where they are not set."""
    try:
        length = float(environ["SLURM_JOB_END_TIME"]) - float(environ["SLURM_JOB_START_TIME"])
    except (KeyError, ValueError):
        return None
    return length if 0 < length < 1e9 else None
