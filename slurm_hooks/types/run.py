"""Run times by GPU type of the jobs in the queue, and placements and requeues: each step is logged before its order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from advisor.artefacts import load_speeds
from advisor.duration.blend import COVERAGE
from advisor.types.runs import load_speed_runs
from advisor.types.times import request_times, user_families
from almanac.actions_config import PlacementSection
from almanac.errors import AlmanacError, CommandError, ConfigError, NoModelError
from almanac.submit_config import GpuType
from almanac.units import DAY_S, format_duration, listed
from slurm.accounting import submit_line
from slurm.backend import SlurmBackend
from slurm.commands import SlurmCommands
from slurm.nodes import SlurmNode
from slurm.queue import read_queue
from slurm.queued_job import QueuedJob
from slurm_hooks.jobs.engine import JobEngine, JobOutcome, JobPlan, readable, require_release
from slurm_hooks.jobs.log import Kind, shown_text
from slurm_hooks.orders import Facts, job_facts, must_still_hold, requeued_facts
from slurm_hooks.types.decide import JobSpeeds, QueueAndNodes, RunTime, cluster_of
from slurm_hooks.types.plan import Move
from slurm_hooks.types.request import RequeueTerms, requeue_terms

if TYPE_CHECKING:
    from advisor.types.times import TypeTime
    from almanac.config import Config
    from telemetry.store.store import ClusterStore


MAX_AGE_S = 60.0
"""Seconds after which a look at Slurm is too old to act on: by then jobs have started."""
UPDATE_S, PAUSE_S = 20.0, 0.5
"""Seconds for which, and between which, the change of a requeued job is tried while its processes end."""


def require_placement(settings: PlacementSection, release: str) -> None:
    """Check that placement can work. Raises ConfigError if partitions or types are missing, or the release cannot."""
    if not settings.partitions or len(set(settings.types)) < 2:
        raise ConfigError(
            f"placement has {len(settings.partitions)} partitions and {len(set(settings.types))} types",
            "set placement.partitions, and at least two placement.types",
        )
    if settings.select_by == "gres":
        require_release(release)


def read_view(
    backend: SlurmBackend, commands: SlurmCommands, cluster: str, clock: Callable[[], float]
) -> QueueAndNodes:
    """Nodes before the queue: a job that starts in between is then in neither. Raises CommandError."""
    read_s = clock()
    nodes = tuple(backend.nodes())
    return QueueAndNodes(read_s, readable(read_queue(commands, cluster)).jobs, nodes)


def read_terms(commands: SlurmCommands, job: QueuedJob, settings: Mapping[str, str]) -> RequeueTerms:
    """Return the requeue terms of a running job's script and submit line, as slurmctld and slurmdbd keep them.

    No file of its owner's is read. Raises CommandError.
    """
    script = commands.run(["scontrol", "write", "batch_script", str(job.job_id), "-"])
    if script.code:
        return RequeueTerms(why_not="Slurm does not show its script")
    line = submit_line(commands, job.job_id, job.submit_s - DAY_S)
    return requeue_terms(script.stdout.decode("utf-8", "replace"), line, settings.get("JobFileAppend") == "1")


@dataclass(kw_only=True)
class PlacementEngine(JobEngine):
    """Carries out plans: changes of pending jobs as any, then requeues of running ones."""

    backend: SlurmBackend
    settings: PlacementSection

    def apply(self, plan: JobPlan) -> JobOutcome:
        """Apply the plan as JobEngine.apply does, then requeue. Raises CommandError if the plan is too old."""
        self._require_fresh(plan.read_s)
        super().apply(plan)
        for move in plan.requeues:
            self._require_fresh(plan.read_s)
            assert isinstance(move, Move)
            self._requeue(move)
        return self.outcome

    def _require_fresh(self, read_s: float | None) -> None:
        age_s = self.clock() - (read_s or 0)
        if not 0 <= age_s + 1 <= MAX_AGE_S + 1:
            raise CommandError(
                f"the look at Slurm is {format_duration(abs(age_s))} old, or from the future",
                "run this again when slurmctld answers faster",
            )

    def _requeue(self, move: Move) -> None:
        """Signal, time for the checkpoint, requeue, and the new request while the processes end.

        The job is never held: whatever stops this process, Slurm runs the job again.
        """
        self._write(move, "requeue", move.line.reason)
        if self._is_stopped(move) or not self._checkpoint(move):
            return
        if not self._are_free(move) or self._is_stopped(move):
            return
        done = self.commands.run(["scontrol", "requeue", str(move.job.job_id)])
        self.outcome.say(done.said)
        if done.code:
            self._stop(move, "Slurm refused the requeue")
            return
        is_changed = move.line.was == move.line.new or self._update(move)
        self.outcome.requeued += 1
        if is_changed:
            self._write(move, "requeued", move.line.reason, move.job.restarts + 1)

    def _is_stopped(self, move: Move) -> bool:
        """Return True if the job has changed since the move was decided."""
        why = must_still_hold({move.job.job_id: job_facts(move.job)}, self.facts).get(move.job.job_id, "")
        if why:
            self.outcome.changed += 1
            self._write(move, "stopped", why)
        return bool(why)

    def _stop(self, move: Move, why: str) -> None:
        self.outcome.stopped += 1
        self._write(move, "stopped", why)

    def _checkpoint(self, move: Move) -> bool:
        """Send the signal and wait. False where the job ended, or was requeued by itself, meanwhile."""
        done = self.commands.run(move.signal.command(move.job.job_id))
        self.outcome.say(done.said)
        why = "Slurm did not send the signal" if done.code else ""
        end_s = self.clock() + move.signal.before_s
        while not why and self.clock() < end_s:
            self.sleep(min(2.0, max(0.1, end_s - self.clock())))
            job = self.jobs([move.job.job_id]).get(move.job.job_id)
            if job is not None and job.restarts > move.job.restarts:
                return self._went_by_itself(move, job)
            if job is None or not job.is_running:
                why = "the job ended after the signal"
        if why:
            self._stop(move, why)
        return not why

    def _are_free(self, move: Move) -> bool:
        """Return True if the GPUs are still free after the time for the checkpoint, also for the jobs that this run
        placed on the type. Raises CommandError.
        """
        placed = {number for number, each in self.sent.items() if each.line.gpu_type == move.line.gpu_type}
        view = read_view(self.backend, self.commands, self.cluster, self.clock)
        pool = cluster_of(view, self.settings).pools.get(move.line.gpu_type)
        waiting = sum(job.gpu_count for job in view.jobs if job.job_id in placed and job.is_pending)
        if pool is not None and pool.free - waiting >= move.job.gpu_count:
            return True
        self._stop(move, f"the free GPUs of {move.line.gpu_type} are gone")
        return False

    def _went_by_itself(self, move: Move, job: QueuedJob) -> bool:
        """A job that requeues itself on the signal gets the new request, too."""
        if shown_text(job, move.line.key) == move.line.was and self._update(move):
            self.outcome.requeued += 1
            self._write(move, "requeued", move.line.reason, job.restarts)
        return False

    def _update(self, move: Move) -> bool:
        """slurmctld refuses some changes while processes end. A job that keeps its request runs again as it was."""
        end_s, number = self.clock() + UPDATE_S, move.job.job_id
        before = {**requeued_facts(move.job, move.job), "states": True}

        def seen(job_ids: Collection[int]) -> dict[int, Facts]:
            jobs = self.jobs(job_ids)
            return {
                each: {**requeued_facts(move.job, job), "states": bool(job.states & {"PENDING", "COMPLETING"})}
                for each, job in jobs.items()
            }

        while True:
            if why := must_still_hold({number: before}, seen).get(number):
                self.outcome.changed += 1
                self._write(move, "place", move.line.reason)
                self._write(move, "dropped", why)
                return False
            done = self.commands.run(
                ["scontrol", "update", f"jobid={move.job.job_id}", f"{move.line.key}={move.line.new}"]
            )
            if not done.code:
                return True
            if self.clock() >= end_s:
                self.outcome.say(done.said)
                return False
            self.sleep(PAUSE_S)

    def _write(self, move: Move, what: Kind, reason: str, restarts: int | None = None) -> None:
        self.write([move.next(what, reason, restarts=move.job.restarts if restarts is None else restarts)])


LONG_RUN = 0.9
"""Probability that a run is in the interval whose end must be within the time limit."""
TRAIN = "run `almanac train`, or see `almanac run --list`"


def stored_speeds(store: ClusterStore, config: Config, now_s: int, users: Collection[str]) -> JobSpeeds:
    """Return the speeds of users' jobs, by the trained table and their runs in the store now.

    Raises NoModelError if nothing is trained, StoreError if the store or the table cannot be read. The returned
    callable raises NoModelError if the table knows fewer than two of the types.
    """
    table = load_speeds(store.models_dir)
    if table is None:
        raise NoModelError("no model is trained, so the speeds of the GPU types are not known", TRAIN)
    since_s = now_s - config.advice.history_days * DAY_S
    families = user_families(load_speed_runs(store, users, since_s), table, config, now_s)

    def times(jobs: Sequence[QueuedJob], types: Sequence[str]) -> Mapping[int, Sequence[RunTime]]:
        known = sorted(set(table.names) & set(types))
        if len(known) < 2:
            raise NoModelError(
                f"the trained speeds hold {len(known)} of {len(types)} GPU types ({', '.join(table.names) or 'none'})",
                f"correct placement.types, or, once jobs ran on each type, {TRAIN}",
            )
        return {
            job.job_id: [_run_time(each) for each in request_times(job.request(), families, table, None, config)]
            for job in jobs
        }

    return times


def speeds_or_fault(store: ClusterStore, config: Config, now_s: int, users: Collection[str]) -> JobSpeeds:
    """Return `stored_speeds`; without any, a callable that raises the reason, to settle earlier changes."""
    try:
        return stored_speeds(store, config, now_s, users)
    except AlmanacError as error:
        found = error

    def fail(jobs: Sequence[QueuedJob], types: Sequence[str]) -> Mapping[int, Sequence[RunTime]]:
        raise found

    return fail


def _run_time(each: TypeTime) -> RunTime:
    """A single run varies more than the usual time, whose interval is not used."""
    low_s, high_s = each.next_run(COVERAGE)
    return RunTime(each.gpu_type, each.run_s, low_s, high_s, max(high_s, each.next_run(LONG_RUN)[1]))


def no_speeds(jobs: Sequence[QueuedJob], types: Sequence[str]) -> Mapping[int, Sequence[RunTime]]:
    """A table without any job."""
    return {}


@dataclass(frozen=True)
class TypeFault:
    """Types that are unknown somewhere. is_fatal: Slurm does not know them, so that no job can be placed there."""

    said: str
    todo: str
    is_fatal: bool = False


def type_faults(
    settings: PlacementSection,
    nodes: Sequence[SlurmNode],
    gpu_types: Sequence[GpuType],
    learned: Collection[str] | None,
) -> Iterator[TypeFault]:
    """Yield faults of the settings of placement by GPU type.

    gpu_types: of the configuration; empty if the site names none. learned: GPU types of the trained speeds; None
    without a trained model.
    """
    own = nodes_of(settings, nodes)
    if own and (absent := _absent(settings, {name for each in own for name in names_of(each, settings)})):
        what = "feature" if settings.select_by == "constraint" else "GRES type"
        said = f"no node of these partitions has {listed(absent, what)}"
        yield TypeFault(said, "correct placement.types, or placement.select_by", is_fatal=True)
    named = {each.selector for each in gpu_types if each.kind == settings.select_by}
    if gpu_types and (absent := _absent(settings, named)):
        yield TypeFault(
            f"no [[gpu_types]] has as its {settings.select_by} {listed(absent, 'placement type')}",
            "add them to [[gpu_types]], or correct placement.types: both name the same node features or GRES types",
        )
    if learned is None:
        yield TypeFault("no model is trained: almanac does not know the speeds of GPU types", "run `almanac train`")
    elif absent := _absent(settings, learned):
        known = ", ".join(sorted(learned)) or "none"
        yield TypeFault(
            f"the trained speeds have no {listed(absent, 'placement type')}; they have: {known}",
            "use the same names in placement.types, or run `almanac train` once jobs ran on these types",
        )


def nodes_of(settings: PlacementSection, nodes: Sequence[SlurmNode]) -> list[SlurmNode]:
    """The nodes with GPUs in partitions that take part."""
    return [each for each in nodes if set(each.partitions) & set(settings.partitions) and each.gpus]


def names_of(each: SlurmNode, settings: PlacementSection) -> Collection[str]:
    """Return the words by which a request can name a node's GPUs."""
    return each.features if settings.select_by == "constraint" else each.gpus


def _absent(settings: PlacementSection, known: Collection[str]) -> list[str]:
    return [name for name in dict.fromkeys(settings.types) if name not in known]
