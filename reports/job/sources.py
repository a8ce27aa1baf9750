"""Decide which source answers for a job: what almanac keeps, Slurm's queue, or its accounting; for every reader.

Needs the standard library only, so that hosts with the client package give the same answers.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from almanac.errors import AlmanacError, CommandError, FileFormatError, NotAllowedError, StoreError
from almanac.records import Counts
from almanac.units import DAY_S, counted, format_duration, format_job_id, format_moment, printable
from reports.job.job_report import JobRow
from slurm.named_jobs import NamedJob
from slurm.queued_job import QueuedJob
from slurm.waiting import what_helps, why_waiting

# What asks Slurm is imported late: a published report needs none of it, and starts 10% sooner.
if TYPE_CHECKING:
    from slurm.accounting import Accounting, Run
    from slurm.commands import Settings
    from slurm.queue import Queue
    from telemetry.site import Site

NUMBERS_LAST_S = 30 * DAY_S
"""Time after a job's end in which Slurm is not expected to give its number again."""
REQUEUED_WITHIN_S = DAY_S
"""Slurm takes no longer to end a run and to submit it again, and gives no number again so soon."""
LAST_JOB_DAYS = 30
ANSWER_S, USE_S = 10.0, 2.0
"""Longest wait for a command of Slurm; and for what accounting adds to jobs that the queue has."""
Kind = Literal["waiting", "not_yours", "unknown", "too_old", "no_answer"]


class KnownRuns(Protocol):
    """Runs that almanac keeps: the store, or what was published for the caller."""

    def runs_named(self, job_ids: Sequence[int]) -> Sequence[Mapping[str, Any]]: ...

    def last_job(self) -> int | None: ...


@dataclass(frozen=True)
class JobState:
    """The state of a job that has no report. message: sentences for people; hint: what to do next, or "".

    job: a row of the table jobs, of a job that waits. reason, expected_start_s: Slurm's, of a job that waits.
    """

    kind: Kind
    shown_id: str
    message: str
    hint: str = ""
    job: Mapping[str, Any] | None = None
    reason: str = ""
    expected_start_s: int | None = None

    @property
    def error(self) -> AlmanacError | None:
        """The error to exit with; None for a job that waits."""
        errors = {"not_yours": NotAllowedError, "no_answer": CommandError, "waiting": None}
        error = errors.get(self.kind, StoreError)
        return error(self.message, self.hint) if error else None


@dataclass(frozen=True)
class SlurmJob:
    """A job that Slurm's accounting or queue has. runs: rows of the table jobs, oldest first; the last counts.

    silence: why accounting did not answer about it, or "".
    """

    runs: tuple[JobRow, ...]
    silence: str = ""

    @property
    def row(self) -> JobRow:
        return self.runs[-1]


@dataclass(frozen=True)
class FoundJobs:
    """The source of each job that was named. stored: raw ids of runs that almanac keeps, in the order named.

    running: as Slurm's queue has them. ended: jobs that only Slurm has, or that run and the queue did not answer.
    states: jobs without a report. queued: records of the queue by raw id, for jobs that run or ended just now.
    """

    stored: tuple[int, ...] = ()
    running: tuple[QueuedJob, ...] = ()
    ended: tuple[SlurmJob, ...] = ()
    states: tuple[JobState, ...] = ()
    queued: Mapping[int, QueuedJob] = field(default_factory=dict)

    def newest(self, limit: int) -> FoundJobs:
        """The last `limit` of those with a report; 0: all. Running jobs are the newest, then those just ended."""
        if limit <= 0:
            return self
        running = self.running[-limit:]
        room = limit - len(running)
        ended = self.ended[-room:] if room else ()
        room -= len(ended)
        return replace(self, stored=self.stored[-room:] if room else (), running=running, ended=ended)

    def __len__(self) -> int:
        return len(self.stored) + len(self.running) + len(self.ended)


@dataclass(frozen=True)
class SlurmAnswer:
    """Slurm's answer about some jobs. queued: the caller's records of the queue. accounted: the caller's by raw id.

    others: rows of other users' jobs. wholes: numbers of the caller's jobs and arrays that Slurm has. silence: why
    squeue or sacct did not answer, or "".
    """

    queued: tuple[QueuedJob, ...] = ()
    accounted: Mapping[int, SlurmJob] = field(default_factory=dict)
    others: tuple[Mapping[str, Any], ...] = ()
    wholes: frozenset[int] = frozenset()
    silence: str = ""


