"""Policies of a MIG cluster by name: the planner, the best static layout in hindsight, and one like MISO.

MISO: when a job arrives or a pending one may fit, every GPU is tried. Its jobs and the new one get the cut that gives
them the most speed together, and the GPU where the others lose least takes the job. Where the cut changes, every job on
that GPU pauses for 30 s. Pending jobs are tried in the order of submission; smaller ones may pass. No Slurm does this:
it changes the slices of a busy GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from operator import add, sub

import pandas as pd

from advisor.events import JobLoop
from advisor.mig.decide import LayoutRules, decide_layout
from advisor.mig.outlook import PoolJob, homes_of, total_wait_s
from advisor.mig.states import Counts, Sizes, sizes_of
from almanac.hardware import mig_models
from simulator.outcomes import PolicyRun, uninterrupted
from simulator.policies.mig.layouts import MigCluster, MigSite
from simulator.traces.mig import SliceRequest, pool_jobs


@dataclass(frozen=True)
class StaticLayout:
    """A layout for each GPU (instances by size), and the mean wait of the trace on it."""

    gpus: tuple[Counts, ...]
    wait_s: float


def best_static(jobs: Sequence[PoolJob], sizes: Sizes, gpus: int) -> StaticLayout:
    """The best of all static layouts without raises; exact.

    Without raises a job waits for its own size only, so that sizes do not affect each other once it is known which of
    them exist. The least wait over all numbers of instances that the GPUs can have is then a sum over sizes.
    """
    curves = _Curves(jobs, len(sizes.shapes))
    wait_s, counts = math.inf, (0,) * (len(sizes.shapes) - 1) + (gpus,)
    for each in reachable_counts(sizes, gpus)[-1]:
        found = curves.wait_s(each, wait_s)
        if found < wait_s:
            wait_s, counts = found, each
    return StaticLayout(_gpus_of(sizes, counts, gpus), wait_s / max(1, len(jobs)))


@cache
def reachable_counts(sizes: Sizes, gpus: int) -> tuple[frozenset[Counts], ...]:
    """Return all numbers of instances that 0, 1, ... GPUs can have, each with nothing to add."""
    found = [frozenset([(0,) * len(sizes.shapes)])]
    for _ in range(gpus):
        found.append(frozenset(tuple(map(add, counts, layout)) for counts in found[-1] for layout in sizes.layouts))
    return tuple(found)


def _gpus_of(sizes: Sizes, counts: Counts, gpus: int) -> tuple[Counts, ...]:
    """A layout for each GPU with these instances together."""
    chosen: list[Counts] = []
    for level in reversed(reachable_counts(sizes, gpus)[:-1]):
        layout = next(each for each in sizes.layouts if tuple(map(sub, counts, each)) in level)
        counts = tuple(map(sub, counts, layout))
        chosen.append(layout)
    return tuple(chosen)


def best_static_with_raises(
    jobs: Sequence[PoolJob], sizes: Sizes, gpus: int, starts: Sequence[Sequence[Counts]]
) -> StaticLayout:
    """The best static layout with raises that a local search finds, from several starts.

    A step gives one GPU another layout; the search ends when no step helps.
    """
    tried: dict[Counts, float] = {}
    best: tuple[float, tuple[Counts, ...]] = (math.inf, ())
    for start in starts:
        found = _descend(jobs, sizes, tuple(start), tried)
        best = min(best, found)
    return StaticLayout(best[1], best[0] / max(1, len(jobs)))


def _descend(
    jobs: Sequence[PoolJob], sizes: Sizes, gpus: tuple[Counts, ...], tried: dict[Counts, float]
) -> tuple[float, tuple[Counts, ...]]:
    now = _tried(jobs, gpus, tried, math.inf)
    while True:
        steps = []
        for old in sorted(set(gpus)):
            place = gpus.index(old)
            for new in sizes.layouts:
                changed = (*gpus[:place], new, *gpus[place + 1 :])
                steps.append((_tried(jobs, changed, tried, now), changed))
        wait_s, changed = min(steps)
        if wait_s >= now:
            return now, gpus
        now, gpus = wait_s, changed


def _tried(jobs: Sequence[PoolJob], gpus: Sequence[Counts], tried: dict[Counts, float], limit_s: float) -> float:
    counts = tuple(map(sum, zip(*gpus, strict=True)))
    if counts not in tried:
        tried[counts] = total_wait_s(counts, jobs, raises=True, limit_s=limit_s)
    return tried[counts]


class _Curves:
    """The wait of each size's jobs by number of instances, computed on demand."""

    def __init__(self, jobs: Sequence[PoolJob], sizes: int) -> None:
        self._jobs = jobs
        self._sizes = sizes
        self._present = {job.size for job in jobs}
        self._found: dict[tuple[int, int, int], float] = {}

    def wait_s(self, counts: Counts, limit_s: float) -> float:
        members = [0] * self._sizes
        for size, home in enumerate(homes_of(counts)):
            if size in self._present and home is None:
                return math.inf
            members[home or 0] |= 1 << size
        total = 0.0
        for size in reversed(range(self._sizes)):
            if counts[size]:
                total += self._of(size, counts[size], members[size])
                if total >= limit_s:
                    return math.inf
        return total

    def _of(self, size: int, count: int, members: int) -> float:
        key = (size, count, members)
        if key not in self._found:
            jobs = [job for job in self._jobs if members >> job.size & 1]
            counts = [count if each == size else 0 for each in range(self._sizes)]
            self._found[key] = total_wait_s(counts, jobs, raises=False)
        return self._found[key]


