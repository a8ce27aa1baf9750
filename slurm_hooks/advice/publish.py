"""`almanac publish`: computes an advice file for each user from the store, and `_site` for everybody else.

A user's file is computed again after their history, the models, the settings or the program change, and once half of
its lifetime is over. It is written if the content changes, or if half of its lifetime is over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pwd
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pyarrow as pa

from advisor.service import Trained
from almanac import __version__
from almanac.config import Config, Priority
from almanac.errors import ConfigError, FileFormatError
from almanac.submit_config import SITE, PriorityMode
from almanac.units import DAY_S, format_count
from slurm_hooks.advice.file import (
    FAMILY,
    FORMAT,
    LIFETIME_S,
    MAX_BYTES,
    AdviceFile,
    Row,
    is_of_future,
    parse,
    render,
    render_row,
    unwritable,
)
from slurm_hooks.advice.folder import SHOWN
from slurm_hooks.advice.packing import packing_content
from slurm_hooks.advice.packing_file import NAME as PACKING
from slurm_hooks.advice.packing_file import PackingRow
from slurm_hooks.advice.publication_log import EVERYBODY, PublishedChange, changed_rows, record
from slurm_hooks.advice.rows import SITE_JOBS, UserRows, site_rows
from slurm_hooks.advice.times_file import NAME as TIMES
from slurm_hooks.advice.workers import rows_by_user
from telemetry.history import UserHistories
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.outgoing import Outgoing
from telemetry.store.user_files import Uids, owners_of, uid_of

SPARE_BYTES = 64
"""Of a file's size, left for numbers that grow."""


@dataclass
class Published:
    """What a run did, or (dry run) would do. Names of users are as accounting has them.

    written: files whose content changed, renewed: only their lifetime; unchanged: left as they were. cut: families
    that did not fit. no_uid: names that the system does not know; shared_uid: several names of one uid, refused.
    families: in the files of all users that this run computed.
    """

    mode: PriorityMode
    written: int = 0
    renewed: int = 0
    unchanged: int = 0
    removed: int = 0
    families: int = 0
    cut: int = 0
    no_uid: list[str] = field(default_factory=list)
    shared_uid: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PublishRun:
    """One run. mode: the `mode` of the files, for job_submit. is_dry: nothing is written."""

    store: ClusterStore
    config: Config
    now_s: int
    folder: Outgoing
    trained: Trained | None
    mode: PriorityMode
    is_dry: bool = False
    processes: int = 1

    @property
    def lifetime_s(self) -> int:
        return LIFETIME_S


@dataclass(frozen=True)
class FileInputs:
    """A file's name (uid), the user whose it is, and what it is made from."""

    name: str
    user: str
    digest: str


def publish(job: PublishRun, uids: Uids = uid_of) -> Published:
    """Raises ConfigError, StoreError (no space: the old files are still there), BusyError."""
    strange = unwritable(job.config.tiers)
    if strange:
        raise ConfigError(
            f"tiers cannot be named {', '.join(map(repr, strange))} in advice files",
            'use ASCII without blanks, ";", "="',
        )
    outcome = Published(job.mode)
    if job.is_dry:
        _publish(job, uids, outcome)
        return outcome
    with job.folder.locked():
        job.folder.prepare()
        _publish(job, uids, outcome)
    return outcome


def _publish(job: PublishRun, uids: Uids, outcome: Published) -> None:
    since_s = job.now_s - job.config.advice.history_days * DAY_S
    histories = UserHistories(job.store)
    plan = _Plan()
    try:
        digests = histories.digests(since_s)
        known = _known(job, _resolve(digests, uids, outcome), digests)
        stale = {each.user: each for each in known if not _is_fresh(job, each)}
        outcome.unchanged += len(known) - len(stale)
        for rows in rows_by_user(histories, list(stale), job.trained, job.config, job.now_s, job.processes):
            _plan(job, plan, [(stale[user], rows[user]) for user in rows], outcome)
        newest = histories.newest(SITE_JOBS, since_s)
    finally:
        histories.close()
    everybody = FileInputs(SITE, EVERYBODY, _digest(_settings(job)))
    _plan(job, plan, [(everybody, UserRows(site_rows(newest, job.trained, job.config, job.now_s)))], outcome)
    silent = {each.name for each in stale.values()} - plan.names
    plan.gone = _gone(job, {each.name for each in known} - silent, outcome)
    plan.tables.append(changed_rows(_removals(job, plan.gone), job.now_s))
    _apply(job, plan, outcome)