def find_jobs(site: Site, known: KnownRuns, wanted: Sequence[NamedJob]) -> FoundJobs:
    """Return where to read each job. Slurm is asked for jobs that almanac does not keep, or not to their end.

    A job that no source has becomes a JobState that says why: absence is not reported as non-existence.
    """
    now_s = site.now_s()
    kept, trouble = _kept(known, wanted)
    asked = [each for each in wanted if _may_be_live(each, kept, now_s)]
    slurm = _ask_queue(site, asked)
    has_report = {row["job_id"] for row in kept if row.get("report", True)}
    settled = has_report | {job.job_id for job in slurm.queued if not job.has_ended}
    open_jobs = [each for each in wanted if _is_open(each, kept, slurm.queued, settled)]
    slurm = _ask_accounting(site, open_jobs, slurm)
    found = decide(kept, slurm, wanted, now_s)
    states = [_absent(site, each, slurm, trouble) for each in wanted if not _names_any(each, kept, slurm)]
    return replace(found, states=(*found.states, *states))


def decide(kept: Sequence[Mapping[str, Any]], slurm: SlurmAnswer, wanted: Sequence[NamedJob], now_s: int) -> FoundJobs:
    """Choose the source of each job that is named and known: the pure part of `find_jobs`.

    kept: rows with RUN_COLUMNS of what almanac keeps; a row's `report` is None before its report is published.
    """
    queued = {job.job_id: job for job in slurm.queued if not job.is_common_record}
    own = {row["job_id"]: row for row in sorted(kept, key=lambda row: int(row["submit_s"]))}
    rows = _rows(kept, slurm)
    stored, running, ended, states = list[int](), list[QueuedJob](), list[SlurmJob](), list[JobState]()
    for job_id in dict.fromkeys(job_id for each in wanted for job_id in each.among(rows)):
        job, row, accounted = queued.get(job_id), own.get(job_id), slurm.accounted.get(job_id)
        newest_s = max((each.row["submit_s"] for each in [accounted] if each), default=0)
        if job and job.is_waiting:
            states.append(waiting_state(job, now_s))
        elif job and not job.has_ended:
            running.append(job)
        elif row and row.get("report", True) and row["end_s"] is not None and newest_s <= row["submit_s"]:
            stored.append(job_id)
        elif accounted and accounted.row["end_s"] is None and accounted.row["start_s"] is None:
            states.append(_waits(accounted.row))
        elif accounted and (accounted.row["end_s"] is not None or not job):
            ended.append(accounted)
        elif job:
            ended.append(SlurmJob((full_row(job.row(now_s)),), slurm.silence))
        else:
            stored.append(job_id)
    common = [job for job in slurm.queued if job.is_common_record and any(each.names(job) for each in wanted)]
    states += [waiting_state(job, now_s) for job in common if job.is_waiting]
    return FoundJobs(tuple(stored), tuple(running), tuple(ended), tuple(states), queued)


def _rows(kept: Iterable[Mapping[str, Any]], slurm: SlurmAnswer) -> list[Mapping[str, Any]]:
    """All rows that say which jobs an id names."""
    queued = [job.row(0) for job in slurm.queued if not job.is_common_record]
    return [*kept, *queued, *(cast(Mapping[str, Any], job.row) for job in slurm.accounted.values())]


def _names_any(named: NamedJob, kept: Sequence[Mapping[str, Any]], slurm: SlurmAnswer) -> bool:
    return bool(named.among(_rows(kept, slurm))) or any(map(named.names, slurm.queued))


def _kept(known: KnownRuns, wanted: Sequence[NamedJob]) -> tuple[Sequence[Mapping[str, Any]], AlmanacError | None]:
    """The runs that almanac keeps of these jobs; and why it has none."""
    try:
        return known.runs_named(sorted({each.job_id for each in wanted})), None
    except (StoreError, FileFormatError) as error:
        return [], error


def _may_be_live(named: NamedJob, kept: Sequence[Mapping[str, Any]], now_s: int) -> bool:
    """Return True if something that is named may run or wait.

    That is an unknown job, one without an end, tasks of an array, or a number that Slurm may have given again.
    """
    ids = set(named.among(kept))
    own = [row for row in kept if row["job_id"] in ids]
    is_old = all((row["end_s"] or now_s) < now_s - NUMBERS_LAST_S for row in own)
    return is_old or any(
        row["end_s"] is None
        or not row.get("report", True)
        or row.get("state") == "REQUEUED"
        or named.job_id in (row["array_job_id"], row["het_job_id"])
        for row in own
    )


def _is_open(
    named: NamedJob, kept: Sequence[Mapping[str, Any]], queued: Sequence[QueuedJob], settled: Collection[int]
) -> bool:
    """Return True if accounting may know more: of an unknown job, one without a report, and an array that runs."""
    ids = set(named.among([*kept, *(job.row(0) for job in queued if not job.is_common_record)]))
    live = [job for job in queued if named.names(job)]
    is_common = any(job.is_common_record and job.is_waiting for job in live)
    is_whole = named.tasks is None and named.offset is None
    is_in_parts = is_whole and any(job.array_job_id or job.het_job_id for job in live)
    return not ids <= set(settled) or not (ids or is_common) or is_in_parts


