"""Sets the site factor of pending jobs from the model's prediction, in place of the one set at submission.

Pure functions plan the changes from Slurm's state and almanac's record. `apply` logs each change, sends the changes to
Slurm in batches, and checks the outcome. Jobs keep a site factor that almanac did not set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from almanac import __version__
from almanac.errors import CommandError, NotAllowedError
from almanac.records import Counts, PriorityAdvice, Request
from almanac.units import format_duration
from slurm_hooks.last_look import Facts, job_facts, must_still_hold
from slurm_hooks.priority.action_log import ActionKind, ActionLog, LoggedAction
from telemetry.slurm.backend import FactorChange, PendingJob, SiteFactor, SlurmBackend

BATCH = 200
"""Changes that one look and one command are for: each is a request of its own to slurmctld, of 1 to 2 ms. So the last
one is told about 0.3 s after its look.
"""
_DENIED = re.compile(r"(?:[0-9_,%:\[\]-]+: )?(?:Access/permission denied|Invalid user id)(?: for job \S+)?")
"""Slurm's words to an owner, and to a user who is neither owner nor operator (22.05 and 26.05)."""

Predict = Callable[[Sequence[Request]], Sequence[PriorityAdvice | None]]
"""The site factors of many submissions, as advisor.services.gpu_time.priorities_of gives them."""
Published = Callable[[PendingJob, int], bool]
"""Whether job_submit may have given a job this site factor, from the advice published for its user."""


@dataclass(frozen=True)
class SiteFactorChange:
    """A new site factor for a job. advice: None to clear it. what: as in LoggedAction."""

    job: PendingJob
    old: int
    new: int
    reason: str
    advice: PriorityAdvice | None = None
    what: ActionKind = "set"


@dataclass(frozen=True)
class ReprioritizeOutcome:
    """Outcome of the changes. gone: the job has started, ended, or been held or changed meanwhile.
    ignored: Slurm said nothing against it, and the factor is as it was. failed: it is as it was, and Slurm said why.
    """

    taken: int = 0
    gone: int = 0
    ignored: int = 0
    failed: int = 0
    said: tuple[str, ...] = field(default=())


def plan_site_factors(
    backend: SlurmBackend, log: Mapping[int, LoggedAction], predict: Predict, published: Published, counts: Counts
) -> tuple[list[SiteFactorChange], list[SiteFactorChange]]:
    """The changes that the pending jobs need now, and what is only to be noted. Only jobs that can be changed are
    predicted.
    """
    read = Counts()
    jobs, factors = _pending(backend, read), backend.site_factors()
    asked = [job for job in jobs if job.gpu_count and not job.is_held and _counts(factors.get(job.job_id))]
    advice_of = dict(zip((job.job_id for job in asked), predict([job.request() for job in asked]), strict=True))
    advices = [advice_of.get(job.job_id) for job in jobs]
    changes = plan(jobs, advices, factors, log, published, counts)
    _add_unread(read, counts)
    return changes, agreed(jobs, advices, factors, log)


def plan_clearing(backend: SlurmBackend, log: Mapping[int, LoggedAction], counts: Counts) -> list[SiteFactorChange]:
    """The changes that undo ours now."""
    read = Counts()
    changes = clearing(_pending(backend, read), backend.site_factors(), log, counts)
    _add_unread(read, counts)
    return changes


def _pending(backend: SlurmBackend, read: Counts) -> list[PendingJob]:
    """Raises CommandError where none of several jobs can be read: that is a fault of the release, not of a job."""
    jobs = backend.pending(read)
    if read.seen > 1 and not jobs:
        why = ", ".join(sorted(read.dropped))
        raise CommandError(f"none of {read.seen} pending jobs can be read: {why}", "run `almanac doctor`")
    return jobs


def _add_unread(read: Counts, counts: Counts) -> None:
    """Pending jobs that could not be read are among those seen, too."""
    counts.add(Counts(seen=read.dropped.total(), dropped=read.dropped, examples=read.examples))


def _counts(factor: SiteFactor | None) -> bool:
    return factor is not None and not factor.is_explicit


