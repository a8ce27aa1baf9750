"""Changes pending jobs: the log first, then Slurm, then a look.

Slurm takes any request without a word, and shows a second later what it makes of it: BadConstraints, a limit, or
nothing. So each change is looked at until the job has started or waits as before; else it gets its own request back.
Which jobs to change is decided by planners: slurm_hooks/priority/reprioritize.py, slurm_hooks/mig/raise_plan.py, and
slurm_hooks/types/plan.py. slurm_hooks/watch/act.py cancels running jobs by it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from almanac import __version__
from almanac.atomic import locked, safe_name
from almanac.errors import AlmanacError, CommandError, ConfigError
from almanac.records import Counts
from slurm.commands import SlurmCommands
from slurm.queue import Queue, read_queue
from slurm.queued_job import QueuedJob
from slurm.releases import first_with, release_of
from slurm_hooks.jobs.log import (
    IN_FORCE,
    PLANNERS,
    SENT,
    TAKEN,
    ChangeHistory,
    JobLine,
    JobLog,
    Key,
    Kind,
    shown_text,
)
from slurm_hooks.orders import AT_ONCE, GONE, Facts, job_facts, must_still_hold
from telemetry.store.store import ClusterStore

JOBS_PER_RUN = 20
"""Most jobs whose request one run changes: each takes three commands, and the next run comes within minutes."""
UNDO_S = 600
"""Seconds until a job that still waits gets its own request back: a free GPU starts it within minutes."""
AGAIN_S = 3600
"""Seconds from then until almanac may change the same job again."""
LOOK_S = 6.0
"""Seconds until a change shows: 1.5 s on 24.11 and 26.05, with the scheduler's defaults."""


@dataclass(frozen=True)
class JobChange:
    """A line for the record, and the job that it is about. The engine fills in the line's time and cluster."""

    job: QueuedJob
    line: JobLine

    @property
    def command(self) -> str:
        """A line for scontrol."""
        if self.line.what == "release":
            return f"release {self.job.address}\n"
        return f"update jobid={self.job.address} {self.line.key}={self.line.text}\n"

    def next(self, what: Kind, reason: str, **more: Any) -> JobChange:
        """The next line about the job."""
        job, line = self.job, self.line
        now = {"job_id": job.job_id, "address": job.address, "submit_s": job.submit_s, "restarts": job.restarts}
        return replace(self, line=replace(line, what=what, reason=reason, **{**now, "delay_s": None, **more}))


def change(what: Kind, job: QueuedJob, key: Key, own: str, new: str, reason: str, **more: Any) -> JobChange:
    """Return the first change of a job. more: further fields of JobLine."""
    texts = {"key": key, "own": own, "new": new, "reason": reason, "was": shown_text(job, key), "address": job.address}
    return JobChange(job, JobLine(what, 0, job.cluster, job.job_id, job.submit_s, job.restarts, **{**texts, **more}))


@dataclass(frozen=True)
class JobPlan:
    """The changes that a planner wants. changes: sent to Slurm, undos first. notes: lines about earlier changes,
    only written. counts: why the other pending jobs stay as they are. requeues, running: the same of running jobs; None
    if no requeue was looked for. read_s: of the look at Slurm, if it must be a new one.

    fault: why no job can be changed now; earlier changes are settled all the same.
    """

    changes: Sequence[JobChange]
    notes: Sequence[JobChange]
    counts: Counts
    requeues: Sequence[JobChange] = ()
    running: Counts | None = None
    read_s: float | None = None
    fault: AlmanacError | None = None