def cluster_of(site: Site) -> str:
    """The name of the cluster, or "" if Slurm's default is meant."""
    return site.cluster_name or site.config.site.cluster


def accounting_of(site: Site, most_s: float = ANSWER_S) -> Accounting:
    """The accounting of the site's cluster, for somebody who waits."""
    from slurm.accounting import Accounting
    from slurm.commands import within

    return Accounting(within(site.commands, most_s), cluster_of(site), site.clock)


def _queue(site: Site, ids: Collection[int] = ()) -> Queue:
    from slurm.commands import within
    from slurm.queue import read_queue

    return read_queue(within(site.commands, ANSWER_S), cluster_of(site), ids, with_ended=True)


def _ask_queue(site: Site, wanted: Sequence[NamedJob]) -> SlurmAnswer:
    if not wanted:
        return SlurmAnswer()
    try:
        queue = _queue(site, {each.job_id for each in wanted})
    except CommandError as error:
        return SlurmAnswer(silence=str(error))
    own_uid, is_operator = os.getuid(), site.is_operator
    own, others = list[QueuedJob](), list[QueuedJob]()
    for job in (*queue.jobs, *queue.ended):
        (own if is_operator or job.user_id == own_uid else others).append(job)
    mine, not_mine = ([job for job in jobs if any(each.names(job) for each in wanted)] for jobs in (own, others))
    wholes = _numbers(job.row(0) for job in own)
    return SlurmAnswer(tuple(mine), {}, tuple(job.row(0) for job in not_mine), wholes)


def _ask_accounting(site: Site, wanted: Sequence[NamedJob], slurm: SlurmAnswer) -> SlurmAnswer:
    """The answer with accounting's jobs: their runs, names, and what their steps used."""
    if not wanted:
        return slurm
    from slurm.accounting import ids_of
    from slurm.sacct import COLUMNS

    is_queued = all(any(map(each.names, slurm.queued)) for each in wanted)
    accounting = accounting_of(site, USE_S if is_queued else ANSWER_S)
    try:
        rows = accounting.jobs(["-j", ids_of(each.job_id for each in wanted)], COLUMNS, Counts())
    except CommandError as error:
        return replace(slurm, silence=slurm.silence or str(error))
    is_own = {site.caller} if not site.is_operator else {row["user"] for row in rows}
    chosen = {job_id for each in wanted for job_id in each.among(rows)}
    own = [full_row(row) for row in rows if row["job_id"] in chosen and row["user"] in is_own]
    _add_use(accounting, own, {job.job_id: job.name for job in slurm.queued})
    by_job: dict[int, list[JobRow]] = {}
    for row in sorted(own, key=lambda row: row["submit_s"]):
        by_job.setdefault(row["job_id"], []).append(row)
    accounted = {job_id: SlurmJob((*requeued(runs[:-1], runs[-1]), runs[-1])) for job_id, runs in by_job.items()}
    others = tuple(row for row in rows if row["user"] not in is_own)
    wholes = slurm.wholes | _numbers(row for row in rows if row["user"] in is_own)
    return replace(slurm, accounted=accounted, others=(*slurm.others, *others), wholes=wholes)


def _numbers(rows: Iterable[Mapping[str, Any]]) -> frozenset[int]:
    names = ("job_id", "array_job_id", "het_job_id")
    return frozenset(row[name] for row in rows for name in names if row[name] is not None)


def _add_use(accounting: Accounting, rows: Sequence[JobRow], names: Mapping[int, str]) -> None:
    """Add names, and what steps used, as far as accounting tells. names: those that the queue told."""
    from slurm.accounting import ids_of
    from slurm.step_use import job_use

    ended: dict[Run, JobRow] = {(row["job_id"], row["submit_s"]): row for row in rows if row["start_s"] is not None}
    try:
        uses = accounting.steps(ended, Counts())[1] if ended else {}
        texts = accounting.texts(["-j", ids_of(row["job_id"] for row in rows)]) if rows else {}
    except (CommandError, ValueError):
        uses, texts = {}, {}
    for run in (run for run in uses if ended[run]["end_s"] is not None):
        ended[run].update(cast(JobRow, job_use(uses[run])))
    for row in rows:
        if text := texts.get((row["job_id"], row["submit_s"])):
            row["framework"] = text.framework or None
        row["name"] = (text.name if text else None) or names.get(row["job_id"]) or row["name"]


