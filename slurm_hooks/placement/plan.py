"""Which jobs get another GPU type now, and which get their own request back. Pure.

A pending job is changed only if its owner and all its partitions allow it, if it waits for resources or priority, and
if the decision would start it now. One that still waits later is decided on again, or gets its own request back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from almanac.errors import AlmanacError
from almanac.records import Counts
from almanac.units import format_duration
from slurm_hooks.placement.consent import ANY_GPU, accepts_any
from slurm_hooks.placement.decide import PENDING_RULES, decide, rows_of
from slurm_hooks.placement.log import Kind, PlacementHistory, PlacementLine, is_sendable
from slurm_hooks.placement.request import Key, TypeRequest, names_one
from slurm_hooks.placement.state import WAITS_FOR, Cluster, SpeedTable, Times, usable_times
from telemetry.slurm.placement_queue import QueueJob

JOBS_PER_RUN = 20
"""Most pending jobs that one run changes: each takes three commands, and the next run comes within minutes."""
UNDO_S = 600
"""Time until a job that still waits gets its own request back, or may be placed elsewhere."""
AGAIN_S = 3600
"""Time from then until almanac may place the same job again."""
IN_FORCE: frozenset[Kind] = frozenset(
    {"place", "placed", "refused", "undo", "requeue", "requeued", "stopped", "restarted"}
)
"""Lines after which the job may have another request than its owner's."""


@dataclass(frozen=True)
class Order:
    """What to tell Slurm of a pending job. own, new: texts. gpu_type: of the new one, in an undo too."""

    what: Literal["place", "undo", "release"]
    job: QueueJob
    key: Key
    own: str
    new: str
    gpu_type: str
    reason: str
    shown: str
    """The text that the job must still have when the order is sent."""

    @property
    def text(self) -> str:
        return self.new if self.what == "place" else self.own


@dataclass(frozen=True)
class Note:
    """What became of an earlier line; Slurm is told nothing."""

    what: Kind
    job: QueueJob
    line: PlacementLine
    reason: str
    delay_s: float | None = None


@dataclass(frozen=True)
class PlacementPlan:
    """orders: undos first. counts: why the other pending jobs stay as they are. read_s: of the look at Slurm.

    fault: why the speeds of the GPU types are not known: then no job is placed, but earlier changes are settled.
    """

    orders: tuple[Order, ...]
    notes: tuple[Note, ...]
    counts: Counts
    times: Times
    read_s: float
    fault: AlmanacError | None = None


def plan_placement(
    cluster: Cluster, history: PlacementHistory, speeds: SpeedTable, now_s: int, is_clearing: bool = False
) -> PlacementPlan:
    """is_clearing: only give back own requests, all of them. Raises ValueError."""
    view = cluster.view
    counts = Counts(seen=sum(job.is_pending for job in view.jobs))
    notes = [note for job in view.jobs if (note := _note(job, history, now_s))]
    if is_clearing:
        orders = [order for job in view.jobs if (order := _release(job, history) or _undo(job, history, "given back"))]
        counts.kept = len(orders)
        return PlacementPlan(tuple(orders), tuple(notes), counts, {}, view.read_s)
    noted = {note.job.job_id: note.what for note in notes}
    faults = [order for job in view.jobs if (order := _fault(job, history, cluster, noted.get(job.job_id)))]
    busy = {order.job.job_id for order in faults}
    open_jobs = []
    for job in view.jobs:
        if not job.is_pending or job.job_id in busy:
            continue
        if why_not := _why_not(job, cluster, history, noted.get(job.job_id), now_s):
            if late := _late(job, history, now_s):
                faults.append(late)
            else:
                counts.drop(why_not)
        else:
            open_jobs.append(job)
    fault: AlmanacError | None = None
    try:
        times = _times(open_jobs, cluster, history, speeds)
    except AlmanacError as error:
        times, fault = {}, error
    orders = _orders(open_jobs, cluster, history, times, now_s, counts)
    counts.kept = len(orders) + len(faults)
    return PlacementPlan((*faults, *orders), tuple(notes), counts, times, view.read_s, fault)


def _times(jobs: Sequence[QueueJob], cluster: Cluster, history: PlacementHistory, speeds: SpeedTable) -> Times:
    """Run times of the jobs with at least two known types that they allow."""
    found = speeds(jobs, cluster.types) if jobs else {}
    times = {}
    for job in jobs:
        request = own_request(job, cluster, line_of(job, history))
        allowed = sorted(request.allowed & cluster.reachable(job)) if request else []
        usable = usable_times(job, found.get(job.job_id, ()), allowed)
        if len(usable) > 1:
            times[job.job_id] = usable
    return times


def line_of(job: QueueJob, history: PlacementHistory) -> PlacementLine | None:
    """The newest line about this submission of the job."""
    return history.line_of(job)


