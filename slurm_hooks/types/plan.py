"""The changes of one run: jobs that get another GPU type, get their own request back, or are requeued to another type.

Pure but for reading the options of the best candidates for a requeue. A pending job is changed only if its owner and
all its partitions allow it, if it waits for resources or priority, and if the decision would start it now. One that
still waits later is decided on again, or gets its own request back. A running job moves only if it ends sooner itself,
after all that the move costs, by cautious run times on both types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from almanac.errors import AlmanacError
from almanac.records import Counts
from almanac.units import HOUR_S, format_duration
from slurm.queued_job import QueuedJob
from slurm.states import WAITS_FOR_ROOM
from slurm_hooks.jobs.engine import AGAIN_S, JOBS_PER_RUN, UNDO_S, JobChange, JobPlan, change, settle, undo
from slurm_hooks.jobs.log import IN_FORCE, ChangeHistory, JobLine, Kind, is_sendable, shown_text
from slurm_hooks.types.decide import (
    MOVE_RULES,
    PENDING_RULES,
    JobSpeeds,
    RunTime,
    Times,
    TypeCluster,
    decide,
    rows_of,
    usable_times,
)
from slurm_hooks.types.request import (
    ANY_GPU,
    CheckpointSignal,
    RequeueTerms,
    TypeRequest,
    accepts_any,
    is_movable,
    names_one,
)


@dataclass(frozen=True)
class PlacementPlan(JobPlan):
    """The plan of a placement run. times: run times by GPU type of the jobs that were decided on."""

    times: Times = field(default_factory=dict)


def plan_placement(
    cluster: TypeCluster, history: ChangeHistory, speeds: JobSpeeds, now_s: int, is_clearing: bool = False
) -> PlacementPlan:
    """Plan the changes of pending jobs' GPU types. Raises ValueError.

    is_clearing: only give back almanac's own requests, all of them. If the speeds of the GPU types are not known, no
    job is placed, but earlier changes are settled.
    """
    view = cluster.view
    counts = Counts(seen=sum(job.is_pending for job in view.jobs))

    def why_undo(job: QueuedJob, line: JobLine, noted: Kind | None) -> str:
        return _why_undo(job, line, noted, cluster, now_s)

    changes, notes = settle(view.jobs, history, now_s, why_undo, is_clearing)
    if is_clearing:
        counts.kept = len(changes)
        return PlacementPlan(changes, list(notes.values()), counts, read_s=view.read_s)
    changes += [each for job in view.jobs if (each := _unfinished(job, history, {one.job.job_id for one in changes}))]
    busy = {each.job.job_id for each in changes}
    open_jobs = []
    for job in view.jobs:
        if job.is_pending and job.job_id not in busy:
            noted = notes[job.job_id].line.what if job.job_id in notes else None
            if why_not := _why_not(job, cluster, history, noted, now_s):
                counts.drop(why_not)
            else:
                open_jobs.append(job)
    fault: AlmanacError | None = None
    try:
        times = _times(open_jobs, cluster, history, speeds)
    except AlmanacError as error:
        times, fault = {}, error
    changes += _orders(open_jobs, cluster, history, times, now_s, counts)
    counts.kept = len(changes)
    return PlacementPlan(changes, list(notes.values()), counts, read_s=view.read_s, fault=fault, times=times)


def _times(jobs: Sequence[QueuedJob], cluster: TypeCluster, history: ChangeHistory, speeds: JobSpeeds) -> Times:
    """Run times of the jobs with at least two known types that they allow."""
    found = speeds(jobs, cluster.types) if jobs else {}
    times = {}
    for job in jobs:
        request = own_request(job, cluster, history.line_of(job))
        allowed = sorted(request.allowed & cluster.reachable(job)) if request else []
        usable = usable_times(job, found.get(job.job_id, ()), allowed)
        if len(usable) > 1:
            times[job.job_id] = usable
    return times


def type_now(job: QueuedJob, line: JobLine, cluster: TypeCluster) -> str:
    """The type of the request that a placed job shows."""
    request = cluster.request(job)
    return (names_one(request) if request else "") or line.gpu_type


def _why_undo(job: QueuedJob, line: JobLine, noted: Kind | None, cluster: TypeCluster, now_s: int) -> str:
    """Return why a placed job gets its own request back whatever the decision says; "" for none."""
    if not accepts_any(job.comment) or not set(job.partitions) <= set(cluster.settings.partitions):
        return "no longer opted in"
    if (kind := type_now(job, line, cluster)) not in cluster.pools:
        return f"no node in service has {kind}"
    if "refused" in (line.what, noted):
        return "Slurm refused another type"
    # It waits for something else than GPUs, such as a limit on its new type.
    is_bound = job.is_held or job.reason_key in WAITS_FOR_ROOM | {"BEGINTIME", "DEPENDENCY"} or job.waits_for_jobs
    is_late = not is_bound and now_s - line.time_s >= UNDO_S
    return f"Slurm: {job.reason_key or 'no reason'}" if is_late else ""


def _unfinished(job: QueuedJob, history: ChangeHistory, busy: set[int]) -> JobChange | None:
    """The new request of a job that was requeued by a run that then ended."""
    line = history.line_of(job)
    if line is None or line.what != "requeue" or not job.is_pending or job.job_id in busy:
        return None
    shown = shown_text(job, line.key)
    is_open = shown in line.texts - {line.new} and job.restarts > line.restarts
    return JobChange(job, line).next("place", line.reason, was=shown) if is_open else None


def _why_not(job: QueuedJob, cluster: TypeCluster, history: ChangeHistory, noted: Kind | None, now_s: int) -> str:
    """Return why a pending job is not decided on; "" if it is."""
    settings, line = cluster.settings, history.line_of(job)
    if not job.gpu_count:
        return "asks for no GPU"
    if not job.partitions or not set(job.partitions) <= set(settings.partitions):
        return "its partition does not take part (placement.partitions)"
    if not accepts_any(job.comment):
        return f"its owner did not say {ANY_GPU}"
    if why_not := why_not_plain(job):
        return why_not
    if line is not None and ("owner" in (line.what, noted)):
        return "somebody changed its request after almanac"
    if job.waits_for_jobs:
        return "waits for other jobs (dependency)"
    if job.is_held:
        return "held"
    if job.reason_key not in WAITS_FOR_ROOM:
        return "does not wait for resources or priority"
    if own_request(job, cluster, line) is None:
        return "its request of GPU types is none that almanac can change"
    return _why_not_again(line, noted, now_s) if line else ""


def why_not_plain(job: QueuedJob) -> str:
    """Return the reason why almanac never changes a job, whatever its owner allows; "" without one."""
    if job.array_job_id is not None:
        return "belongs to an array"
    if job.het_job_id is not None or not job.is_plain:
        return "is heterogeneous, or has a reservation, licenses, or whole nodes"
    return "names its nodes" if job.required_nodes else ""


def _why_not_again(line: JobLine, noted: Kind | None, now_s: int) -> str:
    if line.what in IN_FORCE - {"refused"} and noted not in ("refused", "undone"):
        return ""
    is_recent = now_s - line.time_s < AGAIN_S
    return "got its own request back within the last hour, or Slurm refused the change" if is_recent else ""


def own_request(job: QueuedJob, cluster: TypeCluster, line: JobLine | None) -> TypeRequest | None:
    """Return the owner's request: of a job that has a request of almanac's, as the record has it."""
    if line is None or not line.is_shown(job):
        return cluster.request(job)
    if line.key == "Features":
        return cluster.request_in(line.own, job.requests)
    return cluster.request_in(job.constraints, {**job.requests, line.key: line.own})  # type: ignore[dict-item]


def _orders(
    jobs: Sequence[QueuedJob], cluster: TypeCluster, history: ChangeHistory, times: Times, now_s: int, counts: Counts
) -> list[JobChange]:
    """In the queue's order."""
    lines = {job.job_id: line for job in jobs if (line := history.line_of(job)) and line.is_shown(job)}
    kinds = {job.job_id: type_now(job, lines[job.job_id], cluster) for job in jobs if job.job_id in lines}
    pinned = {number: kinds[number] for number, line in lines.items() if now_s - line.time_s < UNDO_S}
    types = decide(rows_of(cluster, times, pinned, {}, now_s), cluster, PENDING_RULES) if times else {}
    orders: list[JobChange] = []
    for job in sorted(jobs, key=lambda job: (-job.rank, job.job_id)):
        line, wanted = lines.get(job.job_id), types.get(job.job_id)
        if job.job_id in pinned or (line and wanted == kinds[job.job_id]):
            counts.drop("placed, and still waits")
        elif job.job_id in times and wanted:
            _place(job, cluster, line, wanted, times, orders, counts)
        elif line:
            orders.append(undo(JobChange(job, line), f"still waits after {format_duration(now_s - line.time_s)}"))
        else:
            counts.drop("would not start now" if job.job_id in times else "fewer than two of its types are known")
    return orders


