"""Who runs where and when: jobs take the earliest nodes in order of submission; no node is held twice."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from demo.families import MIB_40, MIB_80, NO_TIER, TIER_80, DemoFamilies
from demo.jobs import CANCELLED, COMPLETED, FAILED, NODE_FAIL, Jobs
from demo.profile import Floats, Ints
from demo.shape import SiteShape


@dataclass(frozen=True)
class ScheduledRuns:
    """One entry per accounting record, in order of submission: a requeued job has two.

    start_s is -1 where the job gave up waiting. Nodes of run n: node[first_node[n] : first_node[n + 1]], indices of
    the site's hosts. gpu_mask: bits of the GPUs held on each node.
    """

    job: Ints
    submit_s: Ints
    start_s: Ints
    end_s: Ints
    state: Ints
    restarts: Ints
    capacity_mib: Floats
    gpu_mask: Ints
    first_node: Ints
    node: Ints

    def __len__(self) -> int:
        return len(self.job)


@dataclass
class _FreeNodes:
    """Nodes (or, where shared, GPUs) of one kind, and when each is free again, s since 1970."""

    first: int
    free_s: Floats
    capacity_mib: float

    def earliest(self, submit_s: int, number: int) -> float:
        """When `number` of them are free together; infinite where there are not so many."""
        if number > len(self.free_s):
            return np.inf
        return max(float(submit_s), float(np.partition(self.free_s, number - 1)[number - 1]))

    def take(self, start_s: float, number: int, until_s: float) -> Ints:
        chosen = np.flatnonzero(self.free_s <= start_s)[:number]
        self.free_s[chosen] = until_s
        return chosen


class _Site:
    """The pools of a site: 40 GB, 80 GB and the GPUs of the shared nodes, hosts numbered in this order."""

    def __init__(self, shape: SiteShape) -> None:
        start, self.per_node = float(shape.start_s), shape.gpus_per_node
        self.small = _FreeNodes(0, np.full(shape.nodes_40, start), MIB_40)
        self.large = _FreeNodes(shape.nodes_40, np.full(shape.nodes_80, start), MIB_80)
        first_shared = shape.nodes_40 + shape.nodes_80
        self.shared = _FreeNodes(first_shared, np.full(shape.shared_nodes * self.per_node, start), MIB_40)

    def pool(self, tier: int, prefers_large: bool, submit_s: int, nodes: int) -> tuple[_FreeNodes, float]:
        """The pool that serves a job first, and when. Without a tier asked for, either does."""
        if tier != NO_TIER:
            pool = self.large if tier == TIER_80 else self.small
            return pool, pool.earliest(submit_s, nodes)
        order = (self.large, self.small) if prefers_large else (self.small, self.large)
        times = [pool.earliest(submit_s, nodes) for pool in order]
        best = 0 if times[0] <= times[1] else 1
        return order[best], times[best]

    def share(self, submit_s: int, gpus: int, run_s: int) -> tuple[int, int, float]:
        """Host, mask and start of a job of a few GPUs of one shared node."""
        by_host = self.shared.free_s.reshape(-1, self.per_node)
        times = np.maximum(np.partition(by_host, gpus - 1, axis=1)[:, gpus - 1], submit_s)
        host = int(np.argmin(times))
        chosen = np.flatnonzero(by_host[host] <= times[host])[:gpus]
        by_host[host, chosen] = times[host] + run_s
        return self.shared.first + host, int((1 << chosen).sum()), float(times[host])


@dataclass
class _Log:
    """Runs as they are decided."""

    rows: list[tuple[int, int, int, int, int, int, float, int]]
    nodes: list[Ints]


_NO_NODES = np.empty(0, dtype=np.int64)


def schedule(shape: SiteShape, jobs: Jobs, families: DemoFamilies, rng: np.random.Generator) -> ScheduledRuns:
    """Places every job. A job that needs more memory than its GPUs have dies there within minutes."""
    site, log = _Site(shape), _Log([], [])
    prefers_large = rng.random(len(jobs)) < 0.15
    dies_after_s = rng.integers(60, 900, len(jobs))
    delay_s = rng.integers(1, 20, len(jobs))
    again: list[tuple[int, int]] = []
    for job, submit_s in enumerate(jobs.submit_s.tolist()):
        while again and again[0][0] <= submit_s:
            retry_s, retried = heapq.heappop(again)
            _place(site, jobs, families, log, retried, retry_s, True, bool(prefers_large[retried]), 0, 1)
        end_s = _place(
            site, jobs, families, log, job, submit_s, False, bool(prefers_large[job]), int(dies_after_s[job]),
            int(delay_s[job]),
        )  # fmt: skip
        if jobs.is_requeued[job] and end_s > 0:
            heapq.heappush(again, (end_s, job))
    for retry_s, retried in sorted(again):
        _place(site, jobs, families, log, retried, retry_s, True, bool(prefers_large[retried]), 0, 1)
    return _runs(log)


def _place(
    site: _Site,
    jobs: Jobs,
    families: DemoFamilies,
    log: _Log,
    job: int,
    submit_s: int,
    is_retry: bool,
    prefers_large: bool,
    dies_after_s: int,
    delay_s: int,
) -> int:
    """Writes one run to the log; its end, or -1 where the job gave up waiting."""
    nodes, run_s = int(jobs.nodes[job]), int(jobs.again_s[job] if is_retry else jobs.run_s[job])
    state = COMPLETED if is_retry else int(jobs.state[job])
    if jobs.is_shared[job]:
        host, mask, free_s = site.share(submit_s, int(jobs.gpus[job]), run_s + delay_s)
        start_s = int(free_s) + delay_s
        log.rows.append((job, submit_s, start_s, start_s + run_s, state, int(is_retry), MIB_40, mask))
        log.nodes.append(np.array([host]))
        return start_s + run_s
    pool, free_s = site.pool(int(families.tier[jobs.family[job]]), prefers_large, submit_s, nodes)
    patience_s = int(jobs.waits_in_vain_s[job])
    if patience_s >= 0 and not is_retry:
        log.rows.append((job, submit_s, -1, submit_s + patience_s, CANCELLED, 0, 0.0, 0))
        log.nodes.append(_NO_NODES)
        return -1
    starved = jobs.need_mib[job] > pool.capacity_mib and families.framework[jobs.family[job]] < 0
    if starved and state != NODE_FAIL:
        run_s, state = min(run_s, dies_after_s or run_s), FAILED
    start_s = int(free_s) + delay_s
    log.nodes.append(pool.first + pool.take(free_s, nodes, start_s + run_s))
    full = (1 << site.per_node) - 1
    log.rows.append((job, submit_s, start_s, start_s + run_s, state, int(is_retry), pool.capacity_mib, full))
    return start_s + run_s


def _runs(log: _Log) -> ScheduledRuns:
    columns = list(zip(*log.rows, strict=True))
    whole = [np.array(column, dtype=np.int64) for column in (*columns[:6], columns[7])]
    sizes = np.array([len(nodes) for nodes in log.nodes], dtype=np.int64)
    return ScheduledRuns(
        job=whole[0], submit_s=whole[1], start_s=whole[2], end_s=whole[3], state=whole[4], restarts=whole[5],
        capacity_mib=np.array(columns[6]), gpu_mask=whole[6],
        first_node=np.concatenate([[0], np.cumsum(sizes)]), node=np.concatenate(log.nodes),
    )  # fmt: skip
