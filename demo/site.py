"""The plan of the whole site before its telemetry: each job with its limit, fate, and nodes, and the job table."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from almanac.names import name_key
from demo.shape import GPUS_PER_NODE, Arrays, Bools, Floats, Ints, SiteShape, load_profile, rank_within, reflect
from demo.users import (
    IDLE,
    MIB_40,
    MIB_80,
    NO_TIER,
    REGULAR,
    SUFFIXES,
    TIER_80,
    job_names,
    job_scripts,
    make_submissions,
    make_users,
    size_bins,
    with_traits,
)
from slurm.hostlist import fold
from telemetry.store.schema import JOBS

COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL = range(5)
STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_DEBUG_FACTOR, _DEBUG_LIMIT_S = 0.15, 1800.0


def make_jobs(
    shape: SiteShape, profile: Any, families: Arrays, submissions: Arrays, rng: np.random.Generator
) -> Arrays:
    """Every job of the site, before the nodes are known, in order of submission.

    rank: number within the family. run_s: run time unless memory ends it earlier. A node failure ends the first run,
    and a second one of again_s completes. array_job_id: the id of the array's first task, -1 for single jobs.
    util_frac, spatial, temporal: wanted job mean and imbalances, clipped to what the mean allows. need_mib: HBM peak
    that the job would have on a GPU that is large enough.
    """
    family, number = submissions.family, len(submissions.family)
    of, (rank, runs) = families.take(family), rank_within(family)
    is_debug = (rng.random(number) < profile.people.debug_share) & (submissions.array < 0)
    is_suffixed = rng.random(number) < profile.people.suffix_share
    nodes = np.where(of.role != REGULAR, 1, of.nodes)
    times = _times(shape, profile, of, is_debug, nodes > 1, rng)
    gives_up = rng.random(number) < profile.outcome.cancelled_waiting
    job_id = 1_000_001 + np.arange(number)
    first = np.full(int(submissions.array.max(initial=-1)) + 2, np.iinfo(np.int64).max)
    np.minimum.at(first, submissions.array, job_id)
    is_task = submissions.array >= 0
    use = _use(shape, profile, of, rng)
    return Arrays(
        family=family, role=of.role, submit_s=submissions.submit_s, job_id=job_id,
        array_job_id=np.where(is_task, first[submissions.array], -1), task=np.where(is_task, submissions.task, -1),
        nodes=nodes, gpus=nodes * GPUS_PER_NODE, is_debug=is_debug,
        suffix=np.where(is_suffixed, rng.integers(0, len(SUFFIXES), number), -1), rank=rank, **times,
        waits_in_vain_s=np.where(gives_up, rng.integers(5, 1800, number), -1), **use,
        need_mib=_needs(profile, of, rank, runs, rng),
        has_prof_fault=rng.random(number) < shape.faults.prof_fault_share,
    )  # fmt: skip


def _times(
    shape: SiteShape, profile: Any, of: Arrays, is_debug: Bools, several: Bools, rng: np.random.Generator
) -> dict[str, Ints]:
    """State, run time, second run time and limit. Scaled so that the mean run times are the published ones."""
    durations, outcome, number = profile.duration, profile.outcome, len(of.tier)
    log_s = of.log_median + of.log_sigma * rng.normal(0.0, 1.0, number)
    relative = np.exp(log_s) * np.where(is_debug, _DEBUG_FACTOR, 1.0)
    fate = rng.random(number)
    edges = np.cumsum([outcome.failed, outcome.cancelled, outcome.node_fail])
    state = np.select(list(fate < edges[:, None]), [FAILED, CANCELLED, NODE_FAIL], COMPLETED)
    part = np.where(state == COMPLETED, 1.0, outcome.fails_at(rng.random(number)))
    usual = np.exp(of.log_median) * of.limit_factor
    run, again, limit = np.zeros(number), np.zeros(number), np.zeros(number)
    means = (durations.one_node_mean_s, durations.multi_node_mean_s)
    for members, mean_s in zip((~several, several), means, strict=True):
        if not members.any():
            continue
        scale = mean_s * shape.duration_scale / relative[members].mean()
        for _ in range(6):
            limit_s = _limits(durations.limits_s, usual[members] * scale, is_debug[members])
            run_s = np.minimum(relative[members] * part[members] * scale, limit_s)
            counted = run_s[run_s >= durations.mean_from_s]
            scale *= mean_s * shape.duration_scale / (counted.mean() if len(counted) else run_s.mean())
        run[members], limit[members] = run_s, limit_s
        again[members] = np.minimum(relative[members] * scale, limit_s)
    state = np.where((run >= limit) & (state != NODE_FAIL), TIMEOUT, state)
    late = np.where(state == TIMEOUT, rng.integers(0, 30, number), 0)
    run_s = np.minimum(np.maximum(run, 5) + late, durations.longest_s).astype(np.int64)
    again_s = np.maximum(again, 5).astype(np.int64)
    return {"state": state, "run_s": run_s, "again_s": again_s, "limit_s": limit.astype(np.int64)}


def _limits(limits_s: list[int], wanted_s: Floats, is_debug: Bools) -> Floats:
    """The habitual limit at or above wanted_s; half an hour for debug jobs."""
    habits = np.array(limits_s, dtype=float)
    place = np.minimum(np.searchsorted(habits, wanted_s), len(habits) - 1)
    return np.where(is_debug, _DEBUG_LIMIT_S, habits[place])


def _needs(profile: Any, of: Arrays, rank: Ints, runs: Ints, rng: np.random.Generator) -> Floats:
    """HBM peak of each job: around the family's usual one within its band, or growing from run to run."""
    noise = np.clip(rng.normal(0.0, 1.0, len(rank)), -3, 3)
    around = of.need_mib * (1 + of.need_spread * noise)
    around = np.clip(around, of.need_low_mib * 1.001, of.need_high_mib)
    first, last = of.grow_mib.T
    grown = (first + (last - first) * (rank + 0.5) / runs) * (1 + 0.01 * noise)
    most = np.where(of.tier == TIER_80, MIB_80, MIB_40) * profile.memory.most_frac
    needs: Floats = np.where(of.is_growing, np.minimum(grown, most), around)
    return needs


