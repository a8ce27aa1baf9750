"""Publishes reports for users without access to the store: one for each recent job, and a list of all.

A report is made when its job has metrics, and again when a stored value of the job changes. A report that cannot be
written is not tried again before such a change. A list is written when one of its jobs changes. Other files stay
unread and unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow.compute as pc

from almanac.config import Config
from almanac.units import DAY_S, format_count
from reports.job.context import JobContext, build_runs
from reports.published.choice import Chosen, newest_runs
from reports.published.folder import INDEX, REPORT_NAME, Listed, OwnFolder
from reports.published.format import FORMAT, MAX_FILE_BYTES, OwnIndex, OwnRun, Row, pack_index, pack_report
from telemetry.history import HISTORY, load_history_table
from telemetry.job_selection import plain_rows
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.user_files import REPORTS, Names, Owners, Uids, name_of, owners_of, uid_of

JOBS_AT_ONCE, GPUS_AT_ONCE = 400, 4000
"""Most runs, and most GPUs, whose samples are in memory at once (about 100 MB)."""
OWN_PER_RUN = 1000
"""Most reports that one run makes, newest jobs first; the others wait. A run then takes under a minute."""
USERS_AT_ONCE = 500


@dataclass
class OwnPublished:
    """What a run of `almanac publish` did, or would do in a dry run.

    lists, reports: files written. waiting: reports left for the next run. removed: users whose files were removed.
    unwritable: jobs whose report is too large, or has a number that JSON cannot hold, now or in an earlier run.
    """

    lists: int = 0
    reports: int = 0
    waiting: int = 0
    removed: int = 0
    unwritable: int = 0
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class OwnJob:
    """One run of `almanac publish`. is_dry: write nothing."""

    store: ClusterStore
    config: Config
    now_s: int
    folder: OwnFolder
    is_dry: bool = False

    @property
    def since_s(self) -> int:
        return self.now_s - self.config.reports.own_days * DAY_S


@dataclass(frozen=True)
class _Person:
    """A user, their runs (oldest end first), and the names of their existing reports."""

    user: str
    uid: int
    runs: Sequence[Chosen]
    names: set[str]

    def report_of(self, run: Chosen) -> str | None:
        """The name of the run's report; an outdated report if the new one is not written yet; None if there is none."""
        name = _name(run)
        return name if name in self.names else next((each for each in self.names if _run_of(each) == run.run), None)

    def stale(self) -> set[str]:
        return self.names - {self.report_of(run) for run in self.runs}


def publish_own(job: OwnJob, uids: Uids = uid_of, names: Names = name_of) -> OwnPublished:
    """Publish the reports and lists that are due. Raises ConfigError, BusyError, StoreError (old files stay then)."""
    outcome = OwnPublished()
    if job.is_dry:
        _publish(job, uids, names, outcome)
        return outcome
    with job.folder.outgoing.locked():
        job.folder.outgoing.prepare()
        _publish(job, uids, names, outcome)
    return outcome


def _publish(job: OwnJob, uids: Uids, names: Names, outcome: OwnPublished) -> None:
    most = job.config.reports.own_jobs
    chosen = newest_runs(job.store, job.since_s, most) if most else {}
    owners = owners_of(chosen, uids)
    people = [_Person(user, uid, chosen[user], job.folder.reports(uid)) for user, uid in owners.uids.items()]
    unwritable = job.folder.unwritable(job.store.cluster)
    _write_reports(job, people, unwritable, outcome)
    if unwritable:
        unwritable &= {_name(run) for runs in chosen.values() for run in runs}
    outcome.unwritable = len(unwritable)
    listed = job.folder.listed(job.store.cluster)
    _write_lists(job, people, listed, outcome)
    gone = _gone(job, listed, owners, names, outcome)
    outcome.removed = len(gone)
    if job.is_dry:
        return
    for person in people:
        if stale := person.stale():
            job.folder.remove(person.uid, stale)
    for uid in gone:
        job.folder.remove_all(uid)
        listed.pop(uid, None)
    job.folder.set_published(job.store.cluster, listed, unwritable)


def _name(run: Chosen) -> str:
    return f"{run.run}-{_digest(f'{FORMAT} {run.digest}')}"


def _run_of(name: str) -> str:
    match = REPORT_NAME.fullmatch(name)
    return match[1] if match else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def _write_reports(job: OwnJob, people: Sequence[_Person], unwritable: set[str], outcome: OwnPublished) -> None:
    """Write due reports, and note their names."""
    missing = [
        (run, person)
        for person in people
        for run in person.runs
        if run.is_ready and (name := _name(run)) not in person.names and name not in unwritable
    ]
    missing.sort(key=lambda each: -each[0].end_s)
    now, later = missing[:OWN_PER_RUN], missing[OWN_PER_RUN:]
    outcome.waiting = len(later)
    if job.is_dry:
        outcome.reports = len(now)
        return
    for part in _parts(now):
        made = list(_reports(job, part, unwritable))
        job.folder.outgoing.write((str(person.uid), f"{REPORTS}/{name}", content) for person, name, content in made)
        for person, name, _ in made:
            person.names.add(name)
        outcome.reports += len(made)