def _place(
    job: QueuedJob, cluster: TypeCluster, line: JobLine | None, wanted: str, times: Times, orders: list[JobChange],
    counts: Counts,
) -> None:  # fmt: skip
    request = own_request(job, cluster, line)
    if request is None or not (is_sendable(request.text) and is_sendable(request.of(wanted))):
        counts.drop("its request of GPU types is none that almanac can change")
    elif line is None and names_one(request) == wanted:
        counts.drop("asks for the best type already")
    elif sum(order.line.what == "place" for order in orders) >= JOBS_PER_RUN:
        counts.drop("waits for the next run (20 jobs a run)")
    else:
        why = f"{format_duration(times[job.job_id][wanted].run_s)} on {wanted}"
        orders.append(change("place", job, request.key, request.text, request.of(wanted), why, gpu_type=wanted))


MOST_REQUEUES = 2
"""Most requeues of one job, ever."""
LEAST_BETWEEN_S = HOUR_S
"""Least time from a requeue of a job, and from its start, to its next requeue."""
START_UP_S = 120.0
"""Seconds that a restarted job needs until it goes on from its checkpoint, without the delay that Slurm adds."""
CHECKPOINT_S = 300.0
"""Jobs whose --signal asks for more seconds for their checkpoint are not requeued: a run of almanac waits for it."""
MOST_READ = 5
"""Candidates whose options are read in one run."""


