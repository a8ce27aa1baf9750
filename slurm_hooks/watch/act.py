"""Carry out the steps that advisor/watch/actions.py decides, through the engine of job changes.

The line of the record comes first. Right before a cancel, almanac looks at Slurm and at the counters again: the same
run of the job must still run, still do no work, and still meet every condition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

from advisor.watch.actions import DueStep, PastStep, Run, Step, due_steps, reader_of, rows_of, why_not_cancel
from advisor.watch.round import Kind, Round, WatchFinding
from almanac.actions_config import WatchSection
from almanac.errors import AlmanacError
from almanac.units import format_duration, format_job_id
from slurm.queued_job import QueuedJob
from slurm_hooks.jobs.engine import JobChange, JobEngine, JobOutcome, JobPlan, change
from slurm_hooks.jobs.log import JobLine

RECORD_DAYS = 4
"""Days of the record that decide: no job is idle and kept for longer."""
_STEPS = frozenset({"message", "warn", "warned", "operators", "cancel"})


@dataclass(frozen=True)
class WatchChange(JobChange):
    """A step as a line for the record."""

    step: DueStep


def past_steps(lines: Iterable[JobLine]) -> dict[Run, list[PastStep]]:
    """Return the mails about each run, and its cancels, oldest first. lines: oldest first."""
    found: dict[Run, list[PastStep]] = {}
    for line in lines:
        own = found.setdefault((line.job_id, line.submit_s, line.restarts), [])
        if line.what in _STEPS:
            own.append(PastStep(cast(Step, line.what), cast(Kind, line.finding), line.time_s, line.cancel_s))
    return found


def plan_steps(
    round_: Round,
    findings: Iterable[WatchFinding],
    lines: Iterable[JobLine],
    settings: WatchSection,
    why_no_mail: Callable[[Mapping[str, Any], Step], str],
    now_s: int,
) -> JobPlan:
    """Return the steps to take now. lines: of the record, oldest first. why_no_mail: as `due_steps` takes it."""
    steps, counts = due_steps(round_, findings, past_steps(lines), settings, why_no_mail, now_s)
    return JobPlan([_change(each) for each in steps], (), counts)


def _change(step: DueStep) -> WatchChange:
    row, found = step.job, step.finding
    job = QueuedJob(
        row["job_id"], format_job_id(row), row["submit_s"], user=row["user"], partition=row["partition"],
        restarts=row["restarts"], start_s=row["start_s"], states=frozenset({"RUNNING"}),
    )  # fmt: skip
    reason = f"{found.kind.replace('_', ' ')} for {format_duration(found.until_s - found.since_s)}"
    new = "CANCELLED" if step.what == "cancel" else "RUNNING"
    first = change(step.what, job, "State", "RUNNING", new, reason, finding=found.kind, cancel_s=step.cancel_s)
    return WatchChange(first.job, first.line, step)


@dataclass(kw_only=True)
class WatchEngine(JobEngine):
    """Carries out mails, then cancels. hand_over: gives a reader one mail about steps, and returns once the mail server
    took it; raises AlmanacError. look_again: one more round, and what is found in it.
    """

    hand_over: Callable[[str, Sequence[DueStep]], None]
    look_again: Callable[[], tuple[Round, Iterable[WatchFinding]]]
    settings: WatchSection

    def apply(self, plan: JobPlan) -> JobOutcome:
        """Raises as JobEngine.apply does."""
        changes = [cast(WatchChange, each) for each in plan.changes]
        self._mail([each for each in changes if each.line.what != "cancel"])
        if cancels := self._still_due([each for each in changes if each.line.what == "cancel"]):
            self._send(cancels)
            self._look()
        return self.outcome

    def _mail(self, changes: Sequence[WatchChange]) -> None:
        """Without an answer of the mail server, a warning does not count, and the next mail is due in an hour."""

        def reader(each: WatchChange) -> str:
            return reader_of(each.step.what, each.step.job)

        for name, group in groupby(sorted(changes, key=reader), key=reader):
            own = list(group)
            self.write([each for each in own if each.line.what != "cancelled"])
            try:
                self.hand_over(name, [each.step for each in own])
            except AlmanacError as error:
                self.outcome.say(str(error))
                self.outcome.refused += len(own)
                self.write([each.next("refused", str(error)) for each in own if each.line.what != "cancelled"])
                continue
            self.write([each.next("warned", each.line.reason) for each in own if each.line.what == "warn"])
            self.outcome.told += len(own)

    def _still_due(self, changes: Sequence[WatchChange]) -> list[WatchChange]:
        """Return the cancels that hold after a second look at Slurm and at the counters. Raises AlmanacError."""
        if not changes:
            return []
        self.sleep(1.0)  # a round of the same second shows nothing new
        round_, findings = self.look_again()
        found = {(each.job_id, each.start_s, each.kind): each for each in findings}
        numbers = [each.job.job_id for each in changes]
        jobs, rows = self.jobs(numbers), rows_of(round_.jobs, numbers)
        kept = []
        for each in changes:
            job, key = jobs.get(each.job.job_id), (each.job.job_id, each.job.start_s or 0, each.step.finding.kind)
            why_not = self._why_not(each, job, found.get(key), rows.get(each.job.job_id), round_)
            if job is None or why_not:
                self.outcome.changed += 1
                self.outcome.say(f"{each.job.address} is not cancelled: {why_not}")
            else:
                kept.append(WatchChange(job, each.line, each.step))
        return kept

    def _why_not(
        self,
        each: WatchChange,
        job: QueuedJob | None,
        found: WatchFinding | None,
        row: Mapping[str, Any] | None,
        round_: Round,
    ) -> str:
        """Return why the job is not cancelled after all. row: its row of the round of the second look."""
        seen = each.job
        if job is None or row is None or not job.is_running:
            return "it does not run any more"
        if any(getattr(job, name) != getattr(seen, name) for name in ("submit_s", "restarts", "start_s", "user")):
            return "this is another run"
        if job.partition != seen.partition or job.het_job_id is not None:
            return "it moved to another partition, or is part of a heterogeneous job"
        if found is None or found.since_s > each.step.finding.since_s:
            return "it works again"
        return why_not_cancel(found, {**row, "comment": job.comment}, round_, self.settings)

    def order(self, changes: Sequence[JobChange]) -> list[str]:
        """Cancel jobs that run and belong to the same user: scancel looks once more. Returns what it said."""
        said = list[str]()
        for each in changes:
            argv = ["scancel", "--state=RUNNING", f"--user={each.job.user}", each.job.address]
            done = self.commands.run(argv)
            said += [done.said] if done.code else []
        return said

    def _look(self) -> None:
        """Until each job has ended, or look_s have passed; then tell the owners."""
        open_, end_s = (
            {number: cast(WatchChange, each) for number, each in self.sent.items()},
            self.clock() + self.look_s,
        )
        while open_:
            jobs, is_last = self.jobs(open_.keys()), self.clock() >= end_s
            running = {
                n for n, each in open_.items() if (job := jobs.get(n)) and job.is_running and _is_same(job, each)
            }
            ended = [
                each.next("cancelled", each.line.reason) for number, each in open_.items() if number not in running
            ]
            self.write(ended)
            self.outcome.cancelled += len(ended)
            self._mail([cast(WatchChange, each) for each in ended])
            open_ = {number: each for number, each in open_.items() if number in running}
            if open_ and is_last:
                self.write([each.next("failed", "it still runs after scancel") for each in open_.values()])
                self.outcome.failed += tuple(each.job.address for each in open_.values())
                return
            if open_:
                self.sleep(1.0)


def _is_same(job: QueuedJob, each: JobChange) -> bool:
    return (job.submit_s, job.restarts) == (each.job.submit_s, each.job.restarts)
