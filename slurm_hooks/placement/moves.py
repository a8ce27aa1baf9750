"""Which running job is requeued to another type now. Pure but for reading the options of the best candidates.

A job moves only if it ends sooner itself, after all that the move costs, by cautious run times on both types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from almanac.records import Counts
from almanac.units import HOUR_S, format_duration
from slurm_hooks.placement.consent import CheckpointSignal, RequeueTerms, is_movable
from slurm_hooks.placement.decide import MOVE_RULES, decide, rows_of
from slurm_hooks.placement.log import PlacementHistory, is_sendable
from slurm_hooks.placement.plan import PlacementPlan, line_of, own_request, shown_text, why_not_plain
from slurm_hooks.placement.request import Key
from slurm_hooks.placement.state import Cluster, RunTime, SpeedTable, usable_times
from telemetry.slurm.placement_queue import QueueJob

MOST_REQUEUES = 2
"""Of one job, ever."""
LEAST_BETWEEN_S = HOUR_S
"""From a requeue of a job, and from its start, to its next requeue."""
START_UP_S = 120.0
"""Seconds that a restarted job needs until it goes on from its checkpoint, beside the delay that Slurm adds."""
CHECKPOINT_S = 300.0
"""Jobs whose --signal asks for more seconds for their checkpoint are not requeued: a run of almanac waits for it."""
MOST_READ = 5
"""Candidates whose options are read in one run."""


@dataclass(frozen=True)
class Move:
    """A requeue. own, new: texts of the request. done: share of the work that is done. gain_s: after the cost."""

    job: QueueJob
    key: Key
    own: str
    new: str
    shown: str
    old_type: str
    gpu_type: str
    signal: CheckpointSignal
    done: float
    gain_s: float
    cost_s: float

    @property
    def reason(self) -> str:
        return f"ends {format_duration(self.gain_s)} sooner, after a cost of {format_duration(self.cost_s)}"


@dataclass(frozen=True)
class _Candidate:
    job: QueueJob
    kind: str
    times: Mapping[str, RunTime]
    done: float

    def gain_s(self, kind: str) -> float:
        """By the short end of a run here, and the long end of a run there."""
        return (1 - self.done) * (self.times[self.kind].low_s - self.times[kind].high_s)


def plan_moves(
    cluster: Cluster,
    history: PlacementHistory,
    speeds: SpeedTable,
    plan: PlacementPlan,
    terms_of: Callable[[QueueJob], RequeueTerms],
    now_s: int,
    counts: Counts,
) -> tuple[Move, ...]:
    """At most one. counts: running jobs of owners who allow a requeue.

    Raises NoModelError, CommandError, and ValueError.
    """
    found = _candidates(cluster, history, speeds, now_s, counts)
    if not found:
        return ()
    times = {**plan.times, **{each.job.job_id: each.times for each in found}}
    left = {each.job.job_id: 1 - each.done for each in found}
    placed = {order.job.job_id: order.gpu_type for order in plan.orders if order.what == "place"}
    types = decide(rows_of(cluster, times, placed, left, now_s), cluster, MOVE_RULES)
    free = _free(cluster, plan)
    cost_s = history.requeue_delay_s() + START_UP_S
    wanted = []
    for each in found:
        kind = types.get(each.job.job_id, each.kind)
        if kind == each.kind or kind not in each.times:
            counts.drop("is on the best type")
        elif each.job.record.gpu_count > free.get(kind, 0):
            counts.drop("its better type has too few free GPUs")
        elif each.gain_s(kind) <= cost_s:
            counts.drop("would gain less than the requeue costs")
        else:
            wanted.append((each.gain_s(kind) - cost_s, each, kind))
    wanted.sort(key=lambda one: (-one[0], one[1].job.job_id))
    for gain_s, each, kind in wanted[:MOST_READ]:
        if move := _move(each, kind, gain_s, cost_s, cluster, history, terms_of(each.job), counts):
            return (move,)
    return ()


def _free(cluster: Cluster, plan: PlacementPlan) -> dict[str, int]:
    """Free GPUs by type, less those of jobs that were just placed."""
    free = {name: pool.free for name, pool in cluster.pools.items()}
    for order in plan.orders:
        if order.what == "place":
            free[order.gpu_type] = free.get(order.gpu_type, 0) - order.job.record.gpu_count
    return free


def _candidates(
    cluster: Cluster, history: PlacementHistory, speeds: SpeedTable, now_s: int, counts: Counts
) -> list[_Candidate]:
    jobs = []
    for job in cluster.view.jobs:
        if job.is_running and is_movable(job.gres.comment):
            counts.seen += 1
            if why_not := _why_not(job, cluster, history, now_s):
                counts.drop(why_not)
            else:
                jobs.append(job)
    found = speeds(jobs, cluster.types) if jobs else {}
    candidates = []
    for job in jobs:
        request = own_request(job, cluster, line_of(job, history))
        allowed = {*(request.allowed & cluster.reachable(job) if request else ()), cluster.type_of(job)}
        times = usable_times(job, found.get(job.job_id, ()), sorted(allowed))
        kind = cluster.type_of(job)
        done = _done(job, history, times[kind].run_s, now_s) if kind in times else 1.0
        if len(times) < 2 or not 0 <= done < 1:
            counts.drop("its run times are not known well enough")
        else:
            candidates.append(_Candidate(job, kind, times, done))
    return candidates


def _done(job: QueueJob, history: PlacementHistory, run_s: float, now_s: int) -> float:
    """Share of the work that is done: before the last requeue, and since."""
    before = history.requeues_of(job)
    elapsed_s = now_s - (job.start_s or now_s) - (START_UP_S if before else 0.0)
    return (before[-1].done if before else 0.0) + max(0.0, elapsed_s) / run_s


def _why_not(job: QueueJob, cluster: Cluster, history: PlacementHistory, now_s: int) -> str:
    """Why a running job of an owner who allows it is not requeued; "" if it may be."""
    before, line = history.requeues_of(job), line_of(job, history)
    if not job.gres.partitions or not set(job.gres.partitions) <= set(cluster.settings.partitions):
        return "its partition does not take part (placement.partitions)"
    if why_not := why_not_plain(job):
        return why_not
    if not job.can_requeue or not job.is_batch:
        return "cannot be requeued (--requeue)"
    if line is not None and line.what == "owner":
        return "somebody changed its request after almanac"
    if len(before) >= MOST_REQUEUES:
        return "was requeued twice"
    if job.gres.restarts != len(before):
        return "was restarted by somebody else: what it has done is not known"
    stopped_s = line.time_s if line is not None and line.what == "stopped" else 0
    last_s = max(before[-1].time_s if before else 0, stopped_s, job.start_s or now_s)
    if now_s - last_s < LEAST_BETWEEN_S:
        return "started, was requeued, or its requeue was stopped within an hour"
    if own_request(job, cluster, line) is None:
        return "its request of GPU types is none that almanac can change"
    return "" if cluster.type_of(job) else "runs on a type that is none of placement.types"


def _move(
    each: _Candidate, kind: str, gain_s: float, cost_s: float, cluster: Cluster, history: PlacementHistory,
    terms: RequeueTerms, counts: Counts,
) -> Move | None:  # fmt: skip
    line = line_of(each.job, history)
    request = own_request(each.job, cluster, line)
    if terms.why_not or terms.signal is None:
        counts.drop(terms.why_not or "has no --signal for a checkpoint")
        return None
    if terms.signal.before_s > CHECKPOINT_S:
        counts.drop("asks for more time for its checkpoint than 300 s")
        return None
    if request is None or not (is_sendable(request.text) and is_sendable(request.of(kind))):
        counts.drop("its request of GPU types is none that almanac can change")
        return None
    counts.kept += 1
    return Move(
        each.job, request.key, request.text, request.of(kind), shown_text(each.job, request.key), each.kind, kind,
        terms.signal, each.done, gain_s, cost_s,
    )  # fmt: skip