def plan(
    jobs: Sequence[PendingJob],
    advices: Sequence[PriorityAdvice | None],
    factors: Mapping[int, SiteFactor],
    log: Mapping[int, LoggedAction],
    published: Published,
    counts: Counts,
) -> list[SiteFactorChange]:
    """The changes to make, in the order of jobs; why the others get none is counted. Pure.

    advices: one per job. log: the last action of each job, as ActionLog.newest gives it.
    """
    changes = []
    for job, advice in zip(jobs, advices, strict=True):
        counts.seen += 1
        factor = factors.get(job.job_id)
        why_not = _why_not(job, advice, factor, log, published)
        if why_not or advice is None or factor is None:
            counts.drop(why_not)
            continue
        changes.append(SiteFactorChange(job, factor.value, advice.site_factor, _reason(advice), advice))
    counts.kept += len(changes)
    return changes


def _why_not(
    job: PendingJob,
    advice: PriorityAdvice | None,
    factor: SiteFactor | None,
    log: Mapping[int, LoggedAction],
    published: Published,
) -> str:
    """Why a job keeps its site factor; "" if it changes."""
    if not job.gpu_count:
        return "asks for no GPU"
    if job.is_held:
        return "held: it keeps its site factor until it is released"
    if factor is None:
        return "not ranked by Slurm yet (begin time, dependency, array limit)"
    if factor.is_explicit:
        return "has a priority that somebody set: a site factor does not count"
    if advice is None:
        return "nothing is known to predict it from"
    if factor.value == advice.site_factor:
        return "has its site factor already"
    last = _last_action(job, log)
    if factor.value and not _is_ours(factor.value, last) and not published(job, factor.value):
        return "has a site factor that almanac did not set"
    if last and last.what == "ignored" and (last.old, last.new) == (factor.value, advice.site_factor):
        return "Slurm took this site factor before and did not count it"
    return ""


def _last_action(job: PendingJob, log: Mapping[int, LoggedAction]) -> LoggedAction | None:
    """Of the record, else of the array that it was part of when it was told.

    Numbers come again: a line of another submission is nobody's, unless the job was requeued, which makes it a new one.
    """
    lines = (log.get(number) for number in (job.job_id, job.array_job_id) if number is not None)
    return next((line for line in lines if line and (line.submit_s == job.submit_s or job.restarts)), None)


def agreed(
    jobs: Sequence[PendingJob],
    advices: Sequence[PriorityAdvice | None],
    factors: Mapping[int, SiteFactor],
    log: Mapping[int, LoggedAction],
) -> list[SiteFactorChange]:
    """The jobs with the right site factor and no line in the record yet. The record needs their predicted GPU-time."""
    found = []
    for job, advice in zip(jobs, advices, strict=True):
        factor, last = factors.get(job.job_id), _last_action(job, log)
        if advice is None or factor is None or factor.value != advice.site_factor:
            continue
        if last is None or last.submit_s != job.submit_s:
            is_set = last is not None and last.what == "set"
            found.append(
                SiteFactorChange(
                    job, factor.value, advice.site_factor, _reason(advice), advice, "set" if is_set else "agreed"
                )
            )
    return found


def _is_ours(site_factor: int, last: LoggedAction | None) -> bool:
    """Whether the record explains a factor: what it says was to be set, or, where that did not come about (a run was
    killed, Slurm was away), what was there before: nothing else than ours is ever changed.
    """
    return last is not None and site_factor in (last.old, last.new)


def _reason(advice: PriorityAdvice) -> str:
    counted = f"GPU-time {format_duration(advice.gpu_time_s)}"
    if advice.is_cautious:
        counted += ", more than predicted: the user's newest runs took far longer than expected"
    return f"{counted}; options of this site add {advice.extra}" if advice.extra else counted


def clearing(
    jobs: Sequence[PendingJob], factors: Mapping[int, SiteFactor], log: Mapping[int, LoggedAction], counts: Counts
) -> list[SiteFactorChange]:
    """The changes that undo ours: 0 for a job that still has the factor which the record says it was given. Pure."""
    changes = []
    for job in jobs:
        counts.seen += 1
        factor, last = factors.get(job.job_id), _last_action(job, log)
        if factor is None:
            counts.drop("not ranked by Slurm now (held, begin time, dependency, array limit)")
        elif not factor.value:
            counts.drop("has no site factor")
        elif last is None or last.what == "agreed" or not _is_ours(factor.value, last):
            counts.drop("has a site factor that `almanac reprioritize` did not set")
        else:
            changes.append(SiteFactorChange(job, factor.value, 0, "cleared", what="clear"))
    counts.kept += len(changes)
    return changes


