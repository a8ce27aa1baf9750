"""A policy like MISO: the GPU that takes a job is cut again for all of its jobs, at 30 s a migration.

When a job arrives or a pending one may fit, every GPU is tried: its jobs and the new one get the cut that gives them
the most speed together. The GPU where the others lose least takes the job. Where the cut changes, every job on that
GPU pauses for 30 s. Pending jobs are tried in the order of submission; smaller ones may pass. No Slurm does this: it
changes the slices of a busy GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

from advisor.mig.replay import PoolJob
from advisor.mig.sizes import Counts, Sizes

MIGRATION_S = 30.0


@dataclass
class _Running:
    number: int
    job: PoolJob
    size: int
    left: float
    """Part of the job that is left, 1 at the start."""
    since_s: float
    """Up to when `left` counts; later than now while the job pauses."""
    version: int = 0

    def settle(self, now_s: float) -> None:
        if now_s > self.since_s:
            self.left = max(0.0, self.left - (now_s - self.since_s) / self.job.runs_s[self.size])
            self.since_s = now_s

    @property
    def end_s(self) -> float:
        return self.since_s + self.left * self.job.runs_s[self.size]


@dataclass(frozen=True)
class MisoRun:
    """Waits in seconds, by job, and the number of migrations (jobs that paused)."""

    waits_s: tuple[float, ...]
    migrations: int

    @property
    def wait_s(self) -> float:
        """Mean wait; 0 without jobs."""
        return sum(self.waits_s) / max(1, len(self.waits_s))


class MisoCluster:
    """Runs jobs once on a number of GPUs."""

    def __init__(self, sizes: Sizes, gpus: int) -> None:
        self._sizes = sizes
        self._gpus: list[list[_Running]] = [[] for _ in range(gpus)]
        self._cuts: list[Counts] = [sizes.layouts[0]] * gpus
        self._ends: list[tuple[float, int, int, int]] = []
        self._running: dict[int, _Running] = {}
        self._pending: list[int] = []
        self._migrations = 0

    def run(self, jobs: Sequence[PoolJob]) -> MisoRun:
        """The course of the jobs (by submit time) until all have started."""
        waits_s = [0.0] * len(jobs)
        for number, job in enumerate(jobs):
            self._advance(job.submit_s, jobs, waits_s)
            delay_s = self._place(number, job, job.submit_s)
            if delay_s is None:
                self._pending.append(number)
            else:
                waits_s[number] = delay_s
        while self._pending:
            if not self._ends:
                raise ValueError(f"{len(self._pending)} jobs fit on no GPU of {len(self._gpus)}")
            self._advance(self._ends[0][0], jobs, waits_s)
        return MisoRun(tuple(waits_s), self._migrations)

    def _advance(self, until_s: float, jobs: Sequence[PoolJob], waits_s: list[float]) -> None:
        while self._ends and self._ends[0][0] <= until_s:
            now_s, number, version, gpu = heappop(self._ends)
            running = self._running.get(number)
            if running is None or running.version != version:
                continue
            del self._running[number]
            self._gpus[gpu].remove(running)
            failed: set[int] = set()
            for waiting in list(self._pending):
                size = jobs[waiting].size
                if size in failed:
                    continue
                delay_s = self._place(waiting, jobs[waiting], now_s)
                if delay_s is None:
                    failed.add(size)
                else:
                    self._pending.remove(waiting)
                    waits_s[waiting] = now_s - jobs[waiting].submit_s + delay_s

    def _place(self, number: int, job: PoolJob, now_s: float) -> float | None:
        """Seconds until it runs: 0, or a migration; None where it fits nowhere."""
        best: tuple[float, int, Counts, tuple[int, ...]] | None = None
        for gpu, running in enumerate(self._gpus):
            held = tuple(sorted((*(each.job.size for each in running), job.size)))
            found = best_cut(self._sizes, held)
            if found is None:
                continue
            loss = sum(self._sizes.compute[each.size] for each in running) - found[0]
            if best is None or loss < best[0]:
                best = (loss, gpu, found[1], found[2])
        if best is None:
            return None
        _, gpu, cut, given = best
        return self._recut(gpu, cut, given, _Running(number, job, job.size, 1.0, now_s), now_s)

    def _recut(self, gpu: int, cut: Counts, given: Sequence[int], new: _Running, now_s: float) -> float:
        """Give the jobs of a GPU, by increasing need, these sizes; how long all of them pause."""
        is_moved = cut != self._cuts[gpu] and bool(self._gpus[gpu])
        self._migrations += len(self._gpus[gpu]) if is_moved else 0
        self._gpus[gpu].append(new)
        self._running[new.number] = new
        self._cuts[gpu] = cut
        for each, size in zip(sorted(self._gpus[gpu], key=lambda each: each.job.size), given, strict=True):
            each.settle(now_s)
            each.size = size
            if is_moved:
                each.since_s = max(each.since_s, now_s) + MIGRATION_S
            each.version += 1
            heappush(self._ends, (each.end_s, each.number, each.version, gpu))
        return MIGRATION_S if is_moved else 0.0


@lru_cache(maxsize=1 << 16)
def best_cut(sizes: Sizes, held: tuple[int, ...]) -> tuple[int, Counts, tuple[int, ...]] | None:
    """The cut of one GPU with the most compute slices for jobs that need these sizes (sorted); None where none holds.

    Returns the compute slices in use, the layout, and the size that each job gets, in the order of `held`.
    """
    best = None
    for layout in sizes.layouts:
        given = _assign(layout, held)
        if given is not None:
            compute = sum(sizes.compute[size] for size in given)
            if best is None or compute > best[0]:
                best = (compute, layout, given)
    return best


def _assign(layout: Counts, held: tuple[int, ...]) -> tuple[int, ...] | None:
    """The largest jobs get the largest instances; None where one does not fit."""
    instances = [size for size, count in enumerate(layout) for _ in range(count)][-len(held) :]
    if len(instances) < len(held) or any(have < need for have, need in zip(instances, held, strict=True)):
        return None
    return tuple(instances)
