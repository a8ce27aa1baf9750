"""Raises pending jobs to a larger type, and gives them their own back: the record first, then Slurm, then a look.

Slurm takes any request without a word, and shows a second later what it makes of it: BadConstraints, a limit, or
nothing. So each change is looked at until the job has started or waits as before; else it gets its own type back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from almanac import __version__
from almanac.errors import CommandError, ConfigError
from slurm_hooks.last_look import Facts, batches, job_facts, must_still_hold
from slurm_hooks.mig.raise_log import RaiseKind, RaiseLine, RaiseLog
from slurm_hooks.mig.raise_plan import ClusterState, RaiseOrder, RaisePlan, is_sound
from slurm_hooks.mig.raise_types import one_slice
from telemetry.slurm.backend import Reservation
from telemetry.slurm.commands import Done
from telemetry.slurm.gres_queue import GresJob, read_gres_nodes, read_gres_queue

LEAST_RELEASE = (24, 11)
LOOK_S = 6.0
"""Seconds until a change shows: 1.5 s on 24.11 and 26.05, with the scheduler's defaults."""
_RELEASE = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})")


class Commands(Protocol):
    """Runs Slurm's commands, as SlurmCommands does."""

    def __call__(self, argv: Sequence[str]) -> bytes: ...

    def feed(self, argv: Sequence[str], stdin: bytes) -> Done: ...


class Backend(Protocol):
    """What is asked of Slurm beside the queue, as CommandBackend does."""

    def release(self) -> str: ...

    def reservations(self) -> list[Reservation]: ...


@dataclass
class RaiseOutcome:
    """What became of the orders, in jobs. waiting: with the larger type. refused: it kept its own type. failed: it is
    worse off than before; an operator has to look. gone: it left the queue, which is mostly to run. changed:
    it started, or somebody changed it, before the order was sent.
    """

    gone: int = 0
    waiting: int = 0
    undone: int = 0
    refused: int = 0
    changed: int = 0
    failed: tuple[str, ...] = ()
    said: tuple[str, ...] = field(default=())


def require_release(release: str) -> None:
    """Raises ConfigError before 24.11, where an updated job holds both types."""
    found = _RELEASE.match(release)
    if found is None or (int(found[1]), int(found[2])) < LEAST_RELEASE:
        raise ConfigError(
            f"Slurm {release} cannot change the GPU type of a pending job (22.05 gives it both types)",
            "this needs Slurm 24.11 or later; leave mig_raise.mode off",
        )


def read_state(backend: Backend, commands: Commands, cluster: str) -> ClusterState:
    """Nodes before the queue: a job that starts in between is then in neither. Raises CommandError."""
    nodes = read_gres_nodes(commands)
    return ClusterState(read_gres_queue(commands, cluster), nodes, tuple(backend.reservations()))


