"""The placement decision over a look at Slurm: which type each job that accepts any would get now. Pure.

All jobs that wait for or hold GPUs of the partitions are in the decision; only those of the callers are ever changed.
A job without usable run times counts with its time limit, on each type that it allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from advisor.decisions.placement import (
    NEVER_MOVE,
    SOLVER_S,
    WAITS,
    PlacementDecision,
    PlacementRules,
    PlacementView,
    decide_placement,
)
from slurm_hooks.placement.request import names_one
from slurm_hooks.placement.state import MOST_JOBS, MOST_ROWS, MOST_TASKS, WAITS_FOR, Cluster, Times, limit_s, takes_jobs
from telemetry.slurm.placement_queue import QueueJob

PENDING_RULES = replace(NEVER_MOVE, exponent=0.5)
"""For predicted run times, which can be far off."""
MOVE_RULES = PlacementRules(exponent=0.5)


@dataclass(frozen=True)
class Row:
    """A job in the decision. rates: of the whole job, 1/s, by type. left: share of the work that is left."""

    job_id: int
    gpus: int
    rates: Mapping[str, float]
    left: float = 1.0
    placed: str = ""
    waited_s: float = 0.0
    may_move: bool = False


def decide(rows: Sequence[Row], cluster: Cluster, rules: PlacementRules) -> dict[int, str]:
    """The type of each job, by number; jobs that wait are left out. Raises ValueError."""
    types = cluster.types
    if not rows or not types:
        return {}
    held = {name: sum(row.gpus for row in rows if row.placed == name) for name in types}
    # GPUs in use by jobs that are not among the rows are not there.
    capacity = [
        max(0, pool.total - max(0, pool.total - pool.free - held[name]))
        for name, pool in ((n, cluster.pools[n]) for n in types)
    ]
    view = PlacementView(
        gpus=np.array([row.gpus for row in rows], dtype=np.int64),
        left=np.array([row.left for row in rows], dtype=float),
        rates=np.array([[row.rates.get(name, 0.0) for name in types] for row in rows], dtype=float),
        placed=np.array([types.index(row.placed) if row.placed else WAITS for row in rows], dtype=np.int64),
        capacity=np.array(capacity, dtype=np.int64),
        waited_s=np.array([row.waited_s for row in rows], dtype=float),
        may_move=np.array([row.may_move for row in rows], dtype=bool),
    )
    made: PlacementDecision = decide_placement(view, replace(rules, solver_s=SOLVER_S))
    return {row.job_id: types[kind] for row, kind in zip(rows, made.types.tolist(), strict=True) if kind != WAITS}


def rows_of(
    cluster: Cluster, times: Times, pinned: Mapping[int, str], movable: Mapping[int, float], now_s: float
) -> list[Row]:
    """Every job of the decision. pinned: types of jobs that were placed a short time ago. movable: share of the work
    that is left, of running jobs that may be requeued.
    """
    rows = [
        row for job in cluster.view.jobs if job.is_running and (row := _running(job, cluster, times, movable, now_s))
    ]
    waiting = [job for job in cluster.view.jobs if is_waiting(job, cluster)]
    waiting.sort(key=lambda job: (-job.gres.priority, job.job_id))
    for job in waiting[:MOST_JOBS]:
        row = _pending(job, cluster, times, pinned.get(job.job_id), now_s)
        if row is not None:
            rows += [row] * min(max(1, job.record.task_count), MOST_TASKS)
    return rows[:MOST_ROWS]


def is_waiting(job: QueueJob, cluster: Cluster) -> bool:
    """Whether Slurm would start the job on GPUs of the partitions if there were free ones."""
    is_here = bool(set(job.gres.partitions) & set(cluster.settings.partitions))
    return (
        is_here
        and job.is_pending
        and job.gres.priority > 0
        and job.gres.reason in WAITS_FOR
        and job.record.gpu_count > 0
    )


def _running(job: QueueJob, cluster: Cluster, times: Times, movable: Mapping[int, float], now_s: float) -> Row | None:
    kind = cluster.type_of(job)
    if not kind or not job.record.gpu_count or job.start_s is None or not _is_in_service(job, cluster):
        return None
    if job.job_id in movable:
        rates = {name: 1 / each.run_s for name, each in times[job.job_id].items()}
        return Row(job.job_id, job.record.gpu_count, rates, movable[job.job_id], kind, may_move=True)
    left_s = max(60.0, limit_s(job) - (now_s - job.start_s))
    return Row(job.job_id, job.record.gpu_count, {kind: 1 / limit_s(job)}, left_s / limit_s(job), kind)


def _is_in_service(job: QueueJob, cluster: Cluster) -> bool:
    """Whether all its nodes are among those that the pools count."""
    partitions = set(cluster.settings.partitions)
    known = {
        each.node.name for each in cluster.view.nodes if takes_jobs(each) and set(each.node.partitions) & partitions
    }
    return bool(job.nodes) and known.issuperset(job.nodes)


def _pending(job: QueueJob, cluster: Cluster, times: Times, pinned: str | None, now_s: float) -> Row | None:
    own = times.get(job.job_id)
    if own:
        rates = {name: 1 / each.run_s for name, each in own.items()}
    else:
        rates = {name: 1 / limit_s(job) for name in allowed_types(job, cluster)}
    if pinned is not None:
        rates = {name: rate for name, rate in rates.items() if name == pinned} or {pinned: 1 / limit_s(job)}
    waited_s = 0.0 if job.gres.restarts else max(0.0, now_s - job.gres.submit_s)
    return Row(job.job_id, job.record.gpu_count, rates, waited_s=waited_s) if rates else None


def allowed_types(job: QueueJob, cluster: Cluster) -> frozenset[str]:
    """The types that a job asks for as it stands; all, where almanac cannot tell."""
    request = cluster.request(job)
    everything = frozenset(cluster.types)
    if request is None:
        return everything
    named = names_one(request)
    return frozenset({named}) & everything if named else request.allowed & everything
