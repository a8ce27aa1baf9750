"""Publish reports for users without access to the store: one for each recent job, and a list of all.

A report is made when its job has metrics, and again when a stored value of the job changes; one that cannot be written
is not tried again before that. A list is written when one of its jobs changes. Other files stay as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import pyarrow.compute as pc

from almanac.atomic import write_atomically
from almanac.errors import AlmanacError, FileFormatError
from almanac.files import read_json, with_checksum
from almanac.published.files import REPORTS
from almanac.published.outgoing import Names, Outgoing, Owners, Uids, explained, name_of, owners_of, uid_of
from almanac.units import DAY_S, format_count
from reports.job.build import build_runs
from reports.job.conclusions import Row, report_of
from reports.published.caller import (
    JOBS,
    REPORT,
    REPORT_NAME,
    JobColumn,
    JobList,
    PublishedRun,
    StoreJobs,
    UserMail,
    next_steps,
)
from reports.published.newest import Chosen, newest_mails, newest_runs
from telemetry.history import HISTORY, load_history_table, plain_rows
from telemetry.site import Site

MANIFEST = ".reports.json"
"""In the folder of outgoing files: which list was written for whom, and which reports cannot be made.

File names say what else is published: <uid>/jobs, and <uid>/reports/<job id>-<submission>-<digest>.
"""


@dataclass
class Listed:
    """The list last written for a uid: its user, the digest of its content, and the newest end of its jobs."""

    user: str
    digest: str
    newest_end_s: int


@dataclass(frozen=True)
class OwnFolder:
    """All reports and lists of an outgoing folder, by uid."""

    outgoing: Outgoing

    def uids(self) -> list[int]:
        """The uids with a list or reports, sorted."""
        known = (int(name) for name in self.outgoing.users() if name.isascii() and name.isdecimal())
        return sorted(uid for uid in known if self.has_index(uid) or self.reports(uid))

    def reports(self, uid: int) -> set[str]:
        """Names of the reports of a uid."""
        with contextlib.suppress(OSError):
            found = self.outgoing.path(str(uid), REPORTS).iterdir()
            return {path.name for path in found if path.name[0].isdecimal()}
        return set()

    def has_index(self, uid: int) -> bool:
        return self.outgoing.path(str(uid), JOBS.name).is_file()

    def remove(self, uid: int, names: set[str]) -> None:
        """Remove reports. Raises StoreError."""
        self.outgoing.remove(str(uid), [f"{REPORTS}/{name}" for name in names])

    def remove_all(self, uid: int) -> None:
        """Remove the list and all reports of a uid. Raises StoreError."""
        self.remove(uid, self.reports(uid))
        self.outgoing.remove(str(uid), [JOBS.name])

    def listed(self, cluster: str) -> dict[int, Listed]:
        """The lists written so far, by uid; empty if the manifest is missing or damaged: all are then written again."""
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            return {int(uid): Listed(**listed) for uid, listed in self._manifest(cluster)["users"].items()}
        return {}

    def unwritable(self, cluster: str) -> set[str]:
        """Names of reports that could not be made; empty if the manifest is missing or damaged."""
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            return set(map(str, self._manifest(cluster)["unwritable"]))
        return set()

    def _manifest(self, cluster: str) -> dict[str, Any]:
        """The manifest; empty if this cluster has none. Raises ValueError, KeyError, or TypeError if it is damaged."""
        try:
            document = read_json(self.outgoing.root / MANIFEST)
        except OSError:
            return {}
        return dict(document) if document["cluster"] == cluster else {}

    def set_published(self, cluster: str, users: dict[int, Listed], unwritable: set[str]) -> None:
        """Write the manifest: which lists were written, and which reports cannot be made."""
        document = {
            "cluster": cluster,
            "users": {str(uid): vars(listed) for uid, listed in users.items()},
            "unwritable": sorted(unwritable),
        }
        path = self.outgoing.root / MANIFEST
        with explained(path, self.outgoing.root):
            write_atomically(path, with_checksum(json.dumps(document)))


JOBS_AT_ONCE, GPUS_AT_ONCE = 400, 4000
"""Most runs, and most GPUs, whose samples are in memory at once (about 100 MB)."""
OWN_PER_RUN = 1000
"""Most reports that one run makes, newest jobs first; the others wait. A run then takes under a minute."""
USERS_AT_ONCE = 500
_OF_RUN = tuple(each.name for each in fields(PublishedRun) if each.name != "report")


@dataclass
class OwnPublished:
    """Counts of a run of `almanac publish`; in a dry run, of what it would do.

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
    """One run of `almanac publish`. site: at the time of the run. is_dry: write nothing."""

    site: Site
    folder: OwnFolder
    is_dry: bool = False

    @property
    def since_s(self) -> int:
        return self.site.now_s() - self.site.config.reports.own_days * DAY_S


