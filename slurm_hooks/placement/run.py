"""Carries out placements and requeues: the record first, then Slurm, then a look.

Slurm takes a change without a word and shows a second later what it makes of it. A job is looked at right before each
of its changes: what its owner did meanwhile wins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from almanac import __version__
from almanac.actions_config import Placement
from almanac.errors import CommandError, ConfigError
from almanac.units import DAY_S, format_duration
from slurm_hooks.last_look import GONE, Facts, batches, job_facts, must_still_hold, requeued_facts
from slurm_hooks.mig.raise_run import require_release
from slurm_hooks.placement.consent import RequeueTerms, requeue_terms
from slurm_hooks.placement.log import Kind, PlacementLine, PlacementLog
from slurm_hooks.placement.moves import Move
from slurm_hooks.placement.plan import Order, PlacementPlan, shown_text
from slurm_hooks.placement.state import cluster_of
from telemetry.slurm.backend import Node
from telemetry.slurm.commands import Done
from telemetry.slurm.placement_queue import QueueJob, QueueView, queue_nodes, read_jobs, read_queue, require_readable
from telemetry.sources.sacct_text import optional_number

MAX_AGE_S = 60.0
"""Seconds after which a look at Slurm is too old to act on: by then jobs have started."""
LOOK_S = 6.0
"""Seconds until a change shows."""
UPDATE_S, PAUSE_S = 20.0, 0.5
"""How long, and how often, the change of a requeued job is tried while its processes end."""


class Commands(Protocol):
    """Runs Slurm's commands, as SlurmCommands does."""

    def __call__(self, argv: Sequence[str]) -> bytes: ...

    def run(self, argv: Sequence[str], stdin: bytes = b"") -> Done: ...

    def feed(self, argv: Sequence[str], stdin: bytes) -> Done: ...


class Backend(Protocol):
    """What is asked of Slurm beside the queue, as CommandBackend does."""

    def release(self) -> str: ...

    def nodes(self) -> list[Node]: ...