def _use(shape: SiteShape, profile: Any, of: Arrays, rng: np.random.Generator) -> dict[str, Floats]:
    """Mean utilization, spatial and temporal imbalance of each job (Cankur et al., IV-A, VI and VII)."""
    number = len(of.tier)
    jitter = rng.uniform(-0.05, 0.05, number)
    share = reflect(of.util_low + of.util_width * rng.random(number) + jitter)
    util = np.zeros(number)
    for bin_number, size_bin in enumerate(size_bins(shape, profile)):
        util = np.where(of.size_bin == bin_number, size_bin.util(share) / 100, util)
    util = np.where(of.is_one_gpu, np.minimum(util, 0.98 / GPUS_PER_NODE), util)
    util = np.where(of.role == IDLE, 0.0, util)
    band = np.digitize(util, [0.30, 0.70])
    place = reflect(of.imbalance_share + rng.uniform(-0.25, 0.25, number))
    spatial = np.choose(band, [curve(place) for curve in vars(profile.spatial).values()])
    spatial = np.clip(spatial, 0.0, np.maximum(0.0, 1 - util / 0.98))
    spatial = np.where(of.is_one_gpu, 1 - 1 / GPUS_PER_NODE, spatial)
    place = rng.random(number)
    temporal = np.choose(band, [curve(place) for curve in vars(profile.temporal).values()])
    return {"util_frac": util, "spatial": spatial, "temporal": temporal}


class _Pool:
    """Nodes of one kind, and when each is free again, s since 1970."""

    def __init__(self, shape: SiteShape, first: int, nodes: int, capacity_mib: float) -> None:
        self.first, self.capacity_mib = first, capacity_mib
        self.free_s = np.full(nodes, float(shape.start_s))

    def earliest(self, submit_s: int, number: int) -> float:
        """Return the time at which `number` of them are free together; infinite if there are fewer."""
        if number > len(self.free_s):
            return np.inf
        return max(float(submit_s), float(np.partition(self.free_s, number - 1)[number - 1]))

    def take(self, start_s: float, number: int, until_s: float) -> Ints:
        """The first nodes that are free, as indices of the site's hosts."""
        chosen = np.flatnonzero(self.free_s <= start_s)[:number]
        self.free_s[chosen] = until_s
        return self.first + chosen