def full_row(row: Mapping[str, Any]) -> JobRow:
    """The row with every column of the table jobs; None for those that are not there."""
    return cast(JobRow, {**dict.fromkeys(JobRow.__annotations__), **row})


def requeued(earlier: Sequence[JobRow], job: JobRow) -> tuple[JobRow, ...]:
    """The runs before this one of the same job: each was requeued, and its end is when the next one was submitted.

    Slurm gives numbers again, so that any other run is of another job, even if it is the same user's.
    """
    found: list[JobRow] = []
    for row in reversed([row for row in earlier if row["user"] == job["user"]]):
        next_s = (found[-1] if found else job)["submit_s"]
        if abs(next_s - (row["end_s"] or next_s)) > REQUEUED_WITHIN_S:
            break
        found.append(row)
    return tuple(reversed(found))


def last_job(site: Site, known: KnownRuns) -> NamedJob:
    """The job that the caller submitted last. Raises StoreError if no source has one."""
    user, job_id, silence = site.caller, None, ""
    try:
        queue = _queue(site)
        own = [job for job in (*queue.jobs, *queue.ended) if job.user_id == os.getuid()]
        newest = max(own, key=lambda job: (job.submit_s, job.job_id), default=None)
        job_id = (newest.array_job_id or newest.het_job_id or newest.job_id) if newest else None
        if job_id is None:
            since_s = site.now_s() - LAST_JOB_DAYS * DAY_S
            job_id = accounting_of(site).last_job(user, since_s)
    except CommandError as error:
        silence = f"; Slurm did not answer: {printable(str(error), 200)}"
    if job_id is None:
        _, trouble = _kept(known, [])
        job_id = None if trouble else known.last_job()
    if job_id is None:
        raise StoreError(
            f"{user} has no job in the last {LAST_JOB_DAYS} days{silence}", "name one: almanac report JOBID"
        )
    return NamedJob(str(job_id), job_id)


def waiting_state(job: QueuedJob, now_s: int) -> JobState:
    """Say why a job waits, when Slurm expects it to start, and what would let it start sooner."""
    start_s = job.expected_start_s if (job.expected_start_s or 0) > now_s else None
    shown = printable(job.shown_id, 60)
    said = [f"Job {shown} waits to start: {why_waiting(job)}."]
    if job.restarts:
        said.append(f"It ran before and was requeued {counted(job.restarts, 'time')}.")
    if start_s:
        said.append(f"Slurm expects it to start at {format_moment(start_s)} (in {format_duration(start_s - now_s)}).")
    return JobState("waiting", shown, " ".join(said), what_helps(job), job.row(now_s), job.reason, start_s)


def _waits(row: JobRow) -> JobState:
    shown = format_job_id(row)
    said = f"Job {shown} waits to start. Slurm's queue did not answer, so the reason is not known."
    return JobState("waiting", shown, said, "ask again in a minute", row)


def _absent(site: Site, named: NamedJob, slurm: SlurmAnswer, trouble: AlmanacError | None) -> JobState:
    """Say why no source has a job: another user's, not given yet, or older than what is kept."""
    shown, about = printable(named.text, 60), f"; {printable(str(trouble), 300)}" if trouble else ""
    if any(named.among([row]) for row in slurm.others):
        said = f"job {shown} belongs to another user"
        return JobState("not_yours", shown, said, "`almanac jobs` lists your jobs; operators see everybody's")
    if named.job_id in slurm.wholes:
        part = "component" if named.tasks is None else "task"
        return JobState(
            "unknown", shown, f"job {named.job_id} has no {part} {shown}", f"see all: almanac report {named.job_id}"
        )
    if slurm.silence:
        said = f"almanac has nothing about job {shown}, and Slurm did not answer: {printable(slurm.silence, 200)}"
        return JobState("no_answer", shown, said, "ask again in a minute" + about)
    settings = _settings(site)
    next_id = settings.get("NEXT_JOB_ID", "")
    if next_id.isdecimal() and named.job_id >= int(next_id):
        said = f"no job has the number {named.job_id} yet: Slurm's next one is {next_id}"
        return JobState("unknown", shown, said, "`almanac jobs` lists your jobs")
    said = f"job {shown} is in no record: it is older than what Slurm's accounting and almanac keep"
    if "jobs" in settings.words("PrivateData"):
        said += ", or it belongs to another user, whose jobs this site hides"
    return JobState("too_old", shown, said, "`almanac jobs` lists your jobs" + about)


def _settings(site: Site) -> Settings:
    from slurm.commands import Settings, slurm_settings, within

    with suppress(CommandError):
        return slurm_settings(within(site.commands, ANSWER_S))
    return Settings()