@dataclass
class _Plan:
    """names: files that have rows. files: uid, SHOWN, and content of those to be written.

    packing: by uid the rows of the packing file, of all users that this run computed.
    """

    names: set[str] = field(default_factory=set)
    files: list[tuple[str, str, bytes]] = field(default_factory=list)
    tables: list[pa.Table] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    packing: dict[str, list[PackingRow]] = field(default_factory=dict)


def _plan(job: PublishRun, plan: _Plan, rows: Iterable[tuple[FileInputs, UserRows]], outcome: Published) -> None:
    changes = []
    for known, own in rows:
        plan.names.add(known.name)
        if known.name != SITE:
            plan.packing[known.name] = own.packing
        before = _before(job, known.name)
        outcome.cut += own.cut
        after = _after(job, known, own.rows, before, outcome)
        if after is not None:
            plan.files.append((known.name, SHOWN, render(after)))
            changes.append(PublishedChange(known.user, before, after))
    plan.tables.append(changed_rows(changes, job.now_s))


def _resolve(users: Iterable[str], uids: Uids, outcome: Published) -> dict[str, int]:
    """uid by user; those without one, and several of one uid, are left out and named."""
    owners = owners_of(users, uids)
    outcome.no_uid, outcome.shared_uid = owners.unknown, owners.shared
    return owners.uids


def _known(job: PublishRun, uids: Mapping[str, int], digests: Mapping[str, str]) -> list[FileInputs]:
    settings = _settings(job)
    return [FileInputs(str(uid), user, _digest(f"{settings} {user} {digests[user]}")) for user, uid in uids.items()]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]


def _settings(job: PublishRun) -> str:
    """What changes with all that rows are made from but the user's own record."""
    trained, config = job.trained, job.config
    model = (trained.trained_s, trained.model is None, trained.jobs) if trained else None
    sections = (config.advice, config.priority, config.tiers, config.hooks, config.packing, job.mode)
    return repr((FORMAT, __version__, model, sections))


def _before(job: PublishRun, name: str) -> AdviceFile | None:
    """The file that is there, expired or not; None where it is absent, malformed or of the future."""
    try:
        file = parse(job.folder.read(name, SHOWN) or b"", None)
    except FileFormatError:
        return None
    return None if is_of_future(file, job.now_s) else file


def _is_fresh(job: PublishRun, known: FileInputs) -> bool:
    """Return True if nothing has changed that the file is made from."""
    before = _before(job, known.name)
    return before is not None and before.version.endswith(f"-{known.digest}") and not _is_half_over(job, before)


def _is_half_over(job: PublishRun, file: AdviceFile) -> bool:
    return file.expires_s - job.now_s <= job.lifetime_s / 2


def _after(
    job: PublishRun,
    known: FileInputs,
    rows: Sequence[Row],
    before: AdviceFile | None,
    outcome: Published,
) -> AdviceFile | None:
    """The file to write; None if the file says the same and is less than half over."""
    file = _fitting(job, known, rows)
    outcome.families += sum(row.kind == FAMILY for row in file.rows)
    outcome.cut += len(rows) - len(file.rows)
    if before is None or _said(before) != _said(file):
        outcome.written += 1
        return file
    if not _is_half_over(job, before):
        outcome.unchanged += 1
        return None
    outcome.renewed += 1
    since = before.version.partition("-")[0]
    return dataclasses.replace(file, version=f"{since}-{known.digest}")