MIGRATION_S = 30.0


class MisoCluster(JobLoop):
    """Runs jobs once on a number of GPUs. migrations: times that a running job paused."""

    def __init__(self, sizes: Sizes, gpus: int, jobs: Sequence[PoolJob]) -> None:
        super().__init__([job.submit_s for job in jobs])
        self.migrations = 0
        self._sizes, self._jobs = sizes, jobs
        self._gpus: list[list[int]] = [[] for _ in range(gpus)]
        self._cuts: list[Counts] = [sizes.layouts[0]] * gpus
        self._size = [job.size for job in jobs]
        """Of the instance that each job has, or of the smallest that holds it."""
        self._pending: list[int] = []
        self._in_use, self._busy_s, self._counted_s = 0, 0.0, 0.0

    def run(self) -> None:
        """Run all jobs. Raises ValueError if some fit on no GPU."""
        super().run()
        if self._pending:
            raise ValueError(f"{len(self._pending)} jobs fit on no GPU of {len(self._gpus)}")

    def settle(self) -> None:
        """Count the slices in use until now, and look which are from now on."""
        self._busy_s += self._in_use * (self.now_s - self._counted_s)
        self._counted_s, self._in_use = self.now_s, sum(self._sizes.compute[self._size[job]] for job in self.speeds)

    def outcome(self, policy: str) -> PolicyRun:
        """The result; the pause of a job's first start counts as waiting."""
        found = uninterrupted(self.submit_s, self.start_s, self.end_s, [job.runs_s[-1] for job in self._jobs])
        busy_gpu_s = self._busy_s / self._sizes.compute[-1]
        return PolicyRun(policy, found, len(self._gpus), busy_gpu_s, self.migrations)

    def submitted(self, job: int) -> None:
        if not self._place(job):
            self._pending.append(job)

    def ended(self, job: int) -> None:
        next(running for running in self._gpus if job in running).remove(job)
        failed: set[int] = set()
        for waiting in list(self._pending):
            size = self._jobs[waiting].size
            if size in failed:
                continue
            if self._place(waiting):
                self._pending.remove(waiting)
            else:
                failed.add(size)

    def _place(self, job: int) -> bool:
        """Start the job where the others lose least; return False if it fits nowhere."""
        best: tuple[float, int, Counts, tuple[int, ...]] | None = None
        for gpu, running in enumerate(self._gpus):
            held = tuple(sorted(self._jobs[each].size for each in (*running, job)))
            found = best_cut(self._sizes, held)
            if found is None:
                continue
            loss = sum(self._sizes.compute[self._size[each]] for each in running) - found[0]
            if best is None or loss < best[0]:
                best = (loss, gpu, found[1], found[2])
        if best is not None:
            self._recut(*best[1:], job)
        return best is not None

    def _recut(self, gpu: int, cut: Counts, given: Sequence[int], new: int) -> None:
        """Give the jobs of a GPU, by increasing need, these sizes; where the cut changes, all of them pause."""
        running = self._gpus[gpu]
        pause_s = MIGRATION_S if running and cut != self._cuts[gpu] else 0.0
        self.migrations += len(running) if pause_s else 0
        self._cuts[gpu] = cut
        running.append(new)
        for job, size in zip(sorted(running, key=lambda each: self._jobs[each].size), given, strict=True):
            self._size[job], speed = size, 1 / self._jobs[job].runs_s[size]
            if job == new:
                self.start(job, 1.0, speed, pause_s)
            else:
                self.change_speed(job, speed, pause_s)


