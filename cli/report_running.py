"""The jobs that `almanac report` is asked for: in the store, running, waiting, or known to accounting alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from almanac.errors import AlmanacError, CommandError, FileFormatError, StoreError
from almanac.units import DAY_S, format_moment, printable
from cli.app import App
from cli.job_ids import Named, matching, no_such_job, parse_id, split_ids

if TYPE_CHECKING:
    from reports.job.context import JobContext
    from telemetry.sources.live_jobs import LiveJob


NUMBERS_LAST_S = 30 * DAY_S
"""For so long after a job's end, Slurm is not expected to give its number again."""


@dataclass(frozen=True)
class NamedJobs:
    """Jobs that ids name. stored: raw ids in the store, in the order named. running, pending: as Slurm has them now.

    accounted: rows of the table jobs, of ended jobs that only Slurm's accounting has.
    """

    stored: tuple[int, ...]
    running: tuple[LiveJob, ...] = ()
    pending: tuple[LiveJob, ...] = ()
    accounted: tuple[Mapping[str, Any], ...] = ()

    def newest(self, limit: int) -> NamedJobs:
        """The last `limit` of those with a report; 0: all. Running jobs are the newest, then those just accounted."""
        if limit <= 0:
            return self
        running = self.running[-limit:]
        room = limit - len(running)
        accounted = self.accounted[-room:] if room else ()
        room -= len(accounted)
        return NamedJobs(self.stored[-room:] if room else (), running, self.pending, accounted)

    def __len__(self) -> int:
        return len(self.stored) + len(self.running) + len(self.accounted)


def find_jobs(app: App, texts: Sequence[str]) -> NamedJobs:
    """The jobs that are named and that the caller may see; array ids as their tasks. Slurm is asked for those that
    the store does not have, or not to their end, and its accounting for those that then are still unknown.

    Raises StoreError where a text names none: whether another user has such a job is not said.
    """
    wanted = [parse_id(text) for text in split_ids(texts)]
    rows, trouble = _stored_rows(app, wanted)
    found = [matching(each, rows) for each in wanted]
    asked = [each for each, ids in zip(wanted, found, strict=True) if _may_be_live(each, ids, rows, app.now_s())]
    live, silence = _live(app, asked)
    absent = [each for each, ids in zip(wanted, found, strict=True) if not ids and not any(map(each.names, live))]
    accounted = _accounted(app, absent)
    absent = [each for each in absent if not matching(each, accounted)]
    if absent:
        raise _absent(app, [each.text for each in absent], trouble, silence)
    running = tuple(job for job in live if job.is_running)
    known = dict.fromkeys(job_id for ids in found for job_id in ids)
    return NamedJobs(
        tuple(job_id for job_id in known if job_id not in {job.job_id for job in running}),
        running,
        tuple(job for job in live if not job.is_running),
        tuple(accounted),
    )


def _stored_rows(app: App, wanted: Sequence[Named]) -> tuple[list[dict[str, Any]], AlmanacError | None]:
    """The runs that the store, or what is published, has of these jobs; and why there is neither."""
    try:
        return app.caller_jobs.runs_named(sorted({each.job_id for each in wanted})).to_pylist(), None
    except (StoreError, FileFormatError) as error:
        return [], error


def _may_be_live(named: Named, ids: Sequence[int], rows: Sequence[dict[str, Any]], now_s: int) -> bool:
    """Return True if something that is named may run or wait.

    That is an unknown job, one without an end, tasks of an array, or a number that Slurm may have given again.
    """
    own = [row for row in rows if row["job_id"] in ids]
    is_old = all((row["end_s"] or now_s) < now_s - NUMBERS_LAST_S for row in own)
    return is_old or any(
        row["end_s"] is None
        or row.get("state") == "REQUEUED"
        or named.job_id in (row["array_job_id"], row["het_job_id"])
        for row in own
    )