def _said(file: AdviceFile) -> AdviceFile:
    return dataclasses.replace(file, version="", written_s=0, expires_s=0)


def _fitting(job: PublishRun, known: FileInputs, rows: Sequence[Row]) -> AdviceFile:
    """The file of these rows; of families, which come newest first, as many as fit: reasons give way to rows."""
    empty = _file(job, known, [])
    rest = [row for row in rows if row.kind != FAMILY]
    left = MAX_BYTES - SPARE_BYTES - len(render(empty)) - sum(map(_size, rest))
    if sum(map(_size, rows)) - sum(map(_size, rest)) > left:
        rows = [dataclasses.replace(row, why_not="") for row in rows]
    families = []
    for row in rows:
        if row.kind == FAMILY:
            left -= _size(row)
            if left < 0:
                break
            families.append(row)
    return dataclasses.replace(empty, rows=(*families, *rest))


def _size(row: Row) -> int:
    return len(render_row(row)) + 1


def _file(job: PublishRun, known: FileInputs, rows: Sequence[Row]) -> AdviceFile:
    hooks, config = job.config.hooks, job.config
    return AdviceFile(
        version=f"{datetime.fromtimestamp(job.now_s, UTC):%Y%m%dT%H%M%SZ}-{known.digest}",
        written_s=job.now_s,
        expires_s=job.now_s + job.lifetime_s,
        mode=job.mode,
        tell=hooks.tell,
        prompt=hooks.prompt,
        # As they are read back, so that a file compares equal to what it was made from.
        priority=Priority(
            points_per_e=config.priority.points_per_e,
            min_gpu_time_s=config.priority.min_gpu_time_s,
            max_gpu_time_s=config.priority.max_gpu_time_s,
        ),
        tiers=tuple(dataclasses.replace(tier, gpu_model="") for tier in config.tiers),
        rows=tuple(rows),
    )


def _gone(job: PublishRun, kept: set[str], outcome: Published) -> list[str]:
    """Files of users who are no more, or of whom there is nothing to say any more.

    While a name of the record has no uid only expired ones: a user database may be out of reach, in part or as a whole.
    """
    known = (name for name in job.folder.users() if name not in kept and name.isdecimal())
    gone = [name for name in known if job.folder.path(name, SHOWN).exists()]
    if not outcome.no_uid:
        return gone
    expired = [name for name in gone if _is_expired(job, name)]
    if len(expired) < len(gone):
        many = format_count(len(gone) - len(expired))
        outcome.warnings.append(f"{many} files of nobody known are kept until they expire: some users have no uid here")
    return expired


def _is_expired(job: PublishRun, name: str) -> bool:
    """Also where the file is malformed: it is not used."""
    before = _before(job, name)
    return before is None or before.expires_s <= job.now_s


def _apply(job: PublishRun, plan: _Plan, outcome: Published) -> None:
    """First what is published is recorded, then it is: a file that hooks have read is never unknown."""
    outcome.removed = len(plan.gone)
    outcome.changed = [*(uid for uid, _, _ in plan.files), *plan.gone]
    if job.is_dry:
        return
    record(job.store, pa.concat_tables(plan.tables))
    packing = {uid: packing_content(rows, job.now_s + job.lifetime_s) for uid, rows in plan.packing.items()}
    files = [*plan.files, *((uid, PACKING, content) for uid, content in packing.items() if content)]
    if files:
        job.folder.write(files)
    for uid, content in packing.items():
        if not content:
            job.folder.remove(uid, [PACKING])
    for uid in plan.gone:
        job.folder.remove(uid, [SHOWN, PACKING, TIMES])


def _removals(job: PublishRun, names: Sequence[str]) -> Iterator[PublishedChange]:
    for name in names:
        try:
            user = pwd.getpwuid(int(name)).pw_name
            before = parse(job.folder.read(name, SHOWN) or b"", None)
        except (KeyError, OverflowError, FileFormatError):
            continue  # the name is not known any more, and so nothing can be asked by it
        yield PublishedChange(user, before, None)
