"""Larger MIG slices for pending jobs: the types that are idle, and the jobs that get one. Pure.

A job is raised only if its owner or partition allows it, if it asks for one slice of one type, and if a larger type is
idle that nobody waits for. A raised job that still waits gets its own type back.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from advisor.mig.decide import PendingSlice, decide_raises
from almanac.actions_config import MigRaise
from almanac.hardware import profile_name
from almanac.records import Counts
from almanac.units import MOST_USER_TEXT, format_duration
from slurm.backend import Reservation
from slurm.commands import Runner
from slurm.hostlist import expand
from slurm.nodes import SlurmNode, read_nodes
from slurm.queue import Queue, read_queue
from slurm.queued_job import ANY_TYPE, QueuedJob, RequestKey
from slurm.states import WAITS_FOR_ROOM
from slurm_hooks.jobs.engine import AGAIN_S, JOBS_PER_RUN, UNDO_S, JobChange, JobPlan, change, settle
from slurm_hooks.jobs.log import ChangeHistory, JobLine, Key, Kind, is_sendable
from slurm_hooks.types.request import TypeRequest, gres_request

_PLAIN = re.compile(r"[\w.-]*(?:[&,][\w.-]+)*", re.ASCII)
_NEVER = frozenset({
    "BADCONSTRAINTS", "DEPENDENCYNEVERSATISFIED", "INVALIDACCOUNT", "INVALIDQOS", "JOBHELDADMIN", "JOBHELDUSER",
    "JOBHOLDMAXREQUEUE",
})  # fmt: skip
"""Reasons of jobs that wait for nothing until somebody changes them."""


def waiting_types(jobs: Sequence[QueuedJob], now_s: int, soon_s: float) -> dict[str, frozenset[str]]:
    """Return, by GPU type, the partitions of the pending jobs that ask for it and may start within soon_s.

    ANY_TYPE: of those that take any. Jobs with a dependency or at a limit count: it can end at any time.
    """
    found: dict[str, set[str]] = {}
    for job in jobs:
        is_later = job.reason_key == "BEGINTIME" and job.eligible_s > now_s + soon_s
        if job.reason_key not in _NEVER and not is_later:
            for name in job.asked_types:
                found.setdefault(name, set()).update(job.partitions)
    return {name: frozenset(partitions) for name, partitions in found.items()}


@dataclass
class IdlePool:
    """Free instances of the nodes that can start a job now; `take` counts the ones given away in this run.

    free: of each node, by type.
    """

    nodes: Sequence[SlurmNode]
    reservations: Sequence[Reservation]
    now_s: int
    free: list[dict[str, int]] = field(default_factory=list)
    _taken_cpus: Counter[int] = field(default_factory=Counter)
    _taken_mib: Counter[int] = field(default_factory=Counter)
    _fitting: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)
    _idle: dict[Hashable, Counter[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, nodes: Sequence[SlurmNode], reservations: Sequence[Reservation], now_s: int) -> IdlePool:
        """Return the pool of a cluster's free typed instances.

        nodes: all of the cluster; those without such an instance are left out.
        """
        found = [(node, {name: count for name, count in node.free_gpus.items() if name}) for node in nodes]
        found = [(node, free) for node, free in found if any(free.values()) and node.takes_jobs]
        return cls([node for node, _ in found], reservations, now_s, [free for _, free in found])

    def idle_for(self, job: QueuedJob, waiting: dict[str, frozenset[str]], own: str) -> Counter[str]:
        """Free instances by type on the nodes that can take the job, but for types that others wait for there.

        own: the job's type, which is counted in any case. waiting: the same in all calls.
        """
        key = (_place(job), job.cpu_count, job.memory_mib, own)
        if key not in self._idle:
            idle: Counter[str] = Counter()
            for number in self._places(job):
                if self._has_room(number, job):
                    for name, count in self.free[number].items():
                        if name == own or not _is_wanted(name, self.nodes[number], waiting):
                            idle[name] += count
            self._idle[key] = idle
        return self._idle[key]

    def take(self, job: QueuedJob, name: str, waiting: dict[str, frozenset[str]]) -> None:
        """One instance of a type less, on the first node that can take the job."""
        self._idle.clear()
        for number in self._places(job):
            node = self.nodes[number]
            if self.free[number].get(name) and self._has_room(number, job) and not _is_wanted(name, node, waiting):
                self.free[number][name] -= 1
                self._taken_cpus[number] += job.cpu_count
                self._taken_mib[number] += _memory_mib(job, node)
                return

    def _has_room(self, number: int, job: QueuedJob) -> bool:
        node = self.nodes[number]
        if node.free_cpus is not None and node.free_cpus - self._taken_cpus[number] < job.cpu_count:
            return False
        left_mib = math.inf if node.free_memory_mib is None else node.free_memory_mib - self._taken_mib[number]
        return left_mib >= _memory_mib(job, node)

    def _places(self, job: QueuedJob) -> tuple[int, ...]:
        """Nodes that can take the job, whatever is free there; as far as can be told: Slurm decides."""
        key = _place(job)
        if key not in self._fitting:
            homes, features = set(job.partitions), _features(job)
            self._fitting[key] = tuple(
                number
                for number, each in enumerate(self.nodes)
                if homes & set(each.partitions) and features <= set(each.features) and self._is_allowed(each.name, job)
            )
        return self._fitting[key]

    def _is_allowed(self, name: str, job: QueuedJob) -> bool:
        """By --nodelist, --exclude, and reservations that begin before the job must end."""
        try:
            required, excluded = expand(job.required_nodes), expand(job.excluded_nodes)
        except ValueError:
            return False
        end_s = math.inf if job.time_limit_s is None else self.now_s + job.time_limit_s
        is_reserved = any(
            name in each.nodes and each.start_s < end_s and each.end_s > self.now_s for each in self.reservations
        )
        return required in ((), (name,)) and name not in excluded and not is_reserved


def _place(job: QueuedJob) -> Hashable:
    """Return all that decides on which nodes a job can run."""
    return (job.partitions, job.constraints, job.required_nodes, job.excluded_nodes, job.time_limit_s)


def _is_wanted(name: str, node: SlurmNode, waiting: dict[str, frozenset[str]]) -> bool:
    partitions = set(node.partitions)
    return any(partitions & waiting.get(each, frozenset()) for each in (name, ANY_TYPE))


def _features(job: QueuedJob) -> set[str]:
    return {name for name in re.split("[&,]", job.constraints) if name}


def _memory_mib(job: QueuedJob, node: SlurmNode) -> int:
    """Memory that the job takes of the node; 0 asks for all of it, and what is not known counts as none."""
    if job.memory_mib == 0:
        return node.memory_mib or 0
    return job.memory_mib or 0


_SIZES = re.compile(r"([1-7])g\.([0-9]{1,3})gb")


def one_slice(requests: Mapping[RequestKey, str] | Mapping[Key, str]) -> TypeRequest | None:
    """The only GPU request of a job, if it is for exactly one GPU or slice of one type; None otherwise."""
    found = gres_request(requests)
    return found if found and found.type and found.count in ("", ":1", "=1") else None


def chains(types: Collection[str], configured: Sequence[str] = ()) -> tuple[tuple[str, ...], ...]:
    """Types from the smallest up; in each chain a larger one can run every job of a smaller one.

    configured: the site's own order, the only chain where there is one. Otherwise MIG profiles whose types begin alike
    ("a100_1g.5gb", "a100_2g.10gb"), by memory and compute slices as their names tell; a type with more memory but fewer
    slices than a smaller one is left out, and so are whole GPUs and profiles with an attribute (+me).
    """
    if configured:
        return (tuple(dict.fromkeys(configured)),)
    families: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name in sorted(types):
        profile = profile_name(name) or ""
        sizes = _SIZES.fullmatch(profile)
        if sizes and name.lower().endswith(profile):
            families[name[: -len(profile)]].append((int(sizes[2]), int(sizes[1]), name))
    return tuple(_rising(sorted(found)) for _, found in sorted(families.items()))


def _rising(found: Sequence[tuple[int, int, str]]) -> tuple[str, ...]:
    chain: list[str] = []
    most = 0
    for _, compute, name in found:
        if compute >= most:
            chain.append(name)
            most = compute
    return tuple(chain)


OPT_IN, OPT_OUT = "almanac:larger", "almanac:same"
"""Words of a job's --comment."""
SOON_S = 3600
"""Pending jobs that may start within this time count as waiting for their type."""
_SOUND = WAITS_FOR_ROOM | {"NONE", ""}