def shown_text(job: QueueJob, key: Key) -> str:
    """What Slurm shows of a part of the job's request."""
    return job.gres.constraints if key == "Features" else job.gres.requests.get(key, "")


def _note(job: QueueJob, history: PlacementHistory, now_s: int) -> Note | None:
    """What a look at the job says of its newest line."""
    line = line_of(job, history)
    if line is None or line.what not in IN_FORCE:
        return None
    shown = shown_text(job, line.key)
    requeues = history.requeues_of(job)
    if line.what == "requeue" and job.is_running and job.gres.restarts == line.restarts:
        return Note("stopped", job, line, "the run before ended before its requeue")
    if job.is_running and line.what in ("requeue", "requeued", "place", "placed") and _moved(job, line, requeues):
        delay_s = max(0.0, (job.start_s or now_s) - requeues[-1].time_s)
        if line.what in ("requeue", "place") and shown in line.texts:
            line = replace(line, new=shown, was=None)  # the change may never have been sent
        return Note("restarted", job, line, "it runs again", delay_s)
    if not job.is_pending:
        return None
    if shown not in line.texts:
        return Note("owner", job, line, "somebody else changed the request")
    if line.what == "place":
        is_taken = shown == line.new
        return Note(
            "placed" if is_taken else "refused", job, line, f"Slurm shows the {'new' if is_taken else 'old'} request"
        )
    if shown == line.own and line.own != line.new:
        if line.what == "undo":
            return Note("undone", job, line, "Slurm shows its own request")
        if line.what in ("placed", "restarted"):
            return Note("owner", job, line, "somebody else gave it its own request back")
        if line.what == "stopped" and line.was not in (None, line.own):
            return Note("owner", job, line, "somebody else gave it its own request back")
    return None


def _moved(job: QueueJob, line: PlacementLine, requeues: Sequence[PlacementLine]) -> bool:
    """Whether the job runs for the first time after its last requeue by almanac."""
    return bool(requeues) and requeues[-1].restarts + 1 == job.gres.restarts and line.what != "restarted"


def _undo(job: QueueJob, history: PlacementHistory, reason: str) -> Order | None:
    """Of a pending job that has a request of almanac's."""
    line = line_of(job, history)
    if line is None or not job.is_pending or not is_placed(job, line):
        return None
    shown = shown_text(job, line.key)
    return Order("undo", job, line.key, line.own, shown, line.gpu_type, reason, shown)


def is_placed(job: QueueJob, line: PlacementLine) -> bool:
    """Whether the job shows a request of almanac's: that of its newest line, or one of before."""
    return line.what in IN_FORCE and shown_text(job, line.key) in line.texts - {line.own}


def type_now(job: QueueJob, line: PlacementLine, cluster: Cluster) -> str:
    """The type of the request that a placed job shows."""
    request = cluster.request(job)
    return (names_one(request) if request else "") or line.gpu_type


def _release(job: QueueJob, history: PlacementHistory) -> Order | None:
    """Of a job that has its own request back, and that Slurm still holds."""
    line = line_of(job, history)
    if line is None or not job.is_pending or line.what not in ("undo", "undone", "release"):
        return None
    if job.gres.reason != "BADCONSTRAINTS" or shown_text(job, line.key) != line.own:
        return None
    return Order("release", job, line.key, line.own, line.new, line.gpu_type, "BadConstraints", line.own)


def _fault(job: QueueJob, history: PlacementHistory, cluster: Cluster, noted: Kind | None) -> Order | None:
    """What has to be given back whatever the decision says."""
    line = line_of(job, history)
    if line is None or not job.is_pending:
        return None
    if released := _release(job, history):
        return released
    if line.what == "undo":
        return _undo(job, history, line.reason)
    if job.gres.reason == "BADCONSTRAINTS":
        return _undo(job, history, "Slurm: BadConstraints")
    if not accepts_any(job.gres.comment) or not set(job.gres.partitions) <= set(cluster.settings.partitions):
        return _undo(job, history, "no longer opted in")
    if (kind := type_now(job, line, cluster)) not in cluster.pools:
        return _undo(job, history, f"no node in service has {kind}")
    if "refused" in (line.what, noted):
        return _undo(job, history, "Slurm refused another type")
    shown = shown_text(job, line.key)
    if line.what == "requeue" and shown in line.texts - {line.new} and job.gres.restarts > line.restarts:
        return Order("place", job, line.key, line.own, line.new, line.gpu_type, line.reason, shown)
    return None