@dataclass
class PlacementOutcome:
    """What became of the orders. placed, undone: Slurm shows it. started: left the queue, which is mostly to run.

    refused: kept its request. changed: its owner, or somebody else, was first. failed: an operator has to look at these
    jobs. requeued, stopped: running jobs that were, and that were not requeued after all.
    """

    placed: int = 0
    undone: int = 0
    started: int = 0
    refused: int = 0
    changed: int = 0
    requeued: int = 0
    stopped: int = 0
    failed: tuple[str, ...] = ()
    said: tuple[str, ...] = field(default=())

    def say(self, text: str) -> None:
        """Keep the lines that Slurm said, each once."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        self.said = tuple(dict.fromkeys((*self.said, *lines)))


def require_placement(settings: Placement, release: str) -> None:
    """Raises ConfigError where nothing can be placed with these settings on this release."""
    if not settings.partitions or len(set(settings.types)) < 2:
        raise ConfigError(
            f"placement has {len(settings.partitions)} partitions and {len(set(settings.types))} types",
            "set placement.partitions, and at least two placement.types",
        )
    if settings.select_by == "gres":
        require_release(release)


def read_view(backend: Backend, commands: Commands, cluster: str, clock: Callable[[], float]) -> QueueView:
    """Nodes before the queue: a job that starts in between is then in neither. Raises CommandError."""
    read_s = clock()
    nodes = queue_nodes(backend.nodes())
    jobs, unreadable = read_queue(commands, cluster)
    require_readable(unreadable)
    return QueueView(read_s, jobs, nodes)


def read_terms(commands: Commands, job: QueueJob, configuration: str) -> RequeueTerms:
    """What a running job's script and submit line say, as slurmctld and slurmdbd keep them: no file of its owner's is
    read. Raises CommandError.
    """
    script = commands.run(["scontrol", "write", "batch_script", str(job.job_id), "-"])
    if script.code:
        return RequeueTerms(why_not="Slurm does not show its script")
    shown = commands(["sacct", "-j", str(job.job_id), "-nPX", "-o", "Submit,SubmitLine"]).decode("utf-8", "replace")
    submitted, _, line = shown.partition("|")
    if (optional_number(submitted) or 0) < job.gres.submit_s - DAY_S:
        line = ""  # of an older job: Slurm gives numbers again, and slurmdbd has not stored this one yet
    appends = re.search(r"(?m)^JobFileAppend\s*=\s*1\s*$", configuration) is not None
    return requeue_terms(script.stdout.decode("utf-8", "replace"), line.strip(), appends)


@dataclass
class PlacementActor:
    """Carries out plans. clock: seconds since 1970; sleep: waits for so many seconds."""

    commands: Commands
    backend: Backend
    log: PlacementLog
    cluster: str
    settings: Placement
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    look_s: float = field(default_factory=lambda: LOOK_S)

    def apply(self, plan: PlacementPlan, moves: Sequence[Move] = ()) -> PlacementOutcome:
        """Raises StoreError where the record cannot be written (Slurm is told nothing then), CommandError where Slurm
        does not answer or the plan is too old: the next run goes on from the record.
        """
        self._require_fresh(plan.read_s)
        outcome = PlacementOutcome()
        self._write([
            replace(note.line, what=note.what, time_s=self._now(), restarts=note.job.gres.restarts, reason=note.reason,
                    submit_s=note.job.gres.submit_s, delay_s=note.delay_s, almanac=__version__)
            for note in plan.notes
        ])  # fmt: skip
        orders = self._send(plan.orders, outcome)
        self._look(orders, outcome)
        for move in moves:
            self._require_fresh(plan.read_s)
            placed = {number for number, order in orders.items() if order.gpu_type == move.gpu_type}
            self._requeue(move, placed, outcome)
        return outcome

    def _require_fresh(self, read_s: float) -> None:
        age_s = self.clock() - read_s
        if not 0 <= age_s + 1 <= MAX_AGE_S + 1:
            raise CommandError(
                f"the look at Slurm is {format_duration(abs(age_s))} old, or from the future",
                "run this again when slurmctld answers faster",
            )

    def _jobs(self, job_ids: Collection[int]) -> dict[int, QueueJob]:
        """Some jobs now. Raises CommandError."""
        return read_jobs(self.commands, self.cluster, job_ids)

    def _facts(self, job_ids: Collection[int]) -> dict[int, Facts]:
        return {number: job_facts(job) for number, job in self._jobs(job_ids).items()}

    def _send(self, orders: Sequence[Order], outcome: PlacementOutcome) -> dict[int, Order]:
        """The orders that were sent. What Slurm says is shown, and the queue tells what came of them."""
        sent: dict[int, Order] = {}
        for part in batches(orders):
            self._write([self._line(order, order.what, order.reason) for order in part])
            changed = must_still_hold({order.job.job_id: job_facts(order.job) for order in part}, self._facts)
            kept = [order for order in part if order.job.job_id not in changed]
            if kept:
                done = self.commands.feed(["scontrol"], "".join(map(_command, kept)).encode())
                outcome.say(done.stderr.decode("utf-8", "replace"))
            dropped = [order for order in part if order.job.job_id in changed]
            self._write([self._line(order, "dropped", changed[order.job.job_id]) for order in dropped])
            started = sum(why == GONE or "states" in why for why in changed.values())
            outcome.started += started
            outcome.changed += len(dropped) - started
            sent.update({order.job.job_id: order for order in kept})
        return sent

    def _look(self, orders: Mapping[int, Order], outcome: PlacementOutcome) -> None:
        """Until each job shows its new request and look_s have passed, or it has left the queue."""
        waiting, end_s = dict(orders), self.clock() + self.look_s
        while waiting:
            jobs, is_last = self._jobs(waiting.keys()), self.clock() >= end_s
            lines, heals = [], []
            for number, order in list(waiting.items()):
                job = jobs.get(number)
                if job is not None and job.gres.submit_s != order.job.gres.submit_s:
                    job = None  # it ran, and waits again; or the number is another job's
                heal = _heal(order, job) if job is not None and is_bad(job) else None
                if job is not None and job.is_pending and not is_last and not heal:
                    continue
                del waiting[number]
                if heal:
                    heals.append(heal)
                else:
                    lines += self._close(order, job, outcome)
            self._write(lines)
            if heals:
                waiting.update(self._send(heals, outcome))
                end_s = self.clock() + self.look_s
            if waiting:
                self.sleep(1.0)

    def _close(self, order: Order, job: QueueJob | None, outcome: PlacementOutcome) -> list[PlacementLine]:
        if job is None or not job.is_pending:
            outcome.started += 1
            return [] if order.what != "place" else [self._line(order, "placed", "the job waits no more")]
        shown = shown_text(job, order.key)
        if shown not in (order.own, order.new, order.shown):
            outcome.changed += 1
            return [self._line(order, "owner", "somebody else changed the request")]
        if is_bad(job):
            outcome.failed += (str(job.job_id),)
            return []
        if order.what == "place" and shown == order.new:
            outcome.placed += 1
            return [self._line(order, "placed", "Slurm shows the new request")]
        if order.what == "place":
            outcome.refused += 1
            return [self._line(order, "refused", "Slurm shows the request of before")]
        if shown == order.own:
            outcome.undone += 1
            return [self._line(order, "undone", order.reason)]
        outcome.failed += (str(job.job_id),)
        return []

    def _requeue(self, move: Move, placed: Collection[int], outcome: PlacementOutcome) -> None:
        """Signal, time for the checkpoint, requeue, and the new request while the processes end.

        placed: jobs that this run placed on the type, too.

        The job is never held: whatever stops this process, Slurm runs the job again.
        """
        self._write([self._line(move, "requeue", move.reason)])
        if self._is_stopped(move, outcome) or not self._checkpoint(move, outcome):
            return
        if not self._are_free(move, placed, outcome) or self._is_stopped(move, outcome):
            return
        done = self.commands.run(["scontrol", "requeue", str(move.job.job_id)])
        outcome.say(done.said)
        if done.code:
            self._stop(move, "Slurm refused the requeue", outcome)
            return
        is_changed = move.shown == move.new or self._update(move, outcome)
        outcome.requeued += 1
        if is_changed:
            self._write([self._line(move, "requeued", move.reason, move.job.gres.restarts + 1)])

    def _is_stopped(self, move: Move, outcome: PlacementOutcome) -> bool:
        """Return True if the job has changed since the move was decided."""
        why = must_still_hold({move.job.job_id: job_facts(move.job)}, self._facts).get(move.job.job_id, "")
        if why:
            outcome.changed += 1
            self._write([self._line(move, "stopped", why)])
        return bool(why)

    def _stop(self, move: Move, why: str, outcome: PlacementOutcome) -> None:
        outcome.stopped += 1
        self._write([self._line(move, "stopped", why)])

    def _checkpoint(self, move: Move, outcome: PlacementOutcome) -> bool:
        """Send the signal and wait. False where the job ended, or was requeued by itself, meanwhile."""
        done = self.commands.run(move.signal.command(move.job.job_id))
        outcome.say(done.said)
        why = "Slurm did not send the signal" if done.code else ""
        end_s = self.clock() + move.signal.before_s
        while not why and self.clock() < end_s:
            self.sleep(min(2.0, max(0.1, end_s - self.clock())))
            job = self._jobs([move.job.job_id]).get(move.job.job_id)
            if job is not None and job.gres.restarts > move.job.gres.restarts:
                return self._went_by_itself(move, job, outcome)
            if job is None or not job.is_running:
                why = "the job ended after the signal"
        if why:
            self._stop(move, why, outcome)
        return not why

    def _are_free(self, move: Move, placed: Collection[int], outcome: PlacementOutcome) -> bool:
        """Whether the GPUs are still free after the time for the checkpoint. placed: jobs that wait for some of them.

        Raises CommandError.
        """
        view = read_view(self.backend, self.commands, self.cluster, self.clock)
        pool = cluster_of(view, self.settings).pools.get(move.gpu_type)
        waiting = sum(job.record.gpu_count for job in view.jobs if job.job_id in placed and job.is_pending)
        if pool is not None and pool.free - waiting >= move.job.record.gpu_count:
            return True
        self._stop(move, f"the free GPUs of {move.gpu_type} are gone", outcome)
        return False

    def _went_by_itself(self, move: Move, job: QueueJob, outcome: PlacementOutcome) -> bool:
        """A job that requeues itself on the signal gets the new request, too."""
        if shown_text(job, move.key) == move.shown and self._update(move, outcome):
            outcome.requeued += 1
            self._write([self._line(move, "requeued", move.reason, job.gres.restarts)])
        return False

    def _update(self, move: Move, outcome: PlacementOutcome) -> bool:
        """slurmctld refuses some changes while processes end. A job that keeps its request runs again as it was."""
        end_s, number = self.clock() + UPDATE_S, move.job.job_id
        before = {**requeued_facts(move.job, move.job), "states": True}

        def seen(job_ids: Collection[int]) -> dict[int, Facts]:
            jobs = self._jobs(job_ids)
            return {
                each: {**requeued_facts(move.job, job), "states": bool(job.states & {"PENDING", "COMPLETING"})}
                for each, job in jobs.items()
            }

        while True:
            if why := must_still_hold({number: before}, seen).get(number):
                outcome.changed += 1
                self._write([self._line(move, "place", move.reason), self._line(move, "dropped", why)])
                return False
            done = self.commands.run(["scontrol", "update", f"jobid={move.job.job_id}", f"{move.key}={move.new}"])
            if not done.code:
                return True
            if self.clock() >= end_s:
                outcome.say(done.said)
                return False
            self.sleep(PAUSE_S)

    def _now(self) -> int:
        return int(self.clock())

    def _write(self, lines: Sequence[PlacementLine]) -> None:
        self.log.append(lines, self._now())

    def _line(self, about: Order | Move, what: Kind, reason: str, restarts: int | None = None) -> PlacementLine:
        return PlacementLine(
            what=what,
            time_s=self._now(),
            cluster=self.cluster,
            job_id=about.job.job_id,
            submit_s=about.job.gres.submit_s,
            restarts=about.job.gres.restarts if restarts is None else restarts,
            key=about.key,
            own=about.own,
            new=about.new,
            gpu_type=about.gpu_type,
            reason=reason,
            done=about.done if isinstance(about, Move) else 0.0,
            almanac=__version__,
            was=about.shown,
        )


def is_bad(job: QueueJob) -> bool:
    """Whether Slurm holds the job because no node can satisfy its request."""
    return job.is_pending and job.gres.reason == "BADCONSTRAINTS"


def _heal(order: Order, job: QueueJob) -> Order | None:
    """What gives a job its own request back that Slurm cannot run with the new one, and then releases it."""
    shown = shown_text(job, order.key)
    if order.what == "place" and shown == order.new:
        return replace(order, what="undo", job=job, reason="Slurm: BadConstraints", shown=order.new)
    if order.what == "undo" and shown == order.own:
        return replace(order, what="release", job=job, reason="BadConstraints", shown=order.own)
    return None


def _command(order: Order) -> str:
    if order.what == "release":
        return f"release {order.job.job_id}\n"
    return f"update jobid={order.job.job_id} {order.key}={order.text}\n"