def _live(app: App, wanted: Sequence[Named]) -> tuple[list[LiveJob], str]:
    """What Slurm has of these jobs and the caller may see; and why it could not be asked, or ""."""
    if not wanted:
        return [], ""
    from telemetry.sources.live_jobs import live_jobs

    cluster = app.cluster_name or app.config.site.cluster
    try:
        found = live_jobs(app.commands, {each.job_id for each in wanted}, app.now_s(), cluster)
    except CommandError as error:
        return [], str(error)
    own_uid = os.getuid()
    seen = [job for job in found if app.is_operator or job.user_id == own_uid]
    return [job for job in seen if any(each.names(job) for each in wanted)], ""


def _accounted(app: App, wanted: Sequence[Named]) -> list[dict[str, Any]]:
    """Ended jobs of the caller that only accounting has: jobs without GPUs, and those that ended a moment ago.

    Empty if it does not answer: the error about unknown jobs then stands.
    """
    if not wanted:
        return []
    from telemetry.sources.sacct import ended_jobs

    cluster, user = app.cluster_name or app.config.site.cluster, None if app.is_operator else app.caller
    try:
        rows = ended_jobs(app.commands, {each.job_id for each in wanted}, cluster, app.now_s(), user)
    except CommandError:
        return []
    named = {job_id for each in wanted for job_id in matching(each, rows)}
    return [row for row in rows if row["job_id"] in named and user in (None, row["user"])]


def _absent(app: App, absent: Sequence[str], trouble: AlmanacError | None, silence: str) -> StoreError:
    """trouble: why there are no ended jobs. silence: why Slurm could not be asked for others."""
    if trouble is None:
        return no_such_job(app, absent, silence)
    if silence:
        unasked = f"Slurm could not be asked for running jobs: {printable(silence, 200)}"
        return StoreError(str(trouble), f"{trouble.hint}; {unasked}")
    whose = "" if app.is_operator else " of yours"
    named = printable(", ".join(absent))
    return StoreError(f"{named}: no such job{whose} runs or waits, and {trouble}", trouble.hint)


def contexts_of(app: App, jobs: NamedJobs) -> tuple[list[JobContext], AlmanacError | None]:
    """The reports' contexts, and why those of the running jobs are missing. Raises that error if it leaves none."""
    found = app.caller_jobs.contexts(jobs.stored) if jobs.stored else []
    found += [_accounted_context(app, row) for row in jobs.accounted]
    try:
        return [*found, *_running_contexts(app, jobs.running)], None
    except AlmanacError as error:
        if not found:
            raise
        return found, error


def _accounted_context(app: App, row: Mapping[str, Any]) -> JobContext:
    from reports.job.context import JobContext
    from reports.job.rows import JobRow

    return JobContext(
        cluster=app.cluster_name or app.config.site.cluster,
        now_s=app.now_s(),
        job=cast(JobRow, {**dict.fromkeys(JobRow.__annotations__), **row}),
        metrics={},
        gpus=(),
        series=None,
        ranks={},
        advice=None,
        tiers=app.config.tiers,
    )


def _running_contexts(app: App, jobs: Sequence[LiveJob]) -> list[JobContext]:
    if not jobs:
        return []
    from cli.output import progress
    from reports.job.live import live_contexts

    known = None
    if app.may_read_store and (app.store_root / "store.json").exists():
        known = app.cluster_store()
    return live_contexts(jobs, app.config, app.now_s(), known=known, show=lambda name: progress(f"read {name}"))


def pending_text(job: LiveJob) -> str:
    """ "Job 1234 is waiting to start. Reason: Priority. Expected start: 2026-11-23 16:00 UTC." """
    start = f" Expected start: {format_moment(job.expected_start_s)}." if job.expected_start_s else ""
    reason = f" Reason: {printable(job.reason, 60)}." if job.reason and job.reason != "None" else ""
    return f"Job {printable(job.shown_id, 60)} is waiting to start, so there is nothing to report.{reason}{start}"


def pending_json(job: LiveJob) -> dict[str, Any]:
    """A pending job as plain values; expected_start_s is null if Slurm has no estimate."""
    return {
        "job_id": job.job_id,
        "shown_id": job.shown_id,
        "still_running": False,
        "job": dict(job.row),
        "reason": job.reason,
        "expected_start_s": job.expected_start_s,
    }