@dataclass(frozen=True)
class Move(JobChange):
    """A requeue. signal: asks the job for its checkpoint."""

    signal: CheckpointSignal


@dataclass(frozen=True)
class _Candidate:
    job: QueuedJob
    kind: str
    times: Mapping[str, RunTime]
    done: float

    def gain_s(self, kind: str) -> float:
        """By the short end of a run here, and the long end of a run there."""
        return (1 - self.done) * (self.times[self.kind].low_s - self.times[kind].high_s)


def plan_moves(
    cluster: TypeCluster,
    history: ChangeHistory,
    speeds: JobSpeeds,
    plan: PlacementPlan,
    terms_of: Callable[[QueuedJob], RequeueTerms],
    now_s: int,
    counts: Counts,
) -> tuple[Move, ...]:
    """Plan at most one move of a running job to another type. counts: running jobs of owners who allow a requeue.

    Raises NoModelError, CommandError, and ValueError.
    """
    found = _move_candidates(cluster, history, speeds, now_s, counts)
    if not found:
        return ()
    times = {**plan.times, **{each.job.job_id: each.times for each in found}}
    left = {each.job.job_id: 1 - each.done for each in found}
    placed = {each.job.job_id: each.line.gpu_type for each in plan.changes if each.line.what == "place"}
    types = decide(rows_of(cluster, times, placed, left, now_s), cluster, MOVE_RULES)
    free = _free(cluster, plan)
    cost_s = history.requeue_delay_s() + START_UP_S
    wanted = []
    for each in found:
        kind = types.get(each.job.job_id, each.kind)
        if kind == each.kind or kind not in each.times:
            counts.drop("is on the best type")
        elif each.job.gpu_count > free.get(kind, 0):
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