class _Schedule:
    """Jobs take the earliest nodes in order of submission; no node is held twice."""

    def __init__(self, shape: SiteShape, jobs: Arrays, families: Arrays, rng: np.random.Generator) -> None:
        number = len(jobs.family)
        self._jobs, self._of = jobs, families.take(jobs.family)
        self._small = _Pool(shape, 0, shape.nodes_40, MIB_40)
        self._large = _Pool(shape, shape.nodes_40, shape.nodes_80, MIB_80)
        self._prefers_large = rng.random(number) < 0.15
        self._dies_after_s = rng.integers(60, 900, number)
        self._delay_s = rng.integers(1, 20, number)
        self.rows: list[tuple[int, int, int, int, int, int, float]] = []
        self.nodes: list[Ints] = []

    def place(self, job: int, submit_s: int, *, is_retry: bool = False) -> int:
        """Places one run; returns its end, or -1 where the job gave up waiting.

        A job that needs more memory than its GPUs have dies there within minutes.
        """
        jobs = self._jobs
        patience_s = int(jobs.waits_in_vain_s[job])
        if patience_s >= 0 and not is_retry:
            self.rows.append((job, submit_s, -1, submit_s + patience_s, CANCELLED, 0, 0.0))
            self.nodes.append(np.empty(0, dtype=np.int64))
            return -1
        nodes, run_s = int(jobs.nodes[job]), int(jobs.again_s[job] if is_retry else jobs.run_s[job])
        state = COMPLETED if is_retry else int(jobs.state[job])
        pool, free_s = self._pool(job, submit_s, nodes)
        starved = jobs.need_mib[job] > pool.capacity_mib and self._of.framework[job] < 0
        if starved and state != NODE_FAIL:
            state, run_s = FAILED, run_s if is_retry else min(run_s, int(self._dies_after_s[job]))
        start_s = int(free_s) + (1 if is_retry else int(self._delay_s[job]))
        self.nodes.append(pool.take(free_s, nodes, start_s + run_s))
        self.rows.append((job, submit_s, start_s, start_s + run_s, state, int(is_retry), pool.capacity_mib))
        return start_s + run_s

    def _pool(self, job: int, submit_s: int, nodes: int) -> tuple[_Pool, float]:
        """The pool that serves a job first, and when. Without a tier asked for, either does."""
        tier = self._of.tier[job]
        order = (self._large, self._small) if self._prefers_large[job] else (self._small, self._large)
        pools = order if tier == NO_TIER else (self._large if tier == TIER_80 else self._small,)
        times = [pool.earliest(submit_s, nodes) for pool in pools]
        best = times.index(min(times))
        return pools[best], times[best]


def schedule(shape: SiteShape, jobs: Arrays, families: Arrays, rng: np.random.Generator) -> tuple[Arrays, list[Ints]]:
    """The runs, and the nodes of each, as indices of the site's hosts.

    One entry per accounting record, in order of submission: a requeued job has two. start_s is -1 where the job gave
    up waiting.
    """
    plan = _Schedule(shape, jobs, families, rng)
    again: list[tuple[int, int]] = []
    for job, submit_s in enumerate(jobs.submit_s.tolist()):
        while again and again[0][0] <= submit_s:
            retry_s, retried = heapq.heappop(again)
            plan.place(retried, retry_s, is_retry=True)
        end_s = plan.place(job, submit_s)
        if jobs.state[job] == NODE_FAIL and end_s > 0:
            heapq.heappush(again, (end_s, job))
    for retry_s, retried in sorted(again):
        plan.place(retried, retry_s, is_retry=True)
    names = ("job", "submit_s", "start_s", "end_s", "state", "restarts", "capacity_mib")
    columns = dict(zip(names, map(np.array, zip(*plan.rows, strict=True)), strict=True))
    return Arrays(**columns), plan.nodes


TIERS = (None, "hbm40g", "hbm80g")
_CONSTRAINTS = ("gpu", "gpu&hbm40g", "gpu&hbm80g")
_FIRST_40, _FIRST_80, _CPUS_PER_NODE, _NODE_MIB = 1001, 8193, 128, 256_000
_NODE = {
    "node_cpu_count": _CPUS_PER_NODE, "node_gpu_count": GPUS_PER_NODE, "node_memory_mib": _NODE_MIB, "node_threads": 2
}  # fmt: skip
"""The size of every node, as Perlmutter's GPU nodes: 64 cores of two threads, 4 GPUs, and 256 GB."""


@dataclass(frozen=True)
class SitePlan:
    """All that is decided of a site. nodes: of each run, indices of hosts. names, scripts: of the jobs."""

    shape: SiteShape
    profile: Any
    users: Arrays
    families: Arrays
    jobs: Arrays
    runs: Arrays
    nodes: list[Ints]
    names: list[str]
    scripts: list[str | None]

    @property
    def hosts(self) -> list[str]:
        return host_names(self.shape)