def _facts(job: PendingJob, factor: SiteFactor | None) -> Facts:
    return {**job_facts(job), "site factor": factor and factor.value, "own priority": factor and factor.is_explicit}


@dataclass
class Actor:
    """Makes changes: the record first, then Slurm. clock: seconds since 1970; model: version of the trained model."""

    backend: SlurmBackend
    log: ActionLog
    cluster: str
    model: str
    clock: Callable[[], float]
    batch: int = BATCH

    def apply(self, changes: Sequence[SiteFactorChange]) -> ReprioritizeOutcome:
        """Raises StoreError where the record cannot be written (nothing is changed then), CommandError where Slurm does
        not answer, NotAllowedError where it refuses all: what was done until then stays.
        """
        said: list[str] = []
        silent: set[int] = set()
        sent: list[SiteFactorChange] = []
        for first in range(0, len(changes), self.batch):
            part = changes[first : first + self.batch]
            self.log.append([self._action(change) for change in part], int(self.clock()))
            if not (part := self._unchanged(part)):
                continue
            sent += part
            try:
                answer = self.backend.set_site_factors([FactorChange(change.job, change.new) for change in part])
            except CommandError as error:
                raise CommandError(f"after {first} of {len(changes)} changes: {error}", error.hint) from error
            denials = [line for line in answer if _DENIED.fullmatch(line.strip())]
            if denials and len(answer) >= len(part):
                raise NotAllowedError(
                    f"Slurm refused {len(part)} changes: {denials[0]}",
                    "run this as root or SlurmUser, or give its user AdminLevel=Operator",
                )
            said += answer
            if not answer:
                silent.update(change.job.job_id for change in part)
        found = self._outcome(sent, silent, said) if sent else ReprioritizeOutcome()
        return replace(found, gone=found.gone + len(changes) - len(sent))

    def _unchanged(self, changes: Sequence[SiteFactorChange]) -> list[SiteFactorChange]:
        """The changes of jobs that are as they were planned; the others get a line in the record."""
        jobs: dict[int, PendingJob] = {}

        def read(job_ids: Collection[int]) -> dict[int, Facts]:
            jobs.update({job.job_id: job for job in self.backend.pending(Counts(), job_ids)})
            factors = self.backend.site_factors()
            return {number: _facts(job, factors.get(number)) for number, job in jobs.items()}

        relied_on = {each.job.job_id: _facts(each.job, SiteFactor(each.old)) for each in changes}
        changed = must_still_hold(relied_on, read)
        dropped = [
            replace(self._action(each, "dropped"), reason=why)
            for each in changes
            if (why := changed.get(each.job.job_id))
        ]
        self.log.append(dropped, int(self.clock()))
        # Tasks of an array that got records of their own meanwhile are not named any more.
        return [replace(each, job=jobs[each.job.job_id]) for each in changes if each.job.job_id not in changed]

    def note(self, agreed: Sequence[SiteFactorChange]) -> None:
        """Record the predicted GPU-time of jobs that already have their site factor. Raises StoreError."""
        self.log.append([self._action(change) for change in agreed], int(self.clock()))

    def _outcome(
        self, changes: Sequence[SiteFactorChange], silent: Collection[int], said: Sequence[str]
    ) -> ReprioritizeOutcome:
        """By what Slurm shows now: which words it has for a refusal differs from release to release."""
        factors = self.backend.site_factors()
        shown = [(change, factors.get(change.job.job_id)) for change in changes]
        same = [change for change, factor in shown if factor is not None and factor.value != change.new]
        ignored = [change for change in same if change.job.job_id in silent]
        self.log.append([self._action(change, "ignored") for change in ignored], int(self.clock()))
        gone = sum(factor is None for _, factor in shown)
        return ReprioritizeOutcome(
            taken=len(changes) - gone - len(same),
            gone=gone,
            ignored=len(ignored),
            failed=len(same) - len(ignored),
            said=tuple(dict.fromkeys(said)),
        )

    def _action(self, change: SiteFactorChange, what: ActionKind | None = None) -> LoggedAction:
        return LoggedAction(
            what=what or change.what,
            time_s=int(self.clock()),
            cluster=self.cluster,
            job_id=change.job.job_id,
            address=change.job.address,
            submit_s=change.job.submit_s,
            old=change.old,
            new=change.new,
            reason=change.reason,
            gpu_time_s=change.advice.gpu_time_s if change.advice else None,
            model=self.model,
            almanac=__version__,
        )