@lru_cache(maxsize=1 << 16)
def best_cut(sizes: Sizes, held: tuple[int, ...]) -> tuple[int, Counts, tuple[int, ...]] | None:
    """The cut of one GPU with the most compute slices for jobs of these sizes (sorted); None if no layout holds them.

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


ALONE, FULL, STATIC, STATIC_RAISES = "unchanged", "full", "static", "static-raises"
PLANNER, PLANNER_RAISES, MISO = "planner", "planner-raises", "miso"
POLICIES: Mapping[str, str] = {
    ALONE: "the layouts at the start; jobs get idle larger slices",
    FULL: "full GPUs",
    STATIC: "the best static layout in hindsight",
    STATIC_RAISES: "the best one that a search finds if jobs get idle larger slices",
    PLANNER: "almanac's planner",
    PLANNER_RAISES: "the same, and jobs get idle larger slices",
    MISO: "cuts busy GPUs again, like MISO",
}


def run_mig(
    jobs: Sequence[SliceRequest],
    site: MigSite,
    names: Sequence[str] = tuple(POLICIES),
    history: Sequence[SliceRequest] = (),
    advance: Callable[[float, str], None] = lambda share, policy: None,
) -> list[PolicyRun]:
    """Runs of POLICIES. jobs: by submit time. history: earlier jobs that the planner knows, before 0 s."""
    sizes = sizes_of(mig_models()[site.model])
    pooled = pool_jobs(jobs, sizes)

    @cache
    def static() -> StaticLayout:
        return best_static(pooled, sizes, site.gpus)

    def on(layout: StaticLayout) -> MigSite:
        gpus, size = [sizes.gpu_layout(each) for each in layout.gpus], site.gpus_per_node
        return replace(site, initial=tuple(tuple(gpus[first : first + size]) for first in range(0, len(gpus), size)))

    def raised() -> MigSite:
        full = ((0,) * (len(sizes.shapes) - 1) + (1,),) * site.gpus
        return on(best_static_with_raises(pooled, sizes, site.gpus, [static().gpus, full]))

    def miso(name: str) -> PolicyRun:
        run = MisoCluster(sizes, site.gpus, pooled)
        run.run()
        return run.outcome(name)

    runners: Mapping[str, Callable[[str], PolicyRun]] = {
        ALONE: lambda name: run_cluster(jobs, site, True, None).outcome(name),
        FULL: lambda name: run_cluster(jobs, replace(site, initial=None), False, None).outcome(name),
        STATIC: lambda name: run_cluster(jobs, on(static()), False, None).outcome(name),
        STATIC_RAISES: lambda name: run_cluster(jobs, raised(), True, None).outcome(name),
        PLANNER: lambda name: run_cluster(jobs, site, False, LayoutRules(), history).outcome(name),
        PLANNER_RAISES: lambda name: run_cluster(jobs, site, True, LayoutRules(), history).outcome(name),
        MISO: miso,
    }
    runs = []
    for number, name in enumerate(names):
        advance(number / len(names), name)
        runs.append(runners[name](name))
    return runs


def run_cluster(
    jobs: Sequence[SliceRequest],
    site: MigSite,
    raises: bool,
    rules: LayoutRules | None,
    history: Sequence[SliceRequest] = (),
) -> MigCluster:
    """The cluster with the planner, or with its first layouts where there are no rules."""
    planner = partial(decide_layout, rules=replace(rules, raises=raises, change_s=site.change_s)) if rules else None
    run = MigCluster(site, jobs, raises, planner, history)
    run.run()
    return run


def job_table(jobs: Sequence[SliceRequest]) -> pd.DataFrame:
    """The jobs as score_runs wants them; their kind is the shape."""
    rows = [(job.submit_s, job.full_s, 1, "", job.shape) for job in jobs]
    return pd.DataFrame(rows, columns=["submit_s", "run_s", "gpu_count", "user", "kind"])