def plan_site(
    shape: SiteShape,
    changed: Callable[[Arrays, Arrays], Arrays] = lambda families, jobs: jobs,
    renamed: Callable[[Arrays, list[str]], list[str]] = lambda jobs, names: names,
) -> SitePlan:
    """Users, families, jobs and their places; equal shapes give equal plans.

    changed: takes the families and their jobs, and gives the jobs that are then placed; renamed: likewise for names.
    """
    profile = load_profile()
    rng = [np.random.default_rng(seed) for seed in np.random.SeedSequence(shape.seed).spawn(6)]
    users, families = make_users(shape, profile, rng[0])
    submissions = make_submissions(shape, profile, users, families, rng[1])
    counts = np.bincount(submissions.family, minlength=len(families.user))
    families = with_traits(shape, profile, users, families, counts, rng[2])
    jobs = changed(families, make_jobs(shape, profile, families, submissions, rng[3]))
    runs, nodes = schedule(shape, jobs, families, rng[4])
    names = renamed(jobs, job_names(families, jobs, rng[5]))
    scripts = job_scripts(shape, profile, users, families, jobs.family)
    return SitePlan(shape, profile, users, families, jobs, runs, nodes, names, scripts)


def host_names(shape: SiteShape) -> list[str]:
    """Hosts of the 40 GB and the 80 GB nodes; in alphabetical order."""
    first_80 = max(_FIRST_80, _FIRST_40 + shape.nodes_40)
    numbers = [*range(_FIRST_40, _FIRST_40 + shape.nodes_40), *range(first_80, first_80 + shape.nodes_80)]
    return [f"nid{number:06d}" for number in numbers]


def jobs_table(plan: SitePlan, now_s: int | None = None) -> pa.Table:
    """Return accounting as of now_s (None: the end of the span), columns of schema JOBS, in order of submission.

    A job that has not started by then is PENDING, one that has not ended RUNNING, both without an end.
    """
    now_s = plan.shape.end_s if now_s is None else now_s
    seen = np.flatnonzero(plan.runs.submit_s < now_s)
    seen = seen[np.lexsort((plan.jobs.job_id[plan.runs.job[seen]], plan.runs.submit_s[seen]))]
    runs, hosts = plan.runs.take(seen), plan.hosts
    jobs, of = plan.jobs.take(runs.job), plan.families.take(plan.jobs.family[runs.job])
    is_started, is_ended = (runs.start_s >= 0) & (runs.start_s < now_s), runs.end_s <= now_s
    state = np.where(is_ended, np.array(STATES, dtype=object)[runs.state], np.where(is_started, "RUNNING", "PENDING"))
    elapsed_s = np.where(is_started, np.minimum(runs.end_s, now_s) - runs.start_s, 0)
    node_lists = [
        fold([hosts[node] for node in plan.nodes[run].tolist()]) if started else None
        for run, started in zip(seen.tolist(), is_started.tolist(), strict=True)
    ]
    is_task, zeros = jobs.array_job_id >= 0, np.zeros(len(seen), dtype=np.int64)
    names = [plan.names[job] for job in runs.job.tolist()]
    columns = {
        "job_id": pa.array(jobs.job_id),
        "array_job_id": pa.array(jobs.array_job_id, mask=~is_task),
        "array_task_id": pa.array(jobs.task, pa.int64(), mask=~is_task),
        "user": _chosen(plan.users.name, of.user),
        "account": _chosen(plan.users.account, of.user),
        "partition": _chosen(["gpu"], zeros),
        "qos": _chosen(["regular", "debug"], jobs.is_debug.astype(np.int64)),
        "name": pa.array(names),
        "name_key": pa.array([name_key(name) for name in names]),
        "script_key": pa.array([plan.scripts[job] for job in runs.job.tolist()], pa.string()),
        "submit_s": pa.array(runs.submit_s),
        "time_limit_s": pa.array(jobs.limit_s),
        "node_count": pa.array(jobs.nodes),
        "cpu_count": pa.array(_CPUS_PER_NODE * jobs.nodes),
        "gpu_count": pa.array(jobs.gpus),
        "gpu_count_req": pa.array(jobs.gpus),
        "gpu_type": _chosen(["a100"], zeros),
        "constraints": _chosen(_CONSTRAINTS, of.tier),
        "tier": _chosen(TIERS, of.tier),
        "state": pa.array(state.tolist(), pa.string()),
        "start_s": pa.array(runs.start_s, mask=~is_started),
        "end_s": pa.array(runs.end_s, mask=~is_ended),
        "elapsed_s": pa.array(elapsed_s),
        "node_list": pa.array(node_lists, pa.string()),
        "exit_code": pa.array(np.where(runs.state == 1, 1, 0), mask=~is_ended),
        "exit_signal": pa.array(zeros, mask=~is_ended),
        "restarts": pa.array(runs.restarts),
        **_host_columns(plan, seen, jobs, elapsed_s, is_ended),
    }
    arrays = [columns[f.name] if f.name in columns else pa.nulls(len(seen), f.type) for f in JOBS]
    return pa.Table.from_arrays(arrays, schema=JOBS)