@dataclass
class JobOutcome:
    """The outcome of the changes, in jobs. waiting: with what they were given. undone: with their own again. started:
    left the queue, which is mostly to run. refused: Slurm kept what was before; ignored: without a word, of a site
    factor. changed: its owner, or somebody else, was first. requeued, stopped: running jobs that were, and that were
    not requeued after all. told: mailed to their owners or operators; cancelled: running jobs. failed: they are worse
    off than before; an operator has to look.
    """

    waiting: int = 0
    undone: int = 0
    started: int = 0
    refused: int = 0
    ignored: int = 0
    changed: int = 0
    requeued: int = 0
    stopped: int = 0
    told: int = 0
    cancelled: int = 0
    failed: tuple[str, ...] = ()
    said: tuple[str, ...] = field(default=())

    def say(self, text: str) -> None:
        """Keep the lines that Slurm said, each once."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        self.said = tuple(dict.fromkeys((*self.said, *lines)))


def one_at_a_time(store: ClusterStore, planner: str) -> AbstractContextManager[None]:
    """Lock the store for one planner. Raises BusyError if another run is active, StoreError if it is not writable."""
    return locked(store.root / f".{planner}-{safe_name(store.cluster)}.lock", PLANNERS[planner])


def require_release(release: str) -> None:
    """Check that Slurm can change the GPU type of a pending job. Raises ConfigError if the job would get both types."""
    found = release_of(release)
    if found is None or not found.changes_gpu_type:
        raise ConfigError(
            f"Slurm {release} cannot change the GPU type of a pending job (it gives the job both types)",
            f"this needs Slurm {first_with('changes_gpu_type')} or later; leave mig_raise.mode off",
        )


def is_bad(job: QueuedJob) -> bool:
    """Return True if Slurm holds the job because no node can satisfy its request."""
    return job.is_waiting and job.reason_key == "BADCONSTRAINTS"


def why_bad(job: QueuedJob) -> str:
    return "Slurm: BadConstraints" if is_bad(job) else ""


def readable(queue: Queue) -> Queue:
    """Return the queue. Raises CommandError if a record could not be read: its GPUs would seem idle."""
    if queue.unreadable:
        raise CommandError(
            f"{queue.unreadable} records of squeue --json cannot be read", "run `squeue -a --json` yourself"
        )
    return queue


def settle(
    jobs: Sequence[QueuedJob],
    history: ChangeHistory,
    now_s: int,
    why_undo: Callable[[QueuedJob, JobLine, Kind | None], str],
    is_clearing: bool = False,
) -> tuple[list[JobChange], dict[int, JobChange]]:
    """Return the undos and releases that earlier changes need now, and by job what became of those changes. Pure.

    why_undo: the planner's reason to give a job its own back, "" for none; it gets the job, its line, and what was
    just noted of it. is_clearing: give back everything.
    """
    changes, notes = [], {}
    for job in jobs:
        if (line := history.line_of(job)) is None:
            continue
        last = JobChange(job, line)
        if note := _note(last, history.requeues_of(job), now_s):
            notes[job.job_id] = note
        if not job.is_pending:
            continue
        if line.what in ("undo", "undone", "release") and is_bad(job) and shown_text(job, line.key) == line.own:
            changes.append(last.next("release", "BadConstraints", was=line.own))
        elif line.is_shown(job):
            why = line.reason if line.what == "undo" else "given back" if is_clearing else why_bad(job)
            if why := why or why_undo(job, line, note.line.what if note else None):
                changes.append(undo(last, why))
    return changes, notes


def undo(last: JobChange, reason: str) -> JobChange:
    """Return the change that gives a job its own back."""
    shown = shown_text(last.job, last.line.key)
    return last.next("undo", reason, new=shown, was=shown)


def _note(last: JobChange, requeues: Sequence[JobLine], now_s: int) -> JobChange | None:
    """Return the next line if a look at a job shows the end of its newest one."""
    job, line = last.job, last.line
    shown, what = shown_text(job, line.key), line.what
    if what not in IN_FORCE:
        return None
    if what == "requeue" and job.is_running and job.restarts == line.restarts:
        return last.next("stopped", "the run before ended before its requeue")
    # It runs for the first time after its last requeue by almanac.
    is_next = bool(requeues) and requeues[-1].restarts + 1 == job.restarts
    if job.is_running and is_next and what in ("requeue", "requeued", "place", "placed"):
        never_sent = {"new": shown, "was": None} if what in ("requeue", "place") and shown in line.texts else {}
        delay_s = max(0.0, (job.start_s or now_s) - requeues[-1].time_s)
        return last.next("restarted", "it runs again", delay_s=delay_s, **never_sent)
    if not job.is_pending:
        return None
    if shown not in line.texts:
        return last.next("owner", "somebody else changed it")
    if what in TAKEN:
        if shown == line.new:
            return last.next(TAKEN[what], "Slurm shows the new request")
        return last.next("refused", "Slurm shows what was before")
    if shown == line.own != line.new:
        if what == "undo":
            return last.next("undone", "Slurm shows its own again")
        is_theirs = what in (*TAKEN.values(), "restarted") or (what == "stopped" and line.was not in (None, line.own))
        return last.next("owner", "somebody else gave it its own request back") if is_theirs else None
    return None


@dataclass(kw_only=True)
class JobEngine:
    """Carries out one plan of requests. clock: seconds since 1970; sleep: waits for so many seconds. why_undo: why a
    job must not wait with its new request; "" if it may. batch: changes that one look and one command are for.
    """

    commands: SlurmCommands
    log: JobLog
    cluster: str
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    why_undo: Callable[[QueuedJob], str] = why_bad
    look_s: float = field(default_factory=lambda: LOOK_S)
    batch: int = AT_ONCE
    outcome: JobOutcome = field(default_factory=JobOutcome)
    sent: dict[int, JobChange] = field(default_factory=dict)
    _silent: set[int] = field(default_factory=set)

    def apply(self, plan: JobPlan) -> JobOutcome:
        """Record the plan, send its changes to Slurm, and return what came of them.

        Raises StoreError if the record cannot be written: nothing is sent then. Raises CommandError if Slurm does not
        answer; the next run continues from the record.
        """
        self.write(plan.notes)
        self._send(plan.changes)
        self._look()
        return self.outcome

    def jobs(self, job_ids: Collection[int]) -> dict[int, QueuedJob]:
        """Some jobs now. Raises CommandError."""
        found = readable(read_queue(self.commands, self.cluster, job_ids)).jobs
        return {job.job_id: job for job in found if job.job_id in job_ids}

    def look(self, job_ids: Collection[int]) -> dict[int, QueuedJob]:
        """Return some jobs after their change. Raises CommandError."""
        return self.jobs(job_ids)

    def order(self, changes: Sequence[JobChange]) -> list[str]:
        """Send changes, and return what Slurm said. Raises CommandError."""
        done = self.commands.feed(["scontrol"], "".join(each.command for each in changes).encode())
        return done.stderr.decode("utf-8", "replace").splitlines()

    def write(self, changes: Sequence[JobChange]) -> None:
        """Add their lines to the record. Raises StoreError."""
        time_s = int(self.clock())
        stamp: dict[str, Any] = {"time_s": time_s, "cluster": self.cluster, "almanac": __version__}
        self.log.append([replace(each.line, **stamp) for each in changes], time_s)

    def facts(self, job_ids: Collection[int]) -> dict[int, Facts]:
        return {number: job_facts(job) for number, job in self.jobs(job_ids).items()}

    def _send(self, changes: Sequence[JobChange]) -> None:
        """Adds what was sent to `sent`. What Slurm says is shown, and the queue tells what came of it."""
        for first in range(0, len(changes), self.batch):
            part, now = changes[first : first + self.batch], dict[int, QueuedJob]()
            self.write(part)

            def facts(job_ids: Collection[int], now: dict[int, QueuedJob] = now) -> dict[int, Facts]:
                now.update(self.jobs(job_ids))
                return {number: job_facts(job) for number, job in now.items()}

            changed = must_still_hold({each.job.job_id: job_facts(each.job) for each in part}, facts)
            # Tasks of an array that got records of their own meanwhile are not named any more.
            kept = [replace(each, job=now[each.job.job_id]) for each in part if each.job.job_id not in changed]
            if kept:
                self._order(kept, f"after {first} of {len(changes)} changes")
            dropped = [each for each in part if each.job.job_id in changed]
            self.write([each.next("dropped", changed[each.job.job_id]) for each in dropped])
            started = sum(why == GONE or "states" in why for why in changed.values())
            self.outcome.started += started
            self.outcome.changed += len(dropped) - started

    def _order(self, changes: Sequence[JobChange], where: str) -> None:
        try:
            said = self.order(changes)
        except CommandError as error:
            raise CommandError(f"{where}: {error}", error.hint) from error
        self.outcome.say("\n".join(said))
        sent = {each.job.job_id: each for each in changes}
        self.sent |= sent
        self._silent = self._silent - sent.keys() if said else self._silent | sent.keys()

    def _look(self) -> None:
        """Until each job has left the queue or look_s have passed. A job that is worse off is healed at once."""
        waiting, end_s = dict(self.sent), self.clock() + self.look_s
        while waiting:
            jobs, is_last = self.look(waiting.keys()), self.clock() >= end_s
            ends, heals = [], []
            for number, each in list(waiting.items()):
                job = jobs.get(number)
                if job is not None and job.submit_s != each.job.submit_s:
                    job = None  # it ran, and waits again; or the number is another job's
                heal = self._heal(replace(each, job=job)) if job is not None else None
                if job is not None and job.is_waiting and not is_last and not heal:
                    continue
                del waiting[number]
                if heal:
                    heals.append(heal)
                else:
                    ends += self._close(each, job)
            self.write(ends)
            if heals:
                for each in heals:
                    self.sent.pop(each.job.job_id)
                self._send(heals)
                healed = {each.job.job_id for each in heals}
                waiting |= {number: each for number, each in self.sent.items() if number in healed}
                end_s = self.clock() + self.look_s
            if waiting:
                self.sleep(1.0)

    def _heal(self, sent: JobChange) -> JobChange | None:
        """Return the undo for a job that must not wait with its new request, and then its release."""
        job, line = sent.job, sent.line
        shown = shown_text(job, line.key)
        if line.what in TAKEN and shown == line.new and job.is_waiting and (why := self.why_undo(job)):
            return sent.next("undo", why, was=line.new)
        if line.what == "undo" and shown == line.own and is_bad(job):
            return sent.next("release", "BadConstraints", was=line.own)
        return None

    def _close(self, sent: JobChange, job: QueuedJob | None) -> list[JobChange]:
        """The end of a change: the job has left the queue, or time is up."""
        line, taken, outcome = sent.line, TAKEN.get(sent.line.what), self.outcome
        if job is None or not job.is_waiting:
            outcome.started += 1
            return [sent.next(taken, "the job waits no more")] if taken else []
        shown = shown_text(job, line.key)
        if shown not in (line.own, line.new, line.was):
            outcome.changed += 1
            return [sent.next("owner", "somebody else changed it")]
        if shown == line.text and not is_bad(job):
            if line.what not in SENT:
                outcome.undone += 1
                return [sent.next("undone", line.reason)]
            outcome.waiting += 1
            return [sent.next(taken, "Slurm shows the new request")] if taken else []
        if is_bad(job) or (line.what not in SENT and line.key != "SiteFactor"):
            outcome.failed += (job.address,)
            return [sent.next("failed", f"Slurm: {job.reason or 'waits'}, and shows {shown or 'nothing'}")]
        if line.what == "set" and job.job_id in self._silent:
            outcome.ignored += 1
            return [sent.next("ignored", "Slurm took it, and does not count it")]
        outcome.refused += 1
        return [sent.next("refused", "Slurm shows what was before")]