def _free(cluster: TypeCluster, plan: PlacementPlan) -> dict[str, int]:
    """Free GPUs by type, less those of jobs that were just placed."""
    free = {name: pool.free for name, pool in cluster.pools.items()}
    for each in plan.changes:
        if each.line.what == "place":
            free[each.line.gpu_type] = free.get(each.line.gpu_type, 0) - each.job.gpu_count
    return free


def _move_candidates(
    cluster: TypeCluster, history: ChangeHistory, speeds: JobSpeeds, now_s: int, counts: Counts
) -> list[_Candidate]:
    jobs = []
    for job in cluster.view.jobs:
        if job.is_running and is_movable(job.comment):
            counts.seen += 1
            if why_not := _why_not_moved(job, cluster, history, now_s):
                counts.drop(why_not)
            else:
                jobs.append(job)
    found = speeds(jobs, cluster.types) if jobs else {}
    candidates = []
    for job in jobs:
        request = own_request(job, cluster, history.line_of(job))
        allowed = {*(request.allowed & cluster.reachable(job) if request else ()), cluster.type_of(job)}
        times = usable_times(job, found.get(job.job_id, ()), sorted(allowed))
        kind = cluster.type_of(job)
        done = _done(job, history, times[kind].run_s, now_s) if kind in times else 1.0
        if len(times) < 2 or not 0 <= done < 1:
            counts.drop("its run times are not known well enough")
        else:
            candidates.append(_Candidate(job, kind, times, done))
    return candidates


def _done(job: QueuedJob, history: ChangeHistory, run_s: float, now_s: int) -> float:
    """Share of the work that is done: before the last requeue, and since."""
    before = history.requeues_of(job)
    elapsed_s = now_s - (job.start_s or now_s) - (START_UP_S if before else 0.0)
    return (before[-1].done if before else 0.0) + max(0.0, elapsed_s) / run_s


def _why_not_moved(job: QueuedJob, cluster: TypeCluster, history: ChangeHistory, now_s: int) -> str:
    """Return why a running job of an owner who allows it is not requeued; "" if it may be."""
    before, line = history.requeues_of(job), history.line_of(job)
    if not job.partitions or not set(job.partitions) <= set(cluster.settings.partitions):
        return "its partition does not take part (placement.partitions)"
    if why_not := why_not_plain(job):
        return why_not
    if not job.can_requeue or not job.is_batch:
        return "cannot be requeued (--requeue)"
    if line is not None and line.what == "owner":
        return "somebody changed its request after almanac"
    if len(before) >= MOST_REQUEUES:
        return "was requeued twice"
    if job.restarts != len(before):
        return "was restarted by somebody else: what it has done is not known"
    stopped_s = line.time_s if line is not None and line.what == "stopped" else 0
    last_s = max(before[-1].time_s if before else 0, stopped_s, job.start_s or now_s)
    if now_s - last_s < LEAST_BETWEEN_S:
        return "started, was requeued, or its requeue was stopped within an hour"
    if own_request(job, cluster, line) is None:
        return "its request of GPU types is none that almanac can change"
    return "" if cluster.type_of(job) else "runs on a type that is none of placement.types"


def _move(
    each: _Candidate, kind: str, gain_s: float, cost_s: float, cluster: TypeCluster, history: ChangeHistory,
    terms: RequeueTerms, counts: Counts,
) -> Move | None:  # fmt: skip
    line = history.line_of(each.job)
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
    why = f"ends {format_duration(gain_s)} sooner, after a cost of {format_duration(cost_s)}"
    made = change("requeue", each.job, request.key, request.text, request.of(kind), why, gpu_type=kind, done=each.done)
    return Move(made.job, made.line, terms.signal)