def _parts(missing: Sequence[tuple[Chosen, _Person]]) -> Iterator[list[tuple[Chosen, _Person]]]:
    part: list[tuple[Chosen, _Person]] = []
    gpus = 0
    for run, person in missing:
        if part and (len(part) == JOBS_AT_ONCE or gpus + run.gpus > GPUS_AT_ONCE):
            yield part
            part, gpus = [], 0
        part.append((run, person))
        gpus += run.gpus
    if part:
        yield part


def _reports(
    job: OwnJob, part: Sequence[tuple[Chosen, _Person]], unwritable: set[str]
) -> Iterator[tuple[_Person, str, bytes]]:
    """The reports of these runs, except runs that left the store or changed their user. Adds to unwritable."""
    wanted = {(run.job_id, run.submit_s): (run, person) for run, person in part}
    for context in build_runs(job.store, list(wanted), job.config, job.now_s):
        run, person = wanted[context.job_id, context.job["submit_s"]]
        content = _packed(context)
        if content is None:
            unwritable.add(_name(run))
        elif context.user == person.user:
            yield person, _name(run), content


def _packed(context: JobContext) -> bytes | None:
    """The file of a report; None if it cannot be written, so that other jobs are still published."""
    try:
        content = pack_report(context)
    except ValueError:
        return None
    return content if len(content) <= MAX_FILE_BYTES else None


def _write_lists(job: OwnJob, people: Sequence[_Person], listed: dict[int, Listed], outcome: OwnPublished) -> None:
    """Write lists whose jobs or reports changed, and update `listed`."""
    changed = []
    for person in people:
        now = Listed(person.user, _list_digest(job, person), max(run.end_s for run in person.runs))
        if listed.get(person.uid) != now or not job.folder.has_index(person.uid):
            changed.append(person)
        listed[person.uid] = now
    outcome.lists = len(changed)
    for first in range(0, 0 if job.is_dry else len(changed), USERS_AT_ONCE):
        some = changed[first : first + USERS_AT_ONCE]
        history = _history(job, some)
        job.folder.outgoing.write(
            (str(person.uid), INDEX, pack_index(_index(job, person, history.get(person.user, ())))) for person in some
        )


def _list_digest(job: OwnJob, person: _Person) -> str:
    runs = [(run.run, run.digest, person.report_of(run)) for run in person.runs]
    return _digest(repr((FORMAT, job.store.cluster, HISTORY.names, runs)))


def _index(job: OwnJob, person: _Person, history: Sequence[Row]) -> OwnIndex:
    runs = tuple(
        OwnRun(
            job_id=run.job_id,
            submit_s=run.submit_s,
            end_s=run.end_s,
            array_job_id=run.array_job_id,
            array_task_id=run.array_task_id,
            gpu_count=run.gpu_count,
            report=person.report_of(run),
        )
        for run in person.runs
    )
    return OwnIndex(job.store.cluster, person.user, job.now_s, runs, tuple(history))


def _history(job: OwnJob, people: Sequence[_Person]) -> dict[str, list[Row]]:
    """The rows of HISTORY of each user's runs, by user, oldest end first."""
    keys = {(person.user, run.job_id, run.submit_s) for person in people for run in person.runs}
    first_s = min(submit_s for _, _, submit_s in keys)
    users = [person.user for person in people]
    rows = load_history_table(job.store, HISTORY.names, first_s, None, users)
    found: dict[str, list[Row]] = {}
    for row in plain_rows(rows.filter(pc.field("end_s") >= job.since_s)):
        if (row["user"], row["job_id"], row["submit_s"]) in keys:
            found.setdefault(row["user"], []).append(row)
    return found


def _gone(job: OwnJob, listed: Mapping[int, Listed], owners: Owners, names: Names, outcome: OwnPublished) -> list[int]:
    """The uids with files here but no jobs any more.

    If a user in the history has no uid, the user database may be unreachable. Then recent files are kept, unless the
    uid now belongs to another user.
    """
    served = set(owners.uids.values())
    gone = [uid for uid in job.folder.uids() if uid not in served]
    if not owners.unknown:
        return gone
    known = {uid: listed[uid] for uid in gone if uid in listed}
    recent = [uid for uid, each in known.items() if each.newest_end_s >= job.since_s]
    kept = {uid for uid in recent if names(uid) in (None, known[uid].user)}
    if kept:
        many = f"{format_count(len(kept))} unknown users"
        why = "some users in the history have no account on this host"
        outcome.warnings.append(f"reports of {many} are kept for now: {why}")
    return [uid for uid in gone if uid not in kept]