@dataclass(frozen=True)
class _Person:
    """A user, their runs (oldest end first), and the names of their existing reports."""

    user: str
    uid: int
    runs: Sequence[Chosen]
    names: set[str]
    mails: tuple[UserMail, ...] = ()

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
    most = job.site.config.reports.own_jobs
    chosen = newest_runs(job.site.store, job.since_s, most) if most else {}
    owners = owners_of(chosen, uids)
    try:
        mails = newest_mails(job.site.store)
    except AlmanacError as error:
        mails = {}
        outcome.warnings.append(f"users are not told of their mails: {error}")
    people = [
        _Person(user, uid, chosen[user], job.folder.reports(uid), mails.get(user, ()))
        for user, uid in owners.uids.items()
    ]
    unwritable = job.folder.unwritable(job.site.cluster)
    _write_reports(job, people, unwritable, outcome)
    if unwritable:
        unwritable &= {_name(run) for runs in chosen.values() for run in runs}
    outcome.unwritable = len(unwritable)
    listed = job.folder.listed(job.site.cluster)
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
    job.folder.set_published(job.site.cluster, listed, unwritable)


def _name(run: Chosen) -> str:
    return f"{run.run}-{_digest(f'{REPORT.version} {run.digest}')}"


def _run_of(name: str) -> str:
    match = REPORT_NAME.fullmatch(name)
    return match[1] if match else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]


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
    for context in build_runs(job.site, list(wanted)):
        run, person = wanted[context.job_id, context.job["submit_s"]]
        try:
            content = REPORT.render(report_of(context))
        except (ValueError, FileFormatError):
            unwritable.add(_name(run))  # other jobs are still published
            continue
        if context.user == person.user:
            yield person, _name(run), content


def _write_lists(job: OwnJob, people: Sequence[_Person], listed: dict[int, Listed], outcome: OwnPublished) -> None:
    """Write lists whose jobs or reports changed, and update `listed`."""
    changed = []
    for person in people:
        now = Listed(person.user, _list_digest(job, person), max(run.end_s for run in person.runs))
        if listed.get(person.uid) != now or not job.folder.has_index(person.uid):
            changed.append(person)
        listed[person.uid] = now
    outcome.lists = len(changed)
    columns = StoreJobs(job.site, None).columns if changed else {}
    for first in range(0, 0 if job.is_dry else len(changed), USERS_AT_ONCE):
        some = changed[first : first + USERS_AT_ONCE]
        history = _history(job, some)
        job.folder.outgoing.write(
            (str(person.uid), JOBS.name, JOBS.render(_index(job, person, history.get(person.user, []), columns)))
            for person in some
        )


def _list_digest(job: OwnJob, person: _Person) -> str:
    runs = [(run.run, run.digest, person.report_of(run)) for run in person.runs]
    return _digest(repr((JOBS.version, job.site.cluster, HISTORY.names, runs, person.mails)))


def _index(job: OwnJob, person: _Person, history: Sequence[Row], columns: Mapping[str, JobColumn]) -> JobList:
    def own(
        columns: Sequence[str], since_s: int | None = None, until_s: int | None = None, user: str | None = None,
        among: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[Row]:  # fmt: skip
        return [row for row in history if row["submit_s"] >= (since_s or 0)]

    steps = next_steps(history, job.site, own)
    rows = [
        {**{name: value for name, value in row.items() if value is not None}, **({"next_step": step} if step else {})}
        for row, step in zip(history, steps, strict=True)
    ]
    runs = [
        PublishedRun(**{name: getattr(run, name) for name in _OF_RUN}, report=person.report_of(run))
        for run in person.runs
    ]
    return JobList(job.site.cluster, person.user, job.site.now_s(), columns, tuple(runs), tuple(rows), person.mails)


def _history(job: OwnJob, people: Sequence[_Person]) -> dict[str, list[Row]]:
    """The rows of HISTORY of each user's runs, by user, oldest end first."""
    keys = {(person.user, run.job_id, run.submit_s) for person in people for run in person.runs}
    first_s = min(submit_s for _, _, submit_s in keys)
    users = [person.user for person in people]
    rows = load_history_table(job.site.store, HISTORY.names, first_s, None, users)
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