@dataclass
class RaiseActor:
    """Carries out plans. clock: seconds since 1970; sleep: waits for so many seconds."""

    commands: Commands
    log: RaiseLog
    cluster: str
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    look_s: float = field(default_factory=lambda: LOOK_S)

    def apply(self, plan: RaisePlan) -> RaiseOutcome:
        """Raises StoreError where the record cannot be written (Slurm is told nothing then), CommandError where Slurm
        does not answer: the next run goes on from the record.
        """
        self._write([self._line(note.line, note.what, note.job, note.reason) for note in plan.notes])
        outcome = RaiseOutcome()
        self._look(self._send(plan.orders, outcome), outcome)
        return outcome

    def _send(self, orders: Sequence[RaiseOrder], outcome: RaiseOutcome) -> dict[int, RaiseOrder]:
        """The orders that were sent. What Slurm says is shown, and the queue tells what came of them."""
        sent: dict[int, RaiseOrder] = {}
        for part in batches(orders):
            self._write([self._line_of(order, order.what, order.reason) for order in part])
            changed = must_still_hold({order.job.job_id: job_facts(order.job) for order in part}, self._facts)
            kept = [order for order in part if order.job.job_id not in changed]
            if kept:
                done = self.commands.feed(["scontrol"], "".join(map(_command, kept)).encode())
                said = [line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
                outcome.said = tuple(dict.fromkeys((*outcome.said, *said)))
            dropped = [order for order in part if order.job.job_id in changed]
            self._write([self._line_of(order, "dropped", changed[order.job.job_id]) for order in dropped])
            outcome.changed += len(dropped)
            sent.update({order.job.job_id: order for order in kept})
        return sent

    def _facts(self, job_ids: Collection[int]) -> dict[int, Facts]:
        return {number: job_facts(job) for number, job in self._jobs(job_ids).items()}

    def _jobs(self, job_ids: Collection[int]) -> dict[int, GresJob]:
        """Some pending jobs now. Raises CommandError."""
        queue = read_gres_queue(self.commands, self.cluster, job_ids)
        if queue.unreadable:
            raise CommandError(
                f"{queue.unreadable} pending jobs cannot be read", "run this again: it goes on from its record"
            )
        return {job.job_id: job for job in queue.jobs}

    def _look(self, orders: Mapping[int, RaiseOrder], outcome: RaiseOutcome) -> None:
        """Until each job has left the queue or look_s have passed. A job that is worse off is healed at once."""
        open_orders, end_s = dict(orders), self.clock() + self.look_s
        while open_orders:
            jobs = self._jobs(open_orders.keys())
            is_last = self.clock() >= end_s
            heals = self._judge(open_orders, jobs, outcome, is_last)
            if heals:
                open_orders.update(self._send(heals, outcome))
                end_s = self.clock() + self.look_s
            if open_orders:
                self.sleep(1.0)

    def _judge(
        self,
        open_orders: dict[int, RaiseOrder],
        jobs: Mapping[int, GresJob],
        outcome: RaiseOutcome,
        is_last: bool,
    ) -> list[RaiseOrder]:
        """Close the orders whose end is known; return the orders that heal others."""
        heals, lines = [], []
        for number, order in list(open_orders.items()):
            job = jobs.get(number)
            if job is not None and job.submit_s != order.job.submit_s:
                job = None  # it ran, and waits again; or the number is another job's
            shown = one_slice(job.requests) if job else None
            has_new = shown is not None and (shown.key, shown.type) == (order.request.key, order.new_type)
            has_own = shown is not None and (shown.key, shown.type) == (order.request.key, order.request.type)
            if job is None:
                outcome.gone += 1
                lines.append(self._line_of(order, "started", "the job waits no more"))
            elif order.what == "raise" and has_new and not is_sound(job):
                heals.append(RaiseOrder("undo", job, order.request, order.new_type, f"Slurm: {job.reason or 'held'}"))
            elif not is_last:
                continue
            elif order.what == "undo" and has_own and job.reason == "BADCONSTRAINTS":
                heals.append(RaiseOrder("release", job, order.request, order.new_type, "BadConstraints"))
            else:
                lines += self._close(order, job, has_new, has_own, outcome)
            del open_orders[number]
        self._write(lines)
        return heals

    def _close(
        self, order: RaiseOrder, job: GresJob, has_new: bool, has_own: bool, outcome: RaiseOutcome
    ) -> list[RaiseLine]:
        """Of a job that still waits when time is up."""
        if not has_new and not has_own:
            return [self._line_of(order, "owner", "somebody else changed the request")]
        if order.what == "raise" and has_new:
            outcome.waiting += 1
            return [self._line_of(order, "raised", "Slurm shows the new type")]
        if order.what == "raise":
            outcome.refused += 1
            return [self._line_of(order, "refused", "Slurm shows its own type")]
        if has_new or job.reason == "BADCONSTRAINTS":
            outcome.failed += (order.job.address,)
            return []
        outcome.undone += 1
        return [self._line_of(order, "undone", order.reason)]

    def _write(self, lines: Sequence[RaiseLine]) -> None:
        self.log.append(lines, int(self.clock()))

    def _line_of(self, order: RaiseOrder, what: RaiseKind, reason: str) -> RaiseLine:
        return RaiseLine(
            what=what,
            time_s=int(self.clock()),
            cluster=self.cluster,
            job_id=order.job.job_id,
            address=order.job.address,
            submit_s=order.job.submit_s,
            restarts=order.job.restarts,
            key=order.request.key,
            own=order.request.text,
            new=order.request.of(order.new_type),
            type=order.request.type,
            new_type=order.new_type,
            reason=reason,
            almanac=__version__,
        )

    def _line(self, line: RaiseLine, what: RaiseKind, job: GresJob, reason: str) -> RaiseLine:
        order = RaiseOrder("raise", job, line.request, line.new_type, reason)
        return self._line_of(order, what, reason)


def _command(order: RaiseOrder) -> str:
    if order.what == "release":
        return f"release {order.job.address}\n"
    return f"update jobid={order.job.address} {order.request.key}={order.text}\n"