def _chosen(values: Sequence[str | None], index: Ints) -> pa.Array[Any]:
    return pa.array([values[n] for n in index.tolist()], pa.string())


def _host_columns(plan: SitePlan, seen: Ints, jobs: Arrays, elapsed_s: Ints, is_ended: Bools) -> dict[str, Any]:
    """CPU time and host memory of the runs `seen`, as sacct has them; unknown before the end, and for one run in 50.

    Mostly low, a few high. Drawn, not fitted: the studies behind the site's other figures say nothing of CPUs.
    """
    rng = np.random.default_rng([plan.shape.seed, 29])
    families, number = int(plan.jobs.family.max(initial=-1)) + 1, len(plan.runs.job)
    cpu_share: Floats = rng.beta(1.2, 6.0, families)
    memory_share: Floats = rng.beta(1.5, 6.0, families)
    noise = np.exp(rng.normal(0, 0.05, (2, number)))
    is_lost = rng.random(number) < 0.02
    alloc_mib = _NODE_MIB * jobs.nodes * 1.0
    peak_mib = np.minimum(memory_share[jobs.family] * noise[0][seen], 1.0) * alloc_mib
    cpus = _CPUS_PER_NODE * jobs.nodes
    cpu_s = np.minimum(cpu_share[jobs.family] * noise[1][seen], 1.0) * cpus * elapsed_s
    unknown = ~is_ended | is_lost[seen] | (elapsed_s <= 0)
    return {
        "cpu_time_s": pa.array(np.round(cpu_s, 3), mask=unknown),
        "host_mem_alloc_mib": pa.array(alloc_mib, mask=elapsed_s <= 0),
        "host_mem_peak_mib": pa.array(np.round(peak_mib), mask=unknown),
        "host_mem_task_peak_mib": pa.array(np.round(peak_mib / jobs.nodes), mask=unknown),
        **{name: pa.array(np.full(len(seen), size), mask=elapsed_s <= 0) for name, size in _NODE.items()},
    }


def truth_table(plan: SitePlan) -> pa.Table:
    """Facts that accounting does not have: one row per run, joined to the job table by job_id and submit_s.

    need_mib is the peak that the job needs; hbm_peak_mib what its busiest GPU shows (a preallocating job shows its
    share of the GPU). role: 0 regular, 1 without GPU work, 2 staff. run_s is the run time without the span's end.
    """
    runs = plan.runs
    jobs, of = plan.jobs.take(runs.job), plan.families.take(plan.jobs.family[runs.job])
    is_started = runs.start_s >= 0
    return pa.table(
        {
            **{name: pa.array(getattr(jobs, name)) for name in ("job_id", "family", "role", "gpus", "need_mib")},
            "submit_s": pa.array(runs.submit_s),
            "is_started": pa.array(is_started),
            "run_s": pa.array(np.where(is_started, runs.end_s - runs.start_s, 0)),
            "tier": _chosen(TIERS, of.tier),
            "capacity_mib": pa.array(runs.capacity_mib),
            "hbm_peak_mib": pa.array(shown_peak_mib(plan)),
            **{name: pa.array(getattr(of, name)) for name in ("framework", "is_growing")},
        }
    )


def shown_peak_mib(plan: SitePlan) -> Floats:
    """HBM peak of the busiest GPU of each run that its telemetry holds, MiB, if the run is long enough for it."""
    runs, memory = plan.runs, plan.profile.memory
    framework = plan.families.framework[plan.jobs.family[runs.job]]
    share = np.array([kind.frac for kind in memory.preallocate] + [0.0])[framework]
    peak = np.minimum(plan.jobs.need_mib[runs.job], memory.most_frac * runs.capacity_mib)
    shown: Floats = np.where(framework >= 0, share * runs.capacity_mib, peak)
    return shown