@dataclass(frozen=True)
class ClusterState:
    """Slurm's answers now. queue: jobs that wait."""

    queue: Queue
    nodes: tuple[SlurmNode, ...]
    reservations: tuple[Reservation, ...]


def read_state(commands: Runner, cluster: str, reservations: Sequence[Reservation]) -> ClusterState:
    """Nodes before the queue: a job that starts in between is then in neither. Raises CommandError."""
    nodes = tuple(read_nodes(commands))
    return ClusterState(read_queue(commands, cluster).waiting(), nodes, tuple(reservations))


def is_opted_in(job: QueuedJob, partitions: Sequence[str]) -> bool:
    """Return True for a job that opted in by its --comment, or by all of its partitions.

    Only whole words of a comment count.
    """
    if len(job.comment) > MOST_USER_TEXT:
        return False
    words = set(re.split(r"[\s,;]+", job.comment))
    if OPT_OUT in words:
        return False
    return OPT_IN in words or bool(job.partitions and set(job.partitions) <= set(partitions))


def why_unsound(job: QueuedJob) -> str:
    """Return the reason of a raised job that waits for a limit, a hold, or a missing node; "" for any other."""
    reason = job.reason_key
    is_sound = not job.is_held and (reason in _SOUND or reason.startswith("REQNODENOTAVAIL"))
    return "" if is_sound else f"Slurm: {reason or 'held'}"