def _late(job: QueueJob, history: PlacementHistory, now_s: int) -> Order | None:
    """Of a placed job that waits for something else than GPUs, such as a limit on its new type."""
    line = line_of(job, history)
    is_bound = job.gres.priority == 0 or job.gres.reason in WAITS_FOR | {"BEGINTIME", "DEPENDENCY"}
    if line is None or is_bound or job.waits_for_jobs or now_s - line.time_s < UNDO_S:
        return None
    return _undo(job, history, f"Slurm: {job.gres.reason or 'no reason'}")


def _why_not(job: QueueJob, cluster: Cluster, history: PlacementHistory, noted: Kind | None, now_s: int) -> str:
    """Why a pending job is not decided on; "" if it is."""
    settings, line = cluster.settings, line_of(job, history)
    if not job.record.gpu_count:
        return "asks for no GPU"
    if not job.gres.partitions or not set(job.gres.partitions) <= set(settings.partitions):
        return "its partition does not take part (placement.partitions)"
    if not accepts_any(job.gres.comment):
        return f"its owner did not say {ANY_GPU}"
    if why_not := why_not_plain(job):
        return why_not
    if line is not None and ("owner" in (line.what, noted)):
        return "somebody changed its request after almanac"
    if job.waits_for_jobs:
        return "waits for other jobs (dependency)"
    if job.gres.priority == 0:
        return "held"
    if job.gres.reason not in WAITS_FOR:
        return "does not wait for resources or priority"
    if own_request(job, cluster, line) is None:
        return "its request of GPU types is none that almanac can change"
    return _why_not_again(line, noted, now_s) if line else ""


def why_not_plain(job: QueueJob) -> str:
    """Jobs that almanac never touches, whatever they say."""
    if job.record.array_job_id is not None:
        return "belongs to an array"
    if job.record.het_job_id is not None or not job.gres.is_plain:
        return "is heterogeneous, or has a reservation, licenses, or whole nodes"
    return "names its nodes" if job.gres.required_nodes else ""


def _why_not_again(line: PlacementLine, noted: Kind | None, now_s: int) -> str:
    if line.what in IN_FORCE - {"refused"} and noted not in ("refused", "undone"):
        return ""
    is_recent = now_s - line.time_s < AGAIN_S
    return "got its own request back within the last hour, or Slurm refused the change" if is_recent else ""


def own_request(job: QueueJob, cluster: Cluster, line: PlacementLine | None) -> TypeRequest | None:
    """What the owner asked for: of a job that has a request of almanac's, as the record has it."""
    if line is None or not is_placed(job, line):
        return cluster.request(job)
    if line.key == "Features":
        return cluster.request_in(line.own, job.gres.requests)
    return cluster.request_in(job.gres.constraints, {**job.gres.requests, line.key: line.own})


def _orders(
    jobs: Sequence[QueueJob], cluster: Cluster, history: PlacementHistory, times: Times, now_s: int, counts: Counts
) -> list[Order]:
    """In the queue's order."""
    lines = {job.job_id: line for job in jobs if (line := line_of(job, history)) and is_placed(job, line)}
    kinds = {job.job_id: type_now(job, lines[job.job_id], cluster) for job in jobs if job.job_id in lines}
    pinned = {number: kinds[number] for number, line in lines.items() if now_s - line.time_s < UNDO_S}
    types = decide(rows_of(cluster, times, pinned, {}, now_s), cluster, PENDING_RULES) if times else {}
    orders: list[Order] = []
    for job in sorted(jobs, key=lambda job: (-job.gres.priority, job.job_id)):
        line, wanted = lines.get(job.job_id), types.get(job.job_id)
        if job.job_id in pinned or (line and wanted == kinds[job.job_id]):
            counts.drop("placed, and still waits")
        elif job.job_id in times and wanted:
            _place(job, cluster, line, wanted, times, orders, counts)
        elif line:
            why = f"still waits after {format_duration(now_s - line.time_s)}"
            shown = shown_text(job, line.key)
            orders.append(Order("undo", job, line.key, line.own, shown, kinds[job.job_id], why, shown))
        else:
            counts.drop("would not start now" if job.job_id in times else "fewer than two of its types are known")
    return orders


def _place(
    job: QueueJob, cluster: Cluster, line: PlacementLine | None, wanted: str, times: Times, orders: list[Order],
    counts: Counts,
) -> None:  # fmt: skip
    request = own_request(job, cluster, line)
    if request is None or not (is_sendable(request.text) and is_sendable(request.of(wanted))):
        counts.drop("its request of GPU types is none that almanac can change")
    elif line is None and names_one(request) == wanted:
        counts.drop("asks for the best type already")
    elif sum(order.what == "place" for order in orders) >= JOBS_PER_RUN:
        counts.drop("waits for the next run (20 jobs a run)")
    else:
        shown = shown_text(job, request.key)
        why = f"{format_duration(times[job.job_id][wanted].run_s)} on {wanted}"
        orders.append(Order("place", job, request.key, request.text, request.of(wanted), wanted, why, shown))