def plan_raises(
    state: ClusterState, history: ChangeHistory, settings: MigRaise, now_s: int, is_clearing: bool = False
) -> JobPlan:
    """Changes to make now. is_clearing: only give back own types, all of them."""

    def why_undo(job: QueuedJob, line: JobLine, noted: Kind | None) -> str:
        if why := why_unsound(job):
            return why
        if not is_opted_in(job, settings.partitions):
            return "no longer opted in"
        age_s = now_s - line.time_s
        return f"still waits after {format_duration(age_s)}" if age_s >= UNDO_S else ""

    jobs, unreadable = state.queue.jobs, state.queue.unreadable
    changes, notes = settle(jobs, history, now_s, why_undo, is_clearing)
    counts = Counts(seen=len(jobs) + unreadable)
    counts.drop("job that cannot be read: nothing is raised", unreadable)
    if not is_clearing and not unreadable:
        busy = {each.job.job_id for each in changes}
        others = [job for job in jobs if job.job_id not in busy]
        changes += _raises(state, others, history, notes, settings, now_s, counts)
    counts.kept = len(changes)
    return JobPlan(changes, list(notes.values()), counts)


def _raises(
    state: ClusterState, jobs: Sequence[QueuedJob], history: ChangeHistory, noted: Collection[int], settings: MigRaise,
    now_s: int, counts: Counts,
) -> list[JobChange]:  # fmt: skip
    """In the queue's order. jobs: those without an undo. noted: jobs with news of an earlier change."""
    known = chains({name for node in state.nodes for name in node.gpus}, settings.types)
    waiting = waiting_types(state.queue.jobs, now_s, SOON_S)
    pool = IdlePool.of(state.nodes, state.reservations, now_s)
    raises: list[JobChange] = []
    for job in sorted(jobs, key=lambda job: (-job.rank, job.job_id)):
        request = one_slice(job.requests)
        chain = next((each for each in known if request and request.type in each), ())
        why_not = _why_not(job, request, chain, settings)
        why_not = why_not or _why_not_again(job, history.line_of(job), job.job_id in noted, now_s) or _why_not_now(job)
        if not why_not and len(raises) >= JOBS_PER_RUN:
            why_not = "waits for the next run (20 jobs a run)"
        if why_not or request is None:
            counts.drop(why_not)
            continue
        new = _larger(job, request, chain, pool, waiting)
        if new is None:
            counts.drop("no larger type is idle that nobody waits for, or its own type is")
            continue
        if not (is_sendable(request.text) and is_sendable(request.of(new))):
            counts.drop("its request is none that almanac can change")
            continue
        pool.take(job, new, waiting)
        why = "idle, nobody waits for it"
        raises.append(change("raise", job, request.key, request.text, request.of(new), why, gpu_type=new))
    return raises


def _larger(
    job: QueuedJob, request: TypeRequest, chain: tuple[str, ...], pool: IdlePool, waiting: dict[str, frozenset[str]]
) -> str | None:
    idle = pool.idle_for(job, waiting, request.type)
    [*found] = decide_raises([PendingSlice(job.job_id, request.type)], idle, chain)
    return found[0].new if found else None


def _why_not(job: QueuedJob, request: TypeRequest | None, chain: tuple[str, ...], settings: MigRaise) -> str:
    """Return the reason to leave a job out, whatever it waits for; "" without one."""
    if not job.asked_types:
        return "asks for no GPU"
    if not is_opted_in(job, settings.partitions):
        return f"not opted in ({OPT_IN} in --comment)"
    if job.is_common_record:
        return "an array's common record: only tasks with a record of their own are raised"
    if not job.is_plain or job.node_count != 1 or not _PLAIN.fullmatch(job.constraints):
        return "several nodes, whole nodes, a reservation, licenses, or a constraint with a choice"
    if request is None:
        return "does not ask for exactly one slice of one type"
    return "" if chain else "its type is in no order of sizes (mig_raise.types)"


def _why_not_now(job: QueuedJob) -> str:
    if job.is_held:
        return "held"
    is_ready = job.is_pending and job.priority is not None and job.reason_key in WAITS_FOR_ROOM
    return "" if is_ready else "does not wait for resources or priority"


def _why_not_again(job: QueuedJob, line: JobLine | None, is_noted: bool, now_s: int) -> str:
    if line is None:
        return ""
    if line.what == "owner":
        return "somebody changed its request after a raise"
    if is_noted or line.is_shown(job):
        return "raised, and still waits"
    return "had its own type back within the last hour" if now_s - line.time_s < AGAIN_S else ""
